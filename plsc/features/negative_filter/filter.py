"""Negatives that are left out of a softmax because their classes lie too close to the label's: ``negative_filter``.

Close are classes, not samples: the cosine of two rows of the table. The filter of arcface_torch and UNICOM
(``interclass_filtering_threshold`` of their CombinedMarginLoss) compares a sample's own cosine with a class instead,
and gives a negative above it the logit 0 and no gradient, which is still 1 in the sum. That removes each sample's
hardest negatives, whatever they are. This one removes classes that are the same thing twice, as clusters of too large a
number and identities of merged data sets are, and lets hard negatives be.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head.backends.products import ChunkProducts
from plsc.head.class_table import Chunk
from plsc.head.global_batch import LocalTargetRows
from plsc.head.options import HeadFeature
from plsc.losses.margins import Margin
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead


@dataclass(frozen=True)
class NegativeFilterOptions(HeadFeature):
    """From which cosine of two rows on their classes are no negatives of each other.

    PyTorch makes the passes then, with one product more each and logits in memory, and K labels a sample cost as K
    samples do. Moves 2·b·K·D more of the table's numbers per rank.

    Attributes:
        negative_filter: a class that is as close to a label's, by the nearest pair of their sub-centres, is left out of
            the label's softmax. The choice is a constant: no gradient goes through it. None: all classes are negatives.
    """

    negative_filter: float | None = None

    @property
    def filters_negatives(self) -> bool:
        """See :attr:`HeadFeature.filters_negatives`."""
        return self.negative_filter is not None

    def check(self, margin: Margin) -> None:
        """UsageError where the limit is no cosine above 0, or ``margin`` has no label to compare a negative with."""
        limit = self.negative_filter
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, numbers.Real) or not 0 < float(limit) <= 1:
            raise UsageError(f"negative_filter is a cosine above 0 and at most 1, or None, not {limit!r}")
        if margin.separates_positives:
            raise UsageError(
                f"negative_filter compares negatives with the label of a sum, and {type(margin).__name__} has one sum "
                "for all labels: leave negative_filter out, or give another margin"
            )

    def attach(self, head: "ShardedHead") -> None:
        """See :meth:`HeadFeature.attach`."""
        if self.negative_filter is not None:
            head.softmax.negatives = self

    def of_batch(self, targets: Sequence[LocalTargetRows], mesh: Mesh) -> "NegativeFilter":
        """The filter of b samples with K labels, as b·K, each sample's labels side by side.

        Every row lies on one shard of ``mesh``; their sum is the row itself. Moves 2·b·K·centers·D numbers of the
        table's dtype per rank.
        """
        assert self.negative_filter is not None
        rows = all_reduce_sum(torch.stack([each.class_rows() for each in targets], dim=1).flatten(0, 1), mesh)
        norms = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64)
        limits = torch.where(norms > 0, self.negative_filter * norms, torch.inf)
        return NegativeFilter(rows, limits.to(torch.promote_types(rows.dtype, torch.float32)))


@dataclass(frozen=True)
class NegativeFilter:
    """The classes of B samples' labels, which a pass compares with every class that it visits.

    ``rows`` (B, centers, D) are those of the labels, in the table's dtype; ``limits`` (B, centers) are threshold·‖row‖,
    infinite where a sample has no label. A class is as close to another as the nearest pair of their centres.
    """

    rows: Tensor
    limits: Tensor

    def factors(self, products: ChunkProducts) -> list[Tensor]:
        """The rows (B, D) of each centre as factors, valid for a pass."""
        return [products.factor(f"filter {number}", rows) for number, rows in enumerate(self.rows.unbind(1))]

    def leave_out(
        self, z: Tensor, chunk: Chunk, weight: Tensor, factors: Sequence[Tensor], products: ChunkProducts
    ) -> None:
        """Set logits z (classes, B) of the chunk's classes to −inf where they are close; ``weight`` is a factor.

        No gradient goes through the choice.
        """
        inverse_norm = chunk.inverse_norm[:, None]
        for rows, limits in zip(factors, self.limits.unbind(1), strict=True):
            cos = products.multiply("filter", weight, rows.t()).mul_(inverse_norm)
            if chunk.table.centers > 1:
                cos = cos.view(-1, chunk.table.centers, cos.shape[1]).amax(1)
            z.masked_fill_(cos >= limits, -torch.inf)

    def with_others(self, others: "Sequence[NegativeFilter]") -> "NegativeFilter":
        """The filter of this batch and further ones of the same head."""
        every = [self, *others]
        return NegativeFilter(torch.cat([each.rows for each in every]), torch.cat([each.limits for each in every]))
