"""Batches that wait for the table's update, and the second pass over all of them at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plsc.losses.class_rows import Chunk, ClassRows
from plsc.losses.softmax import Batch, second_pass

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead


@dataclass
class Pending:
    """What one forward leaves for the update: pass 2 needs the batch, log Z and the loss's derivative.

    ``gradient`` is the derivative that backward() brought for the mean loss, a scalar tensor; ``version`` is the
    table's when the batch was seen.
    """

    batch: Batch
    labels: Tensor
    selected: Tensor | None
    log_z: Tensor
    scale: Tensor
    target_pull: Tensor
    version: int
    gradient: Tensor | None = None


def gradient_chunks(head: "ShardedHead", pending: list[Pending]) -> Iterator[tuple[Chunk, Tensor]]:
    """Pass 2 over the concatenation of ``pending``, so that table traffic is paid once, however many they are."""
    rows, member = _union(head, pending)
    labels = torch.cat([p.labels for p in pending]) - head.class_range[0]
    batch = Batch(
        torch.cat([p.batch.features for p in pending]),
        rows.positions(labels),
        torch.cat([p.batch.phi for p in pending]),
        head.margin,
        _states(pending),
    )
    log_z = torch.cat([p.log_z for p in pending])
    scale = torch.cat([p.scale * _gradient_of(p) for p in pending])
    target_pull = torch.cat([p.target_pull * _gradient_of(p) for p in pending])
    return second_pass(rows, batch, log_z, scale, target_pull, head.chunk_size(len(labels)), member)


def _union(head: "ShardedHead", pending: list[Pending]) -> tuple[ClassRows, Tensor | None]:
    """The classes that any batch visited, and which of them each sample's softmax held."""
    sets = [p.selected for p in pending if p.selected is not None]
    if not sets:
        return head.rows(None), None
    if len(sets) == 1:
        return head.rows(sets[0]), None
    union = torch.cat(sets).unique()
    columns = [
        torch.isin(union, p.selected)[:, None].expand(-1, len(p.log_z))
        for p in pending
        if p.selected is not None
    ]
    return head.rows(union), torch.cat(columns, dim=1)


def _states(pending: list[Pending]) -> dict[str, Tensor]:
    """The margin's statistics as each sample (B,) met them: they move from one micro-batch to the next."""
    return {
        name: torch.cat([p.batch.state[name].expand(len(p.log_z)) for p in pending])
        for name in pending[0].batch.state
    }


def _gradient_of(pending: Pending) -> Tensor:
    assert pending.gradient is not None
    return pending.gradient.double()
