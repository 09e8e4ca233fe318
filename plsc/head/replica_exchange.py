"""Replicas of a class table, one in each head group, and how they stay equal, or become equal again.

:class:`ReplicaExchange` sums each chunk's gradient over the groups before the update: replicas are equal bit for bit.
:class:`PartingReplicas` lets them step by themselves; when they meet, the rows that took part in a step since the last
time, which are the same on all replicas, become their mean, and the optimizer's state with them (Yu et al., ICML 2019,
arXiv:1905.03817). Replicas are equal bit for bit after that.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from plsc.head.backends.torch_backend import rounding_bits, write_rows
from plsc.head.class_table import Chunk, ClassRows, ClassTable, OptimizerState
from plsc.head.low_precision import Rounding
from plsc.parallel.collectives import all_reduce_sum, all_reduce_sum_async
from plsc.parallel.mesh import Mesh

_CHUNK_BYTES = 16 << 20  # of the values that are averaged at a time
_SALT = 0x5BD1E995  # random bits other than those of the update of the same number


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

    Attributes:
        steps_apart: whether replicas step by their own gradients, and part.
        sent_bytes: that this rank gave to averages so far.
    """

    steps_apart = False

    def __init__(self, table: ClassTable, replicas: Mesh) -> None:
        self._table, self._replicas = table, replicas
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

    def meet(self) -> None:
        """Make the replicas equal now, as after the last step, before classes move or go. Replicas call."""

    def check_clipping(self) -> None:
        """Raise UsageError where replicas have no common gradient to clip."""


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


class PartingReplicas(ReplicaExchange):
    """Replicas that step by themselves, and become their mean where they meet; arguments of ReplicaExchange."""

    steps_apart = True

    def __init__(self, table: ClassTable, replicas: Mesh) -> None:
        super().__init__(table, replicas)
        self._changed: list[Tensor | None] = []  # classes of the steps since the last average was read
        self._newest: Averages | None = None  # of the last step

    def summed(self, chunks: Iterator[tuple[Chunk, Tensor]]) -> Iterator[tuple[Chunk, Tensor]]:
        """``chunks`` as they are: a replica steps by its own."""
        return chunks

    def record(self, classes: Tensor | None) -> None:
        """See :meth:`ReplicaExchange.record`."""
        self._changed.append(classes)

    def after_step(self, averages: Averages) -> None:
        """See :meth:`ReplicaExchange.after_step`."""
        self._newest = averages

    @torch.no_grad()
    def finish(self, averages: Averages) -> None:
        """See :meth:`ReplicaExchange.finish`."""
        self._average(averages)

    def meet(self) -> None:
        """See :meth:`ReplicaExchange.meet`."""
        if self._newest is not None:
            self.finish(self._newest)

    def _average(self, averages: Averages) -> None:
        for chunk in self._chunks(self._classes(), averages.state):
            own = row_values(chunk, averages)
            self.sent_bytes += own.nbytes
            move_rows(chunk, own, self._mean(all_reduce_sum(own.clone(), self._replicas)), averages, self._table)

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


def row_values(chunk: Chunk, averages: Averages) -> Tensor:
    """Copy a chunk's rows and the rows of its state side by side, (n, D·(1 + tables)), float32 or float64."""
    dtype = torch.promote_types(chunk.weight.dtype, torch.float32)
    state = averages.state.of(chunk)
    return torch.cat([chunk.weight.to(dtype), *(table.read(chunk.index, dtype) for table in state.values())], dim=1)


def move_rows(chunk: Chunk, own: Tensor, mean: Tensor, averages: Averages, table: ClassTable) -> None:
    """Move a chunk's rows and state by ``mean`` − ``own``, but for those that no update changes.

    What has not changed since ``own`` was read becomes the mean itself, to the last bit: the same on all replicas.
    Second moments, which decay meanwhile, must not become negative.
    """
    now = row_values(chunk, averages)
    moved = torch.where(now == own, mean, now + (mean - own))
    weight, *states = moved.split(chunk.weight.shape[1], dim=1)
    tables = averages.state.of(chunk)
    bits = rounding_bits(chunk, tables, averages.seed ^ _SALT, averages.step, table.first_row)
    with nullcontext() if table.kept is None else table.kept.kept(chunk, tables):
        write_rows(chunk, weight, bits, averages.rounding)
        for (name, rows), values in zip(tables.items(), states, strict=True):
            rows.write(chunk.index, values.clamp(min=0) if name == "second_moment" else values, bits)
