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
        size = self.dataset.image_size or 0
        images = torch.empty((len(request.indices), 3, size, size), dtype=torch.uint8)
        good, failures = self._fill(images, request.indices)
        indices = request.indices[good]
        if failures:
            images = images[torch.from_numpy(good)]
        images = augment_batch(images, indices, self.augment, seed=self.seed, epoch=request.epoch)
        return Batch(images, indices, failures)

    def _fill(
        self, images: torch.Tensor, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], dict[str, str]]:
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
