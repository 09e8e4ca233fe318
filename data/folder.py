"""Data sets of image files: a folder per identity, or a list of paths and labels."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.codec import IMAGE_SUFFIXES, read_bytes
from plsc.data.dataset import EncodedDataset, map_names
from plsc.data.string_column import PackedStringColumn
from plsc.errors import DataError, UsageError
from plsc.models.preprocessing import ImageSize
from plsc.text_files import not_utf8, text_lines


class FolderDataset(EncodedDataset):
    """A folder whose sub-folders are the identities, in order of name; each holds its images, at any depth.

    A sub-folder may be a symbolic link; links to folders below it are not followed, so that there is no cycle. Images
    are files ending in .jpg, .jpeg, .png, .webp or .bmp in either case; names that begin with a dot are ignored.
    ``empty_classes`` lists the sub-folders without an image, which are no classes.

    Raises:
        UsageError: there is no image in any sub-folder.
    """

    def __init__(self, folder: Path, image_size: ImageSize | None = 112) -> None:
        self.folder = folder
        empty: list[str] = []
        paths: list[str] = []
        classes: list[str] = []
        counts: list[int] = []
        for name in identities(folder):
            images = sorted(images_below(folder, name))
            if images:
                paths += images
                classes.append(name)
                counts.append(len(images))
            else:
                empty.append(name)
        if not paths:
            raise UsageError(_no_image_error(folder))
        self._paths = PackedStringColumn(paths)
        labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
        super().__init__(str(folder), labels, PackedStringColumn(classes), image_size)
        self.empty_classes = empty

    def key(self, index: int) -> str:
        """Return the image's path below the folder."""
        return self._paths[index]

    def encoded(self, index: int) -> bytes:
        """Read the image file."""
        return read_bytes(self.folder / self._paths[index])


class ListDataset(EncodedDataset):
    """A text file with a line ``path<TAB>label`` per image, in that order.

    If the first line has a third column (as in the ``images.tsv`` of ``plsc data convert``), every line has to have
    one, which is ignored; not in a ``.lst``, whose columns are in another order in MXNet's tools.

    Paths are relative to the list's own folder, or absolute. If every label is a plain integer, classes are ordered by
    number, otherwise by name. Empty lines are ignored. The image files are not opened before they are read.

    Raises:
        DataError: the list is empty or not UTF-8, or a line has another form; the message gives its number.
    """

    def __init__(self, path: Path, image_size: ImageSize | None = 112) -> None:
        self.folder = path.parent
        paths: list[str] = []
        names: list[str] = []
        for image, name in _entries(path):
            paths.append(image)
            names.append(name)
        if not paths:
            raise DataError(f"{path} lists no image; each line is path<TAB>label")
        self._paths = PackedStringColumn(paths)
        labels, classes = map_names(names)
        super().__init__(str(path), labels, classes, image_size)

    def key(self, index: int) -> str:
        """Return the image's path as the list has it."""
        return self._paths[index]

    def encoded(self, index: int) -> bytes:
        """Read the image file."""
        return read_bytes(self.folder / self._paths[index])


def identities(folder: Path) -> list[str]:
    """Return the names of the sub-folders, in order; symbolic links to folders are among them."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def images_below(folder: Path, below: str) -> Iterator[str]:
    """Yield the images under ``folder/below``, relative to ``folder``, unordered; follow no link to a folder."""
    with os.scandir(folder / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from images_below(folder, f"{below}/{entry.name}")
            elif entry.name.lower().endswith(IMAGE_SUFFIXES) and not entry.is_dir():
                yield f"{below}/{entry.name}"


def _no_image_error(folder: Path) -> str:
    loose = any(entry.name.lower().endswith(IMAGE_SUFFIXES) for entry in folder.iterdir())
    problem = "has images but no sub-folder with any" if loose else "has no image in any sub-folder"
    return f"{folder} {problem}; give each identity a folder of its own ({', '.join(IMAGE_SUFFIXES)})"


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    columns = 0
    for number, line in text_lines(path, "surrogateescape"):  # a third column holds the bytes of a file's name
        if line.strip() == "":
            continue
        fields = line.split("\t")
        columns = columns or (3 if len(fields) == 3 and path.suffix != ".lst" else 2)
        if len(fields) != columns or not fields[0].strip() or not fields[1].strip() or "\0" in line:
            raise DataError(f"{path} line {number} is {line[:80]!r}; each line is path<TAB>label")
        try:
            "".join(fields[:2]).encode()
        except UnicodeEncodeError:
            raise not_utf8(path, number) from None
        yield fields[0], fields[1].strip()
