"""Data sets of labelled images, and the loader that feeds them to training."""

if __name__ != "plsc.data":
    raise ImportError("this folder is the package plsc.data: import plsc.data")

from collections.abc import Callable
from pathlib import Path

import numpy as np

from plsc.data.avatars import open_avatars
from plsc.data.codec import decode_image, read_image
from plsc.data.dataset import MAX_BAD_RECORDS, EncodedDataset, ImageDataset
from plsc.data.folder import FolderDataset, ListDataset
from plsc.data.glyphs import open_glyphs
from plsc.data.loader import TrainLoader
from plsc.data.pairs import PairSet, read_pairs, write_pairs
from plsc.data.record_dataset import RecordDataset
from plsc.errors import DataError, UsageError
from plsc.extensions import Registry
from plsc.models.preprocessing import BILINEAR, ImageSize, normalize
from plsc.regular_files import open_regular

__all__ = [
    "EncodedDataset",
    "ImageDataset",
    "PairSet",
    "TrainLoader",
    "decode_image",
    "has_reader",
    "normalize",
    "open_dataset",
    "read_image",
    "read_pairs",
    "write_pairs",
]

# Sets that are drawn, and those that installed packages read, by the word before the colon of their specifications.
READERS: Registry[Callable[[str, ImageSize | None], ImageDataset]] = Registry(
    "plsc.readers",
    {"avatars": open_avatars, "glyphs": open_glyphs},
    callable,
    "a function of (specification, image size or None) that returns a plsc.data.ImageDataset",
)
FORMS = "a folder per identity, a list file (path<TAB>label), a .rec, avatars:IDSxIMAGES, or glyphs:BLOCK"
_LIST_SUFFIXES = ("", ".txt", ".tsv", ".lst", ".list")


def has_reader(source: str | Path) -> bool:
    """Whether ``source`` is the specification of a set of :data:`READERS`, as ``avatars:2000x30``, and no path."""
    kind, colon, _ = str(source).partition(":")
    return bool(colon) and READERS.find(kind) is not None


def open_dataset(
    source: str | Path,
    *,
    image_size: ImageSize | None = 112,
    interpolation: str = BILINEAR,
    max_bad_records: int | None = MAX_BAD_RECORDS,
    label_columns: bool = False,
    own_labels: bool = True,
) -> ImageDataset:
    """Open a folder per identity, a list file, a .rec (or its folder), or a drawn set (:data:`READERS`).

    Args:
        source: the path, or the specification of the built-in data.
        image_size: side in pixels of the square, or (height, width), that every image is resized to; None keeps the
            stored size.
        interpolation: by which it is resized, "bilinear" or "bicubic".
        max_bad_records: number of damaged records of a .rec that are left out before opening fails; None: any number.
        label_columns: take sets of several labels a picture, whose ``labels`` are (N, K), -1 where there is none.
        own_labels: False where others take their place: those of a .rec may then be past what float32 holds.

    Raises:
        UsageError: the path does not exist, is an empty folder or of none of these forms, or has several labels a
            picture where one is wanted.
        DataError: the content cannot be read.
    """
    dataset = _open(source, image_size, max_bad_records, own_labels)
    if dataset.labels.ndim > 1 and not label_columns:
        raise UsageError(f"{source} has {dataset.labels.shape[1]} labels a picture, and one is wanted; drop labels=")
    dataset.interpolation = interpolation
    return dataset


def _open(
    source: str | Path, image_size: ImageSize | None, max_bad_records: int | None, own_labels: bool
) -> ImageDataset:
    if has_reader(source):
        return _read(str(source), image_size)
    path = Path(source)
    if path.is_dir():
        records = _records_in(path)
        if records is None:
            return FolderDataset(path, image_size)
        path = records
    if not path.exists():
        raise UsageError(f"there is no {source}; images come from {FORMS}")
    if path.suffix == ".rec":
        return RecordDataset(path, image_size, max_bad_records=max_bad_records, own_labels=own_labels)
    if path.suffix == ".bin":
        raise UsageError(f"{path} is a verification set of pairs, without labels; images come from {FORMS}")
    if path.suffix.lower() not in _LIST_SUFFIXES:
        raise UsageError(f"{path} is of no known form; images come from {FORMS}")
    return ListDataset(path, image_size)


def _read(source: str, image_size: ImageSize | None) -> ImageDataset:
    dataset = READERS[source.partition(":")[0]](source, image_size)
    if not isinstance(dataset, ImageDataset):
        raise UsageError(
            f"{source}: its reader returns {type(dataset).__name__}, and no plsc.data.ImageDataset; mend it"
        )
    if not isinstance(dataset.labels, np.ndarray) or dataset.labels.dtype.kind not in "iu":
        raise UsageError(f"{source}: its reader's labels are no NumPy array of integers; mend it")
    if not len(dataset):
        raise DataError(f"{source} holds no image; name another set, or mend its reader")
    return dataset


def _records_in(folder: Path) -> Path | None:
    """Return ``train.rec``, or the only .rec, of a folder that holds one; None of a folder per identity."""
    records = sorted(folder.glob("*.rec"))
    if folder / "train.rec" in records:
        records = [folder / "train.rec"]
    if len(records) > 1:
        raise UsageError(f"{folder} holds {len(records)} .rec files and no train.rec; name the one to use")
    if not records:
        return None
    open_regular(records[0], below=folder.resolve()).close()  # a link may lead to records of the reader's own
    return records[0]
