"""Reading memory maps without keeping them in memory."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CHUNK_BYTES = 16 << 20


def release(array: Array) -> None:
    """Let the system take back the pages that reading ``array`` has brought in; nothing for an array in memory.

    They count as this process's resident memory until then. What is read again later comes from the page cache.
    """
    base: Any = getattr(array, "_mmap", None)
    if not isinstance(array, np.memmap) or array.mode not in ("r", "r+") or not hasattr(base, "madvise"):
        return  # a private (copy-on-write) map would lose what was written to it
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = start - start % mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)


def chunks(array: Array, rows: int | None = None) -> Iterator[tuple[int, Array]]:
    """Pairs (first row, copy of the rows from there) covering ``array`` (N, D), each released from memory once read.

    ``rows``: of a copy; 16 MiB of them where left out.
    """
    rows = rows or max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        copy = np.array(part, order="C", subok=False)
        release(part)
        yield start, copy
