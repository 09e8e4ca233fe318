"""The compiled exact scan as a function of arrays: candidates by 8-bit codes, bfloat16 or float32, ranked in float64.

Codes are multiplied by both digits of a query (:mod:`plsc.index.codes`), in int32. Where the processor multiplies
bfloat16 numbers (matrix tiles of Intel AMX, AVX-512 BF16, ARM's BF16), the queries of rows in bfloat16 are rounded too;
any other processor widens such rows and multiplies them by float32 queries.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import IntegrityError
from plsc.native.build import library

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

PADDED_TO = 32  # the width of bfloat16 rows is a multiple of this many numbers
_PANEL = 32  # the kernel reads queries in panels of this many, zeros behind the last
_UNREADABLE = -2  # the kernel's return value for a file that cannot be read
_SOURCE = "scan_kernels"
_KINDS = {"int8": 2, "bf16": 1, "fp32": 0}  # kCodes, kBfloats and kFloats of scan_kernels.cpp
_KIND_OF = {np.dtype(np.uint8): 2, np.dtype(np.uint16): 1}
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
# plsc_scan's parameters, in the order of scan_kernels.cpp.
_ARGUMENTS = (
    *(_POINTER, ctypes.c_int, _INTEGER, _POINTER, _POINTER),  # base, kind, stride, scales, residues
    *(_POINTER, ctypes.c_int, _INTEGER, _INTEGER),  # vectors, file, offset, dim
    *(_POINTER, _INTEGER, _POINTER),  # index, count, allowed
    *(_POINTER, _POINTER, _POINTER, _POINTER, _INTEGER),  # queries, low_queries, query_scales, lengths, query_count
    *(_INTEGER, _POINTER, _INTEGER, _INTEGER),  # k, margin, most, threads
    *(_POINTER, _POINTER),  # scores, rows
)
# plsc_encode_rows' parameters: rows, count, dim, stride, four constants; codes, steps, residues, lengths.
_ENCODING_ARGUMENTS: tuple[Any, ...] = (_POINTER, *[_INTEGER] * 3, *[ctypes.c_float] * 4, *[_POINTER] * 4)
_NEAREST_UNITS = ("avx512-vnni", "avx2-vnni", "neon-dot")
# plsc_nearest_rows' parameters: vectors, codes, bounds and count, of rows and of queries; least; dim, stride, threads;
# three results.
_NEAREST_ARGUMENTS: tuple[Any, ...] = (*[*[_POINTER] * 3, _INTEGER] * 2, _POINTER, *[_INTEGER] * 3, *[_POINTER] * 3)


@dataclass(frozen=True)
class Rows:
    """The rows to scan.

    Attributes:
        vectors: (N, D) float32.
        base: (N, stride) uint16, the bits of bfloat16 numbers with zeros behind the first D, stride a multiple of 32;
            or (N, stride) uint8, codes, stride a multiple of 64; or ``vectors`` again; or None, to score every row in
            float64.
        descriptor: of the file that holds the vectors, which are then read from it and not from memory; or None.
        offset: bytes from its beginning to the first row.
        code_bounds: (2, N) float32, of codes: their steps, and bounds of what they leave of the rows.
    """

    vectors: Float32
    base: npt.NDArray[Any] | None
    descriptor: int | None = None
    offset: int = 0
    code_bounds: Float32 | None = None


@dataclass(frozen=True)
class LowQueries:
    """Q queries in the precision of the rows.

    Attributes:
        numbers: (Q, D) uint16, the bits of bfloat16 numbers; or (Q, 2, stride) int8, digits.
        steps, lengths: (Q,) float32, of digits.
    """

    numbers: npt.NDArray[Any]
    steps: Float32 | None = None
    lengths: Float32 | None = None


@dataclass(frozen=True)
class CodedVectors:
    """Vectors (N, D) float32 in C order, with codes and bounds as plsc.index.codes.RowCodes has them.

    Numbers of the codes behind the D-th are 128, which stands for zero.
    """

    vectors: Float32
    codes: npt.NDArray[np.uint8]
    bounds: Float32


class ScanKernel:
    """The compiled scan; :func:`load_scan` makes one.

    Attributes:
        products: the unit that multiplies, by the rows' precision. "bf16" and "fp32": "amx", "avx512-bf16", "avx512",
            "avx2", "neon-bf16", "neon" or "portable" (without fused multiply-adds). "int8": "amx-int8", "avx512-vnni",
            "avx512", "avx2-vnni", "avx2", "neon-dot" or "portable" (without products of bytes).
        rounds_queries: True if it takes queries in bfloat16.
        finds_nearest: True if :meth:`nearest` adds products of bytes without saturation, and nothing multiplies faster.
    """

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._run = compiled.plsc_scan
        self._run.argtypes, self._run.restype = _ARGUMENTS, _INTEGER
        compiled.plsc_scan_products.restype = ctypes.c_char_p
        self.products: dict[str, str] = {
            precision: compiled.plsc_scan_products(kind).decode() for precision, kind in _KINDS.items()
        }
        self._encode = compiled.plsc_encode_rows
        self._encode.argtypes, self._encode.restype = _ENCODING_ARGUMENTS, _INTEGER
        self._nearest = compiled.plsc_nearest_rows
        self._nearest.argtypes, self._nearest.restype = _NEAREST_ARGUMENTS, _INTEGER
        self.finds_nearest = self.products["int8"] in _NEAREST_UNITS
        self.rounds_queries = bool(compiled.plsc_rounds_queries())

    def __call__(
        self,
        rows: Rows,
        queries: Float32,
        low_queries: LowQueries | None,
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
            low_queries: the queries for codes, and for bfloat16 rows where ``rounds_queries``; else None.
            margin: (Q,), the distance below the k-th best score in low precision at which a row is still a candidate;
                of codes, besides that which the row's own bound adds.
            k: how many rows, at least one.
            index: (n,) ascending, the rows to visit; None: all N.
            allowed: (N,), True for those among them that may be found, at least k; None: all.
            most: candidates of a query above which every row is scored in float64 instead.
            threads: to use.

        Returns:
            scores (Q, k) float32, rows (Q, k) int64, and the number of rows that were scored in float64.

        Raises:
            MemoryError: the candidates do not fit into memory.
            IntegrityError: the file cannot be read any more.
        """
        dim = rows.vectors.shape[1]
        stride = dim if rows.base is None else rows.base.shape[1]
        # Named, so that the arrays live until the call is over: the kernel gets addresses alone.
        padded = _padded(queries, stride)
        low, steps, lengths = _padded_low(low_queries, stride)
        scales, residues = (None, None) if rows.code_bounds is None else rows.code_bounds[:2]
        margin = np.ascontiguousarray(margin, dtype=np.float32)
        scores = np.empty((len(queries), k), dtype=np.float32)
        found = np.empty((len(queries), k), dtype=np.int64)
        ranked = self._run(
            *(_address(rows.base), 0 if rows.base is None else _KIND_OF.get(rows.base.dtype, 0), stride),
            *(_address(scales), _address(residues)),
            *(_address(rows.vectors), -1 if rows.descriptor is None else rows.descriptor, rows.offset, dim),
            *(_address(index), len(rows.vectors) if index is None else len(index), _address(allowed)),
            *(_address(padded), _address(low), _address(steps), _address(lengths), len(queries)),
            *(k, _address(margin), most, threads),
            *(_address(scores), _address(found)),
        )
        if ranked == _UNREADABLE:
            raise IntegrityError("the file of the vectors cannot be read any more: it was cut; open it again")
        if ranked < 0:
            raise MemoryError("the scan's shortlists do not fit into memory")
        return scores, found, ranked

    def encode(
        self, rows: Float32, codes: npt.NDArray[np.uint8], bounds: Float32, constants: tuple[float, float, float, float]
    ) -> int:
        """Code ``rows`` (n, D) into ``codes`` (n, stride) and ``bounds`` (3, n), as plsc.index.codes.encode_rows does.

        Args:
            rows: in C order.
            codes: in C order.
            bounds: whose three rows are contiguous.
            constants: of plsc.index.codes: the slack of lengths, a code's rounding, underflow and the least step.

        Returns:
            The first row that is not finite; -1: all are.
        """
        into = (codes.ctypes.data, *(bound.ctypes.data for bound in bounds))
        return int(self._encode(rows.ctypes.data, *rows.shape, codes.shape[1], *constants, *into))

    def nearest(
        self, rows: CodedVectors, queries: CodedVectors, least: Float32 | None, threads: int
    ) -> tuple[Float32, Int64, Float32]:
        """Find the nearest of ``rows`` (N, D), all of length 1, to each of ``queries`` (Q, D), by float64 products.

        Args:
            rows, queries: in C order.
            least: (Q,), a product that counts; None: any does.
            threads: to use.

        Returns:
            products (Q,) float32, rows (Q,) int64 with ties by number, -1 where none reaches ``least``, and an upper
            bound (Q,) of the products with all other rows.

        Raises:
            MemoryError: the candidates do not fit into memory.
        """
        products, others = np.empty((2, len(queries.vectors)), dtype=np.float32)
        found = np.empty(len(queries.vectors), dtype=np.int64)
        parts: list[int | None] = []
        for coded in (rows, queries):
            parts += [_address(coded.vectors), _address(coded.codes), _address(coded.bounds), len(coded.vectors)]
        into = (_address(products), _address(found), _address(others))
        if self._nearest(*parts, _address(least), rows.vectors.shape[1], rows.codes.shape[1], threads, *into):
            raise MemoryError("the candidates of nearest rows do not fit into memory")
        return products, found, others


def load_scan() -> ScanKernel | None:
    """The compiled scan for this processor (or for ``PLSC_CPU``, see :mod:`plsc.native.build`); None: no compiler."""
    compiled = library(_SOURCE)
    return None if compiled is None else ScanKernel(compiled)


def _padded(queries: npt.NDArray[Any], stride: int) -> npt.NDArray[Any]:
    """``queries`` (Q, D) with zeros to the right and below, for whole panels of whole rows."""
    padded = np.zeros((-(-len(queries) // _PANEL) * _PANEL, stride), dtype=queries.dtype)
    padded[: len(queries), : queries.shape[1]] = queries
    return padded


def _padded_low(queries: LowQueries | None, stride: int) -> tuple[npt.NDArray[Any] | None, ...]:
    """Numbers, steps and lengths for whole panels; None where there are none."""
    if queries is None:
        return None, None, None
    if queries.steps is None or queries.lengths is None:
        return _padded(queries.numbers, stride), None, None
    digits = _padded(queries.numbers.reshape(len(queries.numbers), -1), 2 * stride)
    return digits, _padded(queries.steps[:, None], 1), _padded(queries.lengths[:, None], 1)


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
