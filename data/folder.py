"""Data sets of image files: a folder per identity, or a list of paths and labels."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.data.dataset import EncodedDataset, map_names
from plsc.data.picture_files import PictureFiles, kinds_text
from plsc.data.string_column import PackedStringColumn
from plsc.errors import DataError, UsageError
from plsc.image_files import readable_suffixes
from plsc.models.preprocessing import ImageSize
from plsc.regular_files import read_bytes
from plsc.text_files import not_utf8, text_lines


class FolderDataset(EncodedDataset):
    """A folder whose sub-folders are the identities, in order of name; each holds its images, at any depth.

    :class:`plsc.data.picture_files.PictureFiles` finds them, and says what it leaves out. ``empty_classes`` names the
    sub-folders without an image, which are no classes.

    Raises:
        UsageError: there is no image in any sub-folder.
    """

    def __init__(self, folder: Path, image_size: ImageSize | None = 112) -> None:
        self.folder, self._below = folder, folder.resolve()
        files = PictureFiles(folder)
        empty: dict[str, str] = {}
        paths: list[str] = []
        classes: list[str] = []
        counts: list[int] = []
        for name in files.identities:
            images, others = files.below(name)
            if images:
                paths += images
                classes.append(name)
                counts.append(len(images))
            else:
                empty[name] = kinds_text(others)
        if not paths:
            raise UsageError(_no_image_error(files))
        files.report()
        self._paths = PackedStringColumn(paths)
        labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
        super().__init__(str(folder), labels, PackedStringColumn(classes), image_size)
        self.empty_classes, self.left_out = empty, dict(files.left_out)

    def key(self, index: int) -> str:
        """Return the image's path below the folder."""
        return self._paths[index]

    def encoded(self, index: int) -> bytes:
        """Read the image file."""
        return read_bytes(self.folder / self._paths[index], below=self._below)


class ListDataset(EncodedDataset):
    """A text file with a line ``path<TAB>label`` per image, in that order.

    If the first line has a third column (as in the ``images.tsv`` of ``plsc data convert``), every line has to have
    one, which is ignored; not in a ``.lst``, whose columns are in another order in MXNet's tools.

    Paths are relative to the list's own folder, and lead out of it only where that is allowed
    (:mod:`plsc.regular_files`). If every label is a plain integer, classes are ordered by
    number, otherwise by name. Empty lines are ignored. The image files are not opened before they are read.

    Raises:
        DataError: the list is empty or not UTF-8, or a line has another form; the message gives its number.
    """

    def __init__(self, path: Path, image_size: ImageSize | None = 112) -> None:
        self.folder, self._below = path.parent, path.parent.resolve()
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
        return read_bytes(self.folder / self._paths[index], below=self._below)


def _no_image_error(files: PictureFiles) -> str:
    problem = "has images but no sub-folder with any" if files.loose else "has no image in any sub-folder"
    others = f", and holds {kinds_text(files.left_out)}" if files.left_out else ""
    return (
        f"{files.folder} {problem}{others}; give each identity a folder of its own ({', '.join(readable_suffixes())})"
    )


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
