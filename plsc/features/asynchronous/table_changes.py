"""Changes of a class table's rows: what this rank's updates change is recorded, what other ranks changed is added.

For replicas that step by themselves and send each other what they have changed (asynchronous training). Sums do not
depend on their order but for rounding, which :meth:`TableChanges.make_equal` takes away when nothing is under way.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plsc.head.backends.torch_backend import Updater, rounding_bits, write_rows
from plsc.head.class_table import Chunk, ClassTable
from plsc.head.low_precision import RowState
from plsc.head.replica_exchange import Averages, PartingReplicas
from plsc.head.update_rules import Update
from plsc.parallel.mesh import Mesh

_SALT = 0x2545F491  # random bits other than those of updates and of averages
_SETS = 64  # of changed classes that are kept before they are joined


class TableChanges(PartingReplicas):
    """The changes of one table.

    Args:
        table: this rank's replica, of all classes.
        replicas: the ranks that hold one.
        averages: gives what averages need now.
    """

    def __init__(self, table: ClassTable, replicas: Mesh, averages: Callable[[], Averages]) -> None:
        super().__init__(table, replicas)
        self._averages = averages
        self._recorded: list[tuple[Tensor, Tensor]] = []
        self._added = 0
        self._dtype = torch.promote_types(table.parameter.dtype, torch.float32)

    def recording(self, updater: Updater) -> Updater:
        """Return what updates a chunk as ``updater`` does, and records what that has changed."""

        def update(chunk: Chunk, gradient: Tensor, state: Mapping[str, RowState], step: Update) -> None:
            before = chunk.table.weight[chunk.index].to(self._dtype, copy=True)
            updater(chunk, gradient, state, step)
            change = chunk.table.weight[chunk.index].to(self._dtype) - before
            if self._table.kept is not None:  # whose rows are put back behind the update
                change.masked_fill_(self._table.kept.in_chunk(chunk)[:, None], 0)
            self._recorded.append((chunk.local_rows.cpu(), change.cpu()))

        return update

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self._table.shape.rows

    def pop_recorded(self) -> tuple[Tensor | None, Tensor]:
        """Take what was recorded since the last call: distinct rows (n,), None for all, and their changes (n, D).

        Changes are float32, or float64 of a float64 table.
        """
        recorded, self._recorded = self._recorded, []
        if not recorded:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self._table.shape.dim, dtype=self._dtype)
        rows, changes = (torch.cat(parts) for parts in zip(*recorded, strict=True))
        every = len(rows) == self.rows  # a pass visits rows in order
        self.record(None if every else self._classes_with(rows))
        return None if every else rows, changes

    @torch.no_grad()
    def add(self, rows: Tensor | None, changes: Tensor) -> None:
        """Add another rank's ``changes`` (n, D) to ``rows`` (n,), all of their classes' in order, or to all rows."""
        if not len(changes):
            return
        classes = None if rows is None else self._classes_with(rows)
        self.record(classes)
        averages, first = self._averages(), 0
        self._added += 1
        for chunk in self._chunks(classes, averages.state):
            stop = first + len(chunk.weight)
            self._add_to(chunk, changes[first:stop], averages)
            first = stop

    def _add_to(self, chunk: Chunk, change: Tensor, averages: Averages) -> None:
        weight = chunk.weight.to(self._dtype) + change.to(chunk.weight.device)
        bits = rounding_bits(chunk, {}, averages.seed ^ _SALT, self._added, self._table.first_row)
        write_rows(chunk, weight, bits, averages.rounding)

    def record(self, classes: Tensor | None) -> None:
        """See :meth:`ReplicaExchange.record`. Of many sets the union is kept: many steps may pass until it is taken."""
        super().record(classes)
        if len(self._changed) > _SETS:
            self._changed = [self._classes()]

    def make_equal(self) -> None:
        """Make replicas equal that differ by rounding; the optimizer's state becomes their mean. Replicas call.

        Takes the rows that were changed on any of them since the last call: all have added the same changes.
        """
        self.finish(self._averages())

    def _classes_with(self, rows: Tensor) -> Tensor:
        return (rows[:: self._table.centers] // self._table.centers).to(self._replicas.device)
