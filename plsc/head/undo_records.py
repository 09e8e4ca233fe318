"""The records of a rollback journal: what some rows of a table held, as bytes of a file.

A header is followed by records, each with a checksum, the rows' numbers (int64) and then each column's values, the
widest types first, so that all are aligned. The header's ``end`` tells a damaged record from one that was never
finished.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from plsc.errors import IntegrityError

NUMBER_BYTES = 8  # of a row's number
HEADER = struct.Struct("<8sQQQ")  # magic, rows of the table, bytes of a row in all columns, end of the last record
END_OFFSET = 24  # of ``end`` in it
_MAGIC = b"plscundo"
_RECORD = struct.Struct("<II")  # CRC-32 of what follows, number of rows


class RecordLayout:
    """How the rows of one table lie in its journals' records.

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

    def header(self, end: int = HEADER.size) -> bytes:
        """The header of a journal whose last record ends at ``end``."""
        return HEADER.pack(_MAGIC, self._rows, self.row_bytes, end)

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
            size, header = path.stat().st_size, file.read(HEADER.size)
            if len(header) < HEADER.size or header[:END_OFFSET] != self.header()[:END_OFFSET]:
                raise damaged
            (end,) = struct.unpack("<Q", header[END_OFFSET:])
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
