"""The head's passes by Triton kernels: what lies between two products is one kernel, or part of the first.

Nothing here waits for the device. Sums over classes are taken in float32 by block of classes and in float64 over the
blocks, in a fixed order, so that two runs agree; blocks are chosen by the device's kind, never by timing, for the same
reason.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from plsc.head.backends.products import Fp32Precision, product
from plsc.head.backends.torch_backend import Batch, PartialSoftmax, TorchBackend, Updater
from plsc.head.backends.triton_update import has_kernel, update_rows
from plsc.head.class_table import Chunk, ClassRows
from plsc.head.low_precision import Rounding
from plsc.head.update_rules import UpdateRule

_SMALLEST_CAPABILITY = (8, 0)  # bfloat16 matrix units

Method = Literal["product", "logits"]


@dataclass(frozen=True)
class Block:
    """The part of a chunk that a program of a kernel takes: classes x samples, ``depth`` of D at a time.

    ``stages`` is how many depths are on their way from memory at once, ``warps`` the threads' groups of 32.
    """

    classes: int
    samples: int
    depth: int = 0
    warps: int = 4
    stages: int = 3

    @property
    def options(self) -> dict[str, int]:
        """The arguments of a launch."""
        sizes = {"BLOCK_N": self.classes, "BLOCK_B": self.samples} | ({"BLOCK_K": self.depth} if self.depth else {})
        return sizes | {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# Products by the shared memory that a block of threads may have: 227 KB on Hopper, 163 KB on A100, 99 KB on others.
PRODUCT_BLOCKS = (
    (200 << 10, Block(128, 256, 64, warps=8, stages=4)),
    (150 << 10, Block(128, 256, 64, warps=8, stages=3)),
    (0, Block(128, 128, 32, warps=4, stages=3)),
)
LOGITS_BLOCK = Block(64, 64, warps=4)
_INTERPRETED_BLOCK = Block(16, 16, 16)
_TARGETS = 1024  # samples to a program

_forced_method: Method | None = None
_forced_block: Block | None = None


def is_interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1 has kernels run on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Return whether kernels run on ``device``: an NVIDIA GPU from Ampere on, or the CPU in Triton's interpreter."""
    if device.type == "cpu":
        return is_interpreted() and _is_installed()
    return device.type == "cuda" and torch.version.cuda is not None and _is_installed() and _is_capable(device)


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _SMALLEST_CAPABILITY


class TritonBackend(TorchBackend):
    """Triton kernels for float32 and bfloat16 tables on NVIDIA GPUs from Ampere on, or in Triton's interpreter.

    Args:
        reason: why this backend was chosen, for logs.
        dim: D of the table.
        with_passes: take the passes too: logits that are s·cos, one centre to a class.
        fp32_precision: of the passes' products over a float32 table.
    """

    name = "triton"

    def __init__(self, reason: str, *, dim: int, with_passes: bool, fp32_precision: Fp32Precision = "ieee") -> None:
        super().__init__(reason, fp32_precision)
        self._dim, self.takes_passes = dim, with_passes

    def first_pass(self, rows: ClassRows, batch: Batch, chunk_size: int, *, with_grad: bool) -> PartialSoftmax:
        """See :meth:`TorchBackend.first_pass`."""
        if not self._takes(batch):
            return super().first_pass(rows, batch, chunk_size, with_grad=with_grad)
        samples = batch.features, batch.position, batch.margin.s
        total, grad = first_pass(rows, *samples, chunk_size, with_grad=with_grad)
        return PartialSoftmax(torch.zeros_like(total, dtype=torch.float32), total, grad)

    def second_pass(
        self,
        rows: ClassRows,
        batch: Batch,
        log_z: Tensor,
        scale: Tensor,
        target_grad: Tensor,
        chunk_size: int,
        member: Tensor | None = None,
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """See :meth:`TorchBackend.second_pass`. The kernels have no notion of ``member``."""
        if member is not None or not self._takes(batch):
            return super().second_pass(rows, batch, log_z, scale, target_grad, chunk_size, member)
        samples = batch.features, batch.position, batch.margin.s, log_z, scale, target_grad
        return second_pass(rows, *samples, chunk_size)

    def updater(self, rule: type[UpdateRule], state_dtypes: Sequence[torch.dtype], rounding: Rounding) -> Updater:
        """See :meth:`TorchBackend.updater`."""
        if has_kernel(rule, self._dim, state_dtypes):
            return update_rows
        return super().updater(rule, state_dtypes, rounding)

    def _takes(self, batch: Batch) -> bool:
        return self.takes_passes and len(batch.features) > 0  # a group without a sample has no block to launch


def first_pass(
    rows: ClassRows, features: Tensor, position: Tensor, s: float, chunk_size: int, *, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the exponentials of a table's classes, targets left out.

    Args:
        rows: the shard.
        features: (B, D) unit embeddings.
        position: (B,) int64, where each target stands among the visited classes, or −1.
        s: the logits' scale.
        chunk_size: classes at a time.
        with_grad: whether to sum the rows as well.

    Returns:
        Σ exp(z) (B,) float64, and Σ exp(z)·ρ·W (B, D) float32 or None.
    """
    features, position = features.contiguous(), position.contiguous()
    total = torch.zeros(features.shape[0], dtype=torch.float64, device=features.device)
    grad = torch.zeros(features.shape, dtype=torch.float32, device=features.device) if with_grad else None
    for chunk in rows.chunks(chunk_size):
        weighted = exponentials(chunk, features, position, s, total)
        if grad is not None:
            grad += product(weighted.t(), chunk.weight)
    return total, grad


def second_pass(
    rows: ClassRows,
    features: Tensor,
    position: Tensor,
    s: float,
    log_z: Tensor,
    scale: Tensor,
    target_grad: Tensor,
    chunk_size: int,
) -> Iterator[tuple[Chunk, Tensor]]:
    """Give each chunk with the gradient (n, D) float32 by its unit rows.

    ``log_z``, ``scale`` and ``target_grad`` (B,) are those of :meth:`TorchBackend.second_pass`; the other
    arguments are :func:`first_pass`'s.
    """
    features, position = features.contiguous(), position.contiguous()
    log_z, scale, target_grad = (values.float().contiguous() for values in (log_z, scale, target_grad))
    for chunk in rows.chunks(chunk_size):
        yield chunk, product(probabilities(chunk, features, position, s, log_z, scale, target_grad), features)


def exponentials(chunk: Chunk, features: Tensor, position: Tensor, s: float, total: Tensor) -> Tensor:
    """e = exp(s·ρ·W·xᵀ) of a chunk, 0 where class and sample belong together.

    Its sums by sample are added to ``total`` (B,) float64.

    Returns:
        e·ρ, (n, B) of the table's dtype.
    """
    from plsc.head.backends import triton_kernels as kernels

    block = _block(features)
    n, batch = chunk.stop - chunk.start, features.shape[0]
    out = torch.empty(n, batch, dtype=features.dtype, device=features.device)
    partial = torch.empty(-(-n // block.classes), batch, dtype=torch.float32, device=features.device)
    kernel = kernels.exponentials_of_product if block.depth else kernels.exponentials_of_logits
    _launch(kernel, block, chunk, features, (chunk.inverse_norm, position, out, partial), (chunk.start, s))
    total += partial.sum(0, dtype=torch.float64)
    return out


def probabilities(
    chunk: Chunk, features: Tensor, position: Tensor, s: float, log_z: Tensor, scale: Tensor, target_grad: Tensor
) -> Tensor:
    """exp(s·ρ·W·xᵀ − log Z)·scale of a chunk, and ``target_grad`` where class and sample belong together.

    ``log_z``, ``scale`` and ``target_grad`` are (B,) float32.

    Returns:
        (n, B) of the table's dtype.
    """
    from plsc.head.backends import triton_kernels as kernels

    block = _block(features)
    out = torch.empty(chunk.stop - chunk.start, features.shape[0], dtype=features.dtype, device=features.device)
    kernel = kernels.probabilities_of_product if block.depth else kernels.probabilities_of_logits
    _launch(kernel, block, chunk, features, (chunk.inverse_norm, log_z, scale, out), (s,))
    n, batch = out.shape
    with torch.cuda.device_of(features):
        kernels.scatter_targets[(-(-batch // _TARGETS),)](
            target_grad, position, out, n, batch, chunk.start, BLOCK_B=_TARGETS
        )
    return out


@contextmanager
def force_kernel(method: Method, block: Block | None = None) -> Iterator[None]:
    """Take exponentials inside the "product", or behind one of "logits", within; for tests and benchmarks."""
    global _forced_method, _forced_block
    before = _forced_method, _forced_block
    _forced_method, _forced_block = method, block
    try:
        yield
    finally:
        _forced_method, _forced_block = before


def _block(features: Tensor) -> Block:
    """The block for a table of the features' dtype; its depth is 0 where logits are to be in memory."""
    if _forced_block is not None:
        return _forced_block
    method = _forced_method or ("product" if features.dtype == torch.bfloat16 else "logits")
    if is_interpreted():
        return _INTERPRETED_BLOCK if method == "product" else Block(16, 16)
    if method == "logits":
        return LOGITS_BLOCK
    # Not every supported torch declares this property, or has it; the smallest block fits every GPU.
    shared = getattr(torch.cuda.get_device_properties(features.device), "shared_memory_per_block_optin", 0)
    return next(block for least, block in PRODUCT_BLOCKS if shared >= least)


def _launch(
    kernel: Any, block: Block, chunk: Chunk, features: Tensor, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
) -> None:
    """Run a kernel over all blocks of a chunk and the batch; its product before it, where it does not make its own."""
    n, (batch, dim) = chunk.stop - chunk.start, features.shape
    grid = (-(-n // block.classes) * -(-batch // block.samples),)
    with torch.cuda.device_of(features):
        if block.depth:
            widen = is_interpreted()
            kernel[grid](chunk.weight, features, *tensors, n, batch, dim, *numbers, WIDEN=widen, **block.options)
        else:
            logits = product(chunk.weight, features.t())
            kernel[grid](logits, *tensors, n, batch, *numbers, **block.options)
