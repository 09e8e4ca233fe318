"""Storing rows in fewer bits without a bias: stochastic rounding to bfloat16, and int8 with a scale per row.

Nearest rounding of bfloat16 weights loses every update smaller than half a unit in the last place, and with them the
pull that keeps norms in check. Stochastic rounding is right on average (Gupta et al., ICML 2015).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head.random_bits import random_bits

Rounding = Literal["stochastic", "nearest"]
STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Dice:
    """The random bits of one update of some rows: the low half for weights, the high half for their state."""

    bits: Tensor

    @classmethod
    def throw(cls, seed: int, step: int, rows: Tensor, columns: int) -> "Dice":
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

    ``bits`` (int32 in [0, 65536)) is added below bfloat16's last place, and what lies there is cut off.
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
        device: where.
        rounding: "nearest" exists to show what it breaks.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Rounding = "stochastic",
    ) -> None:
        check_state_dtype(dtype)
        self.values = torch.zeros(rows, columns, dtype=dtype, device=device)
        self.scale = torch.zeros(rows, device=device) if dtype == torch.int8 else None
        self.rounding = rounding

    @classmethod
    def over(cls, values: Tensor, scale: Tensor | None, rounding: Rounding) -> "RowState":
        """A table over memory that someone else holds: ``values`` (rows, D), and ``scale`` (rows,) where int8."""
        state = cls.__new__(cls)
        state.values, state.scale, state.rounding = values, scale, rounding
        return state

    def read(self, index: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows as ``dtype``, a copy."""
        values = self.values[index].to(dtype, copy=True)
        return values if self.scale is None else values.mul_(self.scale[index][:, None])

    def write(self, index: slice | Tensor, values: Tensor, dice: Dice | None) -> None:
        """Store rows. ``dice`` may be None for float32 and float64."""
        if self.scale is not None:
            assert dice is not None
            self.values[index], self.scale[index] = quantize_rows(values, _or_half(dice.high, self.rounding))
        else:
            store(self.values, index, values, dice.high if dice is not None else None, self.rounding)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that hold it, by name."""
        return {name: self.values} | ({scale_name(name): self.scale} if self.scale is not None else {})


def scale_name(name: str) -> str:
    """What the scales of the int8 table ``name`` are called."""
    return f"{name}_scale"


def check_state_dtype(dtype: torch.dtype) -> None:
    """UsageError for a dtype that optimizer state cannot have."""
    if dtype not in STATE_DTYPES:
        raise UsageError(f"state cannot be kept as {dtype}; take float32, bfloat16 or int8")


def store(
    table: Tensor,
    index: slice | Tensor,
    values: Tensor,
    bits: Tensor | None,
    rounding: Rounding = "stochastic",
) -> None:
    """Write rows into a float64, float32 or bfloat16 table, rounding the last by ``bits``."""
    if table.dtype == torch.bfloat16 and rounding == "stochastic":
        assert bits is not None
        values = round_to_bfloat16(values, bits)
    table[index] = values.to(table.dtype)


def _or_half(bits: Tensor, rounding: Rounding) -> Tensor:
    return bits if rounding == "stochastic" else torch.full_like(bits, 32767)
