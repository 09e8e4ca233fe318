"""The steps of a softmax that depend on the labels' form, for one label to a sample; and what they give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.head.backends.torch_backend import Batch
from plsc.head.class_table import ClassRows
from plsc.head.global_batch import GlobalBatch, LocalTargetRows, target_cosines
from plsc.losses.margins import Margin, TargetLogit


@dataclass(frozen=True)
class Normalized:
    """What follows from the sums over all shards, in float64.

    Attributes:
        losses: (b,), weighted.
        highest, total: (n,), Z = total·exp(highest), of the n samples of the passes: a negative's probability is
            exp(z)/Z.
        log_z: log Z, of the same shape.
        by_logit: in the shape of the labels, derivatives of the losses by the targets' logits s·φ.
        count: samples that have a label, of this head group; None: all.
        weights: (n,) of the samples' losses; None: they are in Z.
    """

    losses: Tensor
    highest: Tensor
    total: Tensor
    log_z: Tensor
    by_logit: Tensor
    count: Tensor | None = None
    weights: Tensor | None = None

    def target_grad(self, slope: Tensor, scale: Tensor | float) -> Tensor:
        """Derivatives of the batch's loss by the targets' cosines, ``slope`` being dφ/dcos."""
        return self.by_logit * slope * scale

    def scale_of_passes(self, scale: Tensor | float) -> Tensor:
        """Derivatives (n,) of the batch's loss by a negative's cosine, divided by its probability."""
        by_sample = torch.empty_like(self.log_z).fill_(scale)
        if self.weights is not None:
            by_sample *= self.weights
        return by_sample


class OneLabel:
    """The steps of a softmax that depend on the labels' form; others derive from it, and change what they need.

    A batch of b samples is n of the passes, which are the same here.
    """

    def cosines(self, rows: ClassRows, features: Tensor, position: Tensor) -> tuple[Tensor, list[LocalTargetRows]]:
        """See :func:`target_cosines`: in the shape of the labels, with the rows of each column of them."""
        cos, found = target_cosines(rows, features, position)
        return cos, [found]

    def norms(self, norms: Tensor | None, cos: Tensor) -> Tensor | None:
        """The embeddings' norms (B,), once for each of the cosines."""
        return norms

    def at_targets(self, target: TargetLogit, labels: Tensor) -> TargetLogit:
        """The margin at the ``labels``, with the penalty of each sample (b,)."""
        return target

    def of_passes(self, batch: Batch, labels: Tensor) -> tuple[Batch, Tensor, int]:
        """The samples of the passes, their labels, and n/b."""
        return batch, labels, 1

    def columns(self, cos: Tensor) -> Sequence[Tensor]:
        """The cosines as columns (n,), which are summed beside the passes' sums."""
        return [cos]

    def of_columns(self, columns: Sequence[Tensor], like: Tensor) -> Tensor:
        """What :meth:`columns` took apart, in the shape of ``like``."""
        return columns[0]

    def normalize(
        self,
        margin: Margin,
        gathered: GlobalBatch,
        target: TargetLogit,
        cos: Tensor,
        sums: tuple[Tensor, Tensor],
        generator: Callable[[int], torch.Generator],
    ) -> Normalized:
        """The losses and derivatives of the head group's samples.

        Args:
            margin: of the softmax.
            gathered: the batch.
            target: the margin at the labels.
            cos: the labels' cosines.
            sums: (maximum, total) of all shards (n,) without targets, whose exponentials are added here: exactly once.
            generator: gives that of this batch for a purpose, equal on all ranks, on the CPU.
        """
        logit, (maximum, total) = target.phi * margin.s, sums
        highest = torch.maximum(maximum, logit)
        total = total * (maximum - highest).exp() + (logit - highest).exp()
        log_z = highest + total.log()
        losses = log_z - logit
        if target.penalty is not None:
            losses = losses + target.penalty
        return Normalized(losses, highest, total, log_z, (logit - log_z).exp() - 1)

    def target_grad_of_passes(self, target_grad: Tensor) -> Tensor:
        """Derivatives by the labels' cosines, in the shape of the passes' labels."""
        return target_grad

    def add_targets(self, grad: Tensor, target_grad: Tensor, targets: Sequence[LocalTargetRows]) -> Tensor:
        """Add the targets' share to the negatives' gradient by the samples of the passes (n, D); returns (b, D)."""
        targets[0].add_gradient(grad, target_grad)
        return grad
