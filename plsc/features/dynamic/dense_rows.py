"""The rows of a shard whose classes come and go: dense, changed in place, with their norms and optimizer state."""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.errors import DataError
from plsc.features.dynamic.key_map import Keys
from plsc.head.class_table import ClassRows, ClassTable, class_range, renew_norms


class DenseRows:
    """Changes whole classes of ``table``, of which no update is under way. Numbers are those of the shard's classes."""

    def __init__(self, table: ClassTable) -> None:
        self._table = table

    def write(self, classes: Keys, values: Tensor, *, keeps_state: bool = False) -> None:
        """Store ``values`` (m, K, D) as the rows of ``classes`` (m,), with state of zeros unless it stays."""
        table = self._table
        table.forget_prefetched()
        table.inverse_norms()
        weight, norms, *state = table.row_tensors()
        rows = self._rows_of(classes)
        table.will_change(rows)
        weight[rows] = values.reshape(-1, weight.shape[1]).to(weight.device, weight.dtype)
        renew_norms(ClassRows(weight, norms), rows)
        for tensor in state if not keeps_state else ():
            tensor[rows] = 0
        table.norms_are_current()

    def move(self, sources: Keys, targets: Keys, count: int) -> None:
        """Let the classes ``targets`` (m,) be what ``sources`` (m,) are; all from ``count`` on become zeros."""
        table = self._table
        table.forget_prefetched()
        table.inverse_norms()
        to, of = self._rows_of(targets), self._rows_of(sources)
        first, tensors = count * table.centers, table.row_tensors()
        table.will_change(torch.cat([to, torch.arange(first, len(tensors[0]), device=to.device)]))
        for tensor in tensors:
            tensor[to] = tensor[of]
            tensor[first:] = 0
        table.norms_are_current()

    def _rows_of(self, classes: Keys) -> Tensor:
        numbers = torch.from_numpy(classes).to(self._table.row_tensors()[0].device)
        return ClassRows(torch.empty(0), torch.empty(0), self._table.centers).rows_of(numbers)


def evenly_placed(number: int, counts: Sequence[int]) -> tuple[NDArray[np.int32], Keys, list[int]]:
    """Where new classes come to, each to the shard that has the fewest.

    Args:
        number: of new classes.
        counts: classes that each shard has.

    Returns:
        The shard of each (number,), its number there (number,), and the counts with them.
    """
    shards, classes, after = np.empty(number, np.int32), np.empty(number, np.int64), list(counts)
    heap = [(count, shard) for shard, count in enumerate(counts)]
    heapq.heapify(heap)
    for place in range(number):
        count, shard = heap[0]
        shards[place], classes[place] = shard, count
        heapq.heapreplace(heap, (count + 1, shard))
        after[shard] += 1
    return shards, classes, after


def shares(total: int, shards: int, capacity: int, had: Tensor | None = None) -> list[int]:
    """How many of ``total`` classes each of the shards has that are read from a checkpoint.

    Args:
        total: classes.
        shards: of this run.
        capacity: of a shard.
        had: classes of each shard whose rows are where they were, (shards,); None, or of another number of shards: rows
            come anew, and the shards get even shares.

    Raises:
        DataError: such shards cannot be.
    """
    if had is None or had.numel() != shards:
        return [stop - first for first, stop in (class_range(total, shard, shards) for shard in range(shards))]
    counts: list[int] = had.long().reshape(-1).tolist()
    if min(counts) < 0 or max(counts) > capacity or sum(counts) != total:
        raise DataError("these are no keys of a class table in these files; use another copy")
    return counts
