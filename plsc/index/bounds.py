"""How far a score computed in low precision may be from the true one: Cauchy and Schwarz on what rounding left over."""

import torch
from torch import Tensor

from plsc.errors import DataError

_SUM_ERROR = 2.0**-23  # of each addition in float32, relative to the lengths; twice the unit roundoff, for slack
_SLACK = 1.001  # lengths are themselves computed in float32


class RowBounds:
    """What holds for all rows taken in: ``longest`` length and ``largest_residue``, the length of what rounding
    changed."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.largest_residue = 0.0

    def take(self, start: int, exact: Tensor, kept: Tensor) -> None:
        """exact, kept: (n, D), rows from ``start`` on before and after rounding; :class:`DataError` for NaN."""
        lengths = exact.norm(dim=1)
        if not bool(lengths.isfinite().all()):
            raise DataError(f"row {start + int((~lengths.isfinite()).nonzero()[0])} of the vectors is not finite")
        self.longest = max(self.longest, _SLACK * float(lengths.max()))
        if kept.dtype != exact.dtype:
            residues = (exact - kept.to(exact.dtype)).norm(dim=1)
            self.largest_residue = max(self.largest_residue, _SLACK * float(residues.max()))


def query_error(exact: Tensor, kept: Tensor, rows: RowBounds) -> Tensor:
    """(Q,) bounds on |⟨q, v⟩ − computed ⟨q', v'⟩| for queries (Q, D) before and after rounding and any row.

    ⟨q, v⟩ − ⟨q', v'⟩ = ⟨q − q', v⟩ + ⟨q', v − v'⟩, and the sum of D products in float32 adds its own rounding.
    """
    residue = torch.linalg.vector_norm(exact - kept, dim=1) * _SLACK
    length = torch.linalg.vector_norm(exact, dim=1) * _SLACK + residue  # of the longer of both, at most
    summing = (exact.shape[1] + 16) * _SUM_ERROR * (rows.longest + rows.largest_residue)
    error: Tensor = residue * rows.longest + length * (rows.largest_residue + summing)
    return error
