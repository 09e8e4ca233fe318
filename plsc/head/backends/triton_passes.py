"""The head's passes by the kernels of :mod:`plsc.head.backends.triton_pass_kernels`: launches, and what they sum into.

Nothing here waits for the device. Sums over classes are taken by parts of the table, whose number depends on the
device's kind and the batch's size alone, and in float64 over the parts, in their order: two runs agree.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plsc.head.backends.products import Fp32Precision
from plsc.head.backends.torch_backend import Batch, PassInputs, StateOf
from plsc.head.backends.triton_tiles import Tile, choose_tile, processor_count
from plsc.head.backends.triton_update import mark_written, rule_arguments
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.update_rules import Update

# Matrix units cut off what their float32 sums lose; over this many classes, that stays below 2⁻¹² of a sum.
_MOST_CLASSES = 1 << 18  # to a program of pass 1
SUMMED_CLASSES = 4096  # in float32, tile by tile; such sums are added up in float64
_PROGRAMS = 4  # of pass 1 for each of the device's processors
_REGISTERS = 1 << 16  # of a processor, of 32 bits
_OTHER_REGISTERS = 64  # of a thread, at least about, beside those that its share of the accumulators takes
_UPDATED_ELEMENTS = 4096  # of the table at a time, in a program
_UPDATE_STAGES = 2  # the next of them are on their way from memory while some are updated
_LOG2_E = 1 / math.log(2)
MOST_LABELS = 16  # of a sample: a tile is compared with each
_forced_parks: int | None = None


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


def update_pass(inputs: PassInputs, precision: Fp32Precision, state: StateOf, update: Update) -> None:
    """Run pass 2, and the update of :func:`plsc.head.backends.triton_update.update_rows` in the same programs.

    Its result is that of the gradient and that function, bit for bit.
    """
    from plsc.head.backends import triton_pass_kernels as kernels

    rows, features = inputs.rows, inputs.batch.features
    tile, arguments = _prepared(inputs, precision)
    dim, step = features.shape[1], tile.classes(rows.centers)
    largest = inputs.chunk_size if rows.is_streamed else rows.num_classes
    parks = _parks(processor_count(features.device), tile, dim, -(-largest // step))
    parking = torch.empty(parks, tile.slots, dim, dtype=torch.float32, device=features.device)
    taken = torch.zeros(parks, dtype=torch.int32, device=features.device)
    for chunk in rows.chunks(max(largest, 1)):
        tables = state(chunk)
        _launch(
            kernels.update_pass,
            -(-(chunk.stop - chunk.start) // step),
            tile,
            chunk,
            precision,
            **_table(chunk),
            **arguments,
            **rule_arguments(update, tables),
            parking=parking,
            taken=taken,
            row_numbers=chunk.local_rows.contiguous() if chunk.table.is_copy else None,
            parks=parks,
            **update_options(tile, dim),
        )
        mark_written(chunk, tables)


def update_options(tile: Tile, dim: int) -> dict[str, int]:
    """Constants of the update at the end of pass 2."""
    rows = max(_UPDATED_ELEMENTS // (1 << (dim - 1).bit_length()), 1)
    return {"BLOCK_ROWS": min(rows, tile.slots), "UPDATE_STAGES": _UPDATE_STAGES}


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


def _parks(processors: int, tile: Tile, dim: int, programs: int) -> int:
    """How many programs of pass 2 may be between product and update at a time; others wait.

    They are as many as can run at once, by the registers that their accumulators take: what is parked has to stay in
    the second-level cache, and a part that no program could use would only be one more place in it.
    """
    if _forced_parks is not None:
        return _forced_parks
    at_once = _REGISTERS // (tile.slots * dim + _OTHER_REGISTERS * tile.threads)
    return max(min(max(at_once, 1) * processors, programs), 1)


@contextmanager
def force_parks(parks: int) -> Iterator[None]:
    """Park no more than ``parks`` gradients within, so that programs wait for each other's; for checks."""
    global _forced_parks
    before, _forced_parks = _forced_parks, parks
    try:
        yield
    finally:
        _forced_parks = before


def scratch_bytes(
    samples: tuple[int, int], classes: int, dim: int, tiles: tuple[Tile, Tile], processors: int
) -> tuple[int, int]:
    """Bytes that :func:`first_pass` and :func:`update_pass` take beside the table, at most, for a plan.

    Args:
        samples: B of pass 1 and of pass 2.
        classes: that are visited, of one centre.
        dim: D.
        tiles: of both passes.
        processors: of the device.
    """
    first, second = tiles
    _, parts = class_parts(max(classes, 1), -(-samples[0] // first.samples), first.slots, processors)
    summed = samples[0] * dim * (parts * 4 + (8 + 4 if parts > 1 else 0))  # in float32, float64 and float32
    parked = _parks(processors, second, dim, -(-classes // second.slots)) * second.slots * dim * 4
    return summed, parked
