"""Images for embedding: decoded in worker processes, in row order; a broken one is an error, not a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from plsc.data import ImageDataset
from plsc.errors import PlscError

Decoded = tuple[Tensor | None, str]
Batch = tuple[Tensor, dict[int, str]]


def feed(
    dataset: ImageDataset,
    ranges: Sequence[tuple[int, int]],
    *,
    size: int,
    batch_size: int,
    workers: int,
    pin: bool,
) -> DataLoader[Any]:
    """Iterate over the rows [start, stop) of each of ``ranges`` in batches that never cross a range's end.

    Yields (uint8 (B, 3, size, size), {place in the batch: why it cannot be had}); such an image is black.
    """
    return DataLoader(
        _Decoder(dataset),
        batch_sampler=_Batches(ranges, batch_size),
        num_workers=workers,
        collate_fn=_Collate(size),
        pin_memory=pin,
    )


class _Decoder(Dataset[Decoded]):
    """Item i is (image, "") or (None, why it cannot be had), so that a bad image does not end a worker."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Decoded:
        try:
            return self.dataset.image(index), ""
        except (PlscError, OSError) as error:
            return None, " ".join(str(error).split())


class _Batches(Sampler[list[int]]):
    """Batches of consecutive rows within the ranges: their make-up does not depend on who reads which."""

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
    """Stacks decoded items into uint8 (B, 3, S, S), black where an image is missing, and {place: error}."""

    size: int

    def __call__(self, items: list[Decoded]) -> Batch:
        images = torch.zeros(len(items), 3, self.size, self.size, dtype=torch.uint8)
        errors = {}
        for place, (image, error) in enumerate(items):
            if image is None:
                errors[place] = error
            else:
                images[place] = image
        return images, errors
