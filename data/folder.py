"""Images as files: a folder per identity, or a list of paths and labels."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.dataset import EncodedDataset
from plsc.data.decode import IMAGE_SUFFIXES, read_bytes
from plsc.data.labels import map_names
from plsc.data.packed import PackedStrings
from plsc.errors import DataError, UsageError


class FolderDataset(EncodedDataset):
    """A folder whose sub-folders are the identities, in order of name; each holds its images, at any depth.

    Images are files ending in .jpg, .jpeg, .png, .webp or .bmp in either case; names that begin with a dot
    are passed over. ``empty_classes`` names the sub-folders without an image: they are no classes.
    Raises UsageError where there is no image to be found.
    """

    def __init__(self, folder: Path, image_size: int | None = 112) -> None:
        self.folder = folder
        empty: list[str] = []
        paths: list[str] = []
        classes: list[str] = []
        counts: list[int] = []
        for name in _identities(folder):
            found = sorted(_images(folder, name))
            if found:
                paths += found
                classes.append(name)
                counts.append(len(found))
            else:
                empty.append(name)
        if not paths:
            raise UsageError(_nothing_found(folder))
        self._paths = PackedStrings(paths)
        labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
        super().__init__(str(folder), labels, PackedStrings(classes), image_size)
        self.empty_classes = empty

    def key(self, index: int) -> str:
        """The image's path below the folder."""
        return self._paths[index]

    def encoded(self, index: int) -> bytes:
        """The bytes of the image file."""
        return read_bytes(self.folder / self._paths[index])


class ListDataset(EncodedDataset):
    """A text file with a line ``path<TAB>label`` per image, in that order.

    Paths are relative to the list's own folder, or absolute. If every label is a plain integer, classes are
    ordered by number, otherwise by name. Empty lines are passed over; a line of another shape is a DataError
    that gives its number. Whether the files exist shows when they are read.
    """

    def __init__(self, path: Path, image_size: int | None = 112) -> None:
        self.folder = path.parent
        paths: list[str] = []
        names: list[str] = []
        for image, name in _entries(path):
            paths.append(image)
            names.append(name)
        if not paths:
            raise DataError(f"{path} lists no image; each line is path<TAB>label")
        self._paths = PackedStrings(paths)
        labels, classes = map_names(names)
        super().__init__(str(path), labels, classes, image_size)

    def key(self, index: int) -> str:
        """The image's path as the list has it."""
        return self._paths[index]

    def encoded(self, index: int) -> bytes:
        """The bytes of the image file."""
        return read_bytes(self.folder / self._paths[index])


def _identities(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path, below: str) -> Iterator[str]:
    """Paths of the images under ``folder/below``, relative to ``folder``, in no order."""
    with os.scandir(folder / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _images(folder, f"{below}/{entry.name}")
            elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                yield f"{below}/{entry.name}"


def _nothing_found(folder: Path) -> str:
    loose = any(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in folder.iterdir())
    what = "has images but no sub-folder with any" if loose else "has no image in any sub-folder"
    return f"{folder} {what}; give each identity a folder of its own ({', '.join(IMAGE_SUFFIXES)})"


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise DataError(f"{path} line {number} is not UTF-8 text; save the list as UTF-8") from None
            if line.strip() == "":
                continue
            fields = line.split("\t")
            if len(fields) != 2 or not fields[0].strip() or not fields[1].strip() or "\0" in line:
                raise DataError(f"{path} line {number} is {line[:80]!r}; each line is path<TAB>label")
            yield fields[0], fields[1].strip()
