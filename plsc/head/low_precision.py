"""Rows in fewer bits without a bias: stochastic rounding to bfloat16, int8 with a scale per row, and their random bits.

Nearest rounding of bfloat16 weights loses every update smaller than half a unit in the last place, and with them the
decay that keeps norms in check. Stochastic rounding is right on average (Gupta et al., ICML 2015).

The random bits are counter-based, a pure function of (seed, step, global row, column): results then depend neither on
how the table is sharded nor on how passes are cut into chunks, and every backend can make the same bits by itself.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plsc.errors import UsageError

Rounding = Literal["stochastic", "nearest"]
_GOLDEN = 0x9E3779B9
_MULTIPLY_1 = 0x7FEB352D  # "lowbias32", Chris Wellons' search for 32-bit mixers of low bias
_MULTIPLY_2 = 0x846CA68B
STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8)
ROUNDED = (torch.bfloat16, torch.int8)  # what takes random bits


@dataclass(frozen=True)
class RoundingBits:
    """The random bits of one update of some rows: the low half for weights, the high half for their state."""

    bits: Tensor

    @classmethod
    def draw(cls, seed: int, step: int, rows: Tensor, columns: int) -> "RoundingBits":
        """Bits for global ``rows`` (n,) at this seed and step."""
        return cls(random_bits(seed, step, rows, columns))

    @property
    def low(self) -> Tensor:
        """16 bits for each element, (n, D) int32 in [0, 65536)."""
        return self.bits & 0xFFFF

    @property
    def high(self) -> Tensor:
        """16 other bits for each element."""
        return (self.bits >> 16) & 0xFFFF


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values up or down to bfloat16 with the probabilities that keep the mean.

    ``bits`` (int32 in [0, 65536)) is added below bfloat16's last bit, and what lies there is cut off.
    """
    raised = values.float().view(torch.int32) + bits
    return (raised & -65536).view(torch.float32).to(torch.bfloat16)


def quantize_rows(values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """(n, D) float32 as int8 with a float32 scale (n,) per row, rounded stochastically by 16-bit ``bits``."""
    scale = values.abs().amax(1) / 127
    steps = values / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    chance = (bits.float() + 0.5) / 65536
    return (steps + chance).floor_().clamp_(-127, 127).to(torch.int8), scale


class RowState:
    """A table of optimizer state beside the weights, (rows, D), in float64, float32, bfloat16 or int8.

    Args:
        rows, columns: the shape.
        dtype: how it is stored; int8 adds 4 bytes of scale per row.
        device: its device.
        rounding: "nearest" exists to show what it breaks.
        capacity: rows that memory is reserved for, where there may come to be more than ``rows``; a CPU's is taken
            as :meth:`use` lets them in.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Rounding = "stochastic",
        capacity: int = 0,
    ) -> None:
        check_state_dtype(dtype)
        reserved, make = max(rows, capacity), torch.empty if capacity else torch.zeros
        values = make(reserved, columns, dtype=dtype, device=device)
        self._set(values, make(reserved, device=device) if dtype == torch.int8 else None, rounding)
        if capacity:
            self.values = values[:0]
            self.use(rows)

    @classmethod
    def over(cls, values: Tensor, scale: Tensor | None, rounding: Rounding) -> "RowState":
        """A table in existing memory: ``values`` (rows, D), and ``scale`` (rows,) where int8."""
        state = cls.__new__(cls)
        state._set(values, scale, rounding)
        return state

    def _set(self, values: Tensor, scale: Tensor | None, rounding: Rounding) -> None:
        self.values, self.scale, self.rounding = values, scale, rounding
        self._reserved = values, scale

    def use(self, rows: int, *, clears: bool = True) -> None:
        """Let the first ``rows`` of the memory be the table; those that come in become zero if it ``clears`` them."""
        values, scale = self._reserved
        before = len(self.values) if clears else rows
        for tensor in (values,) if scale is None else (values, scale):
            tensor[before:rows] = 0
        self.values, self.scale = values[:rows], None if scale is None else scale[:rows]

    def read(self, index: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows as ``dtype``, a copy."""
        values = self.values[index].to(dtype, copy=True)
        return values if self.scale is None else values.mul_(self.scale[index][:, None])

    def write(self, index: slice | Tensor, values: Tensor, bits: RoundingBits | None) -> None:
        """Store rows. ``bits`` may be None for float32 and float64."""
        if self.scale is not None:
            assert bits is not None
            stored, scale = quantize_rows(values, _or_half(bits.high, self.rounding))
            self.values[index], self.scale[index] = stored, scale.to(self.scale.dtype)
        else:
            store(self.values, index, values, bits.high if bits is not None else None, self.rounding)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that hold it, by name."""
        return {name: self.values} | ({scale_name(name): self.scale} if self.scale is not None else {})


def scale_name(name: str) -> str:
    """The name of the scales of the int8 table ``name``."""
    return f"{name}_scale"


def check_state_dtype(dtype: torch.dtype) -> None:
    """UsageError for a dtype in which optimizer state is not stored."""
    if dtype not in STATE_DTYPES:
        raise UsageError(f"optimizer state cannot be {dtype}: give float32, bfloat16 or int8")


def store(
    table: Tensor, index: slice | Tensor, values: Tensor, bits: Tensor | None, rounding: Rounding = "stochastic"
) -> None:
    """Write rows into a float64, float32 or bfloat16 table, rounding the last by ``bits``."""
    if table.dtype == torch.bfloat16 and rounding == "stochastic":
        assert bits is not None
        values = round_to_bfloat16(values, bits)
    table[index] = values.to(table.dtype)


def _or_half(bits: Tensor, rounding: Rounding) -> Tensor:
    return bits if rounding == "stochastic" else torch.full_like(bits, 32767)


def random_bits(seed: int, step: int, rows: Tensor, columns: int) -> Tensor:
    """Return 32 random bits for every element of some rows of a table.

    Args:
        seed: of the run.
        step: of the optimizer; other steps give independent bits.
        rows: (n,) int64 global row numbers.
        columns: the table's width D.

    Returns:
        (n, D) int32.
    """
    low = (rows & 0xFFFFFFFF) ^ rounding_key(seed, step)
    high = (rows >> 32) * _GOLDEN
    row_key = _mix(_as_int32((low + high) & 0xFFFFFFFF))
    column = torch.arange(columns, device=rows.device, dtype=torch.int64) * _GOLDEN & 0xFFFFFFFF
    return _mix(row_key[:, None] ^ _as_int32(column)[None])


def rounding_key(seed: int, step: int) -> int:
    """32 bits that key this seed and step."""
    return _mix_int(seed & 0xFFFFFFFF) ^ _mix_int((step + _GOLDEN) & 0xFFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """Hash int32 numbers bijectively, in place."""
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
    """Reinterpret ``x`` in [0, 2³²) as an int32."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _as_int32(x: Tensor) -> Tensor:
    """Reinterpret int64 numbers in [0, 2³²) as int32."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)
