"""Rows as 8-bit codes and queries as two 7-bit digits, with a proven bound of how far a score by them is off.

A row x (D,) becomes integers c in [-127, 127] and a step s, c = round(x/s), s = max|x|/127; x' = s·c is what they stand
for. A query q becomes integers Q = 128·high + low, in [-8127, 8127], and a step t, q' = t·Q. The integers' products are
exact, so

    ⟨q, x⟩ − ⟨q', x'⟩ = ⟨q, x − x'⟩ + ⟨q − q', x'⟩,   hence by Cauchy-Schwarz
    |⟨q, x⟩ − s·t·⟨Q, c⟩| <= |q|·ρ(x) + |q − q'|·|x'|,   ρ(x) >= |x − x'|.

ρ is stored for every row, so that one row of an awkward shape (a single large coordinate) loosens no other's bound.
|q − q'| is known when the query comes, and small beside the rows' part: two digits cost nothing while the memory is
what a scan waits for, and with one, of 8 bits, both parts would be as large. For x on the unit sphere with D = 512, ρ
is about 0.007, and |q − q'| about 0.0001.

The float32 arithmetic that turns ⟨Q, c⟩ into a score adds less than 2⁻²⁰·(1 + √D/64)·(|q| + |q − q'|)·L, where L is
max|x'| + max ρ. The sums of the digits are converted, joined, multiplied by two steps and added to |q|·ρ(x): six
roundings of 2⁻²⁴ each, relative to at most |x'|·(|q'| + 2·t·|low|) + |q|·ρ, t·|low| <= 64·√D·max|q|/8127 < |q|·√D/126.

So a row's score lies between the computed one less and more |q|·ρ(x) + e, with one e for a query. A row whose upper end
is below the k-th best lower end is not among the k best; all others are candidates, and are ranked in float64.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plsc.errors import DataError
from plsc.index.rows import Float32
from plsc.native.scan import load_scan

PADDED_TO = 64  # the width of rows of codes is a multiple of this
LARGEST_DIM = 1 << 16  # sums of 255·64 for each number fit into an int32
ZERO = 128  # what a code of 0 is stored as
UNDERFLOW = 2.0**-54  # at least what numbers add to a length whose squares are 0 in float32
_LARGEST_CODE, _DIGIT, _LARGEST_QUERY = 127, 128, 8127
_SLACK = 1.001  # since lengths are themselves computed in float32
_ROUNDING = 2.0**-20
_CODING = 2.0**-22  # of what a code stands for, relative to the row's length
_LEAST_STEP = 2.0**-120  # rows of a smaller one are coded as zero


@dataclass(frozen=True)
class RowCodes:
    """Codes of N rows.

    Attributes:
        codes: (N, stride) uint8, each 128 more than the integer, stride a multiple of 64; the numbers behind the D-th
            may be any.
        bounds: (3, N) float32: the steps s; the bounds ρ; and upper bounds of the lengths |x'|.
    """

    codes: npt.NDArray[np.uint8]
    bounds: Float32

    @property
    def nbytes(self) -> int:
        """Bytes that a scan reads."""
        return self.codes.nbytes + self.bounds[:2].nbytes


@dataclass(frozen=True)
class QueryCodes:
    """Queries (Q, D) as digits.

    Queries are first multiplied by a power of two each, which changes no ranking, and scores are of those.

    Attributes:
        digits: (Q, 2, stride) int8, high and low, zeros behind the D-th.
        steps: (Q,) float32, t.
        lengths: (Q,) float32, upper bounds of |q|.
        margin: (Q,) float32, 2·e, in which what is computed may be off besides |q|·ρ.
    """

    digits: npt.NDArray[np.int8]
    steps: Float32
    lengths: Float32
    margin: Float32


def stride_of(dim: int) -> int:
    """The width of rows of ``dim`` codes."""
    return -(-dim // PADDED_TO) * PADDED_TO


def encode_into(codes: npt.NDArray[np.uint8], bounds: Float32, start: int, rows: Float32) -> None:
    """Code ``rows`` (n, D), those from number ``start`` on, into their places: compiled, if it can be.

    Args:
        codes: (N, stride).
        bounds: (3, N).
        start: the first row's number.
        rows: float32 in C order.

    Raises:
        DataError: a row that is not finite.
    """
    place, kernel = slice(start, start + len(rows)), load_scan()
    if kernel is None:
        coded, bound = encode_rows(start, torch.from_numpy(np.array(rows)))  # torch takes no read-only ones
        codes[place, : rows.shape[1]], bounds[:, place] = coded.numpy(), bound.numpy()
        return
    wrong = kernel.encode(rows, codes[place], bounds[:, place], (_SLACK, _CODING, UNDERFLOW, _LEAST_STEP))
    if wrong >= 0:
        raise DataError(f"row {start + wrong} of the vectors is not finite")


def encode_rows(start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Code ``rows`` (n, D) float32, those from number ``start`` on, by PyTorch.

    Returns:
        Codes (n, D) uint8 and bounds (3, n) float32, as :class:`RowCodes` has them.

    Raises:
        DataError: a row that is not finite.
    """
    lengths = rows.norm(dim=1)
    if not bool(lengths.isfinite().all()):
        raise DataError(f"row {start + int((~lengths.isfinite()).nonzero()[0])} of the vectors is not finite")
    steps = rows.abs().amax(dim=1) / _LARGEST_CODE
    steps[steps < _LEAST_STEP] = 0
    codes = (rows / steps.clamp(min=_LEAST_STEP)[:, None]).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    codes[steps == 0] = 0
    residues = (rows - codes * steps[:, None]).norm(dim=1)
    residues = _SLACK * residues + _SLACK * _CODING * lengths + UNDERFLOW
    return (codes + ZERO).to(torch.uint8), torch.stack([steps, residues, _SLACK * lengths + residues])


def encode_queries(queries: Float32, rows_bounds: tuple[float, float]) -> QueryCodes:
    """Code ``queries`` (Q, D), finite, against rows of which ``rows_bounds`` are max|x'| and max ρ."""
    longest, largest_residue = rows_bounds
    count, dim = queries.shape
    exact = queries.astype(np.float64)
    largest = np.abs(exact).max(axis=1, initial=0.0)
    exact = np.ldexp(exact, -np.frexp(largest)[1][:, None])  # a float64 holds the smallest float32 as it is
    steps = (np.abs(exact).max(axis=1, initial=0.0) / _LARGEST_QUERY).astype(np.float32)
    steps_f64 = np.where(steps > 0, steps, 1).astype(np.float64)[:, None]
    whole = np.clip(np.rint(exact / steps_f64), -_LARGEST_QUERY, _LARGEST_QUERY)
    residues = np.linalg.norm(exact - whole * steps_f64, axis=1)
    lengths = _SLACK * (np.linalg.norm(exact, axis=1) + residues)
    rounding = _ROUNDING * (1 + dim**0.5 / 64) * lengths * (longest + largest_residue)
    margin = 2 * _SLACK * (residues * longest + rounding + UNDERFLOW)
    high = np.floor_divide(whole + _DIGIT // 2, _DIGIT)
    digits = np.zeros((count, 2, stride_of(dim)), dtype=np.int8)
    digits[:, 0, :dim], digits[:, 1, :dim] = high, whole - _DIGIT * high
    return QueryCodes(digits, steps, lengths.astype(np.float32), margin.astype(np.float32))
