"""Replicas of a class table that step by themselves, and are averaged every few steps: local SGD of the head groups.

In between, a group's replica takes the gradient of its own samples' mean loss. An average may come late: groups then
keep going while the network adds up, and take in the others' differences some steps after they were read (W ← W + mean
− own, as in Paddle's Geo-SGD, which divides differences by the number of trainers too). Averages of differences and of
rows are the same then, and need no copy of the rows as they were.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.distributed import Work

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.head.class_table import ClassTable
from plsc.head.options import HeadFeature
from plsc.head.replica_exchange import Averages, PartingReplicas, move_rows, row_values
from plsc.head.storage import TableStorage
from plsc.parallel.collectives import all_reduce_sum_async
from plsc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead


@dataclass(frozen=True)
class ReplicaOptions(HeadFeature):
    """What replicas of a table exchange, where the mesh has head groups; ``plsc.ReplicaOptions``.

    Attributes:
        averaging_period: steps after which replicas that step by their own samples' gradients are averaged, weights
            and optimizer state; 1: they sum their gradients at every step, and stay equal.
        staleness: steps after which such an average comes in, at most ``averaging_period``; groups keep going
            meanwhile. 0: they wait for it. For tables that are not on the device, as it is added up in host memory.

    Raises:
        UsageError: a value is out of its range.
    """

    averaging_period: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        for name in ("averaging_period", "staleness"):
            object.__setattr__(self, name, as_integer(getattr(self, name), f"the head's {name}"))
        period, staleness = self.averaging_period, self.staleness
        if period < 1 or not 0 <= staleness <= period:
            raise UsageError(
                f"staleness is from 0 to averaging_period, and that at least 1, not {staleness} and {period}: an "
                "average would begin before the last one has come in"
            )

    @property
    def averages(self) -> bool:
        """Whether replicas step by themselves."""
        return self.averaging_period > 1 or self.staleness > 0

    def check_table(self, storage: TableStorage, *, updates: bool = True, clips: bool = False) -> None:
        """Refuse what does not go with averages.

        Args:
            storage: of the table.
            updates: the head's own optimizer updates it.
            clips: gradients of the table are clipped.

        Raises:
            UsageError: something does not.
        """
        if self.staleness and storage.placement == "device":
            raise UsageError('staleness is for tables in host memory: give placement="host" or "mmap:FILE", or 0')
        if self.averages and not updates:
            raise UsageError(
                f'averaging_period {self.averaging_period} averages after the head\'s own update: give update="fused"'
            )
        if self.averages and clips:
            self.refuse_clipping()

    def refuse_clipping(self) -> NoReturn:
        """Raise a UsageError: replicas step by themselves, each by another gradient."""
        raise UsageError(
            f"averaging_period {self.averaging_period} leaves replicas no common gradient to clip: clip the "
            "backbone's alone, or give averaging_period=1"
        )

    def attach(self, head: "ShardedHead") -> None:
        """See :meth:`HeadFeature.attach`."""
        storage = TableStorage.of(head.weight.dtype, head.momentum_dtype, head.placement)
        self.check_table(storage, updates=head.update == "fused")
        if self.averages and head.mesh.replicas.world_size > 1:
            head.softmax.exchange = ReplicaAveraging(head.softmax.table, head.mesh.replicas, self)


@dataclass(frozen=True)
class _Late:
    """An average under way: values ``own`` (rows, columns) as they were read, and their sum over the replicas."""

    classes: Tensor | None
    own: Tensor
    total: Tensor
    work: Work


class ReplicaAveraging(PartingReplicas):
    """Replicas that are averaged every few steps.

    Args:
        table, replicas: as :class:`PartingReplicas` takes them.
        options: of the averages.
    """

    def __init__(self, table: ClassTable, replicas: Mesh, options: ReplicaOptions) -> None:
        super().__init__(table, replicas)
        self._options = options
        self._steps = 0  # since the last average was read
        self._late: _Late | None = None

    @torch.no_grad()
    def after_step(self, averages: Averages) -> None:
        """Count a step; take in an average that was under way, and begin the next, where it is time. Replicas call."""
        super().after_step(averages)
        self._steps += 1
        if self._late is not None and self._steps >= self._options.staleness:
            self._take_in(averages)
        if self._steps < self._options.averaging_period:
            return
        if self._options.staleness == 0:
            self._average(averages)
        else:
            self._begin(averages)
        self._steps = 0

    @torch.no_grad()
    def finish(self, averages: Averages) -> None:
        """See :meth:`plsc.head.replica_exchange.ReplicaExchange.finish`."""
        if self._late is not None:
            self._take_in(averages)
        super().finish(averages)
        self._steps = 0

    def check_clipping(self) -> None:
        """See :meth:`plsc.head.replica_exchange.ReplicaExchange.check_clipping`."""
        self._options.refuse_clipping()

    def _begin(self, averages: Averages) -> None:
        """Read what has changed, and begin to add it up: in host memory, in one piece.

        gloo has few threads. Many pieces would stand before the collectives of the steps that go on.
        """
        classes, shape = self._classes(), self._table.shape
        if classes is None and shape.capacity:  # more may have come when this average comes in
            classes = torch.arange(shape.rows // shape.centers, device=self._replicas.device)
        parts = [row_values(chunk, averages).cpu() for chunk in self._chunks(classes, averages.state)]
        if not parts:
            return
        own = torch.cat(parts)
        total = own.clone()
        self.sent_bytes += own.nbytes
        self._late = _Late(classes, own, total, all_reduce_sum_async(total, self._replicas))

    def _take_in(self, averages: Averages) -> None:
        assert self._late is not None
        late, self._late = self._late, None
        late.work.wait()
        mean = self._mean(late.total)
        first = 0
        for chunk in self._chunks(late.classes, averages.state):
            rows = slice(first, first + len(chunk.weight))
            first = rows.stop
            device = chunk.weight.device
            move_rows(chunk, late.own[rows].to(device), mean[rows].to(device), averages, self._table)


def average_bytes(head_rows: int, dim: int, tables: int, itemsize: int = 4) -> int:
    """Bytes that a rank gives to an average of so many rows, with ``tables`` of optimizer state."""
    return head_rows * dim * (1 + tables) * itemsize
