"""The compiled exact scan as a function of arrays: candidates in bfloat16 or float32, the ranking in float64.

Where the processor multiplies bfloat16 numbers (matrix tiles of Intel AMX, AVX-512 BF16, ARM's BF16), the queries of
rows in bfloat16 are rounded too; any other processor widens such rows and multiplies them by float32 queries.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import DataError
from plsc.native.build import library

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

PADDED_TO = 32  # the width of bfloat16 rows is a multiple of this many numbers
_PANEL = 32  # the kernel reads queries in panels of this many, zeros behind the last
_UNREADABLE = -2  # the kernel's return value for a file that cannot be read
_SOURCE = "scan_kernels"
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
# plsc_scan's parameters, in the order of scan_kernels.cpp.
_ARGUMENTS = (
    *(_POINTER, ctypes.c_int, _INTEGER),  # base, is_bf16, stride
    *(_POINTER, ctypes.c_int, _INTEGER, _INTEGER),  # vectors, file, offset, dim
    *(_POINTER, _INTEGER, _POINTER),  # index, count, allowed
    *(_POINTER, _POINTER, _INTEGER),  # queries, low_queries, query_count
    *(_INTEGER, _POINTER, _INTEGER, _INTEGER),  # k, margin, most, threads
    *(_POINTER, _POINTER),  # scores, rows
)


@dataclass(frozen=True)
class Rows:
    """The rows to scan.

    Attributes:
        vectors: (N, D) float32.
        base: (N, stride) uint16, the bits of bfloat16 numbers with zeros behind the first D, stride a multiple of 32;
            or ``vectors`` again; or None, to score every row in float64.
        descriptor: of the file that holds the vectors, which are then read from it and not from memory; or None.
        offset: bytes from its beginning to the first row.
    """

    vectors: Float32
    base: npt.NDArray[Any] | None
    descriptor: int | None = None
    offset: int = 0


class ScanKernel:
    """The compiled scan; :func:`load_scan` makes one.

    Attributes:
        products: the unit that multiplies bfloat16 and the one that multiplies float32 rows, of "amx", "avx512-bf16",
            "avx512", "avx2", "neon-bf16", "neon" and "portable" (without fused multiply-adds).
        rounds_queries: True if it takes queries in bfloat16.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._run = compiled.plsc_scan
        self._run.argtypes, self._run.restype = _ARGUMENTS, _INTEGER
        compiled.plsc_scan_products.restype = ctypes.c_char_p
        bf16, fp32 = (compiled.plsc_scan_products(is_bf16).decode() for is_bf16 in (1, 0))
        self.products: tuple[str, str] = (bf16, fp32)
        self.rounds_queries = bool(compiled.plsc_rounds_queries())

    def __call__(
        self,
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
        """Find the best ``k`` rows of each query, by float64 products, ties by number.

        Args:
            rows: what to scan.
            queries: (Q, D).
            low_queries: (Q, D) bits of the queries in bfloat16 for bfloat16 rows where ``rounds_queries``; else None.
            margin: (Q,), the distance below the k-th best score in low precision at which a row is still a candidate.
            k: how many rows, at least one.
            index: (n,) ascending, the rows to visit; None: all N.
            allowed: (N,), True for those among them that may be found, at least k; None: all.
            most: candidates of a query above which every row is scored in float64 instead.
            threads: to use.

        Returns:
            scores (Q, k) float32, rows (Q, k) int64, and the number of rows that were scored in float64.

        Raises:
            MemoryError: the candidates do not fit into memory.
            DataError: the file cannot be read any more.
        """
        dim = rows.vectors.shape[1]
        stride = dim if rows.base is None else rows.base.shape[1]
        # Named, so that the arrays live until the call is over: the kernel gets addresses alone.
        padded, low = _padded(queries, stride), None if low_queries is None else _padded(low_queries, stride)
        margin = np.ascontiguousarray(margin, dtype=np.float32)
        scores = np.empty((len(queries), k), dtype=np.float32)
        found = np.empty((len(queries), k), dtype=np.int64)
        ranked = self._run(
            *(_address(rows.base), rows.base is not None and rows.base.dtype == np.uint16, stride),
            *(_address(rows.vectors), -1 if rows.descriptor is None else rows.descriptor, rows.offset, dim),
            *(_address(index), len(rows.vectors) if index is None else len(index), _address(allowed)),
            *(_address(padded), _address(low), len(queries)),
            *(k, _address(margin), most, threads),
            *(_address(scores), _address(found)),
        )
        if ranked == _UNREADABLE:
            raise DataError("the file of the vectors cannot be read any more; has it been cut?")
        if ranked < 0:
            raise MemoryError("the scan's shortlists do not fit into memory")
        return scores, found, ranked


def load_scan() -> ScanKernel | None:
    """The compiled scan for this processor (or for ``PLSC_CPU``, see :mod:`plsc.native.build`); None: no compiler."""
    compiled = library(_SOURCE)
    return None if compiled is None else ScanKernel(compiled)


def _padded(queries: npt.NDArray[Any], stride: int) -> npt.NDArray[Any]:
    """``queries`` with zeros to the right and below, for whole panels of whole rows."""
    padded = np.zeros((-(-len(queries) // _PANEL) * _PANEL, stride), dtype=queries.dtype)
    padded[: len(queries), : queries.shape[1]] = queries
    return padded


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
