"""From a data set to an embedding set, on any number of ranks, resumable after a kill at any moment.

The rows are cut into shards whose bounds depend on the number of rows alone. Each rank takes every world_size-th of the
shards that are not yet published; a shard appears whole or not at all. So a run may stop and be resumed with another
number of ranks, and writes the same bytes as one that was never stopped. Ranks on several machines need one file
system.
"""

import hashlib
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from plsc.data import ImageDataset
from plsc.data.identity import contents_id, counts, samples_id
from plsc.data.loader import report_killed_workers
from plsc.embedding.embedder import EmbeddingModel, embed_whole, stated_contracts
from plsc.embedding.embedding_set import FORMAT, EmbeddingSet, shard_name
from plsc.embedding.pipeline import Embed, StallTimes, decode_loader, embedded_batches, fill_rows
from plsc.embedding.set_writer import SetWriter, ShardRows, sole_writer
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import MANIFEST, atomic_replace_dir, holds_manifest, read_json
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, on_main
from plsc.progress import Progress, counted, note

_FINGERPRINT_KEYS = 4096
_SHOWN = 10  # errors and warnings in a summary


@dataclass
class _Work:
    """One rank's part in this call: rows, seconds in all, seconds of waiting, and warnings of pictures."""

    rows: int = 0
    seconds: float = 0.0
    stalls: StallTimes = field(default_factory=StallTimes)
    warnings: list[tuple[int, str]] = field(default_factory=list)  # (row, warning) of the first ones
    warning_count: int = 0
    several: int = 0  # pictures of which the largest of several faces was taken


def extract(
    embedder: EmbeddingModel,
    dataset: ImageDataset,
    folder: str | Path,
    mesh: Mesh,
    *,
    batch_size: int = 64,
    workers: int = 0,
    flip: bool = False,
    dtype: str = "float32",
    precision: str = "fp32",
    shard_rows: int | None = None,
    quiet: bool = False,
    overwrite: bool = False,
    restart: bool = False,
) -> dict[str, Any]:
    """Embed every image of a data set into an embedding set, or resume where an earlier call stopped.

    Shards whose pictures' files have changed since, by their sizes and times, are made again. An image that cannot be
    read becomes a zero row with its error. A row's bits are those of its picture alone (:func:`embed_whole`).
    Collectives: a few small objects at the start and the end.

    Args:
        embedder: the model.
        dataset: images of the model's size.
        folder: of the embedding set.
        mesh: the ranks, each of which calls this.
        batch_size: images embedded at once.
        workers: decoding processes of each rank.
        flip: average over each image and its mirror image.
        dtype: "float32" or "float16", of what is stored; embeddings are not normalised.
        precision: that ``embedder`` computes in; recorded.
        shard_rows: rows of a shard; None: :func:`default_shard_rows`.
        quiet: print no progress.
        overwrite: make a new set beside one that ``folder`` holds (in ``.NAME.new``, where a killed call is resumed),
            which takes its place when it is complete.
        restart: empty a folder that was begun with other settings, instead of refusing it.

    Returns:
        The same on every rank: "rows", "errors", "first_errors" (at most 10 of {"key", "error"}), "embedded" (in this
        call), "warnings" (their number in this call), "first_warnings" (at most 10 of {"key", "warning"}: see
        :func:`plsc.models.preprocessing.picture_warnings`), "several" (pictures in this call of which the largest of
        several faces was taken), "seconds", "images_per_second", "bound_by" ("decode" or
        "model"; None if there was nothing to do).

    Raises:
        UsageError: the folder cannot be taken, or was begun with another model, data or settings; or the ranks hold
            other images.
        DataError: no image at all could be embedded; nothing is written then.
    """
    _check(embedder, dataset, mesh)
    final = Path(folder)
    # Something else than a set is refused by begin().
    replaces = on_main(lambda: overwrite and holds_manifest(final, FORMAT), mesh)
    stated = {"precision": precision, "dtype": dtype, "shard_rows": shard_rows or default_shard_rows(len(dataset))}
    data_id = on_main(lambda: _data_id(dataset, final, replaces), mesh)
    settings = {**_settings(embedder, dataset, data_id, flip=flip), **stated}
    target = final.with_name(f".{final.name}.new") if replaces else final
    writer = SetWriter(target, settings, {"model": _origin(embedder.source), "data": _origin(dataset.source)})
    with ExitStack() as lock:
        complete = on_main(lambda: _begin(writer, lock, replaces or restart), mesh)
        pending = _pending_shards(writer, dataset, mesh)
        if complete and pending:
            on_main(writer.reopen, mesh)
        shards = sorted(pending)[mesh.rank :: mesh.world_size]
        ranges = [writer.shard_range(number) for number in shards]
        pin = mesh.device.type == "cuda"
        loader = decode_loader(dataset, ranges, embedder.preprocessing, batch_size=batch_size, workers=workers, pin=pin)
        name = "embed" if mesh.world_size == 1 else f"embed (rank {mesh.rank} of {mesh.world_size})"
        progress = Progress(name, sum(stop - start for start, stop in ranges), quiet=quiet or not mesh.is_main)
        embed = partial(embed_whole, embedder, flip=flip, batch_size=batch_size)
        own = {number: pending[number] for number in shards}
        work = _embed_shards(embed, loader, dataset, writer, own, progress) if own else _Work()
        works = all_gather_object(work, mesh)
        unchanged = complete and not pending
        on_main(lambda: _finish(writer, [str(name) for name in dataset.class_names], unchanged, final), mesh)
    return _summary(final, works, dataset)


def _settings(embedder: EmbeddingModel, dataset: ImageDataset, data_id: str, *, flip: bool) -> dict[str, Any]:
    """What a set's manifest states of the model and the images: a call with others does not go on with the set."""
    of_model = stated_contracts(embedder, flip, dataset.alignment)
    return {"contract_id": of_model["contract_id"], "data_id": data_id, "rows": len(dataset)} | of_model


def default_shard_rows(rows: int) -> int:
    """Rows per shard: a power of two that makes about 64 shards, between 256 and 32,768."""
    return min(max(1 << (max(rows, 1) // 64).bit_length(), 256), 32768)


def _data_id(dataset: ImageDataset, folder: Path, replaces: bool) -> str:
    """What a set says of the images that it is of; as earlier versions said it, where one is to be gone on with."""
    if not replaces and holds_manifest(folder, FORMAT):
        former = _former_data_id(dataset)
        with suppress(DataError):  # which begin() reports
            if read_json(folder / MANIFEST).get("data_id") == former:
                note(
                    f"embed: {folder} was begun by an earlier version, which did not note sizes and times of pictures: "
                    "if some were replaced since, give --overwrite"
                )
                return former
    return samples_id(dataset)


def _former_data_id(dataset: ImageDataset) -> str:
    """That of earlier versions: rows, labels, class names, 4,096 keys, alignment, a single file's size."""
    digest = hashlib.sha256(np.ascontiguousarray(dataset.labels, dtype="<i8").tobytes())
    sample = [] if not len(dataset) else np.linspace(0, len(dataset) - 1, _FINGERPRINT_KEYS).astype(np.int64).tolist()
    for text in (*map(str, dataset.class_names), *(dataset.key(row) for row in dict.fromkeys(sample))):
        digest.update(text.encode("utf-8", errors="replace") + b"\0")
    digest.update(dataset.alignment.encode())
    source = Path(dataset.source)
    if source.is_file():
        digest.update(str(source.stat().st_size).encode())
    return digest.hexdigest()[:16]


def _check(embedder: EmbeddingModel, dataset: ImageDataset, mesh: Mesh) -> None:
    first, *others = all_gather_object(counts(dataset), mesh)
    for rank, seen in enumerate(others, 1):
        if seen != first:
            raise UsageError(
                f"{dataset.source} holds {counted(first['images'], 'image')} for rank 0 and "
                f"{counted(seen['images'], 'image')} for rank {rank}, or in other classes: give every rank the same "
                "ones, all of them written"
            )
    if not len(dataset):
        raise UsageError(f"{dataset.source} holds no images")
    if dataset.image_size != embedder.image_size:
        raise UsageError(
            f"{dataset.source} gives images of {dataset.image_size} pixels; "
            f"{embedder.source} takes {embedder.image_size}"
        )


def _origin(source: object) -> str:
    path = Path(str(source))
    return str(path.resolve()) if path.exists() else str(source)


def _begin(writer: SetWriter, lock: ExitStack, restart: bool) -> bool:
    """Lock and begin the folder; True if the set is complete."""
    lock.enter_context(sole_writer(writer.folder))
    return writer.begin(restart=restart)


def _finish(writer: SetWriter, class_names: list[str], unchanged: bool, final: Path) -> None:
    """Complete the set and move it to ``final``; :class:`DataError` if no row has an embedding, and it is removed."""
    if not (unchanged and _is_whole(writer.folder)):
        written = writer.finish(class_names)
        if len(written.errors) == len(written):
            first = written.errors[min(written.errors)]
            shutil.rmtree(writer.folder)
            raise DataError(f"none of the {counted(len(written), 'image')} could be embedded; the first: {first}")
    if writer.folder != final:
        atomic_replace_dir(writer.folder, final)


def _pending_shards(writer: SetWriter, dataset: ImageDataset, mesh: Mesh) -> dict[int, str]:
    """The shards still to be made, with the contents of their pictures before any is read.

    The ranks share the work, since every published shard is hashed.
    """
    pending = {}
    for number in range(mesh.rank, writer.shard_count, mesh.world_size):
        contents, published = contents_id(dataset, *writer.shard_range(number)), writer.published(number)
        if published in ("", contents):
            continue
        pending[number] = contents
        folder = writer.folder / shard_name(number)
        if folder.exists():
            what = "is damaged" if published is None else "is of pictures that have changed since"
            note(f"embed: {folder} {what}; making it again")
    return {number: contents for part in all_gather_object(pending, mesh) for number, contents in part.items()}


def _is_whole(folder: Path) -> bool:
    try:
        EmbeddingSet(folder, verify=True, own=True)
    except IntegrityError:
        return False
    return True


@report_killed_workers()
def _embed_shards(
    embed: Embed,
    loader: DataLoader[Any],
    dataset: ImageDataset,
    writer: SetWriter,
    shards: dict[int, str],
    progress: Progress,
) -> _Work:
    """Make and publish ``shards``, one after the other, of what ``loader`` decodes; each has its pictures' contents."""
    work, began = _Work(), time.monotonic()
    batches = embedded_batches(embed, iter(loader), work.stalls)
    with ThreadPoolExecutor(1) as publisher:  # a shard is hashed and written while the next is computed
        publishing: Future[None] | None = None
        for number, contents in shards.items():
            start, stop = writer.shard_range(number)
            embeddings = np.zeros((stop - start, writer.settings["dim"]), dtype=writer.settings["dtype"])
            errors, warnings, several = fill_rows(embeddings, batches, progress.advance)
            work.rows += len(embeddings)
            work.warning_count += len(warnings)
            first = [(start + row, text) for row, text in warnings.items()][: _SHOWN - len(work.warnings)]
            work.warnings += first
            work.several += several
            rows = ShardRows(
                start,
                embeddings,
                ids=np.arange(start, stop, dtype=np.int64),
                labels=np.asarray(dataset.labels[start:stop], dtype=np.int64),
                keys=[dataset.key(row) for row in range(start, stop)],
                errors={start + row: text for row, text in errors.items()},
                metadata=[dataset.metadata(row) for row in range(start, stop)],
                contents=contents,
            )
            if publishing is not None:
                publishing.result()
            publishing = publisher.submit(writer.publish, number, rows)
    if publishing is not None:
        publishing.result()
    work.seconds = time.monotonic() - began
    progress.finish()
    return work


def _summary(folder: Path, works: list[_Work], dataset: ImageDataset) -> dict[str, Any]:
    finished = EmbeddingSet(folder, own=True)
    errors = [{"key": finished.keys[row], "error": text} for row, text in finished.errors.items()]
    warnings = sorted(warning for work in works for warning in work.warnings)[:_SHOWN]
    rows = sum(work.rows for work in works)
    seconds = max(work.seconds for work in works)
    for_images, for_model = sum(work.stalls.images for work in works), sum(work.stalls.model for work in works)
    bound = "decode" if for_images > for_model else "model"
    return {
        "rows": len(finished),
        "errors": len(errors),
        "first_errors": errors[:_SHOWN],
        "warnings": sum(work.warning_count for work in works),
        "first_warnings": [{"key": dataset.key(row), "warning": text} for row, text in warnings],
        "several": sum(work.several for work in works),
        "dim": finished.dim,
        "contract_id": finished.contract_id,
        "embedded": rows,
        "seconds": round(seconds, 3),
        "images_per_second": round(rows / seconds, 1) if rows else None,
        "bound_by": bound if rows else None,
    }
