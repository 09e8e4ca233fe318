"""Comparison of what reads pictures for training: our loader of every form of data set and its peers, in turn.

``python -m plsc.bench.data TASK.json FOLDER`` is one turn of one of them. All read the same JPEG files of drawn faces,
which lie in the system's memory by then: what is compared is processor time.
"""

import gc
import io
import json
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plsc.bench.comparison import Contestant, VectorComparison, all_contestants, is_ours
from plsc.bench.harness import Result, be_rank, failure, median, summary
from plsc.data import EncodedDataset, TrainLoader, decode_image, open_dataset
from plsc.data.convert import convert
from plsc.data.decoders import decoder_name
from plsc.errors import PlscError, UsageError
from plsc.progress import note

BARE = "decode"  # measured beside the loaders; its name in results and in --contestants
SHARDS = 16  # tar files, which loader processes share out
_PER_IDENTITY = 10
_RATE = "images_per_cpu_s"
_RECORDS, _FOLDER, _PARQUET = "images.rec", "folder", "images.parquet"
_FEATURES = {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}

Batches = Iterable[tuple[Any, Any]]  # images and labels; a loop is a pass over all pictures


# Data sets ----------------------------------------------------------------------------------------------------------


def _write_folder(pictures: EncodedDataset, folder: Path) -> None:
    convert(pictures, folder / _FOLDER, quiet=True)


def _write_tars(pictures: EncodedDataset, folder: Path) -> None:
    """Write WebDataset's form: a picture is ``KEY.jpg`` and ``KEY.cls``, the digits of its label."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as file:
            for index in range(shard, len(pictures), SHARDS):
                label = str(pictures.labels[index]).encode()
                for suffix, content in (("jpg", pictures.encoded(index)), ("cls", label)):
                    member = tarfile.TarInfo(f"{index:08d}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))


def _write_parquet(pictures: EncodedDataset, folder: Path) -> None:
    """Write the form of Hugging Face's datasets: columns ``image``, bytes and path, and ``label``."""
    import pyarrow
    from pyarrow import parquet

    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", image), ("label", pyarrow.int64())])
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": _FEATURES}})})
    rows = [
        {"image": {"bytes": pictures.encoded(index), "path": f"{index:08d}.jpg"}, "label": int(label)}
        for index, label in enumerate(pictures.labels)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), folder / _PARQUET)


@dataclass(frozen=True)
class Source:
    """A form of data sets.

    Attributes:
        label: its name in tables.
        write: writes pictures into a folder.
        specification: what :func:`plsc.data.open_dataset` opens there, with ``{folder}`` in it.
    """

    label: str
    write: Callable[[EncodedDataset, Path], None]
    specification: str


SOURCES = {
    "rec": Source(".rec", lambda pictures, folder: None, f"{{folder}}/{_RECORDS}"),  # the others are made of it
    "folder": Source("folder", _write_folder, f"{{folder}}/{_FOLDER}"),
    "tars": Source("tars", _write_tars, "tars:{folder}/*.tar"),
    "parquet": Source("Parquet", _write_parquet, f"{{folder}}/{_PARQUET}"),
}


def write_sources(folder: Path, images: int) -> dict[str, str]:
    """Write at least ``images`` drawn faces of 112 pixels into ``folder``, in every form.

    Returns:
        Of forms that cannot be written or read here: why, by the names of their contestants.
    """
    convert(open_dataset(f"avatars:{-(-images // _PER_IDENTITY)}x{_PER_IDENTITY}"), folder / _RECORDS, quiet=True)
    pictures = open_dataset(folder / _RECORDS, image_size=None)
    assert isinstance(pictures, EncodedDataset)
    unread = {}
    for name, source in SOURCES.items():
        try:
            source.write(pictures, folder)
            open_dataset(source.specification.format(folder=folder))
        except ImportError as error:
            unread[f"plsc-{name}"] = str(error)
        except PlscError as error:
            unread[f"plsc-{name}"] = str(error).partition(";")[0]
    return unread


# One turn, in a process of its own ----------------------------------------------------------------------------------


def _loader(source: str, folder: Path, workers: int, batch: int) -> Batches:
    dataset = open_dataset(SOURCES[source].specification.format(folder=folder))
    options: dict[str, Any] = {"augment": "none", "cache": None, "workers": workers}
    return TrainLoader(dataset, batch_size=batch, rank=0, world_size=1, seed=0, **options)


class _Decoded:
    """Pictures in memory, decoded and left: what no loader can do without."""

    def __init__(self, folder: Path, workers: int, batch: int) -> None:
        records = open_dataset(folder / _RECORDS, image_size=None)
        assert isinstance(records, EncodedDataset)
        self._files = [records.encoded(index) for index in range(len(records))]
        self._batch = batch

    def __iter__(self) -> Iterator[tuple[list[torch.Tensor], None]]:
        for start in range(0, len(self._files), self._batch):
            yield [decode_image(file, "a picture") for file in self._files[start : start + self._batch]], None


LOADERS = {BARE: Contestant("decode_image, of bytes in memory", _Decoded)} | {
    f"plsc-{name}": Contestant(f"plsc, {source.label}", partial(_loader, name)) for name, source in SOURCES.items()
}


def measure_loading(contestant: Contestant, folder: Path, workers: int, batch: int, passes: int) -> dict[str, float]:
    """Read all pictures of ``folder``, ``passes`` times, by ``workers`` loader processes (0: by this one).

    Returns:
        ``images``, how many were read; and per second of wall time ``images_per_s``, per second that this process and
        its loader processes computed ``images_per_cpu_s``. The start of loader processes counts, opening does not.
    """
    next(iter(contestant.build(folder, 0, batch)))  # imports what is needed
    loader = contestant.build(folder, workers, batch)
    gc.collect()
    gc.freeze()  # what is there by now is not looked through below
    images, cpu, start = 0, _cpu_seconds(), time.perf_counter()
    for _ in range(passes):
        images += sum(len(pictures) for pictures, _ in loader)
    wall = time.perf_counter() - start
    del loader
    gc.collect()  # ends the loader processes: the system tells their time only then
    cpu = _cpu_seconds() - cpu
    return {"images": images, "images_per_cpu_s": images / cpu, "images_per_s": images / wall}


def _cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    name, folder = task["contestant"], Path(task["data"])
    contestant = all_contestants("data", LOADERS, task["baselines"])[name]
    numbers = [0] if name == BARE else task["workers"]
    measure = partial(measure_loading, contestant, folder, batch=task["batch"], passes=task["passes"])
    return {"workers": {str(workers): measure(workers=workers) for workers in numbers}}


# The comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadingComparison(VectorComparison):
    """Request of a comparison over ``images`` pictures, each read ``passes`` times in a turn.

    ``workers`` are numbers of loader processes; the others are those of
    :class:`plsc.bench.search.SearchComparison`.

    Raises:
        UsageError: an unknown contestant.
    """

    subject, ours = "data", LOADERS
    names: Sequence[str] = ()
    images: int = 4000
    workers: Sequence[int] = (0, 2)
    batch: int = 128
    passes: int = 3
    threads: int = 1
    rounds: int = 3
    limit: float = 300.0
    baselines: str | None = None


def compare_loading(comparison: LoadingComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure all in turn, ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per contestant and number of loader processes (see :func:`loading_row`), and ``ratios`` (see
        :func:`loading_ratios`). Forms of data sets that plsc does not open are left out, in a line.
    """
    with tempfile.TemporaryDirectory(prefix="plsc-data-") as name:
        folder = Path(name)
        names = comparison.names or tuple(comparison.known)
        unread = write_sources(folder, comparison.images)
        if left_out := [f"{name} ({unread[name]})" for name in names if name in unread]:
            note(f"left out: {', '.join(left_out)}".replace(f"{folder}/", ""))
        measured = [name for name in names if name not in unread]
        if not measured:
            raise UsageError(f"--contestants {names[0]}: none of them can be measured here")
        comparison = replace(comparison, names=measured)
        options = {name: getattr(comparison, name) for name in ("batch", "passes")}
        rounds = comparison.measure(folder, quiet=quiet, workers=list(comparison.workers), **options)
    rows = [
        loading_row(comparison, name, workers, rounds)
        for workers in dict.fromkeys(comparison.workers)
        for name in rounds
        if name != BARE or workers == 0
    ]
    return {"rows": rows, "ratios": loading_ratios(comparison.workers, rounds)}


def loading_row(
    comparison: LoadingComparison, name: str, workers: int, rounds: Mapping[str, Sequence[Result]]
) -> dict[str, Any]:
    """Return a contestant's row by ``workers`` loader processes: environment, sizes, medians over the rounds.

    ``images_per_cpu_s``, with its extreme rounds, and ``images_per_s`` are those of :func:`measure_loading`;
    ``decode_share`` is the median of the rounds' rates by those of decoding alone. None where it failed.
    """
    failed = failure(rounds[name])
    rates = [] if failed is not None else [result["workers"][str(workers)] for result in rounds[name]]
    row = comparison.about(name) | {"decoder": decoder_name(), "workers": workers}
    row |= {size: getattr(comparison, size) for size in ("images", "batch", "passes", "threads", "rounds")}
    row |= summary(rates, (_RATE, "images_per_s"), _RATE)
    bare = rounds.get(BARE, [{"reason": "not measured"}])
    pairs = [] if failed is not None or failure(bare) is not None else list(zip(rounds[name], bare, strict=True))
    row["decode_share"] = median([_rate(result, workers) / _rate(decoded, 0) for result, decoded in pairs])
    return row | {"failed": failed is not None, "note": failed or ""}


def loading_ratios(workers: Sequence[int], rounds: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return, for each of our loaders and number of loader processes, how many times the best baseline's rate it has.

    ``times`` is the median of the rounds' quotients by the baseline ``best_other``, that with the highest median.
    """
    good = {name: results for name, results in rounds.items() if name != BARE and failure(results) is None}
    baselines = [name for name in good if not is_ours(name)]
    ratios = []
    for number in dict.fromkeys(workers) if baselines else ():
        rates = {name: [_rate(result, number) for result in results] for name, results in good.items()}
        best = max(baselines, key=lambda name: statistics.median(rates[name]))
        for own in filter(is_ours, good):
            times = statistics.median(ours / other for ours, other in zip(rates[own], rates[best], strict=True))
            ratios.append({"workers": number, "ours": own, "best_other": best, "times": times})
    return ratios


def _rate(result: Result, workers: int) -> float:
    return float(result["workers"][str(workers)][_RATE])


if __name__ == "__main__":
    be_rank(_measure)
