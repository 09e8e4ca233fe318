"""Many strings in two arrays: 42 million paths in a list take gigabytes, and each process copies them."""

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray


class PackedStrings(Sequence[str]):
    """An immutable sequence of strings, held as their joined UTF-8 bytes; undecodable file names survive."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        index %= len(self)
        piece = self._bytes[self._ends[index] : self._ends[index + 1]]
        return piece.tobytes().decode("utf-8", "surrogateescape")


class NumberNames(Sequence[str]):
    """The names of numbered classes: the decimal digits of an int64 array."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [str(number) for number in self._numbers[index]]
        return str(self._numbers[index])
