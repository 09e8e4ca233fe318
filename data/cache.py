"""Decoded images kept in memory, for data sets small enough, and shared with the loader's processes."""

import mmap
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.dataset import ImageDataset
from plsc.errors import UsageError

AUTO_LIMIT = 2**30


class ImageCache:
    """A place for every image of a data set, filled as they are first read.

    The memory is mapped and shared: processes forked from this one read and fill the same cache, and what
    was never written takes no memory. Should two processes decode the same image, they write the same bytes.
    Raises UsageError where there cannot be so much memory.
    """

    def __init__(self, dataset: ImageDataset) -> None:
        size = _side(dataset)
        self._pixels = _shared(len(dataset) * 3 * size * size).view(len(dataset), 3, size, size)
        self._present = _shared(len(dataset))

    def present(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``indices`` are cached."""
        found: NDArray[np.bool_] = (self._present[torch.from_numpy(indices)] != 0).numpy()
        return found

    def take(self, indices: NDArray[np.int64]) -> torch.Tensor:
        """Copies of the cached images ``indices``: uint8 (n, 3, S, S)."""
        return self._pixels[torch.from_numpy(indices)]

    def put(self, index: int, image: torch.Tensor) -> None:
        """Keep ``image``, uint8 (3, S, S), as ``index``; marked present once it is whole."""
        self._pixels[index] = image
        self._present[index] = 1


def cache_fits(dataset: ImageDataset) -> bool:
    """Whether the decoded images take at most 1 GiB and an eighth of the free memory."""
    needed = len(dataset) * 3 * _side(dataset) ** 2
    return needed <= min(AUTO_LIMIT, _free_memory() // 8)


def _side(dataset: ImageDataset) -> int:
    if dataset.image_size is None:
        raise ValueError("only images of one size can be cached: open the data set with an image_size")
    return dataset.image_size


def _shared(count: int) -> torch.Tensor:
    try:
        return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
    except (OSError, OverflowError):
        size = f"{count / 2**30:,.0f} GiB"
        raise UsageError(f"{size} of decoded images do not fit in memory; do not cache them") from None


def _free_memory() -> int:
    """Bytes that a new allocation may take without swapping, as far as the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
