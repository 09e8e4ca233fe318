"""Many byte strings searched for at once, at any place of a file or of memory."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.regular_files import open_regular

_READ_BYTES = 8 << 20  # at a time
LEAST_BYTES = 8  # of a string: by so many of them, places are found that may hold all of it
_HASH_BITS = 20
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def parts_of(path: Path, longest: int) -> Iterator[bytes]:
    """The content of a file, some of it at a time, so that each ``longest`` bytes of it are in one part whole."""
    before = b""
    with open_regular(path) as file:
        while part := file.read(_READ_BYTES):
            yield before + part
            before = (before + part)[-(longest - 1) :] if longest > 1 else b""


class ByteSearch:
    """Searches for many byte strings at once, of at least 8 bytes each; shorter ones are never found."""

    def __init__(self, wanted: Iterable[bytes]) -> None:
        self._wanted: dict[int, list[tuple[int, bytes]]] = {}  # by anchor: its place in the string, the string
        self._longest = 1
        for text in wanted:
            if len(text) >= LEAST_BYTES:
                place = _telling_place(text)
                anchor = int.from_bytes(text[place : place + LEAST_BYTES], "little")
                self._wanted.setdefault(anchor, []).append((place, text))
                self._longest = max(self._longest, len(text))
        self._anchors = np.array(sorted(self._wanted), np.uint64)
        self._may_be = np.zeros(1 << _HASH_BITS, dtype=bool)
        self._may_be[_hashed(self._anchors)] = True

    def found_in(self, path: Path) -> set[bytes]:
        """The strings that a file holds; OSError where it may not be read."""
        found = set[bytes]()
        for content in parts_of(path, self._longest):
            found |= self.found(content)
        return found

    def found(self, content: bytes) -> set[bytes]:
        """The strings that ``content`` holds, at whatever places."""
        found: set[bytes] = set()
        for shift in range(LEAST_BYTES if len(self._anchors) else 0):
            count = (len(content) - shift) // LEAST_BYTES
            if count < 1:
                break
            numbers = np.frombuffer(content, "<u8", count, shift)
            places = np.flatnonzero(self._may_be[_hashed(numbers)])
            for place in places[np.isin(numbers[places], self._anchors)].tolist():
                for before, text in self._wanted[int(numbers[place])]:
                    start = shift + place * LEAST_BYTES - before
                    if start >= 0 and content.startswith(text, start):
                        found.add(text)
        return found


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return numbers * _HASH_FACTOR >> np.uint64(64 - _HASH_BITS)


def _telling_place(text: bytes) -> int:
    """Where the 8 bytes of ``text`` begin that are the least like zeros."""
    places = range(0, len(text) - LEAST_BYTES + 1, LEAST_BYTES)
    return max(places, key=lambda place: len(set(text[place : place + LEAST_BYTES])))
