"""The pictures among a folder's files, and what is left out because it is none, or cannot be read here."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from plsc.image_files import SUFFIXES, readable_suffixes, unread_formats
from plsc.progress import counted, log_once

# What stands beside pictures in data sets and folders of cameras. It is named only where there is no picture at all.
_is_side_file = re.compile(
    r"\.(aae|csv|db|html|idx|ini|jsonl?|log|lst|mat|md|np[yz]|pdf|pkl|pts|rec|thm|toml|tsv|txt|xml|xmp|ya?ml)"
).fullmatch
_is_other_picture = re.compile(r"\.(arw|bpg|cr[23]|dng|eps|heics|jp2|jxl|nef|orf|psd|raf|svg)").fullmatch
_LONGEST_SUFFIX = 8
_LISTED_KINDS = 8


class PictureFiles:
    """The files in ``folder`` that are pictures by their names, and those in its sub-folders, the identities.

    A sub-folder may be a symbolic link; links to folders below it are not followed, so that there is no cycle. Whether
    a link may lead out of the folder is decided where a picture is read. Names that begin with a dot are ignored.

    Attributes:
        identities: the names of the sub-folders, in order.
        loose: the names of pictures directly in the folder, in order.
        left_out: numbers of files that are no pictures, by suffix in lower case, as far as :meth:`below` has looked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identities: list[str] = []
        self.loose: list[str] = []
        self.left_out: Counter[str] = Counter()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    self.identities.append(entry.name)
                elif _is_picture(entry.name):
                    self.loose.append(entry.name)
                else:
                    self.left_out[_kind(entry.name)] += 1
        self.identities.sort()
        self.loose.sort()

    def below(self, identity: str) -> tuple[list[str], Counter[str]]:
        """Return the pictures below a sub-folder at any depth, paths in order, and what else is there by suffix."""
        others: Counter[str] = Counter()
        pictures = sorted(self._below(identity, others))
        self.left_out += others
        return pictures, others

    def report(self) -> None:
        """Log what was left out, in a line; once for a folder, and of several ranks by the first."""
        others = Counter({kind: count for kind, count in self.left_out.items() if not _is_side_file(kind)})
        if others:
            log_once("plsc.data", f"{self.folder}: {counted(others.total(), 'file')} left out: {kinds_text(others)}")

    def _below(self, below: str, others: Counter[str]) -> Iterator[str]:
        with os.scandir(self.folder / below) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._below(f"{below}/{entry.name}", others)
                elif not _is_picture(entry.name):
                    others[_kind(entry.name)] += 1
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


def _is_picture(name: str) -> bool:
    return name.lower().endswith(readable_suffixes())


def _kind(name: str) -> str:
    """The suffix in lower case; "" where the name has none that looks like one."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 (a Path for each file of millions)
    return suffix if suffix.isascii() and suffix[1:].isalnum() and len(suffix) <= _LONGEST_SUFFIX else ""
