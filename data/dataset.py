"""What every image data set offers, and the one way to open any of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.errors import UsageError
from plsc.files import write_json

FORMS = "a folder per identity, a list file (path<TAB>label), a .rec, or avatars:IDSxIMAGES"
MAX_BAD_RECORDS = 1000
LIST_SUFFIXES = ("", ".txt", ".tsv", ".lst", ".list")


class ImageDataset(ABC):
    """Labelled images, in a fixed order, whose labels are known without decoding any of them.

    source: what it was opened from.
    labels: (N,) int64, mapped onto 0 … C-1.
    class_names: C names; position c is the name (or the number) that class c bears in the source.
    image_size: side of the square images in pixels; ``None`` leaves each at its stored size.
    skipped: what is wrong with each record that was left out, by its key.
    empty_classes: names of classes without an image; they have no number.
    alignment: how faces are aligned, as text that tells one way from another; "" where pictures are given as stored.

    Subclasses are handed to loader processes: they must pickle, and hold no open handle when they do.
    """

    def __init__(
        self, source: str, labels: NDArray[np.int64], class_names: Sequence[str], image_size: int | None
    ) -> None:
        if image_size is not None and image_size < 1:
            raise UsageError(f"image_size is {image_size}; it must be at least 1")
        self.source = source
        self.labels = labels
        self.class_names = class_names
        self.image_size = image_size
        self.skipped: dict[str, str] = {}
        self.empty_classes: list[str] = []
        self.alignment = ""

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> torch.Tensor:
        """Image ``index`` as uint8 (3, S, S) RGB; a DataError that names the record if it cannot be had."""

    @abstractmethod
    def key(self, index: int) -> str:
        """What a person calls image ``index``: its path, or its record's key."""

    def save_label_map(self, path: Path) -> None:
        """Write ``{"source", "classes"}`` as JSON; ``classes[c]`` is the source's name of class c."""
        write_json(path, {"source": self.source, "classes": list(self.class_names)})


class EncodedDataset(ImageDataset):
    """A data set whose images are stored as encoded files (JPEG, PNG, …)."""

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The stored bytes of image ``index``; a DataError that names the record if they cannot be read."""

    def image(self, index: int) -> torch.Tensor:
        """Image ``index`` decoded and, when ``image_size`` is set, resized to (3, S, S)."""
        from plsc.data.decode import decode_image, resize_image

        image = decode_image(self.encoded(index), f"image {self.key(index)} of {self.source}")
        return image if self.image_size is None else resize_image(image, self.image_size)


def open_dataset(
    source: str | Path, *, image_size: int | None = 112, max_bad_records: int | None = MAX_BAD_RECORDS
) -> ImageDataset:
    """Open a folder per identity, a list file, a .rec (or its folder), or ``avatars:IDSxIMAGES[@FIRST]``.

    image_size: side in pixels that every image is resized to; ``None`` keeps the stored size.
    max_bad_records: how many damaged records a .rec may have, which are then left out; ``None``: any number.
    Raises UsageError for a path that does not exist, an empty folder or a form that is none of these, and
    DataError for content that cannot be read.
    """
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


def _open_folder(path: Path, image_size: int | None, max_bad_records: int | None) -> ImageDataset:
    """A folder that holds train.rec, or one .rec alone, is that .rec; any other is a folder per identity."""
    from plsc.data.folder import FolderDataset

    records = sorted(path.glob("*.rec"))
    if path / "train.rec" in records:
        return _open_file(path / "train.rec", image_size, max_bad_records)
    if len(records) > 1:
        raise UsageError(f"{path} holds {len(records)} .rec files and no train.rec; name the one to use")
    if records:
        return _open_file(records[0], image_size, max_bad_records)
    return FolderDataset(path, image_size)


def _open_file(path: Path, image_size: int | None, max_bad_records: int | None) -> ImageDataset:
    if path.suffix == ".rec":
        from plsc.data.record_dataset import RecordDataset

        return RecordDataset(path, image_size, max_bad_records=max_bad_records)
    if path.suffix == ".bin":
        raise UsageError(f"{path} is a verification set of pairs, without labels; images come from {FORMS}")
    if path.suffix.lower() not in LIST_SUFFIXES:
        raise UsageError(f"{path} is of no known form; images come from {FORMS}")
    from plsc.data.folder import ListDataset

    return ListDataset(path, image_size)
