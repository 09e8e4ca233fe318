"""Savepoints of a table in mapped files: the rows' old values, kept in files beside it until no checkpoint needs them.

The table's own files are the newest state. Before a row is changed for the first time after a savepoint, its values go
to that savepoint's journal, a rollback journal as SQLite's. A checkpoint of a table beyond memory is then a savepoint:
nothing is copied, and going back to it costs what was changed since. The files of rank R of W, beside ``FILE``:

- ``FILE.rankR-of-W.NAME``: a column of the table;
- ``FILE.rankR-of-W.undo-00001000``: what the rows held after step 1,000 that were changed before the next savepoint;
- ``FILE.rankR-of-W.json``: which table this is. It is written with the first savepoint: without it there is no table.

To go back to a step, the journals from the newest to that step's are applied in turn. That may be killed and begun
again at any point: rows that a later journal sets wrongly the second time are set right by an earlier one, and journals
are removed from the newest on.

A record is synced to disk before the table's rows change, and the table before a journal is dropped: a power cut leaves
the same as ``kill -9``. :mod:`plsc.head.undo_records` has the journals' format, :mod:`plsc.head.saved_rows` reads a
savepoint without going back to it.
"""

import contextlib
import os
import re
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError, UsageError
from plsc.files import atomic_write, read_json, sync, write_json
from plsc.head.host_memory import Column
from plsc.head.undo_records import END_OFFSET, HEADER, NUMBER_BYTES, RecordLayout

FORMAT = 1
_NAME = re.compile(r"undo-(\d{8,})")


class UndoJournal:
    """The savepoints of one rank's table. Columns are added before the first of them.

    Args:
        prefix: ``FILE.rankR-of-W``.
        about: what the table is, as JSON holds it; one that exists has to be the same.

    Attributes:
        is_adopted: the files hold a table of an earlier process, and it has not been rolled back to a savepoint yet.
        identity: of the table; None before its first savepoint.
        step: of the savepoint that rows are journaled for; None before the first.

    Raises:
        UsageError: there is another table.
        DataError: its description is damaged.
    """

    def __init__(self, prefix: Path, about: dict[str, Any]) -> None:
        self._prefix, self._about, self._rows = prefix, about, int(about["rows"])
        self._columns: dict[str, tuple[Column, Path | None]] = {}
        self.identity: str | None = None
        self.step: int | None = None
        self._descriptor, self._end = -1, 0
        self._kept = np.zeros(0, dtype=np.uint8)  # a bit for each row that the present journal holds
        self._is_undoing = False
        self.is_adopted = self._description.exists()
        if self.is_adopted:
            self._adopt()
        else:
            for path in self._journals().values():
                path.unlink()

    def add_column(self, name: str, column: Column, path: Path | None) -> None:
        """Journal ``column`` from the next savepoint on; ``path`` is its file, None where it has no rows."""
        self._columns[name] = column, path
        column.journal = self

    def set_savepoint(self, step: int) -> None:
        """Let the table's present state be that of ``step``: from now on, old values go to its journal.

        It withstands a power cut once :meth:`flush` was called too, which may be while training goes on.
        """
        self.refuse_if_adopted()
        if step == self.step:
            return
        if self.identity is None:
            self.flush()
        self._begin(step)
        if self.identity is None:
            self.identity = secrets.token_hex(8)
            described = {"format": FORMAT, "id": self.identity, "columns": sorted(self._columns), **self._about}
            write_json(self._description, described)

    def roll_back(self, step: int) -> None:
        """Give every row the values that it had at savepoint ``step``; later savepoints are removed.

        Raises:
            DataError: there is no such savepoint.
            IntegrityError: a journal is damaged; nothing was changed.
        """
        newest_first = journals_back_to(step, self._prefix)
        for path in newest_first:
            for _ in self._layout.read(path):  # all are checked before a row is changed
                pass
        self._is_undoing = True
        for path in newest_first:
            for rows, values in self._layout.read(path):
                for name, (column, _) in self._columns.items():
                    column.write(rows, values[name], ahead=True)
        self._is_undoing = False
        self.flush()
        for path in newest_first[:-1]:
            path.unlink()
            sync(path.parent)
        self.is_adopted = False
        self._begin(step)

    def forget(self, before: int) -> None:
        """Remove the savepoints of steps before ``before``."""
        for step, path in sorted(self._journals().items()):
            if step < before and step != self.step:
                path.unlink()

    def flush(self) -> None:
        """Sync the table's files to disk."""
        for _, path in self._columns.values():
            if path is not None:
                sync(path)

    def refuse_if_adopted(self) -> None:
        """Raise a UsageError if the rows are of an unknown step."""
        if self.is_adopted:
            raise UsageError(
                f"{self._prefix}.* holds the table of an earlier run: resume that run (in a script, "
                "head.roll_back(step)), remove the files, or name another file"
            )

    def before_write(self, rows: slice | Tensor) -> None:
        """Keep the present values of those of ``rows`` that the journal does not hold. A column is about to change.

        Raises:
            DataError: the disk is full; the table is unchanged.
        """
        if self._is_undoing:
            return
        self.refuse_if_adopted()
        if self.step is None:
            return
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy()
        numbers = numbers[(self._kept[numbers >> 3] >> (numbers & 7)) & 1 == 0]
        if not len(numbers):
            return
        self._append(self._record(torch.from_numpy(numbers)))
        np.bitwise_or.at(self._kept, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._prefix.parent

    @property
    def num_rows(self) -> int:
        """Rows of this rank's table."""
        return self._rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all columns."""
        return self._layout.row_bytes

    @property
    def _layout(self) -> RecordLayout:
        values = {name: column.values for name, (column, _) in self._columns.items()}
        return RecordLayout(self._rows, {name: (each.dtype, each.shape[1:]) for name, each in values.items()})

    @property
    def _description(self) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.json")

    def _adopt(self) -> None:
        found = read_json(self._description)
        if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("id"), str):
            raise DataError(f"{self._description} describes no table; remove {self._prefix.name}.* to begin anew")
        for name, value in self._about.items():
            if found.get(name) != value:
                raise UsageError(
                    f"{self._prefix}.* holds a table with {name} = {found.get(name)}, and this head has {value}: set "
                    "it back, remove the files, or name another file"
                )
        self.identity = found["id"]

    def _journals(self) -> dict[int, Path]:
        return journals_of(self._prefix)

    def _path(self, step: int) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.undo-{step:08d}")

    def _begin(self, step: int) -> None:
        """Write to an empty journal of ``step`` from now on."""
        path = self._path(step)
        with _disk_errors(path), atomic_write(path) as tmp_path:
            tmp_path.write_bytes(self._layout.header())
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._end = os.open(path, os.O_RDWR), HEADER.size
        self._kept = np.zeros(-(-self._rows // 8), dtype=np.uint8)
        self.step = step

    def _record(self, rows: Tensor) -> bytearray:
        layout = self._layout
        record, numbers, values = layout.begin(len(rows))
        numbers.copy_(rows)
        for name, (column, _) in self._columns.items():
            column.read(rows, values[name], ahead=False)  # an update has just read them
        layout.finish(record)
        return record

    def _append(self, record: bytearray) -> None:
        view, position = memoryview(record), self._end
        with _disk_errors(self._path(self.step or 0)):
            while view:
                count = os.pwrite(self._descriptor, view, position)
                view, position = view[count:], position + count
            os.fdatasync(self._descriptor)
        self._end = position
        os.pwrite(self._descriptor, struct.pack("<Q", position), END_OFFSET)


def journals_of(prefix: Path) -> dict[int, Path]:
    """The journals of a rank's savepoints by step."""
    start = f"{prefix.name}."
    found = {}
    for path in prefix.parent.glob("*.undo-*"):
        match = _NAME.fullmatch(path.name.removeprefix(start))
        if path.name.startswith(start) and match:
            found[int(match[1])] = path
    return found


def journals_back_to(step: int, prefix: Path) -> list[Path]:
    """The journals from the newest to that of ``step``: applied in turn, they give the table of that step.

    Raises:
        DataError: there is no such savepoint.
    """
    journals = journals_of(prefix)
    if step not in journals:
        steps = ", ".join(f"{each:,}" for each in sorted(journals)) or "none"
        raise DataError(
            f"{prefix}.* holds no table of step {step:,}, but of {steps}: take one of these, or remove the files and "
            "begin anew"
        )
    return [path for each, path in sorted(journals.items(), reverse=True) if each >= step]


def journal_bytes(rows: int, row_bytes: int, share: float, steps: int) -> int:
    """About the bytes of the journal between two savepoints.

    Args:
        rows: of the table.
        row_bytes: of a row in all columns.
        share: of the rows that a step changes, others in each.
        steps: between the savepoints; 0: any number.
    """
    changed = 1 - (1 - share) ** steps if steps else 1.0
    return int(rows * changed * (NUMBER_BYTES + row_bytes))


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; free some space and resume the run") from None
