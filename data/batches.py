"""One rank's part of a batch: read, cached and augmented. This is what runs in the loader's processes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from plsc.data.cache import ImageCache
from plsc.data.dataset import ImageDataset
from plsc.data.transforms import augment_batch
from plsc.errors import DataError

_NEIGHBOURS = 100


@dataclass(frozen=True)
class Request:
    """The samples wanted, by their indices (b,) in the data set; the epoch keys their augmentation."""

    epoch: int
    indices: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """images: uint8 (n, 3, S, S) of those ``indices`` (n,) that could be read; failures: message by key."""

    images: torch.Tensor
    indices: NDArray[np.int64]
    failures: dict[str, str]


class BatchReader(Dataset[Batch]):
    """Answers requests; a mapping from :class:`Request` to :class:`Batch`, as torch's DataLoader wants it."""

    def __init__(self, dataset: ImageDataset, augment: str, seed: int, cache: ImageCache | None) -> None:
        self.dataset, self.augment, self.seed, self.cache = dataset, augment, seed, cache

    def __getitem__(self, request: Request) -> Batch:
        batch = self._read(request.indices)
        if batch.failures:
            batch = self._with_neighbours(batch, request.indices)
        images = augment_batch(batch.images, batch.indices, self.augment, seed=self.seed, epoch=request.epoch)
        return Batch(images, batch.indices, batch.failures)

    def _read(self, indices: NDArray[np.int64]) -> Batch:
        size = self.dataset.image_size or 0
        images = torch.empty((len(indices), 3, size, size), dtype=torch.uint8)
        good, failures = self._fill(images, indices)
        return Batch(images[torch.from_numpy(good)] if failures else images, indices[good], failures)

    def _with_neighbours(self, batch: Batch, asked: NDArray[np.int64]) -> Batch:
        """Batch normalisation fails on one image: where too few are sound, take those that follow in the data."""
        for distance in range(1, _NEIGHBOURS):
            if len(batch.indices) >= min(2, len(asked)):
                break
            extra = self._read((asked[:1] + distance) % len(self.dataset))
            images = torch.cat([batch.images, extra.images])
            indices = np.concatenate([batch.indices, extra.indices])
            batch = Batch(images, indices, batch.failures | extra.failures)
        return batch

    def _fill(self, images: torch.Tensor, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], dict[str, str]]:
        """Write the images into rows of ``images``; which rows are good, and why the others are not."""
        good = np.zeros(len(indices), dtype=np.bool_)
        failures: dict[str, str] = {}
        if self.cache is not None:
            good = self.cache.present(indices)
            images[torch.from_numpy(good)] = self.cache.take(indices[good])
        for row in np.flatnonzero(~good):
            index = int(indices[row])
            try:
                image = self.dataset.image(index)
            except DataError as error:
                failures[self.dataset.key(index)] = str(error)
                continue
            images[row] = image
            good[row] = True
            if self.cache is not None:
                self.cache.put(index, image)
        return good, failures
