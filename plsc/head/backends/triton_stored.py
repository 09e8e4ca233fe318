"""The head's passes with the weights of a chunk's rows stored, which a large product of PyTorch's takes.

The second product of a pass is cuBLAS's, with tiles as large as it likes. Of bfloat16 rows of one centre, one kernel of
:mod:`plsc.head.backends.triton_stored_kernels` makes the first product and the weights; of others the first product is
cuBLAS's too, and a kernel stands between the two, which costs the traffic of float32 scores. Both pay above some number
of samples: :mod:`plsc.head.backends.triton_shape`. Nothing here waits for the device, and sums are grouped by the
chunks alone: two runs agree.
"""
# mypy: disable-error-code="import-untyped"

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from plsc.head.backends.kept_exponentials import ALIGNED, KeptExponentials, KeptSecondPass
from plsc.head.backends.products import Fp32Precision, product
from plsc.head.backends.torch_backend import Batch, PassInputs
from plsc.head.backends.triton_tiles import device_kind, processor_count
from plsc.head.class_table import Chunk, ClassRows

SUMMED_CLASSES = 256  # whose exponentials a program adds up in float32
_SAMPLES, _ROWS = 128, 16  # that a program has in registers
_WARPS = 4
# A program's block of samples, classes and columns on GPUs that read blocks by TMA; others would wait for each. On
# Hopper two programs fit a processor: while one takes exponentials, the other multiplies.
_BLOCKS: dict[str, dict[str, Any]] = {
    "sm_90": {"BLOCK_B": 128, "BLOCK_N": 128, "BLOCK_D": 32, "num_warps": 4, "num_stages": 4},
    "sm_100": {"BLOCK_B": 128, "BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 2},
    "cpu": {"BLOCK_B": 16, "BLOCK_N": 16, "BLOCK_D": 32},
}
_PROGRAMS = 2  # for each of the device's processors
# Blocks of twice the samples. At D = 512 a block of 128 x 128 reads 256 KB for its 17 million operations: on an H100
# the second-level cache gives that to all processors at about a half of the rate at which they multiply. These read
# three quarters as much, and one program fills a processor. Which is faster is measured (triton_shape.py).
WIDE_SAMPLES = 256
_WIDE_BLOCKS: dict[str, dict[str, Any]] = {
    "sm_90": {"BLOCK_B": WIDE_SAMPLES, "BLOCK_N": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3},
    "cpu": {"BLOCK_B": 32, "BLOCK_N": 16, "BLOCK_D": 32},
}
_WIDE_PROGRAMS = 1
_EMPTY_SHARE = 0.1  # of the samples of wide blocks, at most
_LOG2_E = 1 / math.log(2)


def first_pass(
    rows: ClassRows,
    batch: Batch,
    chunk_size: int,
    precision: Fp32Precision,
    *,
    with_grad: bool,
    kept: KeptExponentials | None = None,
    is_wide: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Sum the exponentials of a table's classes, targets left out; see :func:`.triton_passes.first_pass`.

    Those of chunks for which ``kept`` has room are left there. ``is_wide``: see :func:`row_options`.
    """
    from plsc.head.backends import triton_stored_kernels as kernels

    features, position = batch.features.contiguous(), batch.position.contiguous()
    largest, size = min(chunk_size, rows.num_classes), len(features)
    grad = torch.zeros_like(features, dtype=torch.float32) if with_grad else None
    scratch = _Scratch(rows, largest, features, precision, is_wide=is_wide)
    parts = -(-largest // summed_classes(scratch.options))
    total = torch.zeros(parts, size, dtype=torch.float64, device=features.device)
    for chunk in rows.chunks(chunk_size):
        weights = scratch.fill(
            chunk,
            kernels.exponentials if scratch.options is None else kernels.row_exponentials,
            position=position,
            total=total,
            s=batch.margin.s * _LOG2_E,
            with_weights=with_grad,
            out=None if kept is None else kept.of(chunk),
        )
        if grad is not None:
            grad += product(weights.t(), chunk.weight, precision)
    return total.sum(0), grad


def second_pass(
    inputs: PassInputs, precision: Fp32Precision, *, is_wide: bool = False
) -> Iterator[tuple[Chunk, Tensor]]:
    """Give each chunk with the gradient (n·K, D) float32 by its unit rows."""
    for chunk, gradient, is_by_rows in gradients(inputs, precision, is_wide=is_wide):
        yield chunk, gradient.div_(chunk.inverse_norm[:, None]) if is_by_rows else gradient


def gradients(
    inputs: PassInputs, precision: Fp32Precision, *, is_wide: bool = False
) -> Iterator[tuple[Chunk, Tensor, bool]]:
    """Give each chunk with the gradient (n·K, D) float32 by its unit rows, or (True) with that times their 1/norms."""
    from plsc.head.backends import triton_stored_kernels as kernels

    batch, rows = inputs.batch, inputs.rows
    features, position = batch.features.contiguous(), batch.position.contiguous()
    by_sample = inputs.log_z.double() * _LOG2_E, inputs.scale, inputs.target_grad
    log_z, scale, target_grad = (values.float().contiguous() for values in by_sample)
    member = None if inputs.member is None else inputs.member.contiguous().view(torch.uint8)
    kept = KeptSecondPass(inputs, precision)
    scratch = _Scratch(rows, min(inputs.chunk_size, rows.num_classes), features, precision, is_wide=is_wide)
    for chunk in rows.chunks(inputs.chunk_size):
        if (gradient := kept.gradient(chunk)) is not None:
            yield chunk, gradient, True
            continue
        weights = scratch.fill(
            chunk,
            kernels.probabilities if scratch.options is None else kernels.row_probabilities,
            position=position,
            log_z=log_z,
            scale=scale,
            target_grad=target_grad,
            member=member,
            s=batch.margin.s * _LOG2_E,
        )
        yield chunk, product(weights, features, precision), False


def row_options(
    kind: str, dtype: torch.dtype, dim: int, centers: int, *, is_wide: bool = False
) -> dict[str, Any] | None:
    """Constants and options of the kernels that make scores and weights of such rows in one go; None: none does.

    Args:
        kind: of the GPU, by :func:`.triton_tiles.gpu_kind`; "cpu" where kernels are interpreted.
        dtype, dim, centers: of the table.
        is_wide: in wide blocks, where the kind of GPU has them.
    """
    if kind not in _BLOCKS or dtype != torch.bfloat16 or centers > 1 or dim % ALIGNED:
        return None
    return {
        **(_WIDE_BLOCKS if is_wide and kind in _WIDE_BLOCKS else _BLOCKS)[kind],
        "WIDEN": kind == "cpu",
        "enable_fp_fusion": True,
    }


def has_wide_blocks(kind: str, dtype: torch.dtype, dim: int, centers: int) -> bool:
    """Whether :func:`row_options` has two answers."""
    return kind in _WIDE_BLOCKS and row_options(kind, dtype, dim, centers) is not None


def _fills_wide_blocks(kind: str, samples: int) -> bool:
    """Whether few places of wide blocks are left empty by so many samples."""
    block: int = _WIDE_BLOCKS[kind]["BLOCK_B"]
    return -samples % block <= _EMPTY_SHARE * samples


def summed_classes(options: dict[str, Any] | None) -> int:
    """Classes whose exponentials a program of pass 1 adds up in float32, by :func:`row_options`."""
    return SUMMED_CLASSES if options is None else options["BLOCK_N"]


class _Scratch:
    """Memory for the weights of a chunk's rows, and for scores that no kernel makes; all chunks of a pass share it.

    It is taken by the first chunk that needs it.

    Attributes:
        options: of the kernels that multiply rows; None: the scores are PyTorch's.
    """

    def __init__(
        self, rows: ClassRows, classes: int, features: Tensor, precision: Fp32Precision, *, is_wide: bool
    ) -> None:
        kind, of_table = device_kind(features.device), (features.dtype, features.shape[1], rows.centers)
        self._is_wide = is_wide and has_wide_blocks(kind, *of_table) and _fills_wide_blocks(kind, len(features))
        self.options = row_options(kind, *of_table, is_wide=self._is_wide)
        self._features, self._precision, self._count = features, precision, classes * rows.centers

    @cached_property
    def _weights(self) -> Tensor:
        size = len(self._features)
        apart = size if self.options is None else -(-size // ALIGNED) * ALIGNED
        return self._features.new_empty(self._count, apart)[:, :size]

    @cached_property
    def _scores(self) -> Tensor:
        return self._features.new_empty(self._count, len(self._features), dtype=torch.float32)

    @cached_property
    def _described_features(self) -> Any:  # once: the host has to be ahead of kernels
        return _described(self._features, self.options or {}, "BLOCK_B", "BLOCK_D")

    @cached_property
    def _described_weights(self) -> Any:
        return self._described_as_weights(self._weights)

    def _described_as_weights(self, weights: Tensor) -> Any:
        return _described(weights, self.options or {}, "BLOCK_N", "BLOCK_B")

    def fill(
        self, chunk: Chunk, kernel: Any, *, with_weights: bool = True, out: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """Launch ``kernel``, which makes the weights (n·K, B) of a chunk's rows that are returned: in ``out``, or here.

        ``out`` has rows as far apart as the scratch has.
        """
        weights, count = self._weights[: len(chunk.weight)] if out is None else out, chunk.stop - chunk.start
        arguments |= {"inverse_norm": chunk.inverse_norm, "start": chunk.start, "n": count}
        with torch.cuda.device_of(weights):
            if self.options is not None:
                described = self._described_weights if out is None else self._described_as_weights(out)
                arguments |= {"features": self._described_features, "weights": described if with_weights else None}
                self._launch_on_rows(kernel, chunk.weight, arguments, self.options)
            else:
                scores = self._scores[: len(weights)]
                product(chunk.weight, self._features.t(), self._precision, out=scores)
                arguments["weights"] = weights if with_weights else None
                _launch_on_scores(kernel, scores, arguments, launch_options(chunk.table.centers))
        return weights

    def _launch_on_rows(self, kernel: Any, weight: Tensor, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Run a kernel over a chunk's rows and all samples, by as many programs as run at a time."""
        size, dim = self._features.shape
        blocks = -(-len(weight) // options["BLOCK_N"]) * -(-size // options["BLOCK_B"])
        programs = _WIDE_PROGRAMS if self._is_wide else _PROGRAMS
        kernel[(min(blocks, programs * processor_count(weight.device)),)](
            **arguments,
            rows=_described(weight, options, "BLOCK_N", "BLOCK_D"),
            batch=size,
            dim=dim,
            **options,
        )


def _described(matrix: Tensor, options: dict[str, Any], *sides: str) -> Any:
    """A tensor descriptor of a matrix that is read or written in blocks whose ``sides`` the ``options`` have."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [options[side] for side in sides])


def launch_options(centers: int) -> dict[str, Any]:
    """Constants and options of the kernels: a program has BLOCK_N classes with all of their centres in registers."""
    classes = max(_ROWS >> (centers - 1).bit_length(), 2)
    return {
        "CENTERS": centers, "BLOCK_B": _SAMPLES, "BLOCK_N": classes, "num_warps": _WARPS, "enable_fp_fusion": True
    }  # fmt: skip


def _launch_on_scores(kernel: Any, scores: Tensor, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Run a kernel over a chunk's classes in parts, each for all blocks of samples."""
    if "total" in arguments:
        options["per"] = SUMMED_CLASSES
    parts = -(-arguments["n"] // options.get("per", options["BLOCK_N"]))
    grid = (parts * -(-scores.shape[1] // _SAMPLES),)
    kernel[grid](**arguments, scores=scores, batch=scores.shape[1], **options)
