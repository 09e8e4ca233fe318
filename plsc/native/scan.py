"""The compiled exact scan as a function of arrays: candidates in bfloat16 or float32, the ranking in float64.

In bfloat16, on a processor with matrix tiles (Intel AMX), the queries are rounded too and whole panels of them are
multiplied at once; any other processor multiplies float32 queries by rows widened in registers.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import DataError
from plsc.native.build import library

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

PADDED_TO = 32  # numbers: what the width of bfloat16 rows is a multiple of
_PANEL = 32  # queries: what their number is filled up to a multiple of
_UNREADABLE = -2
_SOURCE = "scan_kernels"
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (
    _POINTER,
    ctypes.c_int,
    _INTEGER,
    _POINTER,
    ctypes.c_int,
    _INTEGER,
    _INTEGER,
    _POINTER,
    _INTEGER,
    _POINTER,
    _POINTER,
    _POINTER,
    _INTEGER,
    _INTEGER,
    _POINTER,
    _INTEGER,
    _INTEGER,
    _POINTER,
    _POINTER,
)


@functools.cache
def has_scan() -> bool:
    """Whether there is a compiler, so that :func:`scan` runs here."""
    return library(_SOURCE) is not None


@functools.cache
def has_tiles() -> bool:
    """Whether bfloat16 products here round the queries, too."""
    compiled = library(_SOURCE)
    return compiled is not None and bool(compiled.plsc_has_tiles())


@dataclass(frozen=True)
class Rows:
    """What is scanned: ``vectors`` (N, D) float32, and ``base``.

    base: (N, stride) uint16, the bits of bfloat16 numbers with zeros behind the first D, stride a multiple of 32; or
    ``vectors`` again; or None, to score every row in float64. descriptor, offset: the file that holds the vectors,
    and where in it, in bytes; they are then read from there and not from memory.
    """

    vectors: Float32
    base: npt.NDArray[Any] | None
    descriptor: int | None = None
    offset: int = 0


def scan(
    rows: Rows,
    queries: Float32,
    low_queries: npt.NDArray[np.uint16] | None,
    margin: Float32,
    k: int,
    *,
    index: Int64 | None,
    allowed: npt.NDArray[np.bool_] | None,
    most: int,
    threads: int,
) -> tuple[Float32, Int64, int]:
    """The best ``k`` rows of each of ``queries`` (Q, D), by float64 products, ties by number.

    Args:
        low_queries: (Q, D) bits of the queries in bfloat16, to multiply in tiles; None to multiply without.
        margin: (Q,) how far below the k-th best score in low precision a row may lie and still be looked at.
        index: (n,) ascending, the rows to look at; None: all N.
        allowed: (N,) the rows among them that may be found, at least k; None: all.
        most: candidates of a query above which every row is scored in float64 instead.

    Returns:
        scores (Q, k) float32, rows (Q, k) int64, and how many rows were scored in float64.

    Raises :class:`MemoryError`, and :class:`DataError` where the file cannot be read any more.
    """
    compiled = library(_SOURCE)
    assert compiled is not None, "ask has_scan() first"
    dim = rows.vectors.shape[1]
    stride = dim if rows.base is None else rows.base.shape[1]
    wide, low = _filled_up(queries, stride), None if low_queries is None else _filled_up(low_queries, stride)
    margin = np.ascontiguousarray(margin, dtype=np.float32)
    scores = np.empty((len(queries), k), dtype=np.float32)
    found = np.empty((len(queries), k), dtype=np.int64)
    run = compiled.plsc_scan
    run.argtypes, run.restype = _ARGUMENTS, _INTEGER
    ranked = run(
        _address(rows.base),
        rows.base is not None and rows.base.dtype == np.uint16,
        stride,
        _address(rows.vectors),
        -1 if rows.descriptor is None else rows.descriptor,
        rows.offset,
        dim,
        _address(index),
        len(rows.vectors) if index is None else len(index),
        _address(allowed),
        _address(wide),
        _address(low),
        len(queries),
        k,
        _address(margin),
        most,
        threads,
        _address(scores),
        _address(found),
    )
    if ranked == _UNREADABLE:
        raise DataError("the file of the vectors cannot be read any more; has it been cut?")
    if ranked < 0:
        raise MemoryError("the scan's shortlists do not fit into memory")
    return scores, found, ranked


def _filled_up(queries: npt.NDArray[Any], stride: int) -> npt.NDArray[Any]:
    """``queries`` with zeros beside and below, for whole panels of whole rows."""
    whole = np.zeros((-(-len(queries) // _PANEL) * _PANEL, stride), dtype=queries.dtype)
    whole[: len(queries), : queries.shape[1]] = queries
    return whole


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
