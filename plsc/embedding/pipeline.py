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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from plsc.data import ImageDataset
from plsc.embedding.embedder import Embedder, embed_images
from plsc.errors import DataError, PlscError

BATCHES_AHEAD = 2  # one that the model computes, one that waits for it
Decoded = tuple[Tensor | None, str]
Batch = tuple[Tensor, dict[int, str]]  # images (B, 3, S, S), and {position in the batch: error}
Embedded = tuple[npt.NDArray[np.float32], dict[int, str]]  # rows (B, D), and {position in the batch: error}


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
        stream: of :data:`Batch`.
        stalls: times are added to it.

    Yields:
        Rows (B, D) and {position in the batch: error}.

    Raises:
        DataError: a decoding process died. Whatever ``embed`` raises passes through.
    """
    running: deque[tuple[Future[Tensor], dict[int, str]]] = deque()
    with ThreadPoolExecutor(1) as model:
        while True:
            began = time.monotonic()
            batch = _next(stream) if len(running) < BATCHES_AHEAD else None
            stalls.images += time.monotonic() - began
            if batch is not None:
                running.append((model.submit(embed, batch[0]), batch[1]))
            elif running:
                future, errors = running.popleft()
                began = time.monotonic()
                vectors = future.result().numpy()
                stalls.model += time.monotonic() - began
                yield vectors, errors
            else:
                return


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
        Rows (N, D) float32, not normalised, and {row: error} of the images without an embedding, whose rows are zero.
    """
    rows = np.zeros((len(dataset), embedder.embedding_dim), dtype=np.float32)
    errors: dict[int, str] = {}
    loader = decode_loader(
        dataset,
        [(0, len(dataset))],
        size=embedder.image_size,
        batch_size=batch_size,
        workers=workers,
        pin=False,
    )
    row = 0
    for vectors, unreadable in embedded_batches(partial(embed_images, embedder, flip=flip), iter(loader), StallTimes()):
        stored, bad = usable_rows(vectors, unreadable, rows.dtype)
        rows[row : row + len(stored)] = stored
        errors |= {row + position: text for position, text in bad.items()}
        row += len(stored)
    return rows, errors


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


def _next(stream: Iterator[Any]) -> Any:
    """The next batch; None when there is no more."""
    try:
        return next(stream, None)
    except RuntimeError as error:  # torch's DataLoader has no class of its own for a worker that was killed
        if "exited unexpectedly" not in str(error):
            raise
        raise DataError("a decoding process was killed, perhaps for want of memory; use fewer --workers") from None


def decode_loader(
    dataset: ImageDataset,
    ranges: Sequence[tuple[int, int]],
    *,
    size: int,
    batch_size: int,
    workers: int,
    pin: bool,
) -> DataLoader[Any]:
    """Decode the rows [start, stop) of each of ``ranges``, in batches that never cross a range's end.

    Args:
        dataset: the images.
        ranges: of rows, in order.
        size: S.
        batch_size: the largest B.
        workers: decoding processes; 0: none but this.
        pin: put batches into pinned memory, for a GPU.

    Returns:
        A loader of (uint8 (B, 3, S, S), {position in the batch: error}); an image with an error is black.
    """
    return DataLoader(
        _Decoder(dataset),
        batch_sampler=_Batches(ranges, batch_size),
        num_workers=workers,
        collate_fn=_Collate(size),
        pin_memory=pin,
    )


class _Decoder(Dataset[Decoded]):
    """Item i is (image, "") or (None, error): an exception would end the worker."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Decoded:
        try:
            return self.dataset.image(index), ""
        except (PlscError, OSError) as error:
            return None, " ".join(str(error).split())


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
    """Stacks decoded items into uint8 (B, 3, S, S), black where an image is missing, and {position: error}."""

    size: int

    def __call__(self, items: list[Decoded]) -> Batch:
        images = torch.zeros(len(items), 3, self.size, self.size, dtype=torch.uint8)
        errors = {}
        for position, (image, error) in enumerate(items):
            if image is None:
                errors[position] = error
            else:
                images[position] = image
        return images, errors
