"""Classes whose rows stay as they are while others train: ``frozen_rows``."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.errors import DataError, UsageError
from plsc.head.key_map import KeyMap, Keys
from plsc.regular_files import map_npy, open_regular

if TYPE_CHECKING:
    from plsc.head.backends.torch_backend import Updater
    from plsc.head.class_table import Chunk  # which import this module
    from plsc.head.low_precision import RowState
    from plsc.head.update_rules import Update

_NO_KEYS = (
    'frozen_rows of a table whose classes come and go is "all", FILE.txt of their names, one a line, or a list of '
    "keys: classes have no numbers"
)
COPIED_ROWS = 16384  # at a time, while they are updated
_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class FrozenRows:
    """Which of a shard's rows are frozen.

    Attributes:
        rows: (rows,) bool, on the device that computes.
        are_all: whether there is no other row.
    """

    rows: Tensor
    are_all: bool

    @classmethod
    def of(
        cls,
        value: str | Sequence[int] | Tensor,
        num_classes: int,
        own: tuple[int, int],
        centers: int,
        device: torch.device,
    ) -> "FrozenRows":
        """The rows of ``value``'s classes among the shard's.

        Args:
            value: "all", "START:STOP" (STOP is the first that is not frozen), FILE.npy of class numbers, or these.
            num_classes: of all ranks.
            own: (first, last + 1) of the shard's classes.
            centers: rows per class.
            device: that computes.

        Raises:
            UsageError: it is none of these, or a class does not exist.
            DataError: the file cannot be read.
        """
        first, stop = own
        frozen = np.zeros(stop - first, dtype=bool)
        if isinstance(value, str) and value == "all":
            frozen[:] = True
        elif isinstance(value, str) and (bounds := _RANGE.fullmatch(value)):
            start, end = int(bounds[1]), int(bounds[2])
            if not start <= end <= num_classes:
                raise UsageError(f"frozen_rows = {value} is no range of the head's {num_classes} classes")
            frozen[max(start - first, 0) : max(end - first, 0)] = True
        else:
            classes = _numbers(value, num_classes)
            frozen[classes[(classes >= first) & (classes < stop)] - first] = True
        rows = torch.from_numpy(frozen).repeat_interleave(centers).to(device)
        return cls(rows, bool(frozen.all()))

    def set_classes(self, classes: NDArray[np.int64], centers: int) -> None:
        """Let the rows of the shard's ``classes`` (n,) be frozen, and no others."""
        frozen = np.zeros((len(self.rows) // centers, centers), dtype=bool)
        frozen[classes] = True
        self.rows.copy_(torch.from_numpy(frozen.ravel()))

    def in_chunk(self, chunk: "Chunk") -> Tensor:
        """Which of a chunk's rows (n·K,) are frozen."""
        return self.rows[chunk.local_rows if chunk.table.is_copy else chunk.index]

    def kept(self, chunk: "Chunk", state: Mapping[str, "RowState"]) -> AbstractContextManager[None]:
        """:func:`kept_rows` of the frozen ones."""
        return kept_rows(chunk, state, self.in_chunk(chunk))

    def updater(self, updater: "Updater") -> "Updater":
        """Return what updates a chunk as ``updater`` does, but for frozen rows."""

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


class FrozenKeys:
    """Which keys' rows are frozen, in a table whose classes come and go.

    Args:
        value: "all"; FILE.txt of classes' names, one a line; or keys.

    Attributes:
        are_all: whether no row trains.

    Raises:
        UsageError: it is none of these.
        DataError: the file cannot be read.
    """

    def __init__(self, value: str | Sequence[int] | Tensor) -> None:
        self.are_all = isinstance(value, str) and value == "all"
        self._names: list[str] = []
        self._keys = np.empty(0, np.int64)
        if isinstance(value, str) and not self.are_all:
            self._names = _read_names(value)
        elif not isinstance(value, str):
            listed = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
            if listed.ndim != 1 or (listed.size and (listed.dtype.kind not in "iu" or int(listed.min()) < 0)):
                raise UsageError(_NO_KEYS)
            self._keys = listed.astype(np.int64)

    def among(self, key_map: KeyMap) -> Keys:
        """The keys that are frozen, whether they have a row or not; of names, those that the map knows."""
        return np.concatenate([self._keys, key_map.known_keys(self._names)])


def _read_names(file: str) -> list[str]:
    if not file.endswith(".txt"):
        raise UsageError(_NO_KEYS)
    try:
        with open_regular(Path(file)) as opened:
            text = opened.read().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(
            f'cannot read frozen_rows = {file}: {error.strerror}; give "all", or FILE.txt of names'
        ) from None
    return [line for line in text.splitlines() if line]


def _numbers(value: str | Sequence[int] | Tensor, num_classes: int) -> NDArray[np.int64]:
    """The class numbers that ``value`` lists or names a file of."""
    given = value.cpu() if isinstance(value, Tensor) else value
    listed: NDArray[Any] = _read(given) if isinstance(given, str) else np.asarray(given)
    if listed.ndim != 1 or (listed.size and listed.dtype.kind not in "iu"):
        raise UsageError(
            'frozen_rows is "all", "START:STOP", FILE.npy of class numbers, or a list of them (integers), '
            f"not {listed.dtype} of shape {listed.shape}"
        )
    outside = listed[(listed < 0) | (listed >= num_classes)]
    if len(outside):
        raise UsageError(
            f"frozen_rows has class {outside[0]}, which lies outside [0, {num_classes}), the head's classes"
        )
    return listed.astype(np.int64)


def _read(file: str) -> NDArray[Any]:
    if not Path(file).exists():
        raise UsageError(f'there is no frozen_rows = {file}; give "all", "START:STOP", or FILE.npy of class numbers')
    numbers = map_npy(Path(file), f"frozen_rows = {file}")
    if not isinstance(numbers, np.ndarray):
        raise DataError(f"frozen_rows = {file} is no array of class numbers")
    return numbers
