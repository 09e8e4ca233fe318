"""Image files: the pictures in a folder, a data set of a folder per identity, and one of a list of paths and labels."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from plsc.data.dataset import FileDataset, PackedStringColumn, map_names
from plsc.errors import DataError, UsageError
from plsc.image_files import SUFFIXES, readable_suffixes, unread_formats
from plsc.models.preprocessing import ImageSize
from plsc.progress import counted, log_once
from plsc.text_files import not_utf8, text_lines

# What stands beside pictures in data sets and folders of cameras. It is named only where there is no picture at all.
_is_side_file = re.compile(
    r"\.(aae|csv|db|html|idx|ini|jsonl?|log|lst|mat|md|np[yz]|pdf|pkl|pts|rec|thm|toml|tsv|txt|xml|xmp|ya?ml)"
).fullmatch
_is_other_picture = re.compile(r"\.(arw|bpg|cr[23]|dng|eps|heics|jp2|jxl|nef|orf|psd|raf|svg)").fullmatch
# Folders that systems put among pictures, in lower case: previews, waste, snapshots and copies of attributes. They are
# nobody's. plsc/serve/page/folders.js has the same names. Other systems' begin with a dot (.@__thumb, .thumbnails).
SYSTEM_FOLDERS = frozenset(
    (
        *("@eadir", "#recycle", "#snapshot"),  # Synology
        *("@__thumb", "@recycle", "@recently-snapshot"),  # QNAP
        *("$recycle.bin", "recycler", "system volume information"),  # Windows
        *("__macosx", "lost+found"),  # archives of macOS; Linux
    )
)
_LONGEST_SUFFIX = 8
_LISTED_KINDS = 8


class PictureFiles:
    """The files in ``folder`` that are pictures by their names, and those in its sub-folders, the identities.

    A sub-folder may be a symbolic link; links to folders below it are not followed, so that there is no cycle. Whether
    a link may lead out of the folder is decided where a picture is read. Names that begin with a dot are ignored, and
    so are :data:`SYSTEM_FOLDERS`, at any depth.

    Attributes:
        identities: the names of the sub-folders, in order.
        loose: the names of pictures directly in the folder, in order.
        left_out: numbers of files that are no pictures, by suffix in lower case, as far as :meth:`below` has looked.
        passed_over: numbers of hidden folders and of systems' by name, likewise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identities: list[str] = []
        self.loose: list[str] = []
        self.left_out: Counter[str] = Counter()
        self.passed_over: Counter[str] = Counter()
        with os.scandir(folder) as entries:
            for entry in entries:
                if self._is_passed_over(entry):
                    continue
                if entry.is_dir():
                    self.identities.append(entry.name)
                elif is_picture(entry.name):
                    self.loose.append(entry.name)
                else:
                    self.left_out[kind(entry.name)] += 1
        self.identities.sort()
        self.loose.sort()

    def by_identity(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Return the pictures of each sub-folder that has any; and of the others in words what they hold."""
        found: dict[str, list[str]] = {}
        empty: dict[str, str] = {}
        for name in self.identities:
            pictures, others = self.below(name)
            if pictures:
                found[name] = pictures
            else:
                empty[name] = kinds_text(others)
        return found, empty

    def below(self, identity: str) -> tuple[list[str], Counter[str]]:
        """Return the pictures below a sub-folder at any depth, paths in order, and what else is there by suffix."""
        others: Counter[str] = Counter()
        pictures = sorted(self._below(identity, others))
        self.left_out += others
        return pictures, others

    def report(self) -> None:
        """Log what was left out, a line for files and one for folders; once, and of several ranks by the first."""
        others = Counter({kind: count for kind, count in self.left_out.items() if not _is_side_file(kind)})
        if others:
            log_once("plsc.data", f"{self.folder}: {counted(others.total(), 'file')} left out: {kinds_text(others)}")
        if self.passed_over:
            log_once("plsc.data", f"{self.folder}: {self.passed_over_text()}")

    def passed_over_text(self) -> str:
        """What was passed over in words: ``3 hidden or system folders left out: 2 @eaDir, 1 #recycle``."""
        listed = sorted(self.passed_over.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(f"{count:,} {name}" for name, count in listed[:_LISTED_KINDS])
        folders = counted(self.passed_over.total(), "hidden or system folder")
        return f"{folders} left out: {names}{', …' if len(listed) > _LISTED_KINDS else ''}"

    def without(self, problem: str, mend: str) -> str:
        """An error's text: what the folder lacks, what it holds instead, and which pictures are looked for."""
        others = f", and holds {kinds_text(self.left_out)}" if self.left_out else ""
        folders = f", and {self.passed_over_text()}" if self.passed_over else ""
        return f"{self.folder} {problem}{others}{folders}; {mend} ({', '.join(readable_suffixes())})"

    def _is_passed_over(self, entry: "os.DirEntry[str]") -> bool:
        is_hidden = entry.name.startswith(".")
        if not is_hidden and entry.name.casefold() not in SYSTEM_FOLDERS:
            return False
        if entry.is_dir():
            self.passed_over[entry.name] += 1
            return True
        return is_hidden

    def _below(self, below: str, others: Counter[str]) -> Iterator[str]:
        with os.scandir(self.folder / below) as entries:
            for entry in entries:
                if self._is_passed_over(entry):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._below(f"{below}/{entry.name}", others)
                elif not is_picture(entry.name):
                    others[kind(entry.name)] += 1
                elif not entry.is_dir():
                    yield f"{below}/{entry.name}"


def kinds_text(kinds: Counter[str]) -> str:
    """Format numbers of files by suffix, with what reads them: ``2 .heic (pip install …), 1 .mov (not a picture)``."""
    listed = [f"{count:,} {kind or 'without a suffix'} ({_reason(kind)})" for kind, count in kinds.most_common()]
    rest = len(listed) - _LISTED_KINDS
    return ", ".join(listed[:_LISTED_KINDS]) + (f" and {counted(rest, 'kind')} more" if rest > 0 else "")


def _reason(kind: str) -> str:
    for name, reader in unread_formats().items():
        if kind in SUFFIXES[name]:
            return reader
    if _is_other_picture(kind):
        return "not read; save as JPEG"
    return "not a picture" if kind else "pictures are known by theirs, as .jpg"


def is_picture(name: str) -> bool:
    """Whether a file of this name is read as a picture."""
    return name.lower().endswith(readable_suffixes())


def kind(name: str) -> str:
    """The suffix in lower case; "" where the name has none that looks like one."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 (a Path for each file of millions)
    return suffix if suffix.isascii() and suffix[1:].isalnum() and len(suffix) <= _LONGEST_SUFFIX else ""


class FolderDataset(FileDataset):
    """A folder whose sub-folders are the identities, in order of name; each holds its images, at any depth.

    :class:`PictureFiles` finds them, and says what it leaves out. ``empty_classes`` names the sub-folders without an
    image, which are no classes.

    Raises:
        UsageError: there is no image in any sub-folder.
    """

    def __init__(self, folder: Path, image_size: ImageSize | None = 112) -> None:
        files = PictureFiles(folder)
        found, empty = files.by_identity()
        if not found:
            problem = "has images but no sub-folder with any" if files.loose else "has no image in any sub-folder"
            raise UsageError(files.without(problem, "give each identity a folder of its own"))
        files.report()
        labels = np.repeat(np.arange(len(found), dtype=np.int64), [len(images) for images in found.values()])
        super().__init__(folder, chain(*found.values()), labels, PackedStringColumn.of(found), image_size)
        self.empty_classes, self.left_out = empty, dict(files.left_out)


class ListDataset(FileDataset):
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
        paths: list[str] = []
        names: list[str] = []
        for image, name in _entries(path):
            paths.append(image)
            names.append(name)
        if not paths:
            raise DataError(f"{path} lists no image; each line is path<TAB>label")
        labels, classes = map_names(names)
        super().__init__(path.parent, paths, labels, classes, image_size)
        self.source = str(path)


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
