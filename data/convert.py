"""Conversion of any data set to a ``.rec``, or to a folder per identity with a list of its images.

Images keep the paths that they have in their source. A ``.rec`` has them in its keys file
(:mod:`plsc.data.recordio`). In a folder an image has its own path, below the folder of its class, with another
suffix where the format changes; ``images.tsv`` lists them, a line ``path<TAB>class<TAB>path in the source`` each, with
the last column escaped as in a keys file. Images without a class (label -1) go to a folder alone, beside those of the
classes, and are in no list.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from plsc.data.codec import Encoding, image_pixels
from plsc.data.dataset import MAX_BAD_RECORDS, ImageDataset, encoded_image, first_labels
from plsc.data.folder import SYSTEM_FOLDERS
from plsc.data.loader import map_in_workers, report_killed_workers
from plsc.data.recordio import check_records, record_writer, write_key
from plsc.data.sharded import ShardedDataset
from plsc.errors import DataError, UsageError
from plsc.files import atomic_folder, check_output, new_folder, remove_leftovers
from plsc.image_files import SUFFIXES, suffix_of
from plsc.progress import Progress, warn

LIST_NAME = "images.tsv"
_SAFE_NAME = re.compile(rb"[^./\\\0\t\n\r][^/\\\0\t\n\r]{0,199}").fullmatch
_USUAL = {suffix: suffixes[0] for suffixes in SUFFIXES.values() for suffix in suffixes}  # suffixes of suffix_of


@report_killed_workers()
def convert(
    dataset: ImageDataset,
    out: Path,
    *,
    encoding: Encoding = "jpeg",
    max_bad_records: int | None = MAX_BAD_RECORDS,
    workers: int = 0,
    label: str = "convert",
    quiet: bool = False,
    overwrite: bool = False,
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
        overwrite: replace a ``.rec``, or a folder that this function wrote, once the new one is complete.

    Returns:
        ``{"out", "images", "classes", "left_out"}``, and "several" where images are the largest of several faces.

    Raises:
        UsageError: ``out`` cannot be written, exists, or holds the images themselves.
        DataError: no image, or too few of them, can be read; a decoding process was killed.
    """
    check_out(dataset.source, out, overwrite=overwrite)
    if isinstance(dataset, ShardedDataset) and out.exists() and out.resolve() in map(Path.resolve, dataset.shards):
        raise UsageError(f"{out} is one of the files of {dataset.source}; name another output")
    images = _Images(dataset, encoding, max_bad_records, workers, Progress(label, len(dataset), quiet=quiet))
    with new_folder(out.absolute().parent):
        classes = _to_records(images, out, overwrite) if out.suffix == ".rec" else _to_folder(images, out)
    several = {"several": images.several} if images.several else {}
    return {"out": str(out), "images": images.count, "classes": classes, "left_out": len(images.left_out), **several}


def check_out(source: str, out: Path, *, overwrite: bool) -> None:
    """Raise :class:`UsageError` unless ``out`` may be written: new, or with ``overwrite`` of :func:`convert`'s making.

    Never an output that is, or holds, the ``source``.
    """
    target = out.resolve()
    if target in (Path(source).resolve(), *Path(source).resolve().parents) and Path(source).exists() and out.exists():
        raise UsageError(f"{out} holds the source {source}; name another output")
    if out.suffix == ".rec":
        check_records(out, overwrite=overwrite)
        return
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a folder, or X.rec")
    check_output(out, overwrite=overwrite)
    if out.is_dir() and any(out.iterdir()) and not (out / LIST_NAME).is_file():
        raise UsageError(f"{out} has no {LIST_NAME}, so it was not written by plsc, and is not replaced; name another")


class _Images:
    """The readable images of a data set in ``order``, that of their classes; iteration reads and encodes them."""

    def __init__(
        self, dataset: ImageDataset, encoding: Encoding, max_bad_records: int | None, workers: int, progress: Progress
    ) -> None:
        self.dataset, self._limit, self._progress = dataset, max_bad_records, progress
        self.labels = first_labels(dataset.labels)  # int64 (N,)
        self.order = np.argsort(self.labels, kind="stable")
        self._encoded = map_in_workers(_Encoder(dataset, encoding), self.order, workers)
        self.count = self.several = 0
        self.left_out: dict[str, str] = dict(dataset.skipped)

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (index, label, encoded image) in order of label."""
        for index, (data, error, faces) in zip(self.order, self._encoded, strict=True):
            self._progress.advance()
            self.several += faces > 1
            if data is None:
                self._leave_out(int(index), error)
            else:
                self.count += 1
                yield int(index), int(self.labels[index]), data
        self._progress.finish()
        if self.count == 0:
            first = next(iter(self.left_out.values()), "it holds none")
            raise DataError(f"no image of {self.dataset.source} can be read; the first: {first}")

    def _leave_out(self, index: int, error: str) -> None:
        self.left_out[self.dataset.key(index)] = error
        warn("plsc.data", f"left out: {error}")
        if self._limit is not None and len(self.left_out) > self._limit:
            raise DataError(
                f"more than {self._limit} images of {self.dataset.source} cannot be read; the last: {error}"
            )


class _Encoder(Dataset[tuple[bytes | None, str, int]]):
    """Maps an index to (encoded image, "", faces in its picture) or (None, error message, 0).

    An exception would end the worker process.
    """

    def __init__(self, dataset: ImageDataset, encoding: Encoding) -> None:
        self.dataset, self.encoding = dataset, encoding

    def __getitem__(self, index: np.int64) -> tuple[bytes | None, str, int]:
        try:
            data = encoded_image(self.dataset, int(index), self.encoding)
        except DataError as error:
            return None, str(error), 0
        if suffix_of(data) is None:
            return None, f"image {self.dataset.key(int(index))} of {self.dataset.source} is no image", 0
        return data, "", self.dataset.faces_found


def _to_records(images: _Images, out: Path, overwrite: bool) -> int:
    """Write a ``.rec``, numbering the classes that have a readable image, or all of several labels an image.

    Return the number of classes.
    """
    dataset, options = images.dataset, {"expected": len(images.dataset), "classes": images.dataset.num_classes}
    with record_writer(out, **options, overwrite=overwrite) as writer:
        previous = -1
        for index, label, data in images:
            if label != previous:
                first = label if dataset.labels.ndim == 1 else previous + 1
                for number in range(first, label + 1):
                    writer.begin_class(dataset.class_names[number])
                previous = label
            writer.add(data, dataset.key(index), dataset.labels[index].tolist() if dataset.labels.ndim > 1 else None)
            if images.count == 1:
                writer.height, writer.width = image_pixels(data)
        for number in range(previous + 1, dataset.num_classes if dataset.labels.ndim > 1 else 0):
            writer.begin_class(dataset.class_names[number])
    return len(writer.class_names)


def _to_folder(images: _Images, out: Path) -> int:
    """Write ``out/CLASS/…`` and ``out/images.tsv``, atomically; return the number of classes."""
    remove_leftovers(out)
    if images.dataset.labels.ndim > 1:
        raise UsageError(
            f"{images.dataset.source} has several labels an image, which a folder has no place for; name X.rec"
        )
    names = _OutputNames(images.dataset, images.labels, images.order)
    with atomic_folder(out) as tmp_path, (tmp_path / LIST_NAME).open("wb") as lines:
        for index, label, data in images:
            name = names.add(index, label, suffix_of(data) or "")
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
            if label >= 0:
                write_key(lines, name, names.folders[label], images.dataset.key(index))
    return len(names.folders)


class _OutputNames:
    """Chooses the path of each image in the output folder, no two alike; images come grouped by class.

    Attributes:
        folders: the folder of each class so far, by label.
    """

    def __init__(self, dataset: ImageDataset, labels: NDArray[np.int64], order: NDArray[np.int64]) -> None:
        self._dataset, self._order = dataset, order
        counts = np.bincount(labels + 1, minlength=dataset.num_classes + 1)  # from label -1 on
        self._ends = np.append(0, np.cumsum(counts))
        self.folders: dict[int, str] = {}
        self._label: int | None = None  # of the present image
        self._used_folders = {LIST_NAME}
        self._own: set[str] = set()
        self._used: set[str] = set()

    def add(self, index: int, label: int, suffix: str) -> str:
        """Return the path of image ``index``, whose encoded form has ``suffix``, with slashes."""
        if label != self._label:
            self._label = label
            if label >= 0:
                self.folders[label] = _folder_name(self._dataset.class_names[label], label, self._used_folders)
            members = self._order[self._ends[label + 1] : self._ends[label + 2]]
            self._own = {self._below_class(int(member), label) for member in members}
            self._used = set()
        name = self._unused(self._below_class(index, label), suffix)
        self._used.update((name, *map(str, PurePosixPath(name).parents)))
        if label < 0:
            self._used_folders.add(name.casefold())
            return name
        return f"{self.folders[label]}/{name}"

    def _below_class(self, index: int, label: int) -> str:
        """Return the source's path of image ``index``, below its class; a number where it has none that is safe."""
        key = self._dataset.key(index)
        if key.isdecimal():  # a record without a path
            return f"{int(key):08d}"
        parts = key.split("/")
        class_name = self._dataset.class_names[label] if label >= 0 else None
        if class_name in parts[:-1]:
            parts = parts[parts.index(class_name) + 1 :]
        for name in ([part for part in parts if part != "."], parts[-1:]):
            if name and all(map(_is_safe, name)):
                return "/".join(name)
        return f"{index:08d}"

    def _unused(self, name: str, suffix: str) -> str:
        """Return ``name`` with ``suffix``, if no other image has or will have it; otherwise one derived from it."""
        path = PurePosixPath(name)
        if _USUAL.get(path.suffix.lower()) == suffix and name not in self._used:
            return name
        replaced = str(path.with_suffix(suffix)) if path.suffix.lower() in _USUAL else name + suffix
        if replaced not in self._used and replaced not in self._own:
            return replaced
        candidates = (f"{name}{f'-{number}' if number > 1 else ''}{suffix}" for number in itertools.count(1))
        return next(name for name in candidates if name not in self._used and name not in self._own)


def _is_safe(name: str) -> bool:
    """Whether a file system takes the name, a list, which is UTF-8, gives it back, and no reader passes it over."""
    try:
        return _SAFE_NAME(name.encode()) is not None and name.casefold() not in SYSTEM_FOLDERS
    except UnicodeEncodeError:  # bytes of a file's name that are not UTF-8
        return False


def _folder_name(name: str, label: int, used: set[str]) -> str:
    """Return a folder name that no other class uses: the class's name if that is safe, otherwise its number.

    A list's reader strips labels, and the mark of its byte order.
    """
    usable = _is_safe(name) and name == name.strip("\ufeff").strip() and name.casefold() not in used
    folder = name if usable else f"class-{label:08d}"
    while folder.casefold() in used:
        folder += "-"
    used.add(folder.casefold())
    return folder
