"""Images in, embeddings out: a loader that decodes in worker processes, and a model that is kept busy.

The model has its next batch before the embeddings of the last are used. An image that cannot be decoded is an error of
its row and ends nothing.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from plsc.data import ImageDataset
from plsc.data.loader import map_in_workers, report_killed_workers
from plsc.embedding.columns import Array, Float32, Mask
from plsc.embedding.embedder import EmbeddingModel, embed_images
from plsc.errors import DataError, PlscError
from plsc.models.preprocessing import (
    Preprocessing,
    picture_warnings,
    resize_image,
    warning_summary,
)
from plsc.parallel.collectives import all_gather_object, all_gather_rows
from plsc.parallel.mesh import Mesh
from plsc.progress import Progress, note

BATCHES_AHEAD = 2  # one that the model computes, one that waits for it
Embed = Callable[[Tensor], Tensor]
Decoded = tuple[Tensor | None, str, str, int]  # the image, or an error; a warning; faces found in its picture


def default_batch_size(device: torch.device) -> int:
    """Images per step of a model on ``device``, where nobody says how many."""
    return 256 if device.type == "cuda" else 64


class ImageSource(Protocol):
    """Images in a fixed order."""

    def __len__(self) -> int: ...

    def picture(self, index: int) -> Tensor:
        """Return image ``index`` as uint8 (3, H, W) in its stored size; :class:`DataError` names an unreadable one."""

    def key(self, index: int) -> str:
        """Return the readable id of image ``index``."""


class Batch(NamedTuple):
    """Images uint8 (B, 3, S, S); errors and warnings of some by their position in the batch.

    ``several`` of them are the largest face of several in a picture.
    """

    images: Tensor
    errors: dict[int, str]
    warnings: dict[int, str]
    several: int = 0


class Embedded(NamedTuple):
    """Embeddings (B, D) float32 of a batch, with errors and warnings by position; and see :class:`Batch`."""

    rows: Float32
    errors: dict[int, str]
    warnings: dict[int, str]
    several: int = 0


@dataclass
class StallTimes:
    """Seconds spent waiting for images, and for the model: the larger one names the bottleneck."""

    images: float = 0.0
    model: float = 0.0


def embedded_batches(embed: Embed, stream: Iterator[Any], stalls: StallTimes) -> Iterator[Embedded]:
    """Embed a stream of batches, in order.

    Args:
        embed: images (B, 3, S, S) to (B, D) on the CPU; runs in a thread of its own.
        stream: of :class:`Batch`.
        stalls: times are added to it.

    Yields:
        Each batch's rows, errors and warnings.

    Raises:
        Exception: whatever ``embed`` or ``stream`` raises.
    """
    running: deque[tuple[Future[Tensor], Batch]] = deque()
    with ThreadPoolExecutor(1) as model:
        while True:
            began = time.monotonic()
            batch = next(stream, None) if len(running) < BATCHES_AHEAD else None
            stalls.images += time.monotonic() - began
            if batch is not None:
                running.append((model.submit(embed, batch.images), batch))
            elif running:
                future, embedded = running.popleft()
                began = time.monotonic()
                vectors = future.result().numpy()
                stalls.model += time.monotonic() - began
                yield Embedded(vectors, *embedded[1:])
            else:
                return


@report_killed_workers()
def embed_dataset(
    embedder: EmbeddingModel, dataset: ImageDataset, *, batch_size: int = 64, workers: int = 0, flip: bool = False
) -> Embedded:
    """Embed every image of a data set into memory.

    Args:
        embedder: the model.
        dataset: images of the model's size.
        batch_size: images embedded at once.
        workers: decoding processes; 0: none but this.
        flip: average over each image and its mirror image.

    Returns:
        Rows (N, D) float32, not normalised; errors of the images without an embedding, whose rows are zero; warnings.

    Raises:
        DataError: a decoding process was killed.
    """
    rows = np.zeros((len(dataset), embedder.embedding_dim), dtype=np.float32)
    loader = decode_loader(dataset, [(0, len(dataset))], embedder.preprocessing, batch_size=batch_size, workers=workers)
    batches = embedded_batches(partial(embed_images, embedder, flip=flip), iter(loader), StallTimes())
    return Embedded(rows, *fill_rows(rows, batches))


def fill_rows(
    rows: Array, batches: Iterator[Embedded], advance: Callable[[int], object] = lambda count: None
) -> tuple[dict[int, str], dict[int, str], int]:
    """Fill ``rows`` (N, D) with the next ``batches``, which end where they do; a row with an error is zero.

    A row has one where its image is unreadable, or its embedding is not finite in the type of ``rows``.

    Returns:
        Errors and warnings by row, and how many are the largest of several faces; ``advance`` gets the number of rows
        of each batch.
    """
    errors: dict[int, str] = {}
    warnings: dict[int, str] = {}
    row = several = 0
    while row < len(rows):
        batch = next(batches)
        with np.errstate(over="ignore"):
            stored = batch.rows.astype(rows.dtype)
        broken = np.flatnonzero(~np.isfinite(stored).all(axis=1))
        bad = {int(place): f"the model's embedding is not finite in {rows.dtype}" for place in broken} | batch.errors
        stored[list(bad)] = 0
        rows[row : row + len(stored)] = stored
        errors |= {row + place: text for place, text in bad.items()}
        warnings |= {row + place: text for place, text in batch.warnings.items()}
        several += batch.several
        row += len(stored)
        advance(len(stored))
    return errors, warnings, several


@dataclass(frozen=True)
class EmbeddedImages:
    """Embeddings ``rows`` float32 (N, D), not normalised; rows where ``readable`` (N,) is False are meaningless."""

    rows: Float32
    readable: Mask


def embed_on_ranks(
    embed: Embed,
    images: ImageSource,
    name: str,
    preprocessing: Preprocessing,
    mesh: Mesh,
    *,
    batch_size: int,
    flip: bool = True,
    quiet: bool = False,
) -> EmbeddedImages:
    """Embed every image; every rank gets all rows.

    Batches are the same for any number of ranks and each rank embeds whole ones, so the result does not depend on the
    number of ranks. Unreadable images are reported by name, and pictures that do not look like aligned crops by their
    number, unless ``quiet``.

    Args:
        embed: maps images uint8 (B, 3, H, W) on the CPU to embeddings (B, D) on any device.
        images: the images to embed.
        name: the set's name, in messages.
        preprocessing: to whose size, and by whose interpolation, pictures are resized.
        mesh: the ranks that share the work; all must call.
        batch_size: images per call of ``embed``.
        flip: add the embedding of each image's mirror image.
        quiet: print no progress.

    Raises:
        DataError: more than 1% of the images (and more than ten) cannot be read, or an embedding is not finite.
    """
    total = -(-len(images) // batch_size)
    batches = range(mesh.rank * total // mesh.world_size, (mesh.rank + 1) * total // mesh.world_size)
    ranges = [range(batch * batch_size, min((batch + 1) * batch_size, len(images))) for batch in batches]
    progress = Progress(f"embedding {name}", len(images), quiet=quiet or not mesh.is_main)
    parts: list[Tensor] = []
    errors: dict[int, str] = {}
    warnings: dict[int, str] = {}
    decoded = decoded_ahead(images, ranges, preprocessing)
    for rows_of, batch in zip(ranges, decoded, strict=True):
        with torch.no_grad():
            part = embed(batch.images).float()
            parts.append((part + embed(batch.images.flip(-1)).float() if flip else part).to(mesh.device))
        errors |= {rows_of[place]: text for place, text in batch.errors.items()}
        warnings |= {rows_of[place]: text for place, text in batch.warnings.items()}
        # This rank's progress is taken for that of all: their shares differ by one batch at most.
        progress.advance(min(len(rows_of) * mesh.world_size, len(images) - progress.count))
    dim = max(all_gather_object(parts[0].shape[1] if parts else 0, mesh))  # a rank without a batch has it from others
    rows = all_gather_rows(torch.cat([*parts, torch.empty(0, dim, device=mesh.device)]), mesh).cpu().numpy()
    progress.advance(len(images) - progress.count)
    progress.finish()
    if (all_warnings := _gathered(warnings, mesh)) and mesh.is_main and not quiet:
        first, message = all_warnings[0]
        note(warning_summary(len(all_warnings), len(images), images.key(first), message))
    readable = _readable(_gathered(errors, mesh), name, len(images), mesh)
    bad = np.flatnonzero(readable & ~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise DataError(
            f"{name}: {bad.size} embeddings are not finite, the first that of {images.key(int(bad[0]))}; "
            "the model has diverged, or its precision overflows"
        )
    return EmbeddedImages(rows, readable)


def _gathered(texts: dict[int, str], mesh: Mesh) -> list[tuple[int, str]]:
    """The texts of all ranks, in the order of the images."""
    return sorted(item for part in all_gather_object(list(texts.items()), mesh) for item in part)


def decoded_ahead(images: ImageSource, ranges: Sequence[range], preprocessing: Preprocessing) -> Iterator["Batch"]:
    """Decode batches of images, by threads one batch ahead.

    Args:
        images: the images.
        ranges: of their indices, one for each batch.
        preprocessing: whose size and interpolation they are resized by.

    Yields:
        Each batch; an image with an error is black.
    """
    decoder = _Decoder(images, preprocessing)
    threads = max(min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), 1)
    ahead: deque[list[Future[Decoded]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for indices in (*ranges, range(0)):
            ahead.append([pool.submit(decoder.decoded, index) for index in indices])
            if len(ahead) > 1:
                yield decoder.batch([image.result() for image in ahead.popleft()])


def _readable(unreadable: list[tuple[int, str]], name: str, total: int, mesh: Mesh) -> Mask:
    """Warn of unreadable images by name, or raise if there are many; return the mask of the readable ones."""
    if len(unreadable) > max(10, total // 100) or len(unreadable) == total:
        raise DataError(
            f"{name}: {len(unreadable)} of {total} images cannot be read, the first: {unreadable[0][1]}; repair the set"
        )
    if mesh.is_main:
        for _, message in unreadable:
            note(f"warning: {name}: an image is left out: {message}")
    readable = np.ones(total, dtype=bool)
    readable[[index for index, _ in unreadable]] = False
    return readable


def decode_loader(
    dataset: ImageDataset,
    ranges: Sequence[tuple[int, int]],
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    workers: int,
    pin: bool = False,
) -> DataLoader[Any]:
    """Decode the rows [start, stop) of each of ``ranges``, in batches that never cross a range's end.

    Args:
        dataset: the images.
        ranges: of rows, in order.
        preprocessing: the model's, which resizes them.
        batch_size: the largest B.
        workers: decoding processes; 0: none but this.
        pin: put batches into pinned memory, for a GPU.

    Returns:
        A loader of :class:`Batch`; an image with an error is black. Warnings are the first of
        :func:`plsc.models.preprocessing.picture_warnings`.
    """
    requests = [
        range(start, min(start + batch_size, stop))
        for first, stop in ranges
        for start in range(first, stop, batch_size)
    ]
    return map_in_workers(_Decoder(dataset, preprocessing), requests, workers, pin_memory=pin)


class _Decoder(Dataset[Batch]):
    """Maps rows to their batch; an error of an image is a value: an exception would end the worker."""

    def __init__(self, dataset: ImageSource, preprocessing: Preprocessing) -> None:
        self.dataset, self.preprocessing = dataset, preprocessing

    def __getitem__(self, rows: range) -> Batch:
        return self.batch([self.decoded(row) for row in rows])

    def decoded(self, index: int) -> Decoded:
        """An image is (image, "", warning, faces) or (None, error, "", 0)."""
        try:
            picture = self.dataset.picture(index)
        except (PlscError, OSError) as error:
            return None, " ".join(str(error).split()), "", 0
        warnings = picture_warnings(picture, self.preprocessing.image_size)
        resized = resize_image(picture, self.preprocessing.image_size, self.preprocessing.interpolation)
        found = getattr(self.dataset, "faces_found", 0)  # of data sets that align
        return resized, "", warnings[0].message if warnings else "", found

    def batch(self, items: list[Decoded]) -> Batch:
        """Stack decoded images, black where one is missing."""
        images = torch.zeros(len(items), *self.preprocessing.shape, dtype=torch.uint8)
        errors = {place: error for place, (image, error, *_) in enumerate(items) if image is None}
        warnings = {place: warning for place, (*_, warning, _) in enumerate(items) if warning}
        for place, (image, *_) in enumerate(items):
            if image is not None:
                images[place] = image
        return Batch(images, errors, warnings, sum(found > 1 for *_, found in items))
