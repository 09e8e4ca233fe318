"""From a data set to an embedding set, on any number of ranks, resumable after a kill at any moment.

The rows are cut into shards whose bounds depend on the number of rows alone. A rank takes every world_size-th
shard that is not yet published; a shard appears whole or not at all. So a run may stop and go on with another
number of ranks, and gives the same bytes as one that was never stopped. Ranks on several machines need one
file system.
"""

import hashlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from plsc.data import ImageDataset
from plsc.embed.embedder import Embedder
from plsc.embed.embedding_set import EmbeddingSet, shard_name
from plsc.embed.feed import feed
from plsc.embed.pipeline import Embedded, Waits, embedded_batches
from plsc.embed.set_writer import SetWriter, ShardRows, sole_writer
from plsc.errors import DataError, IntegrityError, PlscError, UsageError
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_object, barrier, broadcast_object
from plsc.progress import Progress

FLIP_SUFFIX = "+flip"


def contract_of(embedder: Embedder, flip: bool) -> str:
    """The contract of a set: the embedder's, marked when embeddings are averaged over the image and its
    mirror."""
    return embedder.contract_id + (FLIP_SUFFIX if flip else "")


def embed_images(embedder: Embedder, images: Tensor, flip: bool) -> Tensor:
    """Embed uint8 (B, 3, S, S) into float32 (B, D), not normalised; with ``flip``, the mean over image and
    mirror."""
    if not flip:
        return embedder(images)
    return (embedder(images) + embedder(images.flip(-1))) / 2


def default_shard_rows(rows: int) -> int:
    """Rows per shard: a power of two that makes about 64 shards, between 256 and 32,768."""
    return min(max(1 << (max(rows, 1) // 64).bit_length(), 256), 32768)


def data_id(dataset: ImageDataset) -> str:
    """A fingerprint of a data set: rows, labels, class names, 4,096 keys evenly spread, and the size of a
    single file; and how faces are aligned.

    Images that change under unchanged names are not noticed.
    """
    seen = hashlib.sha256(np.ascontiguousarray(dataset.labels, dtype="<i8").tobytes())
    places = [] if not len(dataset) else np.linspace(0, len(dataset) - 1, 4096).astype(np.int64).tolist()
    for text in (*map(str, dataset.class_names), *(dataset.key(place) for place in dict.fromkeys(places))):
        seen.update(text.encode("utf-8", errors="replace") + b"\0")
    seen.update(dataset.alignment.encode())
    source = Path(dataset.source)
    if source.is_file():
        seen.update(str(source.stat().st_size).encode())
    return seen.hexdigest()[:16]


def extract(
    embedder: Embedder,
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
) -> dict[str, Any]:
    """Embed every image of ``dataset`` into the embedding set ``folder``, or go on where an earlier call
    stopped.

    Embeddings are stored as the model gives them, not normalised. An image that cannot be read becomes a zero
    row with its error. ``workers`` processes per rank decode. ``precision`` is what ``embedder`` computes in;
    it is recorded.

    Returns "rows", "errors", "first_errors" (at most 10 of {"key", "error"}), "embedded" (in this call),
    "seconds", "images_per_second", "bound_by" ("decode" or "model"; None if there was nothing to do), the
    same on every rank.

    Raises :class:`UsageError` if the folder cannot be taken or was begun with another model, data or
    settings, and :class:`DataError` if no image at all could be embedded. Collectives: a few small objects at
    the start and the end.
    """
    _check(embedder, dataset, batch_size, workers)
    settings = {
        "contract_id": contract_of(embedder, flip),
        "data_id": data_id(dataset),
        "rows": len(dataset),
        "dim": embedder.embedding_dim,
        "image_size": embedder.image_size,
        "flip": flip,
        "precision": precision,
        "dtype": dtype,
        "shard_rows": shard_rows or default_shard_rows(len(dataset)),
        **({"alignment": dataset.alignment} if dataset.alignment else {}),
    }
    writer = SetWriter(Path(folder), settings, {"model": _place(embedder.source), "data": _place(dataset.source)})
    with ExitStack() as lock:
        complete = _begin(writer, mesh, lock)
        pending = _pending(writer, mesh)
        job = _Job(embedder, dataset, writer, batch_size, workers)
        done = _run(job, pending[mesh.rank :: mesh.world_size], mesh, quiet)
        works = all_gather_object(done, mesh)
        if mesh.is_main and not (complete and not pending and _is_whole(writer.folder)):
            writer.finish([str(name) for name in dataset.class_names])
        barrier(mesh)
    return _summary(writer.folder, works)


@dataclass(frozen=True)
class _Job:
    """What is to be done, the same on every rank."""

    embedder: Embedder
    dataset: ImageDataset
    writer: SetWriter
    batch_size: int
    workers: int


@dataclass
class _Work:
    """What one rank did in this call: rows, seconds in all, and how many of them it waited for what."""

    rows: int = 0
    seconds: float = 0.0
    waits: Waits = field(default_factory=Waits)


def _check(embedder: Embedder, dataset: ImageDataset, batch_size: int, workers: int) -> None:
    if batch_size < 1:
        raise UsageError(f"batch size {batch_size}: at least 1 is needed")
    if workers < 0:
        raise UsageError(f"{workers} workers: 0 or more are needed")
    if not len(dataset):
        raise UsageError(f"{dataset.source} holds no images")
    if dataset.image_size != embedder.image_size:
        raise UsageError(
            f"{dataset.source} gives images of {dataset.image_size} pixels; "
            f"{embedder.source} takes {embedder.image_size}"
        )


def _place(source: object) -> str:
    path = Path(str(source))
    return str(path.resolve()) if path.exists() else str(source)


def _begin(writer: SetWriter, mesh: Mesh, lock: ExitStack) -> bool:
    """Rank 0 takes the folder; what stops it stops all ranks with the same error."""
    outcome: bool | PlscError | None = None
    if mesh.is_main:
        try:
            lock.enter_context(sole_writer(writer.folder))
            outcome = writer.begin()
        except PlscError as error:
            outcome = error
    outcome = broadcast_object(outcome, mesh)
    if isinstance(outcome, PlscError):
        raise outcome
    return bool(outcome)


def _pending(writer: SetWriter, mesh: Mesh) -> list[int]:
    """The shards still to be made, in order; the ranks share the reading that it takes to know."""
    mine = []
    for number in range(mesh.rank, writer.shard_count, mesh.world_size):
        if not writer.is_published(number):
            mine.append(number)
            if (writer.folder / shard_name(number)).exists():
                print(
                    f"embed: {writer.folder / shard_name(number)} is damaged; making it again",
                    file=sys.stderr,
                )
    return sorted(number for part in all_gather_object(mine, mesh) for number in part)


def _is_whole(folder: Path) -> bool:
    try:
        EmbeddingSet(folder, verify=True)
    except IntegrityError:
        return False
    return True


def _run(job: _Job, shards: list[int], mesh: Mesh, quiet: bool) -> _Work:
    """Make and publish ``shards``, one after the other."""
    ranges = [job.writer.shard_range(number) for number in shards]
    what = "embed" if mesh.world_size == 1 else f"embed (rank {mesh.rank} of {mesh.world_size})"
    progress = Progress(what, sum(stop - start for start, stop in ranges), quiet=quiet or not mesh.is_main)
    work = _Work()
    if not shards:
        return work
    began = time.monotonic()
    stream = iter(
        feed(
            job.dataset,
            ranges,
            size=job.embedder.image_size,
            batch_size=job.batch_size,
            workers=job.workers,
            pin=mesh.device.type == "cuda",
        )
    )
    embed = partial(embed_images, job.embedder, flip=job.writer.settings["flip"])
    batches = embedded_batches(embed, stream, work.waits)
    with ThreadPoolExecutor(1) as publisher:  # a shard is hashed and written while the next is computed
        written: Future[None] | None = None
        for number in shards:
            rows = _shard_rows(job, number, batches, work, progress)
            if written is not None:
                written.result()
            written = publisher.submit(job.writer.publish, number, rows)
        if written is not None:
            written.result()
    work.seconds = time.monotonic() - began
    progress.finish()
    return work


def _shard_rows(job: _Job, number: int, batches: Iterator[Embedded], work: _Work, progress: Progress) -> ShardRows:
    """The rows of a shard, out of as many ``batches`` as it takes."""
    start, stop = job.writer.shard_range(number)
    settings = job.writer.settings
    embeddings = np.zeros((stop - start, settings["dim"]), dtype=settings["dtype"])
    errors: dict[int, str] = {}
    row = start
    while row < stop:
        vectors, unread = next(batches)
        stored, unusable = _storable(vectors, embeddings.dtype)
        bad = {**unusable, **unread}
        stored[list(bad)] = 0
        embeddings[row - start : row - start + len(stored)] = stored
        errors |= {row + place: text for place, text in bad.items()}
        row += len(stored)
        work.rows += len(stored)
        progress.advance(len(stored))
    labels = np.asarray(job.dataset.labels[start:stop], dtype=np.int64)
    keys = [job.dataset.key(row) for row in range(start, stop)]
    return ShardRows(start, embeddings, np.arange(start, stop, dtype=np.int64), labels, keys, errors)


def _storable(vectors: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """``vectors`` in the stored dtype, and the rows that are not finite in it."""
    with np.errstate(over="ignore"):
        stored = vectors.astype(dtype)
    broken = np.flatnonzero(~np.isfinite(stored).all(axis=1))
    return stored, {int(row): f"the model's embedding is not finite in {dtype}" for row in broken}


def _summary(folder: Path, works: list[_Work]) -> dict[str, Any]:
    finished = EmbeddingSet(folder)
    errors = [{"key": finished.keys[row], "error": text} for row, text in finished.errors.items()]
    if len(errors) == len(finished):
        raise DataError(f"none of the {len(finished)} images could be embedded; the first: {errors[0]['error']}")
    rows = sum(work.rows for work in works)
    seconds = max(work.seconds for work in works)
    waited = sum(work.waits.images for work in works), sum(work.waits.model for work in works)
    bound = "decode" if waited[0] > waited[1] else "model"
    return {
        "rows": len(finished),
        "errors": len(errors),
        "first_errors": errors[:10],
        "dim": finished.dim,
        "contract_id": finished.contract_id,
        "embedded": rows,
        "seconds": round(seconds, 3),
        "images_per_second": round(rows / seconds, 1) if rows else None,
        "bound_by": bound if rows else None,
    }
