"""The losses of several class tables, each over the samples of its own data."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plsc.data.loader import PartOfBatch, TrainLoader
from plsc.features.tables.sharded_heads import losses_of
from plsc.train.micro_batches import ClassLoss, LossOfTable, MicroBatch


class TableBatch(NamedTuple):
    """A class table's part of a micro-batch: which ``rows`` (n,) of this rank's, with ``labels`` of its own classes.

    ``sizes`` are the samples of each rank.
    """

    rows: Tensor
    labels: Tensor
    sizes: Sequence[int]


class TableLosses(ClassLoss):
    """See :class:`plsc.train.micro_batches.ClassLoss`; :class:`plsc.ShardedHeads` sums the same losses."""

    def split(self, labels: Tensor, loader: TrainLoader) -> list[TableBatch]:
        """Split ``labels`` of all tables' classes, and pin what a GPU is to read where they are pinned."""
        return self._split(labels, loader.parts)

    def losses(
        self,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        batch: MicroBatch,
        group: Sequence[MicroBatch],
    ) -> list[LossOfTable]:
        """See :meth:`ClassLoss.losses`."""
        batches, of_ranks, shares = {}, {}, {}
        for number, (table, part) in enumerate(zip(self.tables, batch.split, strict=True)):
            if any(part.sizes):
                rows = part.rows.to(embeddings.device, non_blocking=True)
                batches[table.name], of_ranks[table.name] = (embeddings[rows], part.labels), part.sizes
                shares[table.name] = number, sum(part.sizes) / sum(sum(each.split[number].sizes) for each in group)
        found = losses_of({table.name: table.head for table in self.tables}, batches, of_ranks)
        return [LossOfTable(shares[name][0], loss, shares[name][1]) for name, loss in found.items()]

    def fetch_rows(self, labels: Tensor, loader: TrainLoader, upcoming: MicroBatch | None) -> None:
        """See :meth:`ClassLoss.fetch_rows`."""
        batches = self._split(labels, loader.next_parts or []) if upcoming is None else upcoming.split
        for table, (_, own, of_ranks) in zip(self.tables, batches, strict=True):
            if table.head.placement != "device" and any(of_ranks):
                table.head.prefetch(own, of_ranks)

    def _split(self, labels: Tensor, parts: Sequence[PartOfBatch]) -> list[TableBatch]:
        found = []
        for part, table in zip(parts, self.tables, strict=True):
            rows = _pinned_as(labels, torch.from_numpy(part.rows))
            own = labels[rows]
            own = _pinned_as(labels, torch.where(own >= 0, own - table.first_class, -1))
            found.append(TableBatch(rows, own, part.sizes))
        return found


def _pinned_as(labels: Tensor, values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=labels.is_pinned()).copy_(values)
