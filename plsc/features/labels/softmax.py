"""What several labels a sample, labels (b, K) with -1 for none, make of a softmax."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plsc.features.labels.losses import of_each, of_each_apart, separate
from plsc.head.backends.torch_backend import Batch
from plsc.head.class_table import ClassRows
from plsc.head.global_batch import GlobalBatch, LocalTargetRows, target_cosines
from plsc.head.one_label import Normalized, OneLabel
from plsc.losses.margins import Margin, TargetLogit

if TYPE_CHECKING:
    from plsc.features.labels.options import LabelOptions  # which imports this module

_DRAWN_LABELS = -1  # the salt of their keys: 0 belongs to the margins, 1 and above to shards


class SeveralLabels(OneLabel):
    """A softmax of each label, from one pass over the classes.

    Args:
        options: how the losses of a sample's labels are formed.
    """

    def __init__(self, options: "LabelOptions") -> None:
        self.options = options

    def cosines(self, rows: ClassRows, features: Tensor, position: Tensor) -> tuple[Tensor, list[LocalTargetRows]]:
        """See :meth:`OneLabel.cosines`."""
        columns = [target_cosines(rows, features, column) for column in position.unbind(1)]
        return torch.stack([cos for cos, _ in columns], 1), [found for _, found in columns]

    def norms(self, norms: Tensor | None, cos: Tensor) -> Tensor | None:
        """See :meth:`OneLabel.norms`."""
        return None if norms is None else norms.repeat_interleave(cos.shape[1])

    def at_targets(self, target: TargetLogit, labels: Tensor) -> TargetLogit:
        """See :meth:`OneLabel.at_targets`; a sample has the penalty if it has a label."""
        penalty, slope = target.penalty, target.penalty_slope
        if penalty is None or slope is None:
            return target
        has_label = (labels >= 0).any(1)
        return replace(target, penalty=penalty[:, 0], penalty_slope=torch.where(has_label, slope[:, 0], 0))

    def columns(self, cos: Tensor) -> Sequence[Tensor]:
        """See :meth:`OneLabel.columns`."""
        return cos.unbind(1)

    def of_columns(self, columns: Sequence[Tensor], like: Tensor) -> Tensor:
        """See :meth:`OneLabel.of_columns`."""
        return torch.stack(list(columns), 1)

    def normalize(
        self,
        margin: Margin,
        gathered: GlobalBatch,
        target: TargetLogit,
        cos: Tensor,
        sums: tuple[Tensor, Tensor],
        generator: Callable[[int], torch.Generator],
    ) -> Normalized:
        """See :meth:`OneLabel.normalize`; which labels count is drawn from the whole batch's keys."""
        labels, keys = gathered.labels, None
        if self.options.draws(labels):
            on_host = torch.empty(gathered.total, labels.shape[1], pin_memory=labels.is_cuda)
            on_host.uniform_(generator=generator(_DRAWN_LABELS))
            keys = gathered.local_group(on_host).to(labels.device, non_blocking=True)
        weights = self.options.weights(labels, gathered.weights, keys)
        maximum, total = sums
        return self._losses(margin, labels, weights, target, cos, maximum + total.log())

    def _losses(
        self, margin: Margin, labels: Tensor, weights: Tensor, target: TargetLogit, cos: Tensor, log_n: Tensor
    ) -> Normalized:
        """The losses by the logarithm (n,) of the negatives' sums."""
        if margin.separates_positives:
            return separate(labels, weights, target, margin.s, log_n)
        return of_each(labels, weights, target, cos, margin.s, log_n, kept=self.options.positives == "kept")

    def add_targets(self, grad: Tensor, target_grad: Tensor, targets: Sequence[LocalTargetRows]) -> Tensor:
        """See :meth:`OneLabel.add_targets`."""
        for rows_of_label, of_label in zip(targets, target_grad.unbind(1), strict=True):
            rows_of_label.add_gradient(grad, of_label)
        return grad


class LabelsApart(SeveralLabels):
    """The same where each label has negatives of its own: b samples with K labels are b·K of the passes.

    Their labels are (b·K,) where a sample's other labels are negatives, and (b·K, K) where none of them is in the sums.
    """

    def of_passes(self, batch: Batch, labels: Tensor) -> tuple[Batch, Tensor, int]:
        """See :meth:`OneLabel.of_passes`."""
        count = labels.shape[1]
        features = batch.features.repeat_interleave(count, 0)
        labels, position = self._apart(labels), self._apart(batch.position)
        return replace(batch, features=features, position=position, phi=batch.phi.flatten()), labels, count

    def _apart(self, values: Tensor) -> Tensor:
        kept = self.options.positives == "kept"
        return values.flatten() if kept else values.repeat_interleave(values.shape[1], 0)

    def columns(self, cos: Tensor) -> Sequence[Tensor]:
        """See :meth:`OneLabel.columns`."""
        return [cos.flatten()]

    def of_columns(self, columns: Sequence[Tensor], like: Tensor) -> Tensor:
        """See :meth:`OneLabel.of_columns`."""
        return columns[0].view(like.shape)

    def _losses(
        self, margin: Margin, labels: Tensor, weights: Tensor, target: TargetLogit, cos: Tensor, log_n: Tensor
    ) -> Normalized:
        return of_each_apart(labels, weights, target, margin.s, log_n)

    def target_grad_of_passes(self, target_grad: Tensor) -> Tensor:
        """See :meth:`OneLabel.target_grad_of_passes`: each sample has its own label's."""
        kept = self.options.positives == "kept"
        return target_grad.flatten() if kept else torch.diag_embed(target_grad).flatten(0, 1)

    def add_targets(self, grad: Tensor, target_grad: Tensor, targets: Sequence[LocalTargetRows]) -> Tensor:
        """See :meth:`OneLabel.add_targets`."""
        return super().add_targets(grad.view(*target_grad.shape, -1).sum(1), target_grad, targets)
