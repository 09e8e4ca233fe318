"""Conversion of any data set to a ``.rec``, or to a folder per identity with a list of its images."""

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from plsc.data.codec import Encoding, image_pixels, suffix_of
from plsc.data.dataset import MAX_BAD_RECORDS, ImageDataset, encoded_image
from plsc.data.loader import map_in_workers
from plsc.data.recordio import record_writer
from plsc.errors import DataError, UsageError
from plsc.files import atomic_replace_dir, atomic_write, make_folder
from plsc.progress import Progress

LIST_NAME = "images.tsv"
_SAFE_NAME = re.compile(rb"[^./\\\0][^/\\\0\t\n\r]{0,199}").fullmatch
_log = logging.getLogger("plsc.data")


def convert(
    dataset: ImageDataset,
    out: Path,
    *,
    encoding: Encoding = "jpeg",
    max_bad_records: int | None = MAX_BAD_RECORDS,
    workers: int = 0,
    label: str = "convert",
    quiet: bool = False,
) -> dict[str, Any]:
    """Write ``dataset`` to ``out``.

    Args:
        dataset: the images; copied byte by byte if its ``image_size`` is None, otherwise resized and re-encoded.
        out: a ``.rec`` if it ends so, otherwise the folder for a folder per identity.
        encoding: of re-encoded images.
        max_bad_records: number of unreadable images that are left out and logged before it fails; None: any number.
        workers: processes that read and encode; 0: this one.
        label: what the progress line begins with.
        quiet: print no progress.

    Returns:
        ``{"out", "images", "classes", "left_out"}``.

    Raises:
        UsageError: ``out`` cannot be written, or is a folder that is not empty.
        DataError: no image, or too few of them, can be read.
    """
    images = _Images(dataset, encoding, max_bad_records, workers, Progress(label, len(dataset), quiet=quiet))
    write = _to_records if out.suffix == ".rec" else _to_folder
    classes = write(images, out)
    return {"out": str(out), "images": images.count, "classes": classes, "left_out": len(images.left_out)}


class _Images:
    """The readable images of a data set in order of class; iteration reads and encodes them."""

    def __init__(
        self, dataset: ImageDataset, encoding: Encoding, max_bad_records: int | None, workers: int, progress: Progress
    ) -> None:
        self.dataset, self._limit, self._progress = dataset, max_bad_records, progress
        self._order = np.argsort(dataset.labels, kind="stable")
        self._encoded = map_in_workers(_Encoder(dataset, encoding), _FixedOrder(self._order), workers)
        self.count = 0
        self.left_out: dict[str, str] = dict(dataset.skipped)

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (index, label, encoded image) in order of label."""
        for index, (data, error) in zip(self._order, self._encoded, strict=True):
            self._progress.advance()
            if data is None:
                self._leave_out(int(index), error)
            else:
                self.count += 1
                yield int(index), int(self.dataset.labels[index]), data
        self._progress.finish()
        if self.count == 0:
            first = next(iter(self.left_out.values()), "it holds none")
            raise DataError(f"no image of {self.dataset.source} can be read; the first: {first}")

    def _leave_out(self, index: int, error: str) -> None:
        self.left_out[self.dataset.key(index)] = error
        _log.warning("left out: %s", error)
        if self._limit is not None and len(self.left_out) > self._limit:
            raise DataError(
                f"more than {self._limit} images of {self.dataset.source} cannot be read; the last: {error}"
            )


class _Encoder(Dataset[tuple[bytes | None, str]]):
    """Maps an index to (encoded image, "") or (None, error message): an exception would end the worker process."""

    def __init__(self, dataset: ImageDataset, encoding: Encoding) -> None:
        self.dataset, self.encoding = dataset, encoding

    def __getitem__(self, index: int) -> tuple[bytes | None, str]:
        try:
            data = encoded_image(self.dataset, index, self.encoding)
        except DataError as error:
            return None, str(error)
        if suffix_of(data) is None:
            return None, f"image {self.dataset.key(index)} of {self.dataset.source} is no image"
        return data, ""


class _FixedOrder:
    """Indices in a given order, as Python integers one at a time: a list of 10^8 takes gigabytes."""

    def __init__(self, order: NDArray[np.int64]) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return map(int, self._order)


def _to_records(images: _Images, out: Path) -> int:
    """Write a ``.rec``, numbering the classes that have a readable image; return their number."""
    names: list[str] = []
    make_folder(out.parent)
    with record_writer(out, names, expected=len(images.dataset)) as writer:
        previous = -1
        for _, label, data in images:
            if label != previous:
                names.append(images.dataset.class_names[label])
                previous = label
            writer.add(data, len(names) - 1)
            if images.count == 1:
                writer.height, writer.width = image_pixels(data)
    return writer.num_classes


def _to_folder(images: _Images, out: Path) -> int:
    """Write ``out/CLASS/NUMBER.jpg`` and ``out/images.tsv``, atomically; return the number of classes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name another")
    make_folder(out.parent)
    tmp_path = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(tmp_path, ignore_errors=True)  # leftovers of an interrupted run
    tmp_path.mkdir()
    folders: dict[int, str] = {}
    used: set[str] = set()
    with atomic_write(tmp_path / LIST_NAME) as list_path, list_path.open("w", encoding="utf-8") as lines:
        for index, label, data in images:
            if label not in folders:
                folders[label] = _folder_name(images.dataset.class_names[label], label, used)
                (tmp_path / folders[label]).mkdir(exist_ok=True)
            name = f"{folders[label]}/{index:08d}{suffix_of(data)}"
            (tmp_path / name).write_bytes(data)
            lines.write(f"{name}\t{folders[label]}\n")
    atomic_replace_dir(tmp_path, out)
    return len(folders)


def _folder_name(name: str, label: int, used: set[str]) -> str:
    """Return a folder name that no other class uses: the class's name if that is safe, otherwise its number."""
    usable = _SAFE_NAME(name.encode("utf-8", "surrogateescape")) and name.casefold() not in used
    folder = name if usable else f"class-{label:08d}"
    while folder.casefold() in used:
        folder += "-"
    used.add(folder.casefold())
    return folder
