"""Pictures under labels from a file, as plsc cluster writes them, in place of their own."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.dataset import ImageDataset, map_numbers, number_names
from plsc.errors import DataError, UsageError, first_line
from plsc.progress import counted
from plsc.regular_files import open_regular


class RelabelledDataset(ImageDataset):
    """The images of ``dataset`` under the labels of a file; those that have none (-1) are left out, and gaps closed.

    Args:
        dataset: N images, whose own labels are not looked at.
        path: of a .npy, int64 (N,): the label of each image in its order; or (N, K), several of each.

    Raises:
        UsageError: the file does not exist, or is of another number of images.
        DataError: it holds something else, or no label.
    """

    def __init__(self, dataset: ImageDataset, path: Path) -> None:
        stored = _read(path)
        if len(stored) != len(dataset):
            raise UsageError(
                f"data.labels = {path} has {counted(len(stored), 'label')}, and {dataset.source} "
                f"{counted(len(dataset), 'image')}; cluster an embedding set of these images"
            )
        has_label = stored >= 0
        self._rows = np.flatnonzero(has_label if stored.ndim == 1 else has_label.any(1))
        if not len(self._rows):
            raise DataError(f"data.labels = {path} gives no image a label; cluster anew")
        mapped, numbers = map_numbers(stored[has_label])
        labels = np.full(stored.shape, -1, np.int64)
        labels[has_label] = mapped
        labels = labels[self._rows]
        super().__init__(dataset.source, labels, number_names(numbers), dataset.image_size)
        self.dataset, self.interpolation = dataset, dataset.interpolation
        self.skipped, self.left_out = dataset.skipped, dataset.left_out
        self.alignment = dataset.alignment
        if len(self._rows) < len(stored):  # for caches of decoded images: other rows are other images
            self.alignment += hashlib.sha256(self._rows.tobytes()).hexdigest()[:16]

    def image(self, index: int) -> torch.Tensor:
        """Return the image, resized as the data set does it."""
        return self.dataset.image(int(self._rows[index]))

    def picture(self, index: int) -> torch.Tensor:
        """Return the image in its stored size."""
        return self.dataset.picture(int(self._rows[index]))

    def key(self, index: int) -> str:
        """Return the image's own key."""
        return self.dataset.key(int(self._rows[index]))

    def metadata(self, index: int) -> dict[str, str]:
        """Return the image's own."""
        return self.dataset.metadata(int(self._rows[index]))

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the images' own."""
        first, last = self._own(start, stop)
        found = self.dataset.sample_ids(first, last)
        return [found[row - first] for row in self._rows[start:stop].tolist()]

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the images' own, and those of images between them that are left out."""
        return self.dataset.stamps(*self._own(start, stop))

    def _own(self, start: int, stop: int) -> tuple[int, int]:
        """The least range of the data set that holds images [start, stop), of which there is one at least."""
        return int(self._rows[start]), int(self._rows[stop - 1]) + 1


def _read(path: Path) -> NDArray[np.int64]:
    if not path.exists():
        raise UsageError(f"there is no data.labels = {path}")
    try:
        with open_regular(path) as file:
            labels = np.load(file, allow_pickle=False)
    except Exception as error:  # the header is an expression of Python, and may be anything
        raise DataError(f"data.labels = {path} is no .npy file: {first_line(error)}") from None
    if not isinstance(labels, np.ndarray) or labels.dtype != np.int64 or labels.ndim not in (1, 2):
        raise DataError(
            f"data.labels = {path} is no array of int64 (images,) or (images, labels); plsc cluster writes such ones"
        )
    return labels
