"""The head's passes with the logits of a chunk of classes stored, between large products of PyTorch's.

Every product is cuBLAS's, with tiles as large as it likes; one kernel of
:mod:`plsc.head.backends.triton_stored_kernels` stands between the two of a pass. It costs the traffic of the logits and
of a stored gradient, which pays above some number of samples: :mod:`plsc.head.backends.triton_shape`. Nothing here
waits for the device, and sums are grouped by the chunks alone: two runs agree.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plsc.head.backends.products import Fp32Precision, product
from plsc.head.backends.torch_backend import Batch, PassInputs
from plsc.head.class_table import Chunk, ClassRows

SUMMED_CLASSES = 256  # whose exponentials a program adds up in float32
_SAMPLES, _ROWS = 128, 16  # that a program has in registers
_WARPS = 4
_LOG2_E = 1 / math.log(2)


def first_pass(
    rows: ClassRows, batch: Batch, chunk_size: int, precision: Fp32Precision, *, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the exponentials of a table's classes, targets left out; see :func:`.triton_passes.first_pass`."""
    from plsc.head.backends import triton_stored_kernels as kernels

    features, position = batch.features.contiguous(), batch.position.contiguous()
    largest, size = min(chunk_size, rows.num_classes), len(features)
    total = torch.zeros(-(-largest // SUMMED_CLASSES), size, dtype=torch.float64, device=features.device)
    grad = torch.zeros_like(features, dtype=torch.float32) if with_grad else None
    scores, weights = _scratch(rows, largest, features)
    for chunk in rows.chunks(chunk_size):
        table, held = chunk.weight, slice(0, len(chunk.weight))
        product(table, features.t(), precision, out=scores[held])
        _launch(
            kernels.exponentials,
            -(-(chunk.stop - chunk.start) // SUMMED_CLASSES),
            chunk,
            scores=scores,
            position=position,
            total=total,
            weights=weights if with_grad else None,
            per=SUMMED_CLASSES,
            s=batch.margin.s * _LOG2_E,
        )
        if grad is not None:
            grad += product(weights[held].t(), table, precision)
    return total.sum(0), grad


def second_pass(inputs: PassInputs, precision: Fp32Precision) -> Iterator[tuple[Chunk, Tensor]]:
    """Give each chunk with the gradient (n·K, D) float32 by its unit rows."""
    from plsc.head.backends import triton_stored_kernels as kernels

    batch, rows = inputs.batch, inputs.rows
    features, position = batch.features.contiguous(), batch.position.contiguous()
    by_sample = inputs.log_z.double() * _LOG2_E, inputs.scale, inputs.target_grad
    log_z, scale, target_grad = (values.float().contiguous() for values in by_sample)
    member = None if inputs.member is None else inputs.member.contiguous().view(torch.uint8)
    scores, weights = _scratch(rows, min(inputs.chunk_size, rows.num_classes), features)
    for chunk in rows.chunks(inputs.chunk_size):
        held = slice(0, len(chunk.weight))
        product(chunk.weight, features.t(), precision, out=scores[held])
        _launch(
            kernels.probabilities,
            -(-(chunk.stop - chunk.start) // launch_options(rows.centers)["BLOCK_N"]),
            chunk,
            scores=scores,
            position=position,
            log_z=log_z,
            scale=scale,
            target_grad=target_grad,
            member=member,
            weights=weights,
            s=batch.margin.s * _LOG2_E,
        )
        yield chunk, product(weights[held], features, precision)


def _scratch(rows: ClassRows, classes: int, features: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the scores and the weights of a chunk of so many classes, which all chunks of a pass share."""
    shape = classes * rows.centers, len(features)
    device = features.device
    return torch.empty(shape, device=device, dtype=torch.float32), torch.empty(
        shape, device=device, dtype=rows.weight.dtype
    )


def launch_options(centers: int) -> dict[str, Any]:
    """Constants and options of the kernels: a program has BLOCK_N classes with all of their centres in registers."""
    classes = max(_ROWS >> (centers - 1).bit_length(), 2)
    return {
        "CENTERS": centers, "BLOCK_B": _SAMPLES, "BLOCK_N": classes, "num_warps": _WARPS, "enable_fp_fusion": True
    }  # fmt: skip


def _launch(kernel: Any, parts: int, chunk: Chunk, **arguments: Any) -> None:
    """Run a kernel over a chunk's classes in ``parts``, each for all blocks of samples."""
    scores = arguments["scores"]
    with torch.cuda.device_of(scores):
        kernel[(parts * -(-scores.shape[1] // _SAMPLES),)](
            **arguments,
            inverse_norm=chunk.inverse_norm,
            start=chunk.start,
            n=chunk.stop - chunk.start,
            batch=scores.shape[1],
            **launch_options(chunk.table.centers),
        )
