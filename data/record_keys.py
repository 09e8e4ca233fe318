"""The keys file of a .rec: the path of each image in its source (:mod:`plsc.data.recordio` has the form)."""

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.data.recordio import KEYS_HEADER, unescaped
from plsc.errors import DataError
from plsc.regular_files import open_regular

_KEYS_CHUNK = 2**26  # bytes of a keys file in which line ends are searched for


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
            if len(fields) == len(KEYS_HEADER) and fields[0] == str(key):
                return fields[2]
        raise DataError(f"{self.path} has no line for record {key} in its place; delete it, or use another copy")

    def of(self, keys: NDArray[np.int64]) -> list[str]:
        """Return the paths of images, a block of lines at a time where their keys (n,) follow one another."""
        first, last = (int(keys[0]) - self._first, int(keys[-1]) - self._first) if len(keys) else (0, -1)
        if not 0 <= first <= last < len(self._starts) - 1 or last - first + 1 != len(keys):
            return [self[key] for key in keys.tolist()]
        block = self._bytes[self._starts[first] : self._starts[last + 1] - 1].tobytes()
        lines = [line.split("\t") for line in block.decode("utf-8", "surrogateescape").split("\n")]
        for key, fields in zip(keys.tolist(), lines, strict=True):
            if len(fields) != len(KEYS_HEADER) or fields[0] != str(key):
                return [self[key]]  # which raises
        return [unescaped(path) for _, _, path in lines]

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
            np.flatnonzero(self._bytes[start : start + _KEYS_CHUNK] == ord("\n")) + start + 1
            for start in range(0, len(self._bytes), _KEYS_CHUNK)
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
