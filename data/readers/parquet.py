"""Parquet files: one, or several that are one data set."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.data.objects import open_file, open_ranges
from plsc.data.readers.tables import Table, TableFiles
from plsc.errors import DataError
from plsc.progress import counted, log_once

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 2**24  # bytes of rows, and
_MOST_ROWS = 1024
_BUFFER = 2**20  # bytes: a row group's columns are streamed, not read whole


class ParquetFormat(TableFiles):
    """Images of ``X.parquet``. Pictures are unpacked once: a row group would have to be read for each otherwise."""

    suffixes = (".parquet",)
    kind = "Parquet"

    def check(self, shards: Sequence[Path]) -> None:
        """See :meth:`TableFiles.check`; says how much disk is going to be taken."""
        super().check(shards)
        missing = [shard for shard in shards if shard.is_file() and not self.unpacked_path(shard).exists()]
        if missing:
            folder, total = self.unpacked_path(missing[0]).parent, sum(open_ranges(shard).size for shard in missing)
            log_once(
                "plsc.data",
                f"the pictures of {counted(len(missing), 'Parquet file')} are unpacked into {folder}, once; "
                f"they take some {total:,} bytes of disk",
            )

    @contextmanager
    def open_table(self, shard: Path) -> Iterator[Table]:
        """See :meth:`TableFormat.open_table`."""
        from pyarrow import parquet

        with open_file(shard) as file:
            opened = parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER)
            rows, size = opened.metadata.num_rows, open_ranges(shard).size
            if rows > size:
                raise DataError(f"{shard} claims {rows:,} rows, which its {size:,} bytes cannot hold; use another copy")
            yield Table(opened.schema_arrow, partial(_batches, opened))


def _batches(opened: Any, columns: list[str]) -> "Iterator[tuple[pa.RecordBatch, None]]":
    """Read columns in batches of some 16 MB, as far as the file tells the truth about its sizes."""
    groups = (opened.metadata.row_group(number) for number in range(opened.num_row_groups))
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1)
    rows = min(max(int(_AT_ONCE / max(largest, 1)), 1), _MOST_ROWS)
    for batch in opened.iter_batches(rows, columns=columns, use_threads=False):
        yield batch, None
