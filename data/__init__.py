"""Data sets of labelled images, and the loader that feeds them to training."""

if __name__ != "plsc.data":
    raise ImportError("this folder is the package plsc.data: import plsc.data")

from pathlib import Path
from typing import Any

from plsc.data.codec import decode_image, read_image
from plsc.data.dataset import MAX_BAD_RECORDS, EncodedDataset, ImageDataset
from plsc.data.folder import FolderDataset, ListDataset
from plsc.data.loader import TrainLoader
from plsc.data.pairs import PairSet, read_pairs, write_pairs
from plsc.data.readers import FORMS, READERS, has_reader, is_named, names_shards, read, read_shards
from plsc.data.sharded import ShardedDataset
from plsc.errors import UsageError
from plsc.models.preprocessing import BILINEAR, ImageSize, normalize

__all__ = [
    "READERS",
    "EncodedDataset",
    "ImageDataset",
    "PairSet",
    "TrainLoader",
    "decode_image",
    "has_reader",
    "is_named",
    "names_shards",
    "normalize",
    "open_dataset",
    "read_image",
    "read_pairs",
    "write_pairs",
]

_LIST_SUFFIXES = ("", ".txt", ".tsv", ".lst", ".list")


def open_dataset(
    source: str | Path,
    *,
    image_size: ImageSize | None = 112,
    interpolation: str = BILINEAR,
    max_bad_records: int | None = MAX_BAD_RECORDS,
    label_columns: int | None = 1,
    own_labels: bool | None = True,
) -> ImageDataset:
    """Open what :data:`plsc.data.readers.FORMS` lists: a folder per identity, a list file, shards, or a drawn set.

    Args:
        source: the path, or a specification ``NAME:…``.
        image_size: side in pixels of the square, or (height, width), that every image is resized to; None keeps the
            stored size.
        interpolation: by which it is resized, "bilinear" or "bicubic".
        max_bad_records: number of damaged records of shards that are left out before opening fails; None: any number.
        label_columns: labels of a picture that are taken where it has several, the first ones; None: all. ``labels``
            are (N, K) where that leaves more than one, with -1 where there is none.
        own_labels: False where others take their place: shards may then have none, or a .rec's be past what float32
            holds. None where none are needed: shards may have none.

    Raises:
        UsageError: the path does not exist, is an empty folder or of none of these forms, or has no labels.
        DataError: the content cannot be read.
    """
    dataset = _open(str(source), image_size, own_labels, max_bad_records=max_bad_records, label_columns=label_columns)
    if dataset.labels.ndim > 1 and label_columns == 1 and not isinstance(dataset, ShardedDataset):
        raise UsageError(f"{source} has {dataset.labels.shape[1]} labels a picture, and one is wanted; drop labels=")
    dataset.interpolation = interpolation
    return dataset


def _open(source: str, image_size: ImageSize | None, own_labels: bool | None, **options: Any) -> ImageDataset:
    shards = read(source, image_size, **options) if has_reader(source) else read_shards(source, image_size, **options)
    if shards is not None:
        if isinstance(shards, ShardedDataset) and (own_labels or (own_labels is None and shards.has_labels)):
            shards.check_labels()
        return shards
    path = Path(source)
    if path.is_dir():
        return FolderDataset(path, image_size)
    if not path.exists():
        raise UsageError(f"there is no {source}; images come from {FORMS}")
    if path.suffix == ".bin":
        raise UsageError(f"{path} is a verification set of pairs, without labels; images come from {FORMS}")
    if path.suffix.lower() not in _LIST_SUFFIXES:
        raise UsageError(f"{path} is of no known form; images come from {FORMS}")
    return ListDataset(path, image_size)
