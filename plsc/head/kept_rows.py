"""Rows of a class table that no update changes, and rows that one update is not to change."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from plsc.head.backends.torch_backend import Updater
    from plsc.head.class_table import Chunk  # which import this module
    from plsc.head.low_precision import RowState
    from plsc.head.update_rules import Update

COPIED_ROWS = 16384  # at a time, while they are updated


class KeptKeys(Protocol):
    """Which keys' rows are kept, in a table whose classes come and go; ``are_all``: no row trains."""

    are_all: bool

    def among(self, known: Callable[[Iterable[str]], NDArray[np.int64]]) -> NDArray[np.int64]:
        """The keys that are kept, whether they have a row or not; ``known`` gives those of names that it knows."""


class KeptClasses(Protocol):
    """Which classes' rows no update changes."""

    def by_number(self, num_classes: int, own: tuple[int, int], centers: int, device: torch.device) -> "KeptRows":
        """Those of a shard.

        Args:
            num_classes: of all ranks.
            own: (first, last + 1) of the shard's classes.
            centers: rows per class.
            device: that computes.
        """

    def by_key(self) -> KeptKeys:
        """Those of a table whose classes come and go."""


@dataclass(frozen=True)
class KeptRows:
    """Which of a shard's rows no update changes.

    Attributes:
        rows: (rows,) bool, on the device that computes.
        are_all: whether there is no other row.
    """

    rows: Tensor
    are_all: bool

    def set_classes(self, classes: NDArray[np.int64], centers: int) -> None:
        """Let the rows of the shard's ``classes`` (n,) be kept, and no others."""
        kept = np.zeros((len(self.rows) // centers, centers), dtype=bool)
        kept[classes] = True
        self.rows.copy_(torch.from_numpy(kept.ravel()))

    def in_chunk(self, chunk: "Chunk") -> Tensor:
        """Which of a chunk's rows (n·K,) are kept."""
        return self.rows[chunk.local_rows if chunk.table.is_copy else chunk.index]

    def kept(self, chunk: "Chunk", state: Mapping[str, "RowState"]) -> AbstractContextManager[None]:
        """:func:`kept_rows` of these."""
        return kept_rows(chunk, state, self.in_chunk(chunk))

    def updater(self, updater: "Updater") -> "Updater":
        """Return what updates a chunk as ``updater`` does, but for these rows."""

        def update_others(chunk: "Chunk", gradient: Tensor, state: Mapping[str, "RowState"], update: "Update") -> None:
            for part, rows in chunk.parts(COPIED_ROWS):
                with self.kept(rows, state):
                    updater(rows, gradient[part], state, update)

        return update_others


@contextmanager
def kept_rows(chunk: "Chunk", state: Mapping[str, "RowState"], kept: Tensor) -> Iterator[None]:
    """Give rows of a chunk, their norms and state back what they held, bit for bit, after the block.

    Args:
        chunk: of the table.
        state: the optimizer's tables.
        kept: which rows, or one value for all. They are not listed: how many there are is what only the device knows.
    """
    tables = [chunk.table.weight, chunk.table.inverse_norm]
    tables += [tensor for name, table in state.items() for tensor in table.tensors(name).values()]
    before = [table[chunk.index].clone() for table in tables]
    yield
    for table, values in zip(tables, before, strict=True):
        now = table[chunk.index]
        table[chunk.index] = torch.where(kept.view(-1, *[1] * (now.dim() - 1)), values, now)
