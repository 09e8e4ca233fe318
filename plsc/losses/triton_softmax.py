"""The softmax's two passes with Triton kernels: what lies between two products is one kernel, or part of the first.

For the common case alone, see :func:`supports`; :mod:`plsc.losses.softmax` has the plain path, and its definitions.
Nothing here waits for the device. Sums over classes are taken in float32 by block of classes and in float64 over the
blocks, in a fixed order, so that two runs agree; blocks are chosen by the device's kind, never by timing, for the same
reason.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plsc.losses.class_rows import Chunk, ClassRows
from plsc.losses.product import product
from plsc.losses.triton_support import is_interpreted, runs_on

Method = Literal["product", "logits"]


@dataclass(frozen=True)
class Block:
    """What a program of a kernel takes: classes x samples, ``depth`` of D at a time, by ``warps`` of threads.

    ``stages`` is how many depths are on their way from memory at once.
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


def supports(rows: ClassRows, features: Tensor) -> bool:
    """Whether these passes are for this table and batch.

    Besides, one row to a class, negatives' logits s·cos and a finite float32 exp() of every logit are taken for given.

    Args:
        rows: float32 or bfloat16; all classes or some.
        features: (B, D) of the table's dtype, where chunks come to, on a device that Triton runs on.
    """
    return (
        rows.weight.dtype == features.dtype
        and features.dtype in (torch.float32, torch.bfloat16)
        and features.shape[0] > 0
        and runs_on(features.device)
    )


def first_pass(
    rows: ClassRows, features: Tensor, position: Tensor, s: float, chunk_size: int, *, with_pull: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the exponentials of a table's classes, targets left out.

    Args:
        rows: the shard.
        features: (B, D) unit embeddings.
        position: (B,) int64, where each target stands among the visited classes, or −1.
        s: the logits' scale.
        chunk_size: classes at a time.
        with_pull: whether to sum the rows as well.

    Returns:
        Σ exp(z) (B,) float64, and Σ exp(z)·ρ·W (B, D) float32 or None.
    """
    features, position = features.contiguous(), position.contiguous()
    total = torch.zeros(features.shape[0], dtype=torch.float64, device=features.device)
    pull = torch.zeros(features.shape, dtype=torch.float32, device=features.device) if with_pull else None
    for chunk in rows.chunks(chunk_size):
        weighted = exponentials(chunk, features, position, s, total)
        if pull is not None:
            pull += product(weighted.t(), chunk.weight)
    return total, pull


def second_pass(
    rows: ClassRows,
    features: Tensor,
    position: Tensor,
    s: float,
    log_z: Tensor,
    scale: Tensor,
    target_pull: Tensor,
    chunk_size: int,
) -> Iterator[tuple[Chunk, Tensor]]:
    """Give each chunk with the gradient (n, D) float32 by its unit rows.

    ``log_z``, ``scale`` and ``target_pull`` (B,) are those of :func:`plsc.losses.softmax.second_pass`; the other
    arguments are :func:`first_pass`'s.
    """
    features, position = features.contiguous(), position.contiguous()
    log_z, scale, target_pull = (values.float().contiguous() for values in (log_z, scale, target_pull))
    for chunk in rows.chunks(chunk_size):
        yield chunk, product(probabilities(chunk, features, position, s, log_z, scale, target_pull), features)


def exponentials(chunk: Chunk, features: Tensor, position: Tensor, s: float, total: Tensor) -> Tensor:
    """e = exp(s·ρ·W·xᵀ) of a chunk, 0 where class and sample belong together.

    Its sums by sample are added to ``total`` (B,) float64.

    Returns:
        e·ρ, (n, B) of the table's dtype.
    """
    from plsc.losses import softmax_kernels as kernels

    block = _block(features)
    n, batch = chunk.stop - chunk.start, features.shape[0]
    out = torch.empty(n, batch, dtype=features.dtype, device=features.device)
    partial = torch.empty(-(-n // block.classes), batch, dtype=torch.float32, device=features.device)
    kernel = kernels.exponentials_of_product if block.depth else kernels.exponentials_of_logits
    _launch(kernel, block, chunk, features, (chunk.inverse_norm, position, out, partial), (chunk.start, s))
    total += partial.sum(0, dtype=torch.float64)
    return out


def probabilities(
    chunk: Chunk, features: Tensor, position: Tensor, s: float, log_z: Tensor, scale: Tensor, target_pull: Tensor
) -> Tensor:
    """exp(s·ρ·W·xᵀ − log Z)·scale of a chunk, and ``target_pull`` where class and sample belong together.

    ``log_z``, ``scale`` and ``target_pull`` are (B,) float32.

    Returns:
        (n, B) of the table's dtype.
    """
    from plsc.losses import softmax_kernels as kernels

    block = _block(features)
    out = torch.empty(chunk.stop - chunk.start, features.shape[0], dtype=features.dtype, device=features.device)
    kernel = kernels.probabilities_of_product if block.depth else kernels.probabilities_of_logits
    _launch(kernel, block, chunk, features, (chunk.inverse_norm, log_z, scale, out), (s,))
    n, batch = out.shape
    with torch.cuda.device_of(features):
        kernels.put_targets[(-(-batch // _TARGETS),)](
            target_pull, position, out, n, batch, chunk.start, BLOCK_B=_TARGETS
        )
    return out


@contextmanager
def forced(method: Method, block: Block | None = None) -> Iterator[None]:
    """Within, exponentials are taken inside the "product", or behind one of "logits"; for tests and benchmarks."""
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
