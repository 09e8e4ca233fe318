"""Float32 rows read from a file without keeping them in memory: pages of a map would count as this process's own."""

import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plsc.errors import DataError
from plsc.index.exact import Float32, Int64

CHUNK_BYTES = 4 << 20  # what a second-level cache about holds, for a chunk is gone over several times


class RowSource:
    """The rows of ``vectors`` (N, D) float32 in C order: from its file where it is a map of one, else from memory.

    Attributes:
        descriptor: of the open file, or None.
        offset: in bytes, of the first row in the file.
    """

    def __init__(self, vectors: Float32) -> None:
        self.vectors = vectors
        self.descriptor, self.offset = _file_of(vectors)
        if self.descriptor is not None:
            weakref.finalize(self, os.close, self.descriptor)

    def chunks(self) -> Iterator[tuple[int, Float32]]:
        """Pairs (first row, copy of the rows from there), 4 MiB each, that cover all rows."""
        count = max(1, CHUNK_BYTES // max(1, self._row_bytes))
        for start in range(0, len(self.vectors), count):
            yield start, self._between(start, min(start + count, len(self.vectors)))

    def take(self, rows: Int64) -> Float32:
        """A copy of ``rows`` (n,), (n, D)."""
        if self.descriptor is None or not len(rows):
            return np.array(self.vectors[rows], subok=False)
        if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
            return self._between(int(rows[0]), int(rows[-1]) + 1)
        return np.concatenate([self._between(row, row + 1) for row in rows.tolist()])

    @property
    def _row_bytes(self) -> int:
        return 4 * int(self.vectors.shape[1])

    def _between(self, start: int, stop: int) -> Float32:
        if self.descriptor is None:
            return np.array(self.vectors[start:stop], subok=False)
        rows = np.empty((stop - start, self.vectors.shape[1]), dtype=np.float32)
        left, offset = rows.reshape(-1).view(np.uint8).data, self.offset + start * self._row_bytes
        while left:
            got = os.preadv(self.descriptor, [left], offset)
            if not got:
                raise DataError("the file of the vectors cannot be read any more; has it been cut?")
            left, offset = left[got:], offset + got
        return rows


def _file_of(vectors: Float32) -> tuple[int | None, int]:
    """An open descriptor and the offset of the first row, where ``vectors`` is a plain map of a file that is there."""
    base = getattr(vectors, "_mmap", None)
    if not isinstance(vectors, np.memmap) or base is None or vectors.mode not in ("r", "r+") or not vectors.size:
        return None, 0  # a private (copy-on-write) map may differ from its file
    name = vectors.filename
    if not isinstance(name, str | os.PathLike) or not hasattr(os, "preadv"):
        return None, 0
    skipped = vectors.offset - vectors.offset % mmap.ALLOCATIONGRANULARITY
    offset = skipped + vectors.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    try:
        descriptor = os.open(Path(name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None, 0
    if os.fstat(descriptor).st_size < offset + vectors.nbytes:
        os.close(descriptor)
        return None, 0
    return descriptor, offset
