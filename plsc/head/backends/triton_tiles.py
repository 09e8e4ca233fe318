"""The blocks of samples and classes that a program of the passes' kernels takes, by the device and the table.

They are chosen by what a device is, never by timing: sums are grouped by them, and two runs must agree.

Matrix instructions take 16 rows of a product to a warp, and 64 of Hopper's to four. Triton has all warps share the
rows of a product that feeds another one, or its columns, 8 to a warp: a tile with fewer of them is computed by several
warps alike. Those of bfloat16 tables have none of that, and no tile spills registers: ``python
benchmarks/compiled_kernels.py`` counts both.
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

WIDEST = 768  # columns: a program's accumulators hold whole rows
_WIDEST_FLOAT32 = 512  # factors of float32 take twice the registers of bfloat16 ones
MOST_CENTERS = 8
_SMALLEST_TILE = 32  # columns of D
_LARGE_TILE = 128  # columns, of which any D above this is a multiple
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


_Tiles = dict[Pass, Tile]


def _alike(
    samples: int, slots: int, columns: int, stages: int = 2, flipped: bool = False, warps: int = _WARPS
) -> _Tiles:
    """Tiles of both passes: what samples are to one, slots are to the other."""
    return {
        "first": Tile(samples, slots, columns, stages, flipped, warps),
        "second": Tile(slots, samples, columns, stages, flipped, warps),
    }


# By the kind of device and the largest D that they are for, in ascending order. Below 128, D is cut into smaller tiles;
# Blackwell's matrix units would take only half of the products of those.
_BFLOAT16: dict[str, dict[int, _Tiles]] = {
    "sm_80": {
        127: _alike(128, 64, 64),
        256: _alike(64, 64, 128),
        512: {"first": Tile(64, 64, 256), "second": Tile(64, 64, 128)},
        768: _alike(32, 64, 128),
    },
    "sm_89": {
        127: _alike(128, 64, 64),
        256: _alike(64, 64, 128),
        512: {"first": Tile(32, 64, 128, stages=1), "second": Tile(64, 16, 128)},
        768: {"first": Tile(16, 32, 128, warps=4), "second": Tile(32, 16, 128, stages=1, warps=4)},
    },
    "sm_90": {
        127: _alike(128, 64, 64),
        256: _alike(128, 64, 256),
        512: _alike(64, 128, 128, stages=1, flipped=True),
        768: _alike(16, 128, 128, stages=1, flipped=True),
    },
    "sm_100": {
        256: _alike(64, 128, 128, flipped=True),
        512: _alike(64, 64, 128, flipped=True),
        768: _alike(16, 64, 128, flipped=True),
    },
}
# Of sampled rows, and of several centres, at D from 257 to 512: they take more registers beside the accumulators.
_GENERAL: dict[str, _Tiles] = {
    "sm_80": _alike(32, 64, 128),
    "sm_89": {"first": Tile(16, 64, 128, stages=1), "second": Tile(64, 16, 128)},
    "sm_90": _alike(32, 128, 128, stages=1, flipped=True),
    "sm_100": _alike(64, 64, 128, flipped=True),
}
# In bf16x3. Scores are still computed twice or four times: without that, registers are spilled.
_FLOAT32: _Tiles = {"first": Tile(32, 16, 64), "second": Tile(16, 32, 64)}
_forced: Tile | None = None


def why_no_tile(dim: int, centers: int, dtype: torch.dtype) -> str | None:
    """The reason why the kernels cannot take such rows on a GPU, ``centers`` to a class; None: they can."""
    if dim % _SMALLEST_TILE:
        return f"D is no multiple of {_SMALLEST_TILE}"
    if dim > _LARGE_TILE and dim % _LARGE_TILE:
        return f"D is above {_LARGE_TILE} and no multiple of it"
    widest = WIDEST if dtype == torch.bfloat16 else _WIDEST_FLOAT32
    if dim > widest:
        return f"D is above {widest}"
    return f"more than {MOST_CENTERS} centres to a class" if centers > MOST_CENTERS else None


def why_no_tile_on(device: torch.device, dim: int, dtype: torch.dtype) -> str | None:
    """The reason why the GPU that is there has no tile for rows that others have one for; None: it has."""
    if dtype != torch.bfloat16 or device.type != "cuda" or not torch.cuda.is_available():
        return None
    capability, shared = gpu_properties(device)
    smallest = min(_BFLOAT16[gpu_kind(capability, shared)])
    return f"D is below {_LARGE_TILE} on {gpu_kind(capability, shared)}" if dim < _LARGE_TILE < smallest else None


def gpu_properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """A GPU's compute capability, and the bytes of shared memory that a block of threads may have."""
    # not every supported torch declares this property, or has it
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return torch.cuda.get_device_capability(device), shared


def processor_count(device: torch.device) -> int:
    """Of a GPU; 2 where kernels are interpreted."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def choose_tile(which: Pass, rows: ClassRows, device: torch.device, precision: Fp32Precision) -> Tile:
    """Choose the tile of a pass over ``rows``."""
    if _forced is not None:
        return _forced
    dim = rows.weight.shape[1]
    if device.type == "cpu":
        return Tile(16, 16, _SMALLEST_TILE)
    is_general = rows.centers > 1 or rows.selected is not None
    return shipped_tile(which, *gpu_properties(device), rows.weight.dtype, dim, precision, is_general=is_general)


@cache
def _shares_blocks() -> bool:
    """Whether Triton keeps a block once that both products of a pass read: before 3.9 it did not on Blackwell."""
    major, minor, *_ = version("triton").split(".")
    return (int(major), int(minor)) >= (3, 9)


def shipped_tile(
    which: Pass,
    capability: tuple[int, int],
    shared: int,
    dtype: torch.dtype,
    dim: int,
    precision: Fp32Precision,
    *,
    is_general: bool = False,
) -> Tile:
    """The tile of a pass for a GPU, with the Triton that is installed.

    Args:
        which: the pass.
        capability: compute capability.
        shared: bytes of shared memory that a block of threads may have.
        dtype: of the table.
        dim: D.
        precision: of the products of a float32 table.
        is_general: rows are a list, or classes have several centres.
    """
    kind = gpu_kind(capability, shared)
    if dtype == torch.bfloat16:
        by_width = _BFLOAT16[kind]
        width = min(widest for widest in by_width if dim <= widest)
        tile = (_GENERAL[kind] if is_general and width == 512 else by_width[width])[which]
    else:
        tile = _FLOAT32[which]
    if kind == "sm_100" and not _shares_blocks():
        tile = replace(tile, columns=min(tile.columns, 128), stages=1)
    return replace(tile, columns=min(tile.columns, dim & -dim))


def device_kind(device: torch.device) -> str:
    """:func:`gpu_kind` of a GPU that is there; "cpu" where kernels are interpreted."""
    return "cpu" if device.type == "cpu" else gpu_kind(*gpu_properties(device))


def gpu_kind(capability: tuple[int, int], shared: int) -> str:
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
