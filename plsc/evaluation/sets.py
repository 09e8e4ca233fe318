"""What can be evaluated on: pairs from a .bin file, or identities from any data set."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.errors import DataError


class ImageSource(Protocol):
    """Images in a fixed order, all of one square size."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> torch.Tensor:
        """Image ``index`` as uint8 (3, S, S); a DataError that names it if it cannot be had."""

    def key(self, index: int) -> str:
        """What a person calls image ``index``."""


class PairImages:
    """The encoded images (2N) of a .bin set, decoded one at a time and resized to ``image_size``."""

    def __init__(self, source: str, encoded: Sequence[bytes], image_size: int) -> None:
        self.source, self.encoded, self.image_size = source, encoded, image_size

    def __len__(self) -> int:
        return len(self.encoded)

    def image(self, index: int) -> torch.Tensor:
        """Image ``index`` as uint8 (3, S, S)."""
        from plsc.data.codec import decode_image, resize_image

        image = decode_image(self.encoded[index], f"{self.key(index)} of {self.source}")
        return resize_image(image, self.image_size)

    def key(self, index: int) -> str:
        """``image 7 (pair 3)``."""
        return f"image {index} (pair {index // 2})"


@dataclass(frozen=True)
class EvaluationSet:
    """``images`` with either ``is_same`` (N,) for 2N images in pairs, or ``labels`` (N,) of N images."""

    name: str
    images: ImageSource
    is_same: NDArray[np.bool_] | None = None
    labels: NDArray[np.int64] | None = None


def open_set(source: str, name: str, image_size: int) -> EvaluationSet:
    """Open a .bin set of pairs, or what :func:`plsc.data.open_dataset` opens, as images of ``image_size``.

    Raises UsageError or DataError, naming ``source``, when it does not exist, is empty or is malformed.
    """
    from plsc.data import open_dataset, read_pairs

    if Path(source).suffix == ".bin":
        pairs = read_pairs(Path(source))
        is_same = np.asarray(pairs.is_same, dtype=bool)
        if len(pairs.images) != 2 * is_same.size or not is_same.size:
            raise DataError(f"{source} holds {len(pairs.images)} images for {is_same.size} pairs; each pair needs two")
        return EvaluationSet(name, PairImages(source, pairs.images, image_size), is_same=is_same)
    dataset = open_dataset(source, image_size=image_size)
    if not len(dataset):
        raise DataError(f"{source} holds no image")
    return EvaluationSet(name, dataset, labels=dataset.labels)


def set_names(sources: Sequence[str]) -> list[str]:
    """A name for each source, none twice: its stem or folder's name, the whole path where two share it."""
    names = [_short_name(source) for source in sources]
    shared = Counter(names)
    names = [source if shared[name] > 1 else name for source, name in zip(sources, names, strict=True)]
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[place] = f"{name}#{seen[name]}"
    return names


def _short_name(source: str) -> str:
    if source.startswith("avatars:"):
        return source
    path = Path(source)
    return (path.stem if path.suffix in (".bin", ".rec", ".txt", ".tsv", ".lst") else path.name) or source
