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
the same as ``kill -9``. :mod:`plsc.features.journal.saved_rows` reads a savepoint without going back to it.
"""

import contextlib
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.config.sections import CheckpointConfig
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import atomic_write, read_json, remove_leftovers, sync, write_json
from plsc.head.host_memory import Column

FORMAT = 1
_NAME = re.compile(r"undo-(\d{8,})")
NUMBER_BYTES = 8  # of a row's number
_HEADER = struct.Struct("<8sQQQ")  # magic, rows of the table, bytes of a row in all columns, end of the last record
_END_OFFSET = 24  # of ``end`` in it
_MAGIC = b"plscundo"
_RECORD = struct.Struct("<II")  # CRC-32 of what follows, number of rows


class RecordLayout:
    """How the rows of one table lie in its journals' records.

    A header is followed by records, each with a checksum, the rows' numbers (int64) and then each column's values, the
    widest types first, so that all are aligned. The header's ``end`` tells a damaged record from one that was never
    finished.

    Args:
        rows: of the table.
        columns: the type and the shape of a row of each column, by name.
    """

    def __init__(self, rows: int, columns: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
        self._rows = rows
        by_width = sorted(columns.items(), key=lambda each: (-each[1][0].itemsize, each[0]))
        self._columns = {name: (dtype, shape, shape.numel() * dtype.itemsize) for name, (dtype, shape) in by_width}
        self.row_bytes = sum(size for _, _, size in self._columns.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes that a row takes in a record."""
        return NUMBER_BYTES + self.row_bytes

    def header(self) -> bytes:
        """The header of an empty journal."""
        return _HEADER.pack(_MAGIC, self._rows, self.row_bytes, _HEADER.size)

    def begin(self, count: int) -> tuple[bytearray, Tensor, dict[str, Tensor]]:
        """Memory for a record of ``count`` rows: all of it; their numbers (n,), and each column's values (n, …)."""
        record = bytearray(_RECORD.size + count * self.kept_bytes)
        return record, *self._views(record, _RECORD.size, count)

    def finish(self, record: bytearray) -> None:
        """Fill in the checksum of a record."""
        content = memoryview(record)[_RECORD.size :]
        _RECORD.pack_into(record, 0, zlib.crc32(content), len(content) // self.kept_bytes)

    def read(self, path: Path) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Rows and their values by column, record by record, of a journal.

        Raises:
            IntegrityError: it is damaged.
        """
        damaged = IntegrityError(f"{path} is corrupt: resume a later checkpoint, or remove the table and begin anew")
        with path.open("rb") as file:
            size, header = path.stat().st_size, file.read(_HEADER.size)
            if len(header) < _HEADER.size or header[:_END_OFFSET] != self.header()[:_END_OFFSET]:
                raise damaged
            (end,) = struct.unpack("<Q", header[_END_OFFSET:])
            while file.tell() < size:
                start = file.tell()
                crc, count = _RECORD.unpack(file.read(_RECORD.size).ljust(_RECORD.size, b"\0"))
                length = count * self.kept_bytes
                content = bytearray(file.read(length) if count and file.tell() + length <= size else b"")
                rows, values = self._views(content, 0, count if content else 0)
                if not content or zlib.crc32(content) != crc or not self._are_rows(rows):
                    if start < end:
                        raise damaged
                    return  # it was never finished, and the table's rows are as they were
                yield rows, values
            if size < end:
                raise damaged

    def _are_rows(self, rows: Tensor) -> bool:
        return bool((rows >= 0).all()) and bool((rows < self._rows).all())

    def _views(self, record: bytearray, start: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The parts of a record as tensors over its memory."""
        if not count:
            return torch.empty(0, dtype=torch.int64), {}
        numbers = torch.frombuffer(record, dtype=torch.int64, count=count, offset=start)
        start += numbers.nbytes
        values: dict[str, Tensor] = {}
        for name, (dtype, shape, size) in self._columns.items():
            flat = torch.frombuffer(record, dtype=dtype, count=count * shape.numel(), offset=start)
            values[name] = flat.view(count, *shape)
            start += count * size
        return numbers, values


class UndoJournal:
    """The savepoints of one rank's table. Columns are added before the first of them.

    Args:
        prefix: ``FILE.rankR-of-W``.
        about: what the table is, as JSON holds it; one that exists has to be the same.

    Attributes:
        is_adopted: the files hold a table of an earlier process, and it has not been rolled back to a savepoint yet.
        identity: of the table; None before its first savepoint.
        step: of the savepoint that rows are journaled for; None before the first.
        num_rows: of this rank's table.

    Raises:
        UsageError: there is another table.
        DataError: its description is damaged.
    """

    def __init__(self, prefix: Path, about: dict[str, Any]) -> None:
        self._prefix, self._about, self.num_rows = prefix, about, int(about["rows"])
        self._description = prefix.with_name(f"{prefix.name}.json")
        self._columns: dict[str, Column] = {}
        self.identity: str | None = None
        self.step: int | None = None
        self._descriptor, self._end = -1, 0
        self._kept = np.zeros(0, dtype=np.uint8)  # a bit for each row that the present journal holds
        remove_leftovers(prefix)
        self.is_adopted = self._description.exists()
        if self.is_adopted:
            self._adopt()
        else:
            for path in journals_of(prefix).values():
                path.unlink()

    def follow(self, name: str, column: Column) -> Column:
        """Journal ``column`` from the next savepoint on."""
        self._columns[name] = column
        column.before_write = self.before_write
        return column

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
        for path in newest_first:
            for rows, values in self._layout.read(path):
                for name, column in self._columns.items():
                    column.put_back(rows, values[name])
        self.flush()
        for path in newest_first[:-1]:
            path.unlink()
            sync(path.parent)
        self.is_adopted = False
        self._begin(step)

    def forget(self, before: int) -> None:
        """Remove the savepoints of steps before ``before``."""
        for step, path in sorted(journals_of(self._prefix).items()):
            if step < before and step != self.step:
                path.unlink()

    def flush(self) -> None:
        """Sync the table's files to disk."""
        for column in self._columns.values():
            if column.path is not None:
                sync(column.path)

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
    def row_bytes(self) -> int:
        """Bytes of a row in all columns."""
        return self._layout.row_bytes

    @property
    def _layout(self) -> RecordLayout:
        values = {name: column.values for name, column in self._columns.items()}
        return RecordLayout(self.num_rows, {name: (each.dtype, each.shape[1:]) for name, each in values.items()})

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

    def _path(self, step: int) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.undo-{step:08d}")

    def _begin(self, step: int) -> None:
        """Write to an empty journal of ``step`` from now on."""
        path = self._path(step)
        with _disk_errors(path), atomic_write(path) as tmp_path:
            tmp_path.write_bytes(self._layout.header())
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._end = os.open(path, os.O_RDWR), _HEADER.size
        self._kept = np.zeros(-(-self.num_rows // 8), dtype=np.uint8)
        self.step = step

    def _record(self, rows: Tensor) -> bytearray:
        layout = self._layout
        record, numbers, values = layout.begin(len(rows))
        numbers.copy_(rows)
        for name, column in self._columns.items():
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
        os.pwrite(self._descriptor, struct.pack("<Q", position), _END_OFFSET)


def check_identities(state: object, path: Path) -> list[str | None]:
    """The identities of the ranks' tables that the checkpoint ``path`` holds; IntegrityError where they are none."""
    if not isinstance(state, list) or not all(isinstance(each, str | None) for each in state):
        raise IntegrityError(f"{path} names no files of a class table; it is the checkpoint of another program")
    return state


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


def journal_bytes(rows: int, row_bytes: int, share: float, checkpoint: CheckpointConfig) -> tuple[int, int]:
    """The savepoints that there are at a time, and about the bytes of their journals.

    Args:
        rows: of the table.
        row_bytes: of a row in all columns.
        share: of the rows that a step changes, others in each.
        checkpoint: when savepoints are set, and how many are kept.
    """
    steps, kept = 0 if checkpoint.every_minutes else checkpoint.every_steps, checkpoint.keep.last + 1
    changed = 1 - (1 - share) ** steps if steps else 1.0
    return kept, kept * int(rows * changed * (NUMBER_BYTES + row_bytes))


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; free some space and resume the run") from None
