"""Columns of strings: read-only sequences that decode an item when it is indexed.

A list of 42 million paths takes gigabytes as Python objects, and every loader process copies it. A column holds the
bytes in arrays, or computes the string from its index.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray


class StringColumn(Sequence[str]):
    """Base class of string columns; a subclass defines ``__len__`` and :meth:`at`."""

    @abstractmethod
    def at(self, index: int) -> str:
        """Return string ``index``, which lies in [0, len)."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.at(row) for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self.at(int(row))


class PackedStringColumn(StringColumn):
    """Strings in memory as their joined UTF-8 bytes; file names that are not UTF-8 survive."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def at(self, index: int) -> str:
        """Return string ``index``."""
        piece = self._bytes[self._ends[index] : self._ends[index + 1]]
        return piece.tobytes().decode("utf-8", "surrogateescape")


class NumberStringColumn(StringColumn):
    """Names of numbered classes: the decimal digits of an int64 array."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def at(self, index: int) -> str:
        """Return the digits of number ``index``."""
        return str(self._numbers[index])
