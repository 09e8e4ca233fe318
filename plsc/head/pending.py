"""Batches that wait for the table's update, and the second pass over all of them at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.losses.class_rows import Chunk, ClassRows
from plsc.losses.softmax import Batch, second_pass


@dataclass
class Pending:
    """What one forward leaves for the update: pass 2 needs the batch, log Z and the loss's derivative.

    The batch is this rank's head group's; ``largest_group`` is the number of samples in the largest group's.
    ``gradient`` is the derivative that backward() brought for the mean loss, a scalar tensor; ``version`` is the
    table's when the batch was seen, and ``rows`` what pass 1 saw of it.
    """

    batch: Batch
    labels: Tensor
    selected: Tensor | None
    log_z: Tensor
    scale: Tensor
    target_pull: Tensor
    version: int
    largest_group: int
    rows: ClassRows
    gradient: Tensor | None = None


def gradient_chunks(
    rows: ClassRows, member: Tensor | None, pending: list[Pending], first_class: int, chunk_size: int
) -> Iterator[tuple[Chunk, Tensor]]:
    """Pass 2 over the concatenation of ``pending``, so that table traffic is paid once, however many they are.

    ``rows`` and ``member`` are those of :func:`visited`; ``first_class`` is the shard's first.
    """
    batch = Batch(
        torch.cat([p.batch.features for p in pending]),
        rows.positions(torch.cat([p.labels for p in pending]) - first_class),
        torch.cat([p.batch.phi for p in pending]),
        pending[0].batch.margin,
        _states(pending),
    )
    log_z = torch.cat([p.log_z for p in pending])
    scale = torch.cat([p.scale * _gradient_of(p) for p in pending])
    target_pull = torch.cat([p.target_pull * _gradient_of(p) for p in pending])
    return second_pass(rows, batch, log_z, scale, target_pull, chunk_size, member)


def visited(pending: list[Pending]) -> tuple[Tensor | None, Tensor | None]:
    """The classes that any batch visited (None: all), and which of them each sample's softmax held (None: all)."""
    sets = [p.selected for p in pending if p.selected is not None]
    if not sets:
        return None, None
    if len(sets) == 1:
        return sets[0], None
    union = torch.cat(sets).unique()
    held = [torch.isin(union, chosen) for chosen in sets]
    columns = [column[:, None].expand(-1, len(p.log_z)) for column, p in zip(held, pending, strict=True)]
    return union, torch.cat(columns, dim=1)


def _states(pending: list[Pending]) -> dict[str, Tensor]:
    """The margin's statistics as each sample (B,) met them: they move from one micro-batch to the next."""
    return {
        name: torch.cat([p.batch.state[name].expand(len(p.log_z)) for p in pending]) for name in pending[0].batch.state
    }


def _gradient_of(pending: Pending) -> Tensor:
    assert pending.gradient is not None
    return pending.gradient.double()
