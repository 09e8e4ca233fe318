"""Which shape the passes have on a GPU: fused, or with their weights stored; by the number of samples.

Fused passes keep few samples or classes in a program: their rate of products is bounded by what a program reads again
and again from the second-level cache. Stored ones multiply at the rate of large products, and pay for it in device
memory: for the weights and maybe the scores of logits by sample, and by class for more reads of the rows. So there is a
number of samples from which on they are faster. It is computed from data sheets; on a GPU it is measured, once for each
kind of table, and kept in the user's cache.

``PLSC_HEAD_SHAPE``: "fused" and "stored" choose for every batch, "computed" has nothing measured.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from plsc.errors import UsageError
from plsc.files import write_json
from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.self_check import plain_arithmetic
from plsc.head.backends.torch_backend import Batch, PassInputs, TorchBackend
from plsc.head.backends.triton_stored import has_wide_blocks, row_options
from plsc.head.backends.triton_tiles import MOST_CENTERS, Tile, device_kind, gpu_kind, gpu_properties, shipped_tile
from plsc.head.backends.triton_update import update_rows
from plsc.head.class_table import ClassRows, default_chunk_size
from plsc.head.low_precision import RowState
from plsc.head.update_rules import SgdRule, Update
from plsc.losses.margins import ArcFace
from plsc.native.build import private_folder

NEVER = sys.maxsize  # samples
COMPUTED = "computed"  # of a threshold that is to be measured
SHAPES = ("fused", "stored", "computed")
_STEP = 128  # samples, to whose multiples a computed number is rounded up
LARGE_SHARE = 0.7  # of the sheet's products per second, that large products reach
_ROW_SHARE = 0.55  # likewise, of both products of a pass where a kernel multiplies rows: measured on an H100
_EPILOGUE = 16  # instructions for each logit of a fused pass, beside which its products stand still
_MEASURED_CLASSES, _MEASURED_BATCHES, _ROUNDS = 1 << 19, (128, 256, 512, 1024, 2048, 4096), 3
_WIDE_BATCH = 1024  # samples at which blocks are compared
_found: dict[tuple[str, str], tuple[int, bool]] = {}  # what this process measured or read, by file and key


@dataclass(frozen=True)
class _Speeds:
    """Of a kind of GPU, per second: bfloat16 FLOPs, bytes of memory and of the second-level cache, instructions.

    ``fused_share`` is what fused passes reach of the FLOPs where nothing else holds them up.
    """

    products: float
    memory: float
    cache: float
    instructions: float
    fused_share: float = LARGE_SHARE


# A100 80GB, L40S, H100 SXM, B200: data sheets, but for caches, which are as others measured them or about. On a B200
# a Triton kernel that stores no logits took 4.5 times as long as a kernel in CuTe, and large products with stored
# logits 0.7 times (linkedin/Liger-Kernel#1291).
_SPEEDS = {
    "sm_80": _Speeds(312e12, 2.0e12, 4.5e12, 19e12),
    "sm_89": _Speeds(362e12, 0.86e12, 4.0e12, 45e12),
    "sm_90": _Speeds(989e12, 3.0e12, 5.5e12, 28e12),
    "sm_100": _Speeds(2250e12, 7.2e12, 9e12, 35e12, fused_share=LARGE_SHARE * 0.7 / 4.5),
}


@dataclass(frozen=True)
class RowKind:
    """What a threshold depends on beside the GPU: the rows' dtype, D, sub-centres to a class, float32 products."""

    dtype: torch.dtype
    dim: int
    centers: int
    precision: Fp32Precision

    @property
    def can_be_stored(self) -> bool:
        """Whether passes with stored weights take such rows: PyTorch has no products in bf16x3."""
        return self.centers <= MOST_CENTERS and not (self.dtype == torch.float32 and self.precision == "bf16x3")


@dataclass(frozen=True)
class Threshold:
    """From how many ``samples`` on weights are stored; ``source`` says where the number is from.

    ``is_wide``: they are made in wide blocks of samples (:func:`.triton_stored.row_options`) of batches that fill them.
    """

    samples: int
    source: str
    is_wide: bool = False

    def __str__(self) -> str:
        if self.samples in (0, NEVER):
            return f"weights {'stored' if self.samples == 0 else 'never stored'} ({self.source})"
        wide = ", in wide blocks" if self.is_wide else ""
        return f"weights stored from {self.samples:,} samples on{wide} ({self.source})"


def threshold(device: torch.device, kind: RowKind, not_fused: str | None) -> Threshold | None:
    """The threshold as it is requested, or computed; None where no weights are stored, as by default on a CPU.

    Args:
        device: that computes.
        kind: of the rows.
        not_fused: why the fused shape does not take them; None: it does.

    Raises:
        UsageError: ``PLSC_HEAD_SHAPE`` is none of its values.
    """
    requested = os.environ.get("PLSC_HEAD_SHAPE") or None
    if requested not in (None, *SHAPES):
        raise UsageError(f"PLSC_HEAD_SHAPE={requested} does not exist: give {', '.join(SHAPES)}, or unset it")
    if not kind.can_be_stored or (requested != "stored" and (requested == "fused" or device.type != "cuda")):
        return None
    if requested == "stored" or not_fused is not None:
        return Threshold(0, not_fused or "PLSC_HEAD_SHAPE")
    if not torch.cuda.is_available():
        return None
    return Threshold(computed(*gpu_properties(device), kind), COMPUTED if requested is None else "PLSC_HEAD_SHAPE")


def computed(capability: tuple[int, int], shared: int, kind: RowKind) -> int:
    """From how many samples on a step with stored weights takes less time, by the data sheet of such a GPU.

    Args:
        capability: compute capability.
        shared: bytes of shared memory that a block of threads may have.
        kind: of the rows, for which there are fused kernels.
    """
    gpu, width = gpu_kind(capability, shared), kind.dtype.itemsize
    speeds, flops, row = _SPEEDS[gpu], 4 * kind.dim, kind.dim * width  # of a logit, in two products; bytes
    fused = 0.0
    for which in ("first", "second"):
        tile = shipped_tile(
            which, capability, shared, kind.dtype, kind.dim, kind.precision, is_general=kind.centers > 1
        )  # fmt: skip
        shared_by = tile.samples if which == "first" else tile.slots
        fused += _fused_seconds(speeds, tile, flops, row / shared_by) + _EPILOGUE / speeds.instructions
    if row_options(gpu, kind.dtype, kind.dim, kind.centers) is None:
        stored = 2 * (flops / (LARGE_SHARE * speeds.products) + (4 + width) / speeds.memory)
    else:
        stored = 2 * flops / (_ROW_SHARE * speeds.products)
    again = 2 * row / speeds.memory  # the second product of each pass reads the rows once more
    return NEVER if fused <= stored else -(-int(again / (fused - stored) + 1) // _STEP) * _STEP


def _fused_seconds(speeds: _Speeds, tile: Tile, flops: float, read: float) -> float:
    """Of a logit in a fused pass, which computes on one block while it reads the next, if it holds two."""
    seconds = flops / (speeds.fused_share * speeds.products), read / speeds.cache
    return sum(seconds) if tile.stages == 1 else max(seconds)


# Measured ------------------------------------------------------------------------------------------------------------


def measured(
    device: torch.device, kind: RowKind, fused: TorchBackend, stored: tuple[TorchBackend, TorchBackend]
) -> Threshold:
    """The threshold as this GPU has it: from the user's cache, or measured in seconds and kept there.

    Args:
        device: the GPU.
        kind: of the rows.
        fused: a backend that stores nothing.
        stored: one that stores weights, and one that makes them in wide blocks.
    """
    name, key = _place(device, kind)
    if (name, key) not in _found:
        known: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):  # no folder of the user's alone, or no file of ours
            known = dict(json.loads((private_folder() / name).read_text(encoding="utf-8")))
        match known.get(key):
            case [int(samples), bool(is_wide)]:
                pass
            case _:
                with plain_arithmetic(device):
                    samples, is_wide = measure(device, kind, fused, *stored)
                with contextlib.suppress(OSError):  # ranks may write side by side, and the last one wins
                    write_json(private_folder() / name, {**known, key: [samples, is_wide]})
        _found[name, key] = samples, is_wide
    samples, is_wide = _found[name, key]
    return Threshold(samples, "measured", is_wide)


def measure(
    device: torch.device, kind: RowKind, fused: TorchBackend, stored: TorchBackend, wide: TorchBackend
) -> tuple[int, bool]:
    """Time steps of the head: the first number of samples at which ``stored`` is faster, and whether ``wide`` is then.

    The latter is ``stored`` in wide blocks, compared with it at 1,024 samples.
    """
    count = _MEASURED_CLASSES // kind.centers * kind.centers
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(count, kind.dim, dtype=kind.dtype, device=device, generator=generator)
    rows = ClassRows(weight, torch.full((count,), kind.dim**-0.5, device=device), kind.centers)
    state = RowState(count, kind.dim, torch.int8 if kind.dtype == torch.bfloat16 else torch.float32, device)

    def is_faster(one: TorchBackend, than: TorchBackend, samples: int) -> bool:
        features = torch.nn.functional.normalize(weight[:samples].float()).to(kind.dtype)
        before, after = (_milliseconds(partial(_step, each, rows, features, state)) for each in (than, one))
        return after < before

    found = next((samples for samples in _MEASURED_BATCHES if is_faster(stored, fused, samples)), NEVER)
    has_wide = found != NEVER and has_wide_blocks(device_kind(device), kind.dtype, kind.dim, kind.centers)
    return found, has_wide and is_faster(wide, stored, _WIDE_BATCH)


def _step(backend: TorchBackend, rows: ClassRows, features: torch.Tensor, state: RowState) -> None:
    """Both passes and an update that leaves the rows as they are."""
    position = torch.arange(len(features), device=features.device)
    values = torch.ones(len(features), device=features.device)
    batch = Batch(features, position, values, ArcFace(), {})
    size = default_chunk_size(len(features), features.shape[1], rows.centers, features.device.type)
    backend.first_pass(rows, batch, size, with_grad=True)
    update = Update(SgdRule(0.0, 0.9, 0.0, nesterov=False), 1.0, "stochastic", seed=0, step=1, first_row=0)
    inputs = PassInputs(rows, batch, 64.0 * values, values, -values, size)
    backend.update_pass(inputs, update_rows, lambda chunk: {"momentum": state}, update)


def _milliseconds(run: Callable[[], None]) -> float:
    """The shortest of some runs, by the device's clock; a first one compiles the kernels."""
    run()
    spent: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end))
    return min(spent)


def _place(device: torch.device, kind: RowKind) -> tuple[str, str]:
    """The file for the device, and the key in it: everything that a measurement depends on."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("triton_*.py")))
    versions = f"torch {torch.__version__}, triton {version('triton')}, {hashlib.sha256(sources).hexdigest()[:12]}"
    name = re.sub(r"\W+", "-", torch.cuda.get_device_properties(device).name)
    return f"head-shapes-{name}.json", f"{versions}, {kind}"
