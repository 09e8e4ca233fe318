"""Rows of removed classes, searched for by their bytes in files: a file may hold a row without any name.

A checkpoint or a file from before tells what the rows were. They are searched for at any place of any file, as they
were stored and as they may have been written since: an export in float32, a table that went on in bfloat16.
"""

import glob
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.errors import UsageError
from plsc.features.dynamic.named_table import NamedTable
from plsc.head.host_memory import mapped_file
from plsc.head.low_precision import scale_name
from plsc.parallel import Mesh
from plsc.train.byte_search import LEAST_BYTES, ByteSearch
from plsc.train.checkpoint import CHECKPOINTS
from plsc.train.checkpoint_inspection import find_checkpoints
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.table_file import TableFile, class_names_beside

_ALONE = Mesh(0, 1, 0, torch.device("cpu"))
_CLASSES = 16384  # that are compared at a time
_LEAST_VALUES = 4  # different bytes of a row that tells: zeros are everywhere


@dataclass(frozen=True)
class FormerTable:
    """A class table as it was.

    Attributes:
        path: where it is stored.
        names: of each class.
        columns: ``weight`` and the optimizer's tables, (classes x sub-centres, D), and scales of int8 rows.
    """

    path: Path
    names: list[list[str]]
    columns: Mapping[str, Tensor]

    @classmethod
    def opened(cls, path: Path, table: str = "") -> "list[FormerTable]":
        """The tables of all checkpoints that ``path`` names; or of a .safetensors of ``plsc table export``.

        Raises:
            UsageError: there is none, or its classes have no names.
            DataError: it cannot be read, or names of another table lie beside it.
        """
        if not path.exists():
            raise UsageError(f"there is no {path}; give a run, a checkpoint or a .safetensors from before the removal")
        if path.suffix == ".safetensors":
            file = TableFile(path)
            return [cls(path, class_names_beside(path, file.classes), file.columns())]
        tables = [NamedTable(each, table) for each in find_checkpoints(path)]
        if tables[0].in_files:
            raise UsageError(f"rows of {path} lie in files of the run: give a .safetensors of plsc table export")
        return [cls(each.path, each.key_map.names_of_classes(), each.columns()) for each in tables]

    def rows_of(self, classes: NDArray[np.int64]) -> Iterator[tuple[str, Tensor]]:
        """The rows of ``classes`` (n,), by column, (n x sub-centres, D), in the types in which files may hold them."""
        index = torch.from_numpy((classes[:, None] * self.centers + np.arange(self.centers)).ravel())
        for column, rows in self.columns.items():
            if rows.dim() == 2:  # a number for each row is no trace of it
                scales = self.columns.get(scale_name(column))
                for kept in _as_kept(rows[index], None if scales is None else scales[index]):
                    yield column, kept.contiguous().view(torch.uint8)

    @property
    def centers(self) -> int:
        """Rows of a class."""
        return max((len(rows) for rows in self.columns.values()), default=0) // max(len(self.names), 1)


def _as_kept(rows: Tensor, scales: Tensor | None) -> Iterator[Tensor]:
    """``rows`` (n, D) in the types in which files may hold them."""
    yield rows
    values = rows.float() if scales is None else rows.float() * scales.float()[:, None]
    yield from (values.to(dtype) for dtype in (torch.float32, torch.bfloat16) if dtype != rows.dtype)


class RemovedRows:
    """What is left of classes that were removed, once their rows are found.

    Args:
        former: tables in which they still were.
        names: of the classes; empty: all that ``former`` has and ``kept`` has not.
        kept: names of the classes that there are now.

    Attributes:
        classes: the names of those that are searched for.
        skipped: rows that are not: a class that stays has the same bytes, or they are of few values, such as zeros, or
            of less than 8 bytes.

    Raises:
        UsageError: a name is in none of ``former``; or no class of them was removed.
    """

    def __init__(self, former: Sequence[FormerTable], names: Collection[str], kept: Collection[str]) -> None:
        self.classes: set[str] = set()
        self.skipped = 0
        self._rows: dict[bytes, tuple[str, str]] = {}
        stays, wanted = set(kept), set(names)
        known = {name for table in former for each in table.names for name in each}
        if unknown := wanted - known:
            raise UsageError(f"{former[0].path} has no class {min(unknown)}: give a copy that has it as --removed")
        for table in former:
            gone = [not stays & {*each} and bool(wanted & {*each} if wanted else each) for each in table.names]
            self._take(table, np.flatnonzero(gone))
        if not self.classes and not wanted:
            raise UsageError(f"every class of {former[0].path} is still there: nothing was removed since")

    def _take(self, table: FormerTable, classes: NDArray[np.int64]) -> None:
        owners = [min(table.names[each]) for each in classes.repeat(table.centers).tolist()]
        self.classes |= set(owners)
        found = {
            row.tobytes(): (owner, column)
            for column, rows in table.rows_of(classes)
            for owner, row in zip(owners, rows.numpy(), strict=True)
        }
        telling = {row: of for row, of in found.items() if len(set(row)) >= _LEAST_VALUES and len(row) >= LEAST_BYTES}
        search, others = ByteSearch(telling), np.setdiff1d(np.arange(len(table.names)), classes)
        for start in range(0, len(others), _CLASSES):
            for _, rows in table.rows_of(others[start : start + _CLASSES]):
                for row in search.found(rows.numpy().tobytes()):
                    telling.pop(row, None)
        self.skipped += len(found) - len(telling)
        self._rows |= telling

    def found_in(self, paths: Iterable[Path]) -> list[tuple[Path, str, str]]:
        """(File, name of the class, column) of each row in the files ``paths``."""
        search = ByteSearch(self._rows)
        return [(path, *of) for path in paths for of in sorted({self._rows[row] for row in search.found_in(path)})]


def files_of_run(checkpoints: Sequence[Path], others: Iterable[Path] = ()) -> list[Path]:
    """All files of the run that ``checkpoints`` are of, those that its tables are mapped from, and ``others``.

    Args:
        checkpoints: one alone, or all of a run.
        others: files, or folders of files.

    Raises:
        UsageError: one of ``others`` is not there.
    """
    newest = checkpoints[-1]
    run = newest.parent.parent if newest.parent.name == CHECKPOINTS else newest
    found = {path for folder in (run, *others) for path in _files_below(folder)}
    found |= set(table_files(newest))
    return sorted(path for path in found if path.is_file())


def _files_below(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise UsageError(f"there is no {path}; name files or folders that may hold rows")
    if not path.is_dir():
        yield path
    for folder, _, files in os.walk(path):
        yield from (Path(folder, name) for name in files)


def table_files(checkpoint: Path) -> list[Path]:
    """The files beside a checkpoint that its run's tables are mapped from, sorted."""
    config = StoredCheckpoint(checkpoint, _ALONE, prefixes=()).value("config", dict)
    heads = [config.get("head"), *(each.get("head") for each in config.get("table") or () if isinstance(each, dict))]
    placements = [head.get("placement") for head in heads if isinstance(head, dict)]
    found: set[Path] = set()
    for placement in placements:
        file = mapped_file(placement) if isinstance(placement, str) and placement.startswith("mmap:") else None
        if file is not None:
            found |= set(file.parent.glob(f"{glob.escape(file.name)}.rank*-of-*"))
    return sorted(found)
