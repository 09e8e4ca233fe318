"""The rows of the class table that a pass visits, and the order in which it does."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Some consecutive classes of those a pass visits: positions [start, stop), and their rows of the table.

    ``index`` selects the rows in ``table``. The rows themselves are read when asked for, since kernels that take
    the table and the index need no copy of them.
    """

    start: int
    stop: int
    index: slice | Tensor
    table: "ClassRows"

    def parts(self, rows: int) -> "Iterator[tuple[slice, Chunk]]":
        """The chunk cut into pieces of at most ``rows`` rows of one class each, and where they are in the chunk."""
        if isinstance(self.index, Tensor):
            first, count = 0, len(self.index)
        else:
            first, stop, _ = self.index.indices(self.table.weight.shape[0])
            count = stop - first
        for start in range(0, count, max(rows, 1)):
            part = slice(start, min(start + rows, count))
            index = self.index[part] if isinstance(self.index, Tensor) else slice(first + part.start, first + part.stop)
            yield part, Chunk(self.start + part.start, self.start + part.stop, index, self.table)

    @cached_property
    def weight(self) -> Tensor:
        """The chunk's rows (n·K, D): a view of consecutive rows, a copy of scattered ones."""
        return self.table.weight[self.index]

    @cached_property
    def inverse_norm(self) -> Tensor:
        """Their 1/norms (n·K,)."""
        return self.table.inverse_norm[self.index]

    @property
    def local_rows(self) -> Tensor:
        """The rows' numbers (n·K,) in this rank's shard, wherever ``table`` keeps them."""
        return self.table.local_rows(self.index)


@dataclass(frozen=True)
class ClassRows:
    """A rank's class table: ``weight`` (C_local·K, D) with 1/norms (C_local·K,), K sub-centres to a class.

    ``selected`` holds the local classes to visit, sorted (int64), or None for all of them.
    """

    weight: Tensor
    inverse_norm: Tensor
    centers: int = 1
    selected: Tensor | None = None

    @property
    def num_classes(self) -> int:
        """How many classes a pass visits."""
        return self.weight.shape[0] // self.centers if self.selected is None else self.selected.numel()

    def positions(self, local_labels: Tensor) -> Tensor:
        """Where each label (B,) stands among the visited classes, −1 where it does not. Labels may lie outside."""
        count = self.weight.shape[0] // self.centers
        owned = (local_labels >= 0) & (local_labels < count)
        if self.selected is None:
            return torch.where(owned, local_labels, -1)
        if self.selected.numel() == 0:
            return torch.full_like(local_labels, -1)
        place = torch.searchsorted(self.selected, local_labels).clamp(max=self.selected.numel() - 1)
        return torch.where(owned & (self.selected[place] == local_labels), place, -1)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The visited classes in order, ``size`` at a time."""
        for start in range(0, self.num_classes, size):
            stop = min(start + size, self.num_classes)
            yield Chunk(start, stop, self.row_index(start, stop), self)

    def row_index(self, start: int, stop: int) -> slice | Tensor:
        """Which table rows the classes at positions [start, stop) have."""
        if self.selected is None:
            return slice(start * self.centers, stop * self.centers)
        return self.rows_of(self.selected[start:stop])

    def picked(self, index: Tensor) -> "ClassRows":
        """Rows ``index`` (n,) alone, in that order."""
        return ClassRows(self.weight[index], self.inverse_norm[index], self.centers)

    def local_rows(self, index: slice | Tensor) -> Tensor:
        """The numbers that rows ``index`` of ``weight`` have in this rank's shard."""
        if isinstance(index, Tensor):
            return index
        start, stop, _ = index.indices(self.weight.shape[0])
        return torch.arange(start, stop, device=self.weight.device)

    def rows_of(self, classes: Tensor) -> Tensor:
        """The table rows (n·K,) of local classes (n,)."""
        if self.centers == 1:
            return classes
        return (classes[:, None] * self.centers + torch.arange(self.centers, device=classes.device)).flatten()
