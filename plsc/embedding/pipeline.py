"""Images in, embeddings out: a loader that decodes in worker processes, and a model that is kept busy.

The model has its next batch before the embeddings of the last are used. An image that cannot be decoded is an error of
its row and ends nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from plsc.data import ImageDataset
from plsc.data.codec import resize_image
from plsc.data.loader import begin_worker, report_killed_workers
from plsc.embedding.embedder import Embedder, embed_images
from plsc.embedding.preprocessing import picture_warnings
from plsc.errors import PlscError
from plsc.models.preprocessing import Preprocessing

BATCHES_AHEAD = 2  # one that the model computes, one that waits for it
Decoded = tuple[Tensor | None, str, str]  # the image, or an error; a warning


class Batch(NamedTuple):
    """Images uint8 (B, 3, S, S); errors and warnings of some by their position in the batch."""

    images: Tensor
    errors: dict[int, str]
    warnings: dict[int, str]


class Embedded(NamedTuple):
    """Embeddings (B, D) float32 of a batch, with errors and warnings by position."""

    rows: npt.NDArray[np.float32]
    errors: dict[int, str]
    warnings: dict[int, str]


@dataclass
class StallTimes:
    """Seconds spent waiting for images, and for the model: the larger one names the bottleneck."""

    images: float = 0.0
    model: float = 0.0


def embedded_batches(
    embed: Callable[[Tensor], Tensor], stream: Iterator[Any], stalls: StallTimes
) -> Iterator[Embedded]:
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
                yield Embedded(vectors, embedded.errors, embedded.warnings)
            else:
                return


@report_killed_workers()
def embed_dataset(
    embedder: Embedder, dataset: ImageDataset, *, batch_size: int = 64, workers: int = 0, flip: bool = False
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
    errors: dict[int, str] = {}
    warnings: dict[int, str] = {}
    loader = decode_loader(
        dataset,
        [(0, len(dataset))],
        preprocessing=embedder.preprocessing,
        batch_size=batch_size,
        workers=workers,
        pin=False,
    )
    row = 0
    for batch in embedded_batches(partial(embed_images, embedder, flip=flip), iter(loader), StallTimes()):
        stored, bad = usable_rows(batch.rows, batch.errors, rows.dtype)
        rows[row : row + len(stored)] = stored
        errors |= {row + position: text for position, text in bad.items()}
        warnings |= {row + position: text for position, text in batch.warnings.items()}
        row += len(stored)
    return Embedded(rows, errors, warnings)


def usable_rows(
    vectors: npt.NDArray[np.float32], unreadable: dict[int, str], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """A batch's ``vectors`` in the stored dtype, and {position: error}: zero rows where there is an error.

    A row has one where its image is ``unreadable``, or its embedding is not finite in that dtype.
    """
    with np.errstate(over="ignore"):
        stored = vectors.astype(dtype)
    broken = np.flatnonzero(~np.isfinite(stored).all(axis=1))
    errors = {int(row): f"the model's embedding is not finite in {dtype}" for row in broken} | unreadable
    stored[list(errors)] = 0
    return stored, errors


def decode_loader(
    dataset: ImageDataset,
    ranges: Sequence[tuple[int, int]],
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    workers: int,
    pin: bool,
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
        :func:`plsc.embedding.preprocessing.picture_warnings`.
    """
    return DataLoader(
        _Decoder(dataset, preprocessing),
        batch_sampler=_Batches(ranges, batch_size),
        num_workers=workers,
        collate_fn=_Collate(preprocessing.shape),
        pin_memory=pin,
        worker_init_fn=begin_worker,
    )


class _Decoder(Dataset[Decoded]):
    """Item i is (image, "", warning) or (None, error, ""): an exception would end the worker."""

    def __init__(self, dataset: ImageDataset, preprocessing: Preprocessing) -> None:
        self.dataset, self.size, self.interpolation = dataset, preprocessing.image_size, preprocessing.interpolation

    def __getitem__(self, index: int) -> Decoded:
        try:
            picture = self.dataset.picture(index)
        except (PlscError, OSError) as error:
            return None, " ".join(str(error).split()), ""
        warnings = picture_warnings(picture, self.size)
        resized = resize_image(picture, self.size, self.interpolation)
        return resized, "", warnings[0].message if warnings else ""


class _Batches(Sampler[list[int]]):
    """Batches of consecutive rows within the ranges; independent of which rank reads which range."""

    def __init__(self, ranges: Sequence[tuple[int, int]], batch_size: int) -> None:
        self._ranges, self._size = ranges, batch_size

    def __len__(self) -> int:
        return sum(-(-(stop - start) // self._size) for start, stop in self._ranges)

    def __iter__(self) -> Iterator[list[int]]:
        for start, stop in self._ranges:
            for first in range(start, stop, self._size):
                yield list(range(first, min(first + self._size, stop)))


@dataclass
class _Collate:
    """Stacks decoded items into a batch, black where an image is missing."""

    shape: tuple[int, int, int]

    def __call__(self, items: list[Decoded]) -> Batch:
        images = torch.zeros(len(items), *self.shape, dtype=torch.uint8)
        errors = {position: error for position, (image, error, _) in enumerate(items) if image is None}
        warnings = {position: warning for position, (_, _, warning) in enumerate(items) if warning}
        for position, (image, _, _) in enumerate(items):
            if image is not None:
                images[position] = image
        return Batch(images, errors, warnings)
