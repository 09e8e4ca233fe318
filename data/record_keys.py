"""The keys file of a ``.rec``: the source file that each of its images came from.

``X.keys.tsv`` stands beside ``X.rec``. It is text in UTF-8: a header line, and then a line for each image, in order of
key::

    key<TAB>class<TAB>path
    1<TAB>person-a<TAB>person-a/2021/portrait.png
    2<TAB>person-b<TAB>person-b/NAME_0001.jpg

``key`` is the record's key in ``X.idx``, ``class`` the name of its class, ``path`` that of its image in the source:
relative to the folder, or as the list has it. A backslash, tab, line feed and carriage return in a name are written as
``\\\\``, ``\\t``, ``\\n`` and ``\\r``; bytes of file names that are not UTF-8 are kept.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from plsc.errors import DataError
from plsc.regular_files import open_regular

HEADER = ("key", "class", "path")
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape: character for character, escape in _ESCAPES.items()}
_CHUNK = 2**26  # bytes in which line ends are searched for


def keys_path(records: Path) -> Path:
    """Return the path of the keys file of ``X.rec``: ``X.keys.tsv``."""
    return records.with_suffix(".keys.tsv")


def escaped(text: str) -> str:
    """Return ``text`` as a field of a line."""
    return re.sub(r"[\\\t\n\r]", lambda match: _ESCAPES[match[0]], text)


def unescaped(field: str) -> str:
    """Return the text of a field; the inverse of :func:`escaped`."""
    return re.sub(r"\\[\\tnr]", lambda match: _UNESCAPES[match[0]], field)


def write_key(file: BinaryIO, *fields: str) -> None:
    """Write a line of fields."""
    file.write("\t".join(map(escaped, fields)).encode("utf-8", "surrogateescape") + b"\n")


class RecordKeys:
    """The paths of a keys file by key, memory-mapped when the first is asked for; pickles as its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __getitem__(self, key: int) -> str:
        """Return the path of the image with this key; :class:`DataError` if the file is not that of its ``.rec``."""
        row = key - self._first
        if 0 <= row < len(self._starts) - 1:
            fields = self._fields(row)
            if len(fields) == len(HEADER) and fields[0] == str(key):
                return fields[2]
        raise DataError(f"{self.path} has no line for record {key} in its place; delete it, or use another copy")

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        if not self.path.stat().st_size:
            raise DataError(f"{self.path} is empty; delete it, or use another copy")
        with open_regular(self.path) as file:
            return np.memmap(file, dtype=np.uint8, mode="r")

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each line after the header begins, int64 (N + 1,); the last is the end of the file."""
        parts = [
            np.flatnonzero(self._bytes[start : start + _CHUNK] == ord("\n")) + start + 1
            for start in range(0, len(self._bytes), _CHUNK)
        ]
        return np.concatenate(parts).astype(np.int64)

    @cached_property
    def _first(self) -> int:
        text = self._fields(0)[0] if len(self._starts) > 1 else ""
        if not text.isdecimal():
            raise DataError(f"{self.path} has no lines of key<TAB>class<TAB>path; delete it, or use another copy")
        return int(text)

    def _fields(self, row: int) -> list[str]:
        line = self._bytes[self._starts[row] : self._starts[row + 1] - 1].tobytes()
        return [unescaped(field) for field in line.decode("utf-8", "surrogateescape").split("\t")]
