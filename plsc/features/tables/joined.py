"""Several data sets as one, for the class tables that train on them together."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.dataset import ImageDataset, StringColumn
from plsc.data.mixture import Mixture
from plsc.errors import UsageError
from plsc.files import write_json


class JoinedDataset(ImageDataset):
    """Several data sets as one, whose images and classes follow one another; names of classes are "part/class".

    Args:
        parts: data sets of one image size, by names.
        shares: of each batch, in relation to each other.
        classes: of each part; more than its data set has are classes without an image.
    """

    def __init__(self, parts: Mapping[str, ImageDataset], shares: Sequence[float], classes: Sequence[int]) -> None:
        datasets = list(parts.values())
        self._parts, self.names, self.shares = datasets, list(parts), tuple(shares)
        self._first_classes = [0, *np.cumsum(classes).tolist()]
        self._first_images = [0, *np.cumsum([len(part) for part in datasets]).tolist()]
        names = _JoinedNames(self.names, [part.class_names for part in datasets], self._first_classes)
        source = ", ".join(dict.fromkeys(part.source for part in datasets))
        super().__init__(source, _joined_labels(datasets, self._first_classes), names, datasets[0].image_size)
        self.interpolation = datasets[0].interpolation
        if any((part.image_size, part.interpolation) != (self.image_size, self.interpolation) for part in datasets):
            raise UsageError("data sets that train together have images of one size")
        for name, part in parts.items():
            self.skipped |= {f"{name}: {key}": reason for key, reason in part.skipped.items()}
            self.empty_classes |= {f"{name}/{key}": found for key, found in part.empty_classes.items()}
            for suffix, count in part.left_out.items():
                self.left_out[suffix] = self.left_out.get(suffix, 0) + count
        self.alignment = "".join(f"{part.source}={part.alignment}\n" for part in datasets)

    @property
    def parts(self) -> Sequence[ImageDataset]:
        """The data sets, in their order."""
        return self._parts

    @property
    def first_classes(self) -> Sequence[int]:
        """See :attr:`ImageDataset.first_classes`."""
        return self._first_classes

    @property
    def mixture(self) -> Mixture:
        """How an epoch mixes the parts."""
        return Mixture(tuple(len(part) for part in self._parts), self.shares)

    def picture(self, index: int) -> torch.Tensor:
        """Return the image in its stored size."""
        part, own = self._part_of(index)
        return self._parts[part].picture(own)

    def image(self, index: int) -> torch.Tensor:
        """Return the image, resized as its data set does it."""
        part, own = self._part_of(index)
        return self._parts[part].image(own)

    def key(self, index: int) -> str:
        """Return the image's own key, after the name of its part."""
        part, own = self._part_of(index)
        return f"{self.names[part]}: {self._parts[part].key(own)}"

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the parts' own, after their names."""
        return [
            f"{self.names[part]}: {text}"
            for part, first, last in self._parts_in(start, stop)
            for text in self._parts[part].sample_ids(first, last)
        ]

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the parts' own."""
        return b"".join(self._parts[part].stamps(first, last) for part, first, last in self._parts_in(start, stop))

    def save_label_map(self, path: Path) -> None:
        """Write what other data sets do, and ``"tables"``: the first class of each part and the one behind its last."""
        ranges = dict(zip(self.names, zip(self._first_classes, self._first_classes[1:], strict=False), strict=True))
        write_json(path, {"source": self.source, "tables": ranges, "classes": list(self.class_names)})

    def _part_of(self, index: int) -> tuple[int, int]:
        """The number of an image's part, and the image's index in it."""
        part = bisect_right(self._first_images, index) - 1
        return part, index - self._first_images[part]

    def _parts_in(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the numbers of the parts that have some of images [start, stop), and which of their own these are."""
        for part, (first, end) in enumerate(pairwise(self._first_images)):
            if max(start, first) < min(stop, end):
                yield part, max(start, first) - first, min(stop, end) - first


class _JoinedNames(StringColumn):
    """Names of classes that follow one another: "part/class", or the class's number where it has no name."""

    def __init__(self, parts: Sequence[str], names: Sequence[Sequence[str]], first_classes: Sequence[int]) -> None:
        self._parts, self._names, self._first_classes = parts, names, first_classes

    def __len__(self) -> int:
        return self._first_classes[-1]

    def at(self, index: int) -> str:
        """Return the name of class ``index``."""
        part = bisect_right(self._first_classes, index) - 1
        own = index - self._first_classes[part]
        return f"{self._parts[part]}/{self._names[part][own] if own < len(self._names[part]) else own}"


def _joined_labels(parts: Sequence[ImageDataset], first_classes: Sequence[int]) -> NDArray[np.int64]:
    """Labels (N,) or (N, K) of the joined classes, filled up with -1 where parts have fewer labels an image."""
    most = max(part.labels.shape[1] if part.labels.ndim > 1 else 0 for part in parts)
    joined = np.full((sum(map(len, parts)), max(most, 1)), -1, np.int64)
    start = 0
    for part, first in zip(parts, first_classes, strict=False):
        labels = part.labels.reshape(len(part), -1).astype(np.int64)  # a mapped index has smaller integers
        joined[start : start + len(part), : labels.shape[1]] = np.where(labels < 0, -1, labels + first)
        start += len(part)
    return joined if most else joined[:, 0]
