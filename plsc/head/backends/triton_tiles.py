"""The blocks of samples and classes that a program of the passes' kernels takes, by the device and the table.

They are chosen by what a device is, never by timing: sums are grouped by them, and two runs must agree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import torch

from plsc.head.backends.products import Fp32Precision
from plsc.head.class_table import ClassRows

Pass = Literal["first", "second"]

WIDEST = 1024  # columns: a program's accumulators hold whole rows
_WIDEST_FLOAT32 = 512  # factors of float32 take twice the registers of bfloat16 ones
MOST_CENTERS = 8
_SMALLEST_TILE = 32  # columns of D
_WARPS = 8


@dataclass(frozen=True)
class Tile:
    """The part of a pass that a program works on at a time.

    Attributes:
        samples: of the batch.
        slots: for rows; a class takes a power of two of them, at least one for each of its centres.
        columns: of D in an accumulator; divides D.
        stages: blocks that are on their way from memory at once.
        flipped: accumulators are transposed.
        warps: of a program.
    """

    samples: int
    slots: int
    columns: int
    stages: int = 2
    flipped: bool = False
    warps: int = _WARPS

    @property
    def threads(self) -> int:
        """Of a program."""
        return 32 * self.warps

    def classes(self, centers: int) -> int:
        """That its slots hold."""
        return self.slots // (1 << (centers - 1).bit_length())

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a launch."""
        return {
            "TILE": self.columns,
            "BLOCK_B": self.samples,
            "BLOCK_N": self.slots,
            "FLIPPED": self.flipped,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }


_BFLOAT16: dict[str, dict[Pass, Tile]] = {
    "sm_80": {"first": Tile(64, 32, 128), "second": Tile(32, 64, 128)},
    "sm_89": {"first": Tile(32, 16, 128), "second": Tile(16, 32, 128)},
    "sm_90": {"first": Tile(64, 32, 512), "second": Tile(32, 64, 256, stages=3)},
    "sm_100": {"first": Tile(64, 64, 256, flipped=True), "second": Tile(64, 64, 128, flipped=True)},
}
_WIDE: dict[str, dict[Pass, Tile]] = {  # D above 512
    "sm_80": {"first": Tile(32, 32, 128), "second": Tile(32, 32, 128)},
    "sm_89": {"first": Tile(16, 16, 128), "second": Tile(16, 16, 128)},
    "sm_90": {"first": Tile(32, 32, 128, flipped=True), "second": Tile(32, 32, 128, flipped=True)},
    "sm_100": {"first": Tile(32, 32, 128, flipped=True), "second": Tile(32, 32, 128, flipped=True)},
}
_FLOAT32: dict[Fp32Precision, dict[Pass, Tile]] = {
    "tf32": {"first": Tile(16, 32, 128), "second": Tile(16, 16, 64)},
    "bf16x3": {"first": Tile(32, 16, 64), "second": Tile(16, 32, 64)},
}
_forced: Tile | None = None


def why_no_tile(dim: int, centers: int, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot take such rows on a GPU, ``centers`` to a class; None: they can."""
    if dim % _SMALLEST_TILE:
        return f"D is no multiple of {_SMALLEST_TILE}"
    widest = WIDEST if dtype == torch.bfloat16 else _WIDEST_FLOAT32
    if dim > widest:
        return f"D is above {widest}"
    return f"more than {MOST_CENTERS} centres to a class" if centers > MOST_CENTERS else None


def choose_tile(which: Pass, rows: ClassRows, device: torch.device, precision: Fp32Precision) -> Tile:
    """Choose the tile of a pass over ``rows``."""
    if _forced is not None:
        return _forced
    dim = rows.weight.shape[1]
    if device.type == "cpu":
        return Tile(16, 16, _SMALLEST_TILE)
    capability = torch.cuda.get_device_capability(device)
    # not every supported torch declares this property, or has it
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return shipped_tile(which, capability, shared, rows.weight.dtype, dim, precision)


@cache
def _shares_blocks() -> bool:
    """Whether Triton keeps a block once that both products of a pass read: before 3.9 it did not on Blackwell."""
    major, minor, *_ = version("triton").split(".")
    return (int(major), int(minor)) >= (3, 9)


def shipped_tile(
    which: Pass, capability: tuple[int, int], shared: int, dtype: torch.dtype, dim: int, precision: Fp32Precision
) -> Tile:
    """The tile of a pass for a GPU, with the Triton that is installed.

    Args:
        which: the pass.
        capability: compute capability.
        shared: bytes of shared memory that a block of threads may have.
        dtype: of the table.
        dim: D.
        precision: of the products of a float32 table.
    """
    kind = _kind(capability, shared)
    tile = _BFLOAT16[kind][which] if dtype == torch.bfloat16 else _FLOAT32[precision][which]
    if dim > 512:
        tile = _WIDE[kind][which]
    if kind == "sm_100" and not _shares_blocks():
        tile = replace(tile, columns=min(tile.columns, 128), stages=1)
    return replace(tile, columns=min(tile.columns, dim & -dim))


def _kind(capability: tuple[int, int], shared: int) -> str:
    if capability[0] == 9:
        return "sm_90"
    if capability[0] == 10:
        return "sm_100"
    return "sm_80" if shared >= 150 << 10 else "sm_89"


@contextmanager
def force_tile(tile: Tile) -> Iterator[None]:
    """Take ``tile`` in both passes within; for tests and benchmarks."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before
