"""Replicas of a class table, one in each head group, and how they stay equal, or become equal again.

:class:`ReplicaExchange` sums each chunk's gradient over the groups before the update: replicas are equal bit for bit.
:class:`ReplicaAveraging` lets them step by themselves and averages them every few steps: local SGD of the head groups.

In between, a group's replica takes the gradient of its own samples' mean loss. An average takes the rows that took
part in a step since the last one, which are the same on all replicas, and the optimizer's state with them (Yu et al.,
ICML 2019, arXiv:1905.03817), after which replicas are equal bit for bit.

It may come late: groups then keep going while the network adds up, and take in the others' differences some steps
after they were read (W ← W + mean − own, as in Paddle's Geo-SGD, which divides differences by the number of trainers
too). Averages of differences and of rows are the same then, and need no copy of the rows as they were.

A further exchange is a class here and its line in :meth:`ReplicaOptions.make`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import Work

from plsc.arguments import as_integer
from plsc.errors import UsageError
from plsc.head.backends.torch_backend import rounding_bits, write_rows
from plsc.head.class_table import Chunk, ClassRows, ClassTable, OptimizerState
from plsc.head.low_precision import Rounding
from plsc.head.storage import TableStorage
from plsc.parallel.collectives import all_reduce_sum, all_reduce_sum_async
from plsc.parallel.mesh import Mesh

_CHUNK_BYTES = 16 << 20  # of the values that are averaged at a time
_SALT = 0x5BD1E995  # random bits other than those of the update of the same number


@dataclass(frozen=True)
class ReplicaOptions:
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

    def check(self, storage: TableStorage, *, updates: bool = True, clips: bool = False) -> None:
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

    def make(self, table: ClassTable, replicas: Mesh) -> "ReplicaExchange":
        """The exchange between ``replicas``, the ranks that hold the same shard."""
        kind = ReplicaAveraging if self.averages and replicas.world_size > 1 else ReplicaExchange
        return kind(table, replicas, self)


@dataclass(frozen=True)
class Averages:
    """What all averages of an optimizer's steps have in common: its state, and how rows and state are rounded.

    ``seed`` and ``step``, the number of the update, key the random bits; equal on all replicas.
    """

    state: OptimizerState
    rounding: Rounding
    seed: int
    step: int


class ReplicaExchange:
    """Replicas of one shard whose gradients are summed, chunk by chunk, while they are float32 or float64.

    Args:
        table: this rank's rows.
        replicas: the ranks that hold the same shard.
        options: of the exchange.

    Attributes:
        steps_apart: whether replicas step by their own gradients, and part.
        sent_bytes: that this rank gave to averages so far.
    """

    steps_apart = False

    def __init__(self, table: ClassTable, replicas: Mesh, options: ReplicaOptions) -> None:
        self._table, self._replicas, self.options = table, replicas, options
        self.sent_bytes = 0

    @property
    def sums(self) -> bool:
        """Whether gradients have to be summed before the update."""
        return self._replicas.world_size > 1 and not self.steps_apart

    @property
    def loss_factor(self) -> int:
        """Of a group's part of the mean loss, to be the mean that its replica follows."""
        return self._replicas.world_size if self.steps_apart else 1

    @property
    def overlaps(self) -> bool:
        """True if a chunk is summed over the replicas while the next is computed, and is updated after that.

        Tables that do not lie on the device store a chunk when the next is asked for: it has to be updated by then.
        """
        return self.sums and self._table.is_resident

    def summed(self, chunks: Iterator[tuple[Chunk, Tensor]]) -> Iterator[tuple[Chunk, Tensor]]:
        """``chunks`` with their gradients summed over the replicas. Replicas call."""
        if self.overlaps:
            return _summed_asynchronously(chunks, self._replicas)
        return ((chunk, all_reduce_sum(gradient, self._replicas)) for chunk, gradient in chunks)

    def record(self, classes: Tensor | None) -> None:
        """Record that a step updates local ``classes`` (None: all), the same on all replicas."""

    def after_step(self, averages: Averages) -> None:
        """Count a step, a skipped one too: what is averaged at one changes no mean. Replicas call."""

    def finish(self, averages: Averages) -> None:
        """Make the replicas equal now, and count the period from here. Replicas call."""

    def settle(self) -> None:
        """Make the replicas equal now, as after the last step, before classes move or go. Replicas call."""


def _summed_asynchronously(chunks: Iterator[tuple[Chunk, Tensor]], mesh: Mesh) -> Iterator[tuple[Chunk, Tensor]]:
    """Sum each chunk's gradient over ``mesh`` while the caller updates the one before and the next is computed."""
    summing: tuple[Chunk, Tensor, Work] | None = None
    for chunk, gradient in chunks:
        summed = gradient if gradient.is_cuda else gradient.clone()  # a CPU's backend overwrites it by the next
        before, summing = summing, (chunk, summed, all_reduce_sum_async(summed, mesh))
        if before is not None:
            yield _waited_for(*before)
    if summing is not None:
        yield _waited_for(*summing)


def _waited_for(chunk: Chunk, gradient: Tensor, work: Work) -> tuple[Chunk, Tensor]:
    work.wait()
    return chunk, gradient


@dataclass(frozen=True)
class _Late:
    """An average under way: values ``own`` (rows, columns) as they were read, and their sum over the replicas."""

    classes: Tensor | None
    own: Tensor
    total: Tensor
    work: Work


class ReplicaAveraging(ReplicaExchange):
    """Replicas that step by themselves and are averaged; see :class:`ReplicaExchange` for the arguments."""

    steps_apart = True

    def __init__(self, table: ClassTable, replicas: Mesh, options: ReplicaOptions) -> None:
        super().__init__(table, replicas, options)
        self._changed: list[Tensor | None] = []  # classes of the steps since the last average was read
        self._steps = 0  # since then
        self._late: _Late | None = None
        self._newest: Averages | None = None  # of the last step

    def summed(self, chunks: Iterator[tuple[Chunk, Tensor]]) -> Iterator[tuple[Chunk, Tensor]]:
        """``chunks`` as they are: a replica steps by its own."""
        return chunks

    def record(self, classes: Tensor | None) -> None:
        """See :meth:`ReplicaExchange.record`."""
        self._changed.append(classes)

    @torch.no_grad()
    def after_step(self, averages: Averages) -> None:
        """Count a step; take in an average that was under way, and begin the next, where it is time. Replicas call."""
        self._steps, self._newest = self._steps + 1, averages
        if self._late is not None and self._steps >= self.options.staleness:
            self._take_in(averages)
        if self._steps < self.options.averaging_period:
            return
        if self.options.staleness == 0:
            self._average(averages)
        else:
            self._begin(averages)
        self._steps = 0

    @torch.no_grad()
    def finish(self, averages: Averages) -> None:
        """See :meth:`ReplicaExchange.finish`."""
        if self._late is not None:
            self._take_in(averages)
        self._average(averages)
        self._steps = 0

    def settle(self) -> None:
        """See :meth:`ReplicaExchange.settle`."""
        if self._newest is not None:
            self.finish(self._newest)

    def _average(self, averages: Averages) -> None:
        for chunk in self._chunks(self._classes(), averages.state):
            own = _values(chunk, averages)
            self.sent_bytes += own.nbytes
            _store(chunk, own, self._mean(all_reduce_sum(own.clone(), self._replicas)), averages, self._table)

    def _begin(self, averages: Averages) -> None:
        """Read what has changed, and begin to add it up: in host memory, in one piece.

        gloo has few threads. Many pieces would stand before the collectives of the steps that go on.
        """
        classes, shape = self._classes(), self._table.shape
        if classes is None and shape.capacity:  # more may have come when this average comes in
            classes = torch.arange(shape.rows // shape.centers, device=self._replicas.device)
        parts = [_values(chunk, averages).cpu() for chunk in self._chunks(classes, averages.state)]
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
            _store(chunk, late.own[rows].to(device), mean[rows].to(device), averages, self._table)

    def _mean(self, total: Tensor) -> Tensor:
        return total.div_(self._replicas.world_size)

    def _classes(self) -> Tensor | None:
        """The classes that have changed since the last call; None: all."""
        changed, self._changed = self._changed, []
        sets = [classes for classes in changed if classes is not None]
        if len(sets) < len(changed):
            return None
        return torch.cat(sets).unique() if sets else torch.empty(0, dtype=torch.int64)

    def _chunks(self, classes: Tensor | None, state: OptimizerState) -> Iterator[Chunk]:
        """Give the rows of ``classes`` with their state, and store what the caller makes of each chunk."""
        columns = self._table.parameter.shape[1] * self._table.centers * (1 + len(state.tables))
        size = max(_CHUNK_BYTES // (4 * columns), 1)  # the same on all replicas
        if classes is None:
            yield from self._table.rows_again(None, [], state).chunks(size)
            self._table.norms_are_current()
            return
        for part in classes.split(size) if classes.numel() else ():
            fetched: list[ClassRows] = [self._table.rows(part, training=True)]
            yield from self._table.rows_again(part, fetched, state).chunks(size)
            self._table.norms_are_current()


def average_bytes(head_rows: int, dim: int, tables: int, itemsize: int = 4) -> int:
    """Bytes that a rank gives to an average of so many rows, with ``tables`` of optimizer state."""
    return head_rows * dim * (1 + tables) * itemsize


def _values(chunk: Chunk, averages: Averages) -> Tensor:
    """Copy a chunk's rows and the rows of its state side by side, (n, D·(1 + tables)), float32 or float64."""
    dtype = torch.promote_types(chunk.weight.dtype, torch.float32)
    state = averages.state.of(chunk)
    return torch.cat([chunk.weight.to(dtype), *(table.read(chunk.index, dtype) for table in state.values())], dim=1)


def _store(chunk: Chunk, own: Tensor, mean: Tensor, averages: Averages, table: ClassTable) -> None:
    """Move a chunk's rows and state by ``mean`` − ``own``, but for those that no update changes.

    What has not changed since ``own`` was read becomes the mean itself, to the last bit: the same on all replicas.
    Second moments, which decay meanwhile, must not become negative.
    """
    now = _values(chunk, averages)
    moved = torch.where(now == own, mean, now + (mean - own))
    weight, *states = moved.split(chunk.weight.shape[1], dim=1)
    tables = averages.state.of(chunk)
    bits = rounding_bits(chunk, tables, averages.seed ^ _SALT, averages.step, table.first_row)
    with nullcontext() if table.kept is None else table.kept.kept(chunk, tables):
        write_rows(chunk, weight, bits, averages.rounding)
        for (name, rows), values in zip(tables.items(), states, strict=True):
            rows.write(chunk.index, values.clamp(min=0) if name == "second_moment" else values, bits)
