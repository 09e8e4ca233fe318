"""Sequences of strings of which each is made when it is asked for: millions of names cost next to nothing."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload


class LazyStrings(Sequence[str]):
    """The part that all such sequences share; a subclass gives ``__len__`` and :meth:`at`."""

    @abstractmethod
    def at(self, position: int) -> str:
        """The string at ``position``, which lies in [0, len)."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.at(position) for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self.at(int(position))
