"""Losses of several labels a sample, from one pass over the classes.

Notation: P_i the labels of sample i, z = s·cos, a = s·φ(cos) with the margin's φ, N_i = Σ exp(z_ij) over the classes j
outside of P_i, which is all that pass 1 computes; w_ip the weight of label p. Labels are (b, K) int64, -1 for none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.head.one_label import Normalized
from plsc.losses.margins import TargetLogit

_NEVER = 1e4  # log Z of a sample without a label: exp(z − log Z) is 0, and a check of finite numbers passes


@dataclass(frozen=True)
class NormalizedLabels(Normalized):
    """The same of several labels a sample.

    Attributes:
        by_cosine: (b, K), derivatives by s·cos, where a sample's labels are negatives of each other; None: they are
            not.
    """

    by_cosine: Tensor | None = None

    def target_grad(self, slope: Tensor, scale: Tensor | float) -> Tensor:
        """See :meth:`Normalized.target_grad`."""
        found = super().target_grad(slope, scale)
        return found if self.by_cosine is None else found + self.by_cosine * scale


def of_each(
    labels: Tensor, weights: Tensor, target: TargetLogit, cos: Tensor, s: float, log_n: Tensor, *, kept: bool
) -> Normalized:
    """The losses of labels (b, K), each with a softmax of its own.

    Args:
        labels: (b, K).
        weights: (b, K) of their losses.
        target: the margin at the labels, (b, K); its penalty (b,).
        cos: (b, K), the labels' cosines.
        s: the margin's scale.
        log_n: (b,) the logarithm of N.
        kept: a sample's labels are negatives of each other.
    """
    logit = target.phi * s
    log_z = torch.logaddexp(log_n[:, None], logit)
    others = torch.full_like(cos, -torch.inf)
    if kept:
        others = torch.where(labels >= 0, cos * s, -torch.inf)
        log_z = torch.logaddexp(log_z, _without_own(others))
    losses = (weights * (log_z - logit)).sum(1)
    by_logit = weights * ((logit - log_z).exp() - 1)
    log_shares = weights.log() - log_z
    log_a = torch.logsumexp(log_shares, 1)  # -inf where no label counts
    by_cosine = (others + _without_own(log_shares)).exp() if kept else None
    return _of_labels(losses, -log_a, by_logit, labels, target, by_cosine)


def of_each_apart(labels: Tensor, weights: Tensor, target: TargetLogit, s: float, log_n: Tensor) -> Normalized:
    """The losses log(exp(a_p) + N_p) − a_p of labels that have negatives N_p each, log_n (b·K,) being their logarithms.

    Arguments as for :func:`of_each`. Where labels are kept, N_p has the sample's other ones in it.
    """
    logit = target.phi * s
    log_z = torch.logaddexp(log_n.view_as(logit), logit)
    losses = (weights * (log_z - logit)).sum(1)
    by_logit = weights * ((logit - log_z).exp() - 1)
    return _of_labels(losses, log_z.flatten(), by_logit, labels, target, weights=weights.flatten())


def separate(labels: Tensor, weights: Tensor, target: TargetLogit, s: float, log_n: Tensor) -> Normalized:
    """The loss log(1 + N) + log(1 + Σ exp(−a_p)), whose two terms know nothing of each other.

    Source: An et al., Multi-label Cluster Discrimination, ECCV 2024, the loss L_MLCD of section 3. Arguments as for
    :func:`of_each`; labels whose weight is 0 (not drawn) are left out, and other weights do not matter.
    """
    counts = weights > 0
    has_label = counts.any(1)
    exponents = torch.where(counts, -target.phi * s, -torch.inf)
    log_z = torch.nn.functional.softplus(log_n)
    log_positive = torch.nn.functional.softplus(torch.logsumexp(exponents, 1))
    losses = torch.where(has_label, log_z + log_positive, 0)
    by_logit = -(exponents - log_positive[:, None]).exp()
    log_z = torch.where(has_label, log_z, _NEVER)
    return _of_labels(losses, log_z, by_logit, labels, target)


def _without_own(values: Tensor) -> Tensor:
    """The logsumexp (b, K) of each row's other numbers: sums from both sides, since a difference would cancel."""
    nothing = values.new_full((len(values), 1), -torch.inf)
    before = torch.cat([nothing, values[:, :-1]], 1).logcumsumexp(1)
    after = torch.cat([nothing, values.flip(1)[:, :-1]], 1).logcumsumexp(1).flip(1)
    return torch.logaddexp(before, after)


def _of_labels(
    losses: Tensor,
    log_z: Tensor,
    by_logit: Tensor,
    labels: Tensor,
    target: TargetLogit,
    by_cosine: Tensor | None = None,
    weights: Tensor | None = None,
) -> Normalized:
    """The result for labels (b, K): samples that have one count, and have the margin's penalty."""
    has_label = (labels >= 0).any(1)
    if target.penalty is not None:
        losses = losses + torch.where(has_label, target.penalty, 0)
    log_z = log_z.clamp(max=_NEVER)
    return NormalizedLabels(losses, log_z, torch.ones_like(log_z), log_z, by_logit, has_label.sum(), weights, by_cosine)
