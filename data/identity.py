"""What a data set is: its images and classes by their names and labels, and by the contents of their files.

A number says nothing about who or what it stands for: class 7 is another person once a folder is gone, and a path leads
to another picture once its file was replaced. Whatever goes on from earlier work on a data set compares one of these:

- :func:`samples` are the names of all images and classes, and the labels. A run is resumed with the same ones; a file
  that was touched, or a damaged one that was replaced by a sound one, does not matter there.
- :func:`contents_id` is of sizes and times of the files besides. What was made of pixels (cached images, embeddings) is
  used again where it is the same.
- :func:`file_stamps` are the sizes and times alone, of any files.

Sizes and times stand for a file's bytes, as in make and rsync: a file that is exchanged for another of the same path,
the same size and the same time to a nanosecond is not told from the former.
"""

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plsc.errors import PlscError
from plsc.files import read_json, write_json

if TYPE_CHECKING:
    from plsc.data.dataset import ImageDataset

_AT_ONCE = 65_536  # strings or files: 10 MB
_THREADS, _FILES_OF_THREAD = 16, 1024


def samples(dataset: "ImageDataset") -> dict[str, Any]:
    """Describe the images and classes of a data set, whatever form it has and wherever it lies.

    Takes 1 to 2 seconds a million images, in bounded memory. No image is read, and no file's state.

    Returns:
        "images" and "classes", their numbers, and hashes of what they are, in their order: "labels_sha256",
        "names_sha256" of the classes' names, "keys_sha256" of :meth:`~plsc.data.ImageDataset.sample_ids`, without the
        folder that the first and the last one begin with: where a list names a mounted disk, it may come to be another.

    Raises:
        DataError: the names cannot be read.
    """
    kept = dataset.samples_file
    if kept is not None and kept.is_file():
        found: dict[str, Any] = read_json(kept)
        return found
    names = (dataset.class_names[start:stop] for start, stop in _spans(len(dataset.class_names)))
    ends = [dataset.sample_ids(row, row + 1)[0] for row in (0, len(dataset) - 1)] if len(dataset) else [""]
    folder, slash, _ = commonprefix(ends).rpartition("/")  # noqa: RUF071 (commonpath would change keys)
    shared = folder + slash
    keys = (dataset.sample_ids(start, stop) for start, stop in _spans(len(dataset)))
    found = {
        **counts(dataset),
        "names_sha256": _strings_digest(names),
        "keys_sha256": _strings_digest([key.removeprefix(shared) for key in block] for block in keys),
    }
    if kept is not None:
        with suppress(PlscError, OSError):  # a folder that is full, or may not be written any more
            write_json(kept, found)
    return found


def counts(dataset: "ImageDataset") -> dict[str, Any]:
    """The part of :func:`samples` that takes little time: "images", "classes" and "labels_sha256"."""
    digest = dataset.labels_sha256 or labels_digest([dataset.labels])
    return {"images": len(dataset), "classes": dataset.num_classes, "labels_sha256": digest}


def labels_digest(parts: Iterable[NDArray[np.integer[Any]]]) -> str:
    """SHA-256 of the labels of consecutive images as 64-bit integers, in 64 hexadecimal digits, in bounded memory."""
    digest = hashlib.sha256()
    for labels in parts:
        for start, stop in _spans(len(labels)):
            digest.update(np.ascontiguousarray(labels[start:stop], dtype="<i8").data)
    return digest.hexdigest()


def samples_id(dataset: "ImageDataset") -> str:
    """The hash of :func:`samples`, of the images' whole keys, and of how the faces are aligned: 32 hexadecimal digits.

    Raises:
        DataError: the names cannot be read.
    """
    ends = dataset.sample_ids(0, 1) + dataset.sample_ids(len(dataset) - 1, len(dataset)) if len(dataset) else []
    parts = [*samples(dataset).items(), *ends, dataset.alignment]
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def contents_id(dataset: "ImageDataset", start: int = 0, stop: int | None = None) -> str:
    """The hash of the contents of images [start, stop) (None: all), in 32 hexadecimal digits, without their names.

    Asks for the state of each file: 3 to 10 seconds a million files on a local disk, and on a network's as long as 16
    threads take that wait for it. A file that is gone, or cannot be looked at, is of another state than any other.
    """
    digest = hashlib.sha256()
    for first, last in _spans(len(dataset) if stop is None else stop, start):
        digest.update(dataset.stamps(first, last))
    return digest.hexdigest()[:32]


def file_stamps(paths: Sequence[str]) -> bytes:
    """Size and time of change of files (links are followed): 16 bytes each, in their order; -1 for what is not there.

    Two calls give the same bytes where no file was written, replaced or removed in between.
    """
    if len(paths) <= _FILES_OF_THREAD:
        return _stamps_of(paths)
    with ThreadPoolExecutor(_THREADS) as threads:  # which wait for a network's disk side by side
        parts = (paths[first : first + _FILES_OF_THREAD] for first in range(0, len(paths), _FILES_OF_THREAD))
        return b"".join(threads.map(_stamps_of, parts))


def _stamps_of(paths: Sequence[str]) -> bytes:
    values = array("q")
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 (a Path for each file of millions)
            values.extend((status.st_size, status.st_mtime_ns))
        except (OSError, ValueError):
            values.extend((-1, -1))
    return values.tobytes()


def _spans(stop: int, start: int = 0) -> Iterable[tuple[int, int]]:
    return ((first, min(first + _AT_ONCE, stop)) for first in range(start, stop, _AT_ONCE))


def _strings_digest(blocks: Iterable[Sequence[object]]) -> str:
    """SHA-256 of strings in their order, however they come in blocks: of their bytes, and of their lengths."""
    contents, lengths = hashlib.sha256(), hashlib.sha256()
    for block in blocks:
        encoded = [str(text).encode("utf-8", "surrogatepass") for text in block]
        contents.update(b"".join(encoded))
        lengths.update(np.fromiter(map(len, encoded), "<i8", len(encoded)).data)
    return hashlib.sha256(contents.digest() + lengths.digest()).hexdigest()
