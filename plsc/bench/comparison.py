"""Comparison of class heads, or of training loops: contestants in fresh ranks, in turn, at every size; medians, ratios.

Ours are this package's; baselines stand in a Python file, ``benchmarks/baselines.py`` of a checkout, whose
``BASELINES`` maps a subject ("head", "train", "search") to its contestants by name.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import torch

from plsc.bench.harness import (
    PeakMemory,
    Result,
    be_rank,
    environment,
    failure,
    in_turn,
    measure_on_ranks,
    median,
    processor_name,
    summary,
    time_steps,
)
from plsc.errors import UsageError
from plsc.parallel.mesh import Mesh, init
from plsc.progress import Progress
from plsc.sizes import available_bytes

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}  # of all steps
ARCFACE: dict[str, Any] = {"s": 64.0, "m": 0.5}
ROOFLINE = "floor"  # measured beside the heads; its name in results and in --contestants
BASELINES = Path(__file__).resolve().parents[2] / "benchmarks" / "baselines.py"  # of this checkout, if it is one
_NOUNS = {
    "head": "head",
    "train": "loop",
    "variants": "variant",
    "search": "search",
    "cluster": "clustering",
    "data": "loader",
}
_MEMORY_SHARE = 0.85  # of what is available now, for all ranks together
_TOO_LARGE: Result = {"reason": "failed with fewer classes already"}
_RATIO_FIGURES = ("cpu_s", "wall_s", "memory_mib")
_FIGURES = (*_RATIO_FIGURES, "peak_mib", "loss", "product_gflops", "copy_gb_s", "images_per_second")
# Of a row, behind the environment's and before ``failed`` and ``note``; files of results have them in this order.
_NAMES, _RANKS = ("kind", "contestant", "label"), ("nproc", "threads", "dim")
_TIMES = ("cpu_s", "wall_s", "memory_mib", "peak_mib", "loss")
_RATES = ("images_per_second", "images_per_second_low", "images_per_second_high")
_ROOFLINES = ("product_gflops", "copy_gb_s", "cpu_s_low", "cpu_s_high", "floor_share")
_LOOPS = ("backbone", "classes", "image_size", "batch")
_COLUMNS = {
    "head": (*_NAMES, "classes", "batch_per_rank", *_RANKS, "rounds", "steps", *_TIMES, *_ROOFLINES),
    "train": (*_NAMES, *_LOOPS, *_RANKS, "precision", "rounds", "steps", *_RATES, *_TIMES),
}


@dataclass(frozen=True)
class Task:
    """One measurement of a contestant on the ranks of this machine.

    ``classes`` and ``batch``, the samples of a rank, are its size; ``threads`` the CPU threads of a rank; ``device`` is
    "cpu" or "cuda"; ``sample_rate`` is that of sampled heads; ``backbone``, ``image_size`` and ``precision`` are those
    of training loops. ``peer`` is the folder of arcface_torch's files, ``baselines`` the file with the contestants that
    are not ours; ``memory_bytes`` is what a rank on a CPU may allocate.
    """

    contestant: str
    classes: int
    batch: int
    dim: int = 512
    nproc: int = 2
    threads: int = 1
    steps: int = 3
    device: str = "cpu"
    sample_rate: float = 0.1
    backbone: str = "iresnet18"
    image_size: int = 112
    precision: str = "fp32"
    peer: str | None = None
    baselines: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Contestant:
    """What is measured beside others; the names of heads that leave classes out of a step end in "-sampled".

    Attributes:
        label: its name in tables.
        build: makes its step of a :class:`Task` and this rank's mesh; of a search, the search of rows and threads.
        prepare: of a loop, brings a batch into the form that its step takes; of a search, tunes it for queries and
            returns a remark; of a clustering, reads the rows of the folder in the order that it wants, before its time.
        peer: of one that needs a peer's files: checks their folder (UsageError), and returns their versions.
        why_not: the reason why it cannot run here at all, or None.
    """

    label: str
    build: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    peer: Callable[[str | Path | None], str] | None = None
    why_not: Callable[[], str | None] = lambda: None


def all_contestants(
    subject: str, ours: Mapping[str, Contestant], baselines: str | Path | None
) -> dict[str, Contestant]:
    """Ours, and those of the file ``baselines``.

    Raises:
        UsageError: there is no such file, or it names no baselines.
    """
    if baselines is None:
        return dict(ours)
    if not Path(baselines).is_file():
        raise UsageError(f"--baselines {baselines}: there is no such file; it is benchmarks/baselines.py of a checkout")
    found = getattr(load_file(Path(baselines)), "BASELINES", None)
    if not isinstance(found, Mapping):
        raise UsageError(f"--baselines {baselines}: it has no BASELINES; it is benchmarks/baselines.py of a checkout")
    return {**ours, **found.get(subject, {})}


def load_file(file: Path) -> ModuleType:
    """Import a file once under a name of its own: arcface_torch is no package, nor are benchmarks."""
    name = f"_peer_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def check_names(subject: str, names: Iterable[str], known: Iterable[str]) -> None:
    """UsageError for a name that no contestant has."""
    if unknown := [name for name in names if name not in known]:
        choices = f"choose from {', '.join(known)} (others need --baselines FILE)"
        raise UsageError(f"--contestants {unknown[0]}: there is no such {_NOUNS[subject]}; {choices}")


class VectorComparison:
    """What comparisons over one set of vectors share: their contestants, and turns of one process each.

    A subclass is a frozen dataclass, whose fields are those below and more.

    Raises:
        UsageError: an unknown contestant.
    """

    subject: ClassVar[str]  # the name of its module, and of its part of the file of baselines
    ours: ClassVar[Mapping[str, Contestant]]
    names: Sequence[str]
    threads: int
    rounds: int
    limit: float
    baselines: str | None

    def __post_init__(self) -> None:
        check_names(self.subject, self.names, self.known)

    @property
    def known(self) -> dict[str, Contestant]:
        """All contestants that there are, by name."""
        return all_contestants(self.subject, self.ours, self.baselines)

    def measure(self, folder: Path, *, quiet: bool, **options: Any) -> dict[str, list[Result]]:
        """Measure all on the data of ``folder`` in turn, ``rounds`` times over; ``options`` are of a turn's task."""
        names = self.names or tuple(self.known)
        progress = Progress("measuring", self.rounds * len(names), "turns", interval=2.0, quiet=quiet)
        task = {"data": str(folder), "threads": self.threads, "baselines": self.baselines, **options}
        rounds = in_turn(names, self.rounds, partial(self._turn, task), progress)
        progress.finish()
        return rounds

    def _turn(self, task: Mapping[str, Any], name: str) -> Result:
        if (reason := self.known[name].why_not()) is not None:
            return {"reason": reason}
        own = {**task, "contestant": name}
        return measure_on_ranks(f"plsc.bench.{self.subject}", own, threads=self.threads, limit=self.limit)

    def about(self, name: str, *sizes: str) -> dict[str, Any]:
        """What a row begins with: the environment, the contestant, and the values of ``sizes`` here."""
        row = environment(processor_name()) | {"contestant": name, "label": self.known[name].label}
        return row | {size: getattr(self, size) for size in sizes}


@dataclass(frozen=True)
class Comparison:
    """Request of a comparison of ``names`` at every number of classes and batch; ``limit`` is the seconds of a turn.

    ``subject`` is "head" or "train", ``known`` holds its contestants, ``task`` what all measurements have in common.

    Raises:
        UsageError: an unknown contestant, or a wrong folder of its peer's files.
    """

    subject: str
    known: Mapping[str, Contestant]
    names: Sequence[str]
    task: Task
    classes: Sequence[int]
    batches: Sequence[int]
    rounds: int = 2
    limit: float = 300.0

    def __post_init__(self) -> None:
        check_names(self.subject, self.names, self.known)
        needed = [name for name in self.names if self.known[name].peer is not None]
        given = [name for name, contestant in self.known.items() if contestant.peer is not None and self.task.peer]
        for name in (*needed, *given):
            self.version(name)

    def version(self, name: str) -> str:
        """The versions of the peer's files that a contestant takes; "" of one that takes none."""
        peer = self.known[name].peer
        return "" if peer is None else peer(self.task.peer)

    def turn(self, name: str, classes: int, batch: int, variables: Mapping[str, str] = MappingProxyType({})) -> Result:
        """Measure a contestant once; ``variables`` are of its ranks' environment alone."""
        if (reason := self.known[name].why_not()) is not None:
            return {"reason": reason}
        memory = available_bytes() if self.task.device == "cpu" else None
        allowed = None if memory is None else int(memory * _MEMORY_SHARE / self.task.nproc)
        task = replace(self.task, contestant=name, classes=classes, batch=batch, memory_bytes=allowed)
        module = f"plsc.bench.{self.subject}"
        values, nproc, threads = asdict(task), task.nproc, task.threads
        return measure_on_ranks(module, values, nproc=nproc, threads=threads, limit=self.limit, variables=variables)


def compare(comparison: Comparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure every contestant at every size, all in turn, ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per contestant and size (see :func:`result_row`), and ``ratios`` (see :func:`ratios_of`).
    """
    batches, ascending = sorted(set(comparison.batches)), sorted(set(comparison.classes))
    total = len(batches) * len(ascending) * comparison.rounds * len(comparison.names)
    progress = Progress("measuring", total, "starts", interval=2.0, quiet=quiet)
    rows, ratios = [], []
    for batch in batches:
        too_large: set[str] = set()  # what failed with fewer classes already
        for classes in ascending:
            tried = [name for name in comparison.names if name not in too_large]
            turn = partial(comparison.turn, classes=classes, batch=batch)
            measured = in_turn(tried, comparison.rounds, turn, progress)
            progress.advance(comparison.rounds * len(too_large))
            rounds = {name: measured.get(name, [_TOO_LARGE]) for name in comparison.names}
            too_large |= {name for name, results in rounds.items() if failure(results) is not None}
            rows += _rows(comparison, classes, batch, rounds)
            ratios += ratios_of(classes, batch, rounds)
    progress.finish()
    return {"rows": rows, "ratios": ratios}


def _rows(
    comparison: Comparison, classes: int, batch: int, rounds: Mapping[str, Sequence[Result]]
) -> list[dict[str, Any]]:
    """The rows of a size; ``floor_share`` of exact heads is the roofline's time over theirs (CPU seconds on a CPU)."""
    rows = [result_row(comparison, name, classes, batch, results) for name, results in rounds.items()]
    key = "cpu_s" if comparison.task.device == "cpu" else "wall_s"
    floor = next((row[key] for row in rows if row["contestant"] == ROOFLINE), None)
    for row in rows if floor else ():
        if row[key] and row["contestant"] != ROOFLINE and not is_sampled(row["contestant"]):
            row["floor_share"] = floor / row[key]
    return rows


def result_row(
    comparison: Comparison, name: str, classes: int, batch: int, results: Sequence[Result]
) -> dict[str, Any]:
    """Return a contestant's row: environment, sizes, and medians over the rounds; None where a figure is missing.

    ``kind`` is "cpu" or "cuda"; ``cpu_s`` and ``wall_s`` are seconds per step and rank; ``images_per_second`` is over
    all ranks; ``…_low`` and ``…_high`` are the extreme rounds; ``memory_mib`` is the peak per rank above the libraries,
    ``peak_mib`` the peak with them; ``note`` is a remark, or the reason of a failure.
    """
    task, failed = comparison.task, failure(results)
    good = [] if failed is not None else results
    rated = [{**result, "images_per_second": batch * task.nproc / result["wall_s"]} for result in good]
    row = summary(rated, _FIGURES, "images_per_second") | summary(rated, ("cpu_s",), "cpu_s")
    label = comparison.known[name].label.replace("sampled", f"r = {task.sample_rate:g}")
    sizes = {"classes": classes, "batch": batch, "batch_per_rank": batch, "rounds": comparison.rounds}
    note = (comparison.version(name) or good[0].get("note", "")) if good else failed
    about = {"kind": task.device, "contestant": name, "label": label, "failed": failed is not None, "note": note}
    every: dict[str, Any] = {"floor_share": None, **asdict(task), **row, **sizes, **about}
    measured = environment(processor_name() if task.device == "cpu" else None)
    return {**measured, **{column: every[column] for column in (*_COLUMNS[comparison.subject], "failed", "note")}}


def measure_steps(
    task: Task, mesh: Mesh, build: Callable[[Task, Mesh], Callable[..., Any]], batches: Sequence[Any], warm_up: int
) -> dict[str, Any]:
    """Make a step and call it with the parts of each of ``batches``; of these, the first ``warm_up`` do not count.

    Returns:
        Medians over the steps, ``cpu_s`` and ``wall_s``; ``memory_mib`` above what the rank held before the step was
        made, and ``peak_mib`` with it; the ``loss`` of the first step.
    """
    memory = PeakMemory(mesh.device)
    step = build(task, mesh)
    loss, *_ = [float(step(*batch)) for batch in batches[:warm_up]]
    times: dict[str, Any] = time_steps(lambda batch: step(*batch), batches[warm_up:], mesh.device)
    return times | {"memory_mib": memory.above(), "peak_mib": memory.peak(), "loss": loss}


def be_contestant(measure: Callable[[Task, Mesh], dict[str, Any]]) -> None:
    """Be a rank that ``measure`` is called on, see :func:`plsc.bench.harness.be_rank`."""

    def measure_task(values: dict[str, Any]) -> dict[str, Any]:
        task = Task(**values)
        torch.set_num_threads(task.threads)
        return measure(task, init(None if task.device == "cuda" else "cpu"))

    be_rank(measure_task)


def is_ours(name: str) -> bool:
    """True for a contestant of this project."""
    return name.startswith("plsc")


def is_sampled(name: str) -> bool:
    """True for a head that leaves classes out of a step."""
    return name.endswith("-sampled")


def ratios_of(classes: int, batch: int, rounds: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return how many times as much each baseline took as each of ours: the median of the rounds' quotients."""
    measured = [name for name, results in rounds.items() if name != ROOFLINE and failure(results) is None]
    ratios = []
    for own in filter(is_ours, measured):
        for baseline in (name for name in measured if not is_ours(name)):
            pairs = list(zip(rounds[own], rounds[baseline], strict=True))
            times = {key: median([b[key] / o[key] for o, b in pairs if o[key] > 0]) for key in _RATIO_FIGURES}
            ratios.append({"classes": classes, "batch_per_rank": batch, "ours": own, "peer": baseline, **times})
    return ratios
