"""Several labels a sample: which of them count in a step, and their softmax losses from one pass over the classes.

Notation: P_i the labels of sample i, z = s·cos, a = s·φ(cos) with the margin's φ, N_i = Σ exp(z_ij) over the classes j
outside of P_i, which is all that pass 1 computes; w_ip the weight of label p. Labels are (b, K) int64, -1 for none.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.losses.margins import Margin, TargetLogit

MOST_LABELS = 100
_NEVER = 1e4  # log Z of a sample without a label: exp(z − log Z) is 0, and a check of finite numbers passes
Positives = Literal["excluded", "kept"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Normalized:
    """What follows from the sums over all shards, in float64.

    Attributes:
        losses: (b,), weighted.
        highest, total: (b,), Z = total·exp(highest): a negative's probability, or the labels' together, is exp(z)/Z.
            (b·K,) where each label has its own negatives.
        log_z: log Z, of the same shape.
        by_logit: (b,) or (b, K), derivatives of the losses by the targets' logits s·φ.
        by_cosine: (b, K), those by s·cos, where a sample's labels are negatives of each other; None: they are not.
        count: samples that have a label, of this head group; None: all.
        weights: (b·K,), where each label has its own negatives: those of its loss; None: they are in Z.
    """

    losses: Tensor
    highest: Tensor
    total: Tensor
    log_z: Tensor
    by_logit: Tensor
    by_cosine: Tensor | None = None
    count: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class LabelOptions:
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
        for name, choices in (("positives", get_args(Positives)), ("label_reduction", get_args(Reduction))):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} must be {' or '.join(choices)}, not {value!r}")
        if self.labels_per_step is not None:
            drawn = as_integer(self.labels_per_step, "the head's labels_per_step", 1)
            object.__setattr__(self, "labels_per_step", drawn)

    def draws(self, labels: Tensor) -> bool:
        """Whether fewer than the K labels (b, K) of a sample count in a step."""
        return self.labels_per_step is not None and self.labels_per_step < labels.shape[1]

    def weights(self, labels: Tensor, given: Tensor | None, keys: Tensor | None) -> Tensor:
        """The weights w (b, K) float64 of distinct ``labels``; 0 where there is none, or where it is not drawn.

        Args:
            labels: (b, K), see :func:`distinct`.
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

    def unrolled(self, labels: Tensor) -> Tensor:
        """Labels (b, K) as b·K samples, each with a label that has negatives of its own.

        They are (b·K,) where other labels are negatives, and (b·K, K) where all labels are left out of the sums.
        """
        return labels.flatten() if self.positives == "kept" else labels.repeat_interleave(labels.shape[1], 0)

    def unrolled_grad(self, target_grad: Tensor) -> Tensor:
        """Derivatives (b, K) by the labels' cosines, in the shape of :meth:`unrolled`: each sample has its own's."""
        return target_grad.flatten() if self.positives == "kept" else torch.diag_embed(target_grad).flatten(0, 1)

    def normalize(
        self, labels: Tensor, weights: Tensor, target: TargetLogit, cos: Tensor, s: float, log_n: Tensor
    ) -> Normalized:
        """The losses of labels (b, K), each with a softmax of its own.

        Args:
            labels, weights: (b, K), see :meth:`weights`.
            target: the margin at the labels, (b, K); its penalty (b,).
            cos: (b, K), the labels' cosines.
            s: the margin's scale.
            log_n: (b,) the logarithm of N.
        """
        exists = labels >= 0
        logit = target.phi * s
        log_z = torch.logaddexp(log_n[:, None], logit)
        others = torch.full_like(cos, -torch.inf)
        if self.positives == "kept":
            others = torch.where(exists, cos * s, -torch.inf)
            log_z = torch.logaddexp(log_z, _without_own(others))
        losses = (weights * (log_z - logit)).sum(1)
        by_logit = weights * ((logit - log_z).exp() - 1)
        log_shares = weights.log() - log_z
        log_a = torch.logsumexp(log_shares, 1)  # -inf where no label counts
        by_cosine = (others + _without_own(log_shares)).exp() if self.positives == "kept" else None
        return _of_labels(losses, -log_a, by_logit, by_cosine, exists, target)


def normalize_each(labels: Tensor, weights: Tensor, target: TargetLogit, s: float, log_n: Tensor) -> Normalized:
    """The losses log(exp(a_p) + N_p) − a_p of labels that have negatives N_p each, log_n (b·K,) being their logarithms.

    Arguments as for :meth:`LabelOptions.normalize`. Where labels are "kept", N_p has the sample's other ones in it.
    """
    logit = target.phi * s
    log_z = torch.logaddexp(log_n.view_as(logit), logit)
    losses = (weights * (log_z - logit)).sum(1)
    by_logit = weights * ((logit - log_z).exp() - 1)
    found = _of_labels(losses, log_z.flatten(), by_logit, None, labels >= 0, target)
    return replace(found, weights=weights.flatten())


def separate(labels: Tensor, weights: Tensor, target: TargetLogit, s: float, log_n: Tensor) -> Normalized:
    """The loss log(1 + N) + log(1 + Σ exp(−a_p)), whose two terms know nothing of each other.

    Source: An et al., Multi-label Cluster Discrimination, ECCV 2024, the loss L_MLCD of section 3. Arguments as for
    :meth:`LabelOptions.normalize`; labels whose weight is 0 (not drawn) are left out, and other weights do not matter.
    """
    exists, counts = labels >= 0, weights > 0
    has_label = counts.any(1)
    exponents = torch.where(counts, -target.phi * s, -torch.inf)
    log_z = torch.nn.functional.softplus(log_n)
    log_positive = torch.nn.functional.softplus(torch.logsumexp(exponents, 1))
    losses = torch.where(has_label, log_z + log_positive, 0)
    by_logit = -(exponents - log_positive[:, None]).exp()
    log_z = torch.where(has_label, log_z, _NEVER)
    return _of_labels(losses, log_z, by_logit, None, exists, target)


def check_labels_join(margin: Margin, positives: str, reduction: str) -> None:
    """UsageError where ``margin`` has no loss of each label, and the others say how such losses are formed."""
    if not margin.separates_positives:
        return
    for name, value, only in (("label_reduction", reduction, "mean"), ("positives", positives, "excluded")):
        if value != only:
            raise UsageError(
                f"{type(margin).__name__} has one term for all labels of a sample, and no loss of each: "
                f'{name} = "{value}" means nothing with it; leave it out'
            )


def distinct(labels: Tensor) -> Tensor:
    """Labels (b, K) of which each counts once: a repeated one is -1, as one that is missing."""
    if labels.dim() == 1 or labels.shape[1] == 1:
        return labels
    ordered, order = labels.sort(dim=1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return labels.masked_fill(repeated.gather(1, order.argsort(1)), -1)


def concatenated(values: list[Tensor], filling: float) -> Tensor:
    """Tensors (b,) or (b, K) below each other, those of fewer labels filled up."""
    if all(each.dim() == 1 for each in values):
        return torch.cat(values)
    columns = [each[:, None] if each.dim() == 1 else each for each in values]
    most = max(each.shape[1] for each in columns)
    return torch.cat([torch.nn.functional.pad(each, (0, most - each.shape[1]), value=filling) for each in columns])


def _without_own(values: Tensor) -> Tensor:
    """The logsumexp (b, K) of each row's other numbers: sums from both sides, since a difference would cancel."""
    nothing = values.new_full((len(values), 1), -torch.inf)
    before = torch.cat([nothing, values[:, :-1]], 1).logcumsumexp(1)
    after = torch.cat([nothing, values.flip(1)[:, :-1]], 1).logcumsumexp(1).flip(1)
    return torch.logaddexp(before, after)


def _of_labels(
    losses: Tensor, log_z: Tensor, by_logit: Tensor, by_cosine: Tensor | None, exists: Tensor, target: TargetLogit
) -> Normalized:
    """The result for labels that exist (b, K): their samples count, and have the margin's penalty."""
    has_label = exists.any(1)
    if target.penalty is not None:
        losses = losses + torch.where(has_label, target.penalty, 0)
    log_z = log_z.clamp(max=_NEVER)
    return Normalized(losses, log_z, torch.ones_like(log_z), log_z, by_logit, by_cosine, has_label.sum())
