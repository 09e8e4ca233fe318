"""The interface of image data sets, the mapping of their labels onto 0 … C-1, and :func:`open_dataset`."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.codec import Encoding, decode_image, encode_image, resize_image
from plsc.data.string_column import NumberStringColumn, PackedStringColumn
from plsc.errors import UsageError
from plsc.files import write_json
from plsc.models.preprocessing import BILINEAR, ImageSize
from plsc.models.preprocessing import image_size as checked_image_size
from plsc.regular_files import open_regular

FORMS = "a folder per identity, a list file (path<TAB>label), a .rec, or avatars:IDSxIMAGES"
MAX_BAD_RECORDS = 1000
LIST_SUFFIXES = ("", ".txt", ".tsv", ".lst", ".list")
_PLAIN_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}").fullmatch


class ImageDataset(ABC):
    """Labelled images in a fixed order, whose labels are known without decoding any image.

    Subclasses are sent to loader processes: they must pickle, and hold no open handle when they do.

    Attributes:
        source: the path or specification that the data set was opened from.
        labels: int64 (N,), in 0 … C-1.
        class_names: C names; item c is the name (or number) of class c in the source.
        image_size: side of the square images in pixels, or (height, width); None leaves each at its stored size.
        interpolation: by which they are resized to it.
        skipped: the reason why a record was left out, by the record's key.
        empty_classes: classes without an image, which have no label: what each holds instead, in words, by its name.
        left_out: numbers of files that are no pictures, or of a kind that is not read here, by suffix.
        alignment: fingerprint of the face alignment; "" where images are returned as stored.
    """

    def __init__(
        self, source: str, labels: NDArray[np.int64], class_names: Sequence[str], image_size: ImageSize | None
    ) -> None:
        self.source = source
        self.labels = labels
        self.class_names = class_names
        self.image_size = None if image_size is None else checked_image_size(image_size)
        self.interpolation = BILINEAR
        self.skipped: dict[str, str] = {}
        self.empty_classes: dict[str, str] = {}
        self.left_out: dict[str, int] = {}
        self.alignment = ""

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) RGB, of ``image_size`` where that is set.

        Raises:
            DataError: the image cannot be read; the message names its record.
        """

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` as uint8 (3, H, W) in its stored size, or as :meth:`image` if it has none."""
        return self.image(index)

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the readable id of image ``index``: its path, or its record's key."""

    def record_key(self, index: int) -> str:
        """Return the record's key of an image in a ``.rec`` even if its path is known; elsewhere :meth:`key`."""
        return self.key(index)

    def save_label_map(self, path: Path) -> None:
        """Write ``{"source", "classes"}`` as JSON; ``classes[c]`` is the source's name of class c."""
        write_json(path, {"source": self.source, "classes": list(self.class_names)})


class EncodedDataset(ImageDataset):
    """A data set whose images are stored as encoded files (JPEG, PNG, …)."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """Return the stored bytes of image ``index``.

        Raises:
            DataError: they cannot be read; the message names the record.
        """

    def picture(self, index: int) -> torch.Tensor:
        """Return image ``index`` decoded, in its stored size."""
        return decode_image(self.encoded(index), f"image {self.key(index)} of {self.source}")

    def image(self, index: int) -> torch.Tensor:
        """Return image ``index`` decoded, and resized when ``image_size`` is set."""
        picture = self.picture(index)
        return picture if self.image_size is None else resize_image(picture, self.image_size, self.interpolation)


def encoded_image(dataset: ImageDataset, index: int, encoding: Encoding) -> bytes:
    """Encode image ``index``: the stored bytes if the data set keeps stored sizes, else resized and re-encoded.

    Raises:
        DataError: the image cannot be read or, where it is re-encoded, decoded; the message names it.
    """
    if isinstance(dataset, EncodedDataset) and dataset.image_size is None:
        return dataset.encoded(index)
    return encode_image(dataset.image(index), encoding)


def open_dataset(
    source: str | Path,
    *,
    image_size: ImageSize | None = 112,
    interpolation: str = BILINEAR,
    max_bad_records: int | None = MAX_BAD_RECORDS,
) -> ImageDataset:
    """Open a folder per identity, a list file, a .rec (or its folder), or ``avatars:IDSxIMAGES[@FIRST]``.

    Args:
        source: the path, or the specification of the built-in data.
        image_size: side in pixels of the square, or (height, width), that every image is resized to; None keeps the
            stored size.
        interpolation: by which it is resized, "bilinear" or "bicubic".
        max_bad_records: number of damaged records of a .rec that are left out before opening fails; None: any number.

    Raises:
        UsageError: the path does not exist, is an empty folder or of none of these forms.
        DataError: the content cannot be read.
    """
    dataset = _open(source, image_size, max_bad_records)
    dataset.interpolation = interpolation
    return dataset


def _open(source: str | Path, image_size: ImageSize | None, max_bad_records: int | None) -> ImageDataset:
    name = str(source)
    if name.startswith("avatars:"):
        from plsc.data.avatars import open_avatars

        return open_avatars(name, image_size=image_size)
    path = Path(source)
    if path.is_dir():
        return _open_folder(path, image_size, max_bad_records)
    if not path.exists():
        raise UsageError(f"there is no {name}; images come from {FORMS}")
    return _open_file(path, image_size, max_bad_records)


def _open_folder(path: Path, image_size: ImageSize | None, max_bad_records: int | None) -> ImageDataset:
    """Open a folder: one that holds train.rec, or a single .rec, is that .rec; any other is a folder per identity."""
    from plsc.data.folder import FolderDataset

    records = sorted(path.glob("*.rec"))
    if path / "train.rec" in records:
        records = [path / "train.rec"]
    if len(records) > 1:
        raise UsageError(f"{path} holds {len(records)} .rec files and no train.rec; name the one to use")
    if records:
        open_regular(records[0], below=path.resolve()).close()  # a link may lead to records of the reader's own
        return _open_file(records[0], image_size, max_bad_records)
    return FolderDataset(path, image_size)


def _open_file(path: Path, image_size: ImageSize | None, max_bad_records: int | None) -> ImageDataset:
    if path.suffix == ".rec":
        from plsc.data.record_dataset import RecordDataset

        return RecordDataset(path, image_size, max_bad_records=max_bad_records)
    if path.suffix == ".bin":
        raise UsageError(f"{path} is a verification set of pairs, without labels; images come from {FORMS}")
    if path.suffix.lower() not in LIST_SUFFIXES:
        raise UsageError(f"{path} is of no known form; images come from {FORMS}")
    from plsc.data.folder import ListDataset

    return ListDataset(path, image_size)


def map_numbers(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Close the gaps between class numbers, keeping their order.

    Returns:
        The labels, int64 (N,) in 0 … C-1, and the original number of each class, int64 (C,).
    """
    if len(numbers) and numbers.min() >= 0 and numbers.max() < 4 * len(numbers) + 1024:
        # Counting takes a twentieth of the time that sorting does for tens of millions of labels.
        present = np.bincount(numbers) > 0
        return (np.cumsum(present) - 1)[numbers], np.flatnonzero(present).astype(np.int64)
    classes, labels = np.unique(numbers, return_inverse=True)
    return labels.reshape(-1).astype(np.int64), classes


def map_names(names: Sequence[str]) -> tuple[NDArray[np.int64], Sequence[str]]:
    """Map label texts to labels: by number if every text is a plain integer, otherwise by name in sorted order.

    A plain integer is one as Python prints it: "007" is a name, and a different one than "7".

    Returns:
        The labels, int64 (N,) in 0 … C-1, and the C class names.
    """
    if not all(_PLAIN_INTEGER(name) for name in names):
        classes = sorted(set(names))
        label_of = {name: label for label, name in enumerate(classes)}
        return np.array([label_of[name] for name in names], dtype=np.int64), PackedStringColumn(classes)
    labels, values = map_numbers(np.array([int(name) for name in names], dtype=np.int64))
    return labels, NumberStringColumn(values)
