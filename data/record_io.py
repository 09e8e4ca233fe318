"""MXNet's RecordIO: the bytes of a ``.rec`` file.

A record is one or more parts. A part is the magic word, a word of 3 flag bits and 29 bits of length, and that many
bytes, padded to a multiple of 4. Flag 0 is a whole record; 1, 2 and 3 are its first, middle and last part, between
which the reader puts the magic word back that the writer took out. So the magic word, at a multiple of 4, always
begins a part, and a damaged file can be entered anywhere.

The content of an image record is a header (flag uint32, label float32, id uint64, id2 uint64), then ``flag`` labels
of float32, then the encoded image.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from plsc.errors import DataError, UsageError

MAGIC = 0xCED7230A
HEADER_BYTES = 24
MAX_PART_BYTES = 2**29 - 1
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_CHUNK = 2**16

WHOLE, FIRST, MIDDLE, LAST = range(4)


@dataclass(frozen=True)
class ImageRecord:
    """One record: its labels (the header's, or the array's), its two ids and the encoded image."""

    flag: int
    labels: tuple[float, ...]
    ids: tuple[int, int]
    image: bytes


class RecordFile:
    """A ``.rec`` file, opened by memory map; it pickles as its path. Raises UsageError if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise UsageError(f"there is no {self.path}") from None
        except ValueError:
            raise DataError(f"{self.path} is empty; use another copy") from None
        self._words = np.frombuffer(self._map, dtype="<u4", count=len(self._map) // 4)

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.path = state["path"]
        self._open()

    def __len__(self) -> int:
        """The file's size in bytes."""
        return len(self._map)

    def read(self, offset: int) -> bytes:
        """The content of the record at ``offset``, its parts joined; ValueError says what is wrong with it."""
        pieces = []
        expected = (WHOLE, FIRST)
        while True:
            flag, start, stop = self._part(offset)
            if flag not in expected:
                raise ValueError("its parts are out of order")
            pieces.append(self._map[start:stop])
            if flag in (WHOLE, LAST):
                return _MAGIC_BYTES.join(pieces)
            expected, offset = (MIDDLE, LAST), stop + -(stop - start) % 4

    def read_image(self, offset: int) -> ImageRecord:
        """The image record at ``offset``; ValueError says what is wrong with it."""
        return unpack_image(self.read(offset))

    def record_offsets(self) -> NDArray[np.int64]:
        """Where records begin, found by their magic words: needs no index, and passes over damaged places."""
        found = []
        for start in range(0, len(self._words) - 1, 2**24):
            starts = np.flatnonzero(self._words[start : start + 2**24] == MAGIC) + start
            starts = starts[starts + 1 < len(self._words)]
            flags = self._words[starts + 1] >> 29
            found.append(starts[(flags == WHOLE) | (flags == FIRST)] * 4)
        return np.concatenate(found).astype(np.int64) if found else np.empty(0, dtype=np.int64)

    def labels_at(self, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        """The label of each record, (N,) float64; NaN where the record is damaged or holds no image."""
        labels = np.full(len(offsets), np.nan)
        for start in range(0, len(offsets), _CHUNK):
            part = slice(start, start + _CHUNK)
            labels[part] = self._labels_at(offsets[part])
        return labels

    def _labels_at(self, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        labels = np.full(len(offsets), np.nan)
        room = (offsets >= 0) & (offsets % 4 == 0) & (offsets + 8 + HEADER_BYTES <= len(self._map))
        rows = np.flatnonzero(room)
        places = offsets[rows] // 4
        # magic, length, flag, label, then (past both ids) the first of the label array
        head = self._words[np.minimum(places[:, None] + np.array([0, 1, 2, 3, 8]), len(self._words) - 1)]
        floats = head.view("<f4")
        part_flags, lengths = head[:, 1] >> 29, head[:, 1] & MAX_PART_BYTES
        content = lengths.astype(np.int64) - HEADER_BYTES - 4 * head[:, 2].astype(np.int64)
        whole = (head[:, 0] == MAGIC) & (part_flags == WHOLE) & (content > 0)
        whole &= offsets[rows] + 8 + lengths <= len(self._map)
        labels[rows[whole]] = np.where(head[whole, 2] > 0, floats[whole, 4], floats[whole, 3])
        for row in rows[(head[:, 0] == MAGIC) & (part_flags == FIRST)]:
            labels[row] = self._label_in_parts(int(offsets[row]))
        return labels

    def _label_in_parts(self, offset: int) -> float:
        try:
            return self.read_image(offset).labels[0]
        except ValueError:
            return np.nan

    def _part(self, offset: int) -> tuple[int, int, int]:
        """(flag, start, stop) of the part at ``offset``."""
        if not 0 <= offset <= len(self._map) - 8:
            raise ValueError(f"its offset {offset:,} is past the end of the file")
        magic, word = struct.unpack_from("<II", self._map, offset)
        if magic != MAGIC:
            raise ValueError(f"no record begins at its offset {offset:,}")
        start = offset + 8
        stop = start + (word & MAX_PART_BYTES)
        if stop > len(self._map):
            raise ValueError("the file ends inside it")
        return word >> 29, start, stop


def unpack_image(content: bytes) -> ImageRecord:
    """Split a record's content; ValueError if it is too short for what its header announces."""
    if len(content) < HEADER_BYTES:
        raise ValueError("it is too short for a header")
    flag, label, first_id, second_id = struct.unpack_from("<IfQQ", content)
    if len(content) < HEADER_BYTES + 4 * flag:
        raise ValueError(f"it is too short for the {flag:,} labels it announces")
    labels = struct.unpack_from(f"<{flag}f", content, HEADER_BYTES) if flag else (label,)
    return ImageRecord(flag, labels, (first_id, second_id), content[HEADER_BYTES + 4 * flag :])


def pack_image(record: ImageRecord) -> bytes:
    """A record's content; inverse of :func:`unpack_image`."""
    label = 0.0 if record.flag else record.labels[0]
    array = struct.pack(f"<{record.flag}f", *record.labels) if record.flag else b""
    return struct.pack("<IfQQ", record.flag, label, *record.ids) + array + record.image


def write_record(file: BinaryIO, content: bytes) -> None:
    """Append one record, in as many parts as its magic words call for; DataError from 2^29 bytes on."""
    if len(content) > MAX_PART_BYTES:
        raise DataError(f"a record of {len(content):,} bytes is too long for a .rec; shrink the image")
    pieces = list(_split_at_magic(content))
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        flag = (WHOLE if last else FIRST) if number == 0 else (LAST if last else MIDDLE)
        file.write(struct.pack("<II", MAGIC, flag << 29 | len(piece)) + piece + bytes(-len(piece) % 4))


def _split_at_magic(content: bytes) -> Iterator[bytes]:
    """The pieces between magic words that stand at multiples of 4 of the content."""
    start = place = 0
    while (place := content.find(_MAGIC_BYTES, place)) >= 0:
        if place % 4 == 0:
            yield content[start:place]
            start = place = place + 4
        else:
            place += 1
    yield content[start:]
