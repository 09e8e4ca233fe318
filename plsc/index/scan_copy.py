"""What an exact scan reads in place of the float32 rows: 8-bit codes, a bfloat16 copy, or a copy on a GPU."""

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError
from plsc.index.codes import UNDERFLOW, ZERO, RowCodes, encode_into, encode_rows, stride_of
from plsc.index.rows import Float32, RowSource
from plsc.native.scan import PADDED_TO

_SUM_ERROR = 2.0**-23  # of each float32 addition, relative to the lengths; twice the unit roundoff, for slack
_SLACK = 1.001  # since lengths are themselves computed in float32
_ROUNDED_AT_ONCE = 1 << 18  # rows, on a GPU
_WHOLE = 32  # rows of a copy on a GPU are a multiple of this, as its products of bytes want them


class ScanCopy:
    """Memory that a scan reads: codes or a bfloat16 copy of ``vectors`` (N, D), a copy on a GPU, or the vectors.

    Attributes:
        source: reads the float32 rows.
        codes: of precision "int8" on a CPU; else None.
        rows: (N, stride) on ``device``, bfloat16 with stride the next multiple of 32 from D on and zeros behind D, or
            float32 on a GPU; None: codes, or the vectors themselves, are scanned.
        signed_codes: (N rounded up to 32, stride) int8, the codes on a GPU; else None.
        code_bounds: (2, N) on ``device``, steps and bounds of the codes.
        code_maxima: max|x'| and max ρ over the rows that are coded.
        bounds: of the rounding errors of the rows, which are not coded.
        rounded: bfloat16 of float32 rows on a GPU, once they were asked for.
    """

    def __init__(self, vectors: Float32, precision: str, device: torch.device, codes: RowCodes | None = None) -> None:
        self.vectors, self.device = vectors, device
        self.source = RowSource(vectors)
        self.bounds = RowBounds()
        self.codes = codes if device.type == "cpu" else None
        self.signed_codes: Tensor | None = None
        self.rows: Tensor | None = None
        self.rounded: Tensor | None = None
        if precision == "int8":
            self._encode()
        else:
            self.rows = self._rounded(precision)

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is scanned."""
        if self.codes is not None:
            return self.codes.nbytes
        if self.signed_codes is not None:
            return self.signed_codes.nbytes
        return (self.vectors if self.rows is None else self.rows).nbytes + (
            0 if self.rounded is None else self.rounded.nbytes
        )

    def round_rows(self, exact: Tensor | None) -> tuple[Tensor, "RowBounds"]:
        """Rows (N, stride) in bfloat16, zeros behind D, and their bounds: of ``exact`` ones (N, D), or :attr:`rows`."""
        if exact is None:
            assert self.rows is not None, "the rows are rounded"
            return self.rows, self.bounds
        count, dim = exact.shape
        self.rounded = torch.zeros(count, stride_of(dim), dtype=torch.bfloat16, device=exact.device)
        largest = torch.zeros((), device=exact.device)
        for start in range(0, count, _ROUNDED_AT_ONCE):
            part = exact[start : start + _ROUNDED_AT_ONCE]
            rounded = self.rounded[start : start + len(part), :dim].copy_(part)
            largest = torch.maximum(largest, (part - rounded).norm(dim=1).max())
        return self.rounded, RowBounds(self.bounds.longest, _SLACK * float(largest) + UNDERFLOW)

    def _encode(self) -> None:
        """Code the rows, unless their codes were given, and note the bounds."""
        count, dim = self.vectors.shape
        if self.device.type != "cpu":
            bounds = self._encode_on_device(count, dim)
        else:
            if self.codes is None:
                codes, bounds_f32 = _empty_bytes(count, stride_of(dim)).numpy(), np.empty((3, count), np.float32)
                for start, part in self.source.chunks():
                    encode_into(codes, bounds_f32, start, part)
                self.codes = RowCodes(codes, bounds_f32)
            bounds = torch.from_numpy(np.array(self.codes.bounds, subok=False))
        self.code_maxima = (float(bounds[2].max()), float(bounds[1].max())) if count else (0.0, 0.0)
        self.code_bounds = bounds[:2].clone().to(self.device)

    def _encode_on_device(self, count: int, dim: int) -> Tensor:
        whole = -(-count // _WHOLE) * _WHOLE
        self.signed_codes = torch.zeros(whole, stride_of(dim), dtype=torch.int8, device=self.device)
        bounds = torch.empty(3, count)
        for start, part in self.source.chunks():
            rows = slice(start, start + len(part))
            coded, bounds[:, rows] = encode_rows(start, torch.from_numpy(part))
            self.signed_codes[rows, :dim] = signed(coded).to(self.device)
        return bounds

    def _rounded(self, precision: str) -> Tensor | None:
        """The rows to scan, in ``precision``, while their bounds are counted; None: the vectors themselves."""
        count, dim = self.vectors.shape
        rows: Tensor | None = None
        if precision == "bf16":
            rows = _empty_bf16(count, -(-dim // PADDED_TO) * PADDED_TO, self.device)
        elif self.device.type != "cpu":
            rows = torch.empty(count, dim, device=self.device)
        for start, part in self.source.chunks():
            exact = torch.from_numpy(part)
            rounded = exact if rows is None else exact.to(rows.dtype)
            self.bounds.add(start, exact, rounded)
            if rows is not None:
                rows[start : start + len(exact), :dim] = rounded.to(self.device)
        return rows


def signed(codes: Tensor) -> Tensor:
    """Codes as :class:`plsc.index.codes.RowCodes` has them, as the int8 numbers that they are."""
    return (codes ^ ZERO).view(torch.int8)


def _empty_bf16(count: int, stride: int, device: torch.device) -> Tensor:
    """(count, stride) zeros."""
    if device.type != "cpu":
        return torch.zeros(count, stride, dtype=torch.bfloat16, device=device)
    return _empty_bytes(count, 2 * stride).view(torch.bfloat16)


def _empty_bytes(count: int, stride: int) -> Tensor:
    """(count, stride) uint8 zeros; in huge pages where the system has them, because scans read them end to end."""
    if not count:
        return torch.zeros(count, stride, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private, since shared memory gets no huge pages.
        memory = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, count * stride)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(count, stride)


@dataclass
class RowBounds:
    """Upper bounds over all rows added.

    Attributes:
        longest: of a row's length.
        largest_residue: of the length of (row − rounded row).
    """

    longest: float = 0.0
    largest_residue: float = 0.0

    def add(self, start: int, exact: Tensor, rounded: Tensor) -> None:
        """exact, rounded: (n, D), the rows from ``start`` on; :class:`DataError` for one that is not finite."""
        lengths = exact.norm(dim=1)
        if not bool(lengths.isfinite().all()):
            raise DataError(f"row {start + int((~lengths.isfinite()).nonzero()[0])} of the vectors is not finite")
        self.longest = max(self.longest, _SLACK * float(lengths.max()) + UNDERFLOW)
        if rounded.dtype != exact.dtype:
            residues = (exact - rounded.to(exact.dtype)).norm(dim=1)
            self.largest_residue = max(self.largest_residue, _SLACK * float(residues.max()) + UNDERFLOW)


def query_error(exact: Tensor, rounded: Tensor, rows: RowBounds) -> Tensor:
    """Bound the error of low-precision scores: |⟨q, v⟩ − computed ⟨q', v'⟩| for any row v.

    ⟨q, v⟩ − ⟨q', v'⟩ = ⟨q − q', v⟩ + ⟨q', v − v'⟩, each bounded by Cauchy-Schwarz; the float32 sum of D products adds
    its own rounding.

    Args:
        exact: queries q (Q, D).
        rounded: the same after rounding, q'.
        rows: the bounds of the rows v and their rounded v'.

    Returns:
        (Q,) bounds.
    """
    residue = torch.linalg.vector_norm(exact - rounded, dim=1) * _SLACK
    length = torch.linalg.vector_norm(exact, dim=1) * _SLACK + residue  # at least those of q and of q'
    error: Tensor = residue * rows.longest + length * (rows.largest_residue + sum_error(exact.shape[1], rows))
    return error


def sum_error(dim: int, rows: RowBounds) -> float:
    """Bound the rounding error of a float32 sum of ``dim`` products, relative to the query's length."""
    return (dim + 16) * _SUM_ERROR * (rows.longest + rows.largest_residue)
