"""The head's passes by the kernels of :mod:`plsc.head.backends.triton_pass_kernels`: launches, and what they sum into.

Nothing here waits for the device. Sums over classes are taken by parts of the table, whose number depends on the
device's kind and the batch's size alone, and in float64 over the parts, in their order: two runs agree.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.torch_backend import Batch, PassInputs
from plsc.head.backends.triton_tiles import Tile, choose_tile, processor_count
from plsc.head.class_table import Chunk, ClassRows

# Matrix units cut off what their float32 sums lose; over this many classes, that stays below 2⁻¹² of a sum.
_MOST_CLASSES = 1 << 18  # to a program of pass 1
SUMMED_CLASSES = 4096  # in float32, tile by tile; such sums are added up in float64
_PROGRAMS = 4  # of pass 1 for each of the device's processors
_LOG2_E = 1 / math.log(2)
MOST_LABELS = 16  # of a sample: a tile is compared with each


def first_pass(
    rows: ClassRows, batch: Batch, chunk_size: int, precision: Fp32Precision, *, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the exponentials of a table's classes, targets left out.

    Args:
        rows: the shard.
        batch: the samples, at least one.
        chunk_size: classes at a time, of a table that is copied chunk by chunk.
        precision: of the products of a float32 table.
        with_grad: whether to sum the rows as well.

    Returns:
        Σ exp(z) (B,) float64, and Σ exp(z)·ρ·W (B, D) float32 or None.
    """
    from plsc.head.backends import triton_pass_kernels as kernels

    features, labels = batch.features.contiguous(), _labels(batch)
    size, device = len(features), features.device
    tile = choose_tile("first", rows, device, precision)
    blocks, step = -(-size // tile.samples), tile.classes(rows.centers)
    processors = processor_count(device)
    most_parts = _most_parts(blocks, processors)
    totals = torch.zeros(most_parts, size, dtype=torch.float64, device=device)  # to which every launch adds
    grad: Tensor | None = None
    at_once = most_parts * _MOST_CLASSES
    for chunk in rows.chunks(min(chunk_size, at_once) if rows.is_streamed else at_once):
        share, parts = class_parts(chunk.stop - chunk.start, blocks, step, processors)
        pulls = torch.empty(parts, *features.shape, dtype=torch.float32, device=device) if with_grad else None
        _launch(
            kernels.first_pass,
            parts * blocks,
            tile,
            chunk,
            precision,
            weight=chunk.table.weight,
            features=features,
            inverse_norm=chunk.table.inverse_norm,
            **labels,
            total=totals,
            pull=pulls,
            batch=size,
            per=share,
            SUMMED=SUMMED_CLASSES,
            s=batch.margin.s * _LOG2_E,
        )
        if pulls is not None:
            pull = pulls[0] if parts == 1 else pulls.sum(0, dtype=torch.float64)
            grad = pull.float() if grad is None else grad.add_(pull)
    if with_grad and grad is None:
        grad = torch.zeros_like(features, dtype=torch.float32)
    return totals.sum(0), grad


def second_pass(inputs: PassInputs, precision: Fp32Precision) -> Iterator[tuple[Chunk, Tensor]]:
    """Give each chunk with the gradient (n·K, D) float32 by its unit rows."""
    from plsc.head.backends import triton_pass_kernels as kernels

    tile, arguments = _prepared(inputs, precision)
    for chunk in inputs.rows.chunks(inputs.chunk_size):
        count = chunk.stop - chunk.start
        shape = count * inputs.rows.centers, inputs.batch.features.shape[1]
        gradient = torch.empty(shape, dtype=torch.float32, device=inputs.batch.features.device)
        programs = -(-count // tile.classes(inputs.rows.centers))
        _launch(
            kernels.gradient_pass, programs, tile, chunk, precision, gradient=gradient, **_table(chunk), **arguments
        )
        yield chunk, gradient


def _prepared(inputs: PassInputs, precision: Fp32Precision) -> tuple[Tile, dict[str, Any]]:
    """Pass 2's tile, and those arguments of its kernels that all chunks share."""
    batch, device = inputs.batch, inputs.batch.features.device
    log_z = inputs.log_z.double() * _LOG2_E
    by_sample = {"log_z": log_z, "scale": inputs.scale, "target_grad": inputs.target_grad}
    member = None if inputs.member is None else inputs.member.contiguous().view(torch.uint8)
    arguments = {name: values.float().t().contiguous() for name, values in by_sample.items()}
    return choose_tile("second", inputs.rows, device, precision), {
        **arguments,
        "features": batch.features.contiguous(),
        **_labels(batch),
        "member": member,
        "batch": len(batch.features),
        "s": batch.margin.s * _LOG2_E,
    }


def _labels(batch: Batch) -> dict[str, Any]:
    """The targets' positions, label by label, and how many labels a sample has."""
    return {"position": batch.position.t().contiguous(), "LABELS": math.prod(batch.position.shape[1:])}


def _table(chunk: Chunk) -> dict[str, Tensor]:
    return {"weight": chunk.table.weight, "inverse_norm": chunk.table.inverse_norm}


def _launch(kernel: Any, programs: int, tile: Tile, chunk: Chunk, precision: Fp32Precision, **arguments: Any) -> None:
    """Run a kernel over a chunk's rows, by their numbers or from the first on."""
    index, features = chunk.index, arguments["features"]
    if programs == 0:
        return
    with torch.cuda.device_of(features):
        kernel[(programs,)](
            **arguments,
            index=None if isinstance(index, slice) else index.contiguous(),
            first=index.indices(len(chunk.table.weight))[0] if isinstance(index, slice) else 0,
            start=chunk.start,
            n=chunk.stop - chunk.start,
            dim=features.shape[1],
            CENTERS=chunk.table.centers,
            PRECISION=precision,
            WIDEN=features.device.type == "cpu",
            **tile.options,
        )


def _most_parts(blocks: int, processors: int) -> int:
    """Into how many parts pass 1 divides the classes for this many blocks of samples."""
    return max(_PROGRAMS * processors // blocks, 1)


def class_parts(classes: int, blocks: int, step: int, processors: int) -> tuple[int, int]:
    """How pass 1 divides the classes: (how many to a part, parts).

    Args:
        classes: at least one.
        blocks: of samples, each of which has every part for itself.
        step: classes that a program takes at a time.
        processors: of the device.
    """
    share = -(-classes // (_most_parts(blocks, processors) * step)) * step
    return share, -(-classes // share)


def scratch_bytes(samples: int, classes: int, dim: int, tile: Tile, processors: int) -> int:
    """Bytes that :func:`first_pass` takes beside the table, at most, for a plan.

    Args:
        samples: B of pass 1.
        classes: that are visited, of one centre.
        dim: D.
        tile: of pass 1.
        processors: of the device.
    """
    _, parts = class_parts(max(classes, 1), -(-samples // tile.samples), tile.slots, processors)
    return samples * dim * (parts * 4 + (8 + 4 if parts > 1 else 0))  # in float32, float64 and float32
