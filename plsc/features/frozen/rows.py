"""Classes whose rows stay as they are while others train: ``frozen_rows`` of the class head."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.errors import DataError, UsageError
from plsc.head.kept_rows import KeptRows
from plsc.head.options import HeadFeature
from plsc.regular_files import map_npy, open_regular

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead

_NO_KEYS = (
    'frozen_rows of a table whose classes come and go is "all", FILE.txt of their names, one a line, or a list of '
    "keys: classes have no numbers"
)
_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, eq=False)
class FrozenRows(HeadFeature):
    """Classes that stay in the softmax and are not updated: their rows and the optimizer's state keep their bits.

    Beside rows that train, they take a copy of each chunk while it is updated, and Triton's update a launch of its own.

    Attributes:
        frozen_rows: "all" (pass 2 is left out then), "START:STOP" (STOP is the first that trains), FILE.npy of class
            numbers, or these. Where classes come and go: "all", FILE.txt of names, one a line, or keys. None: all rows
            train.
    """

    frozen_rows: str | Sequence[int] | Tensor | None = None

    def attach(self, head: "ShardedHead") -> None:
        """See :meth:`HeadFeature.attach`."""
        if self.frozen_rows is None:
            return
        if head.update != "fused":
            raise UsageError('frozen_rows are kept by the head\'s own optimizers: give update="fused"')
        head.keep(self)

    def by_number(self, num_classes: int, own: tuple[int, int], centers: int, device: torch.device) -> KeptRows:
        """See :meth:`plsc.head.kept_rows.KeptClasses.by_number`.

        Raises:
            UsageError: ``frozen_rows`` is none of these, or a class does not exist.
            DataError: the file cannot be read.
        """
        (first, stop), value = own, self.frozen_rows
        assert value is not None
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
        return KeptRows(rows, bool(frozen.all()))

    def by_key(self) -> "FrozenKeys":
        """See :meth:`plsc.head.kept_rows.KeptClasses.by_key`."""
        assert self.frozen_rows is not None
        return FrozenKeys(self.frozen_rows)


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

    def among(self, known: Callable[[Iterable[str]], NDArray[np.int64]]) -> NDArray[np.int64]:
        """See :meth:`plsc.head.kept_rows.KeptKeys.among`."""
        return np.concatenate([self._keys, known(self._names)])


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
