"""Exponentials that pass 1 keeps for pass 2, which then makes one product in the place of two.

Pass 1 has stored exp(z)·ρ of each class and sample, for the embeddings' gradient. Pass 2 needs Σ_b p·x̂ of each class,
with p = scale·exp(z)/Z. So exp(z)·ρ times the samples' scale/Z·x̂ is ρ times that: the scores need not be made again.
Three of a step's four products are left, for a number of the table's dtype per class and sample, which stay from the
forward to the update. Targets are entered before the product, as everywhere: exp(z) and its share would cancel.

Both factors of the product are rounded to the table's dtype: p and x̂ without it, here exp(z)·ρ and scale/Z·x̂. The
latter loses digits where Z nears the largest float32: at s = 64, if 10 million classes and more lie on one embedding.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plsc.head.backends.products import Fp32Precision, product
from plsc.head.class_table import Chunk, ClassRows

if TYPE_CHECKING:
    from plsc.head.backends.torch_backend import Batch, PassInputs  # which imports this module

ALIGNED = 8  # numbers: the kernels that write them take rows that are whole 16 bytes of bfloat16 apart


def kept_classes(memory: int, each: int, classes: int, chunk_size: int) -> int:
    """How many of the ``classes`` that a pass visits are kept in ``memory`` bytes: all, or those of whole chunks.

    Args:
        memory: bytes.
        each: bytes of a class.
        classes: of all chunks.
        chunk_size: classes of a chunk of pass 1.
    """
    held = min(memory // each, classes)
    return held if held == classes else held // chunk_size * chunk_size


@dataclass(frozen=True)
class KeptExponentials:
    """Those of a batch.

    Attributes:
        weights: (n, B) of the table's dtype, exp(z)·ρ of the first n classes that pass 1 visits, 0 for targets.
    """

    weights: Tensor

    @classmethod
    def fitting(cls, memory: int, rows: ClassRows, batch: "Batch", chunk_size: int) -> "KeptExponentials | None":
        """Room for as many whole chunks as ``memory`` bytes hold, of a batch whose exponentials have no maximum off.

        None where there is none, with several centres or labels, logits that are not s·cos, and numbers of samples
        that are no multiple of 8: rows of bfloat16 would not begin at whole 16 bytes.
        """
        size, width = len(batch.features), batch.features.dtype.itemsize
        is_plain = batch.position.dim() == 1 and batch.negatives is None and not batch.margin.changes_negatives
        if not (is_plain and size and size % ALIGNED == 0 and rows.centers == 1):
            return None
        held = kept_classes(memory, size * width, rows.num_classes, chunk_size)
        return cls(batch.features.new_empty(held, size)) if held else None

    def of(self, chunk: Chunk) -> Tensor | None:
        """A chunk's (n, B); None if it is not among those kept."""
        return self.weights[chunk.start : chunk.stop] if chunk.stop <= len(self.weights) else None


class KeptSecondPass:
    """Pass 2 over chunks whose exponentials were kept.

    Args:
        inputs: of pass 2; ``exponentials`` are those of its batches, in their order.
        precision: of float32 products on a GPU.
    """

    def __init__(self, inputs: "PassInputs", precision: Fp32Precision) -> None:
        self._kept, self._precision = inputs.exponentials, precision
        self._batches = _pulled(inputs) if self._kept else []

    def gradient(self, chunk: Chunk) -> Tensor | None:
        """ρ times the gradient (n, D) by a chunk's unit rows, float32; None if its exponentials were not kept."""
        weights = [kept.of(chunk) for kept in self._kept]
        total: Tensor | None = None
        for each, (batch, pull) in zip(weights, self._batches, strict=True):
            if each is None:
                return None
            place = (batch.position - chunk.start).clamp(0, len(each) - 1)  # of targets elsewhere nothing is taken
            batch.scatter_targets(chunk, each, (pull * chunk.inverse_norm[place]).to(each.dtype))
            gradient = product(each, batch.features, self._precision)
            total = gradient if total is None else total.add_(gradient)
        return total

    def unit_gradient(self, chunk: Chunk) -> Tensor | None:
        """The gradient (n, D) by a chunk's unit rows, float32, for updates that take no other; likewise."""
        gradient = self.gradient(chunk)
        return None if gradient is None else gradient.div_(chunk.inverse_norm[:, None])


def _pulled(inputs: "PassInputs") -> "list[tuple[Batch, Tensor]]":
    """Each batch with features scale/Z·x̂, and what its targets' weights are (B,) but for ρ, in float64."""
    batch, sizes = inputs.batch, [kept.weights.shape[1] for kept in inputs.exponentials]
    factor = inputs.scale.double() * torch.exp(-inputs.log_z.double())
    pull = torch.where(factor != 0, inputs.target_grad.double() / factor, 0.0)  # none where the loss has no weight
    scaled = (batch.features * factor[:, None]).to(batch.features.dtype)
    parts = zip(scaled.split(sizes), batch.position.split(sizes), pull.split(sizes), strict=True)
    return [(replace(batch, features=x, position=at), own) for x, at, own in parts]
