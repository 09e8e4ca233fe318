"""Counter-based random bits: a pure function of (seed, step, row, column), whatever shard or chunk asks."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_MULTIPLY_1 = 0x7FEB352D  # "lowbias32", Chris Wellons' search for 32-bit mixers of low bias
_MULTIPLY_2 = 0x846CA68B


def random_bits(seed: int, step: int, rows: Tensor, columns: int) -> Tensor:
    """32 random bits for every element of some rows of a table.

    Args:
        seed: of the run.
        step: of the optimizer; other steps give independent bits.
        rows: (n,) int64 global row numbers.
        columns: the table's width D.

    Returns:
        (n, D) int32.
    """
    low = (rows & 0xFFFFFFFF) ^ key_of(seed, step)
    high = (rows >> 32) * _GOLDEN
    row_key = _mix(_as_int32((low + high) & 0xFFFFFFFF))
    column = torch.arange(columns, device=rows.device, dtype=torch.int64) * _GOLDEN & 0xFFFFFFFF
    return _mix(row_key[:, None] ^ _as_int32(column)[None])


def key_of(seed: int, step: int) -> int:
    """32 bits that stand for this seed and step."""
    return _mix_int(seed & 0xFFFFFFFF) ^ _mix_int((step + _GOLDEN) & 0xFFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """Scramble int32 numbers one to one. ``x`` is overwritten."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLY_1
    x ^= (x >> 15) & 0x1FFFF
    x *= as_int32(_MULTIPLY_2)
    x ^= (x >> 16) & 0xFFFF
    return x


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = x * _MULTIPLY_1 & 0xFFFFFFFF
    x ^= x >> 15
    x = x * _MULTIPLY_2 & 0xFFFFFFFF
    return x ^ x >> 16


def as_int32(x: int) -> int:
    """The int32 that has the bits of ``x``, a number in [0, 2³²)."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _as_int32(x: Tensor) -> Tensor:
    """int64 numbers in [0, 2³²) as the int32 of the same bits."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
