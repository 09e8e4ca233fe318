"""How the losses of a sample's labels are formed: options of the class head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.features.labels.softmax import LabelsApart, SeveralLabels
from plsc.head.options import HeadFeature
from plsc.losses.margins import Margin

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead

Positives = Literal["excluded", "kept"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class LabelOptions(HeadFeature):
    """How the losses of a sample's labels are formed; ``plsc.LabelOptions``.

    Attributes:
        positives: of samples with several labels P, labels (b, K): with "excluded" the loss of label p, m being the
            margin, is log(exp(m(z_p)) + Σ exp(z_j) over j outside of P) − m(z_p); with "kept" the sum has all j ≠ p.
            One pass computes each score once, however many labels there are.
        label_reduction: of a sample's losses: "mean" or "sum" over its labels. The batch's loss is the mean over
            samples that have a label.
        labels_per_step: how many of a sample's labels, drawn anew, have a loss in a step; None: all. The others stay
            its labels: "excluded" leaves them out of the sums, and samplers have them in the sample.

    Raises:
        UsageError: an option is out of its range.
    """

    positives: Positives = "excluded"
    label_reduction: Reduction = "mean"
    labels_per_step: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, choices in (("positives", get_args(Positives)), ("label_reduction", get_args(Reduction))):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} must be {' or '.join(choices)}, not {value!r}")
        if self.labels_per_step is not None:
            drawn = as_integer(self.labels_per_step, "the head's labels_per_step", 1)
            object.__setattr__(self, "labels_per_step", drawn)

    def check(self, margin: Margin) -> None:
        """UsageError where ``margin`` has no loss of each label, and the options say how such losses are formed."""
        if not margin.separates_positives:
            return
        for name, only in (("label_reduction", "mean"), ("positives", "excluded")):
            if (value := getattr(self, name)) != only:
                raise UsageError(
                    f"{type(margin).__name__} has one term for all labels of a sample, and no loss of each: "
                    f'{name} = "{value}" means nothing with it; leave it out'
                )

    def attach(self, head: "ShardedHead") -> None:
        """See :meth:`HeadFeature.attach`."""
        form = LabelsApart if head.softmax.negatives is not None else SeveralLabels
        head.softmax.forms[2] = form(self)

    def draws(self, labels: Tensor) -> bool:
        """Whether fewer than the K labels (b, K) of a sample count in a step."""
        return self.labels_per_step is not None and self.labels_per_step < labels.shape[1]

    def weights(self, labels: Tensor, given: Tensor | None, keys: Tensor | None) -> Tensor:
        """The weights w (b, K) float64 of distinct ``labels``; 0 where there is none, or where it is not drawn.

        Args:
            labels: (b, K), see :func:`plsc.head.global_batch.distinct`.
            given: (b, K) by the caller, not negative, in place of those of ``label_reduction``.
            keys: (b, K) uniform random numbers, the largest of which are drawn; None: all labels count.
        """
        counts = labels >= 0
        if keys is not None and self.labels_per_step is not None:
            kept = torch.where(counts, keys, -1).topk(self.labels_per_step, dim=1).indices
            counts = counts & torch.zeros_like(counts).scatter_(1, kept, True)
        weights = counts.double() if given is None else torch.where(counts, given.double(), 0)
        if given is None and self.label_reduction == "mean":
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        return weights
