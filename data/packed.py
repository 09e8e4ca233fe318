"""Many strings in two arrays: 42 million paths in a list take gigabytes, and each process copies them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from plsc.data.lazy_strings import LazyStrings


class PackedStrings(LazyStrings):
    """An immutable sequence of strings, held as their joined UTF-8 bytes; undecodable file names survive."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def at(self, position: int) -> str:
        """The string at ``position``."""
        piece = self._bytes[self._ends[position] : self._ends[position + 1]]
        return piece.tobytes().decode("utf-8", "surrogateescape")


class NumberNames(LazyStrings):
    """The names of numbered classes: the decimal digits of an int64 array."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def at(self, position: int) -> str:
        """The digits of the number at ``position``."""
        return str(self._numbers[position])
