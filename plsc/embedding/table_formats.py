"""The formats of tables that embedding sets are written as and read from: Parquet, a file, and Lance, a folder.

Each is one class. What the columns are, :mod:`plsc.embedding.arrow_tables` says, for all of them.
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from plsc.errors import DataError, PlscError, UsageError, first_line
from plsc.files import atomic_folder, atomic_write
from plsc.regular_files import check_links, open_regular

if TYPE_CHECKING:
    import pyarrow as pa

ABOUT = b"plsc"  # the key of what our own tables state, in the metadata of their schemas
COLUMNS = "columns"
_BUFFER = 1 << 20  # bytes: a row group's columns are streamed, not read whole
_LANCE_READING = {"batch_readahead": 1, "io_buffer_size": 1 << 26}  # bytes that are read ahead
_NOT_IN_LANCE = re.compile(r"^$|^_+|[.`]")  # names with _ in front are its own


class OpenTable(NamedTuple):
    """An open table.

    Attributes:
        schema: of its columns.
        rows: their number, as the table claims.
        size: bytes that it takes.
        state: another one, where the table has changed.
        batches: reads the named columns in batches of some rows, in order.
    """

    schema: "pa.Schema"
    rows: int
    size: int
    state: str
    batches: "Callable[[list[str], int], Iterator[pa.RecordBatch]]"


class SetFormat(ABC):
    """A format of tables."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def is_at(self, path: Path) -> bool:
        """Whether a table, or what one may be written in the place of, is at ``path``."""

    @abstractmethod
    def open_table(self, path: Path) -> AbstractContextManager[OpenTable]:
        """Open a table; :class:`DataError` where it cannot be read."""

    @abstractmethod
    def write(self, path: Path, schema: "pa.Schema", batches: "Iterable[pa.RecordBatch]") -> None:
        """Write a table, which appears whole and survives a power cut, or not at all."""

    @contextmanager
    def readable(self, path: Path) -> Iterator[None]:
        """Say in one line that what the block reads is no sound table."""
        import pyarrow as pa

        from plsc.data.readers.lance import lance_faults

        try:
            with lance_faults():
                yield
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            if isinstance(error, PlscError):
                raise
            raise DataError(f"{path} cannot be read as {self.name}: {first_line(error)}; use another copy") from None

    def require(self) -> None:
        """Raise :class:`UsageError` unless what reads and writes the format is installed."""
        if find_spec(self.package) is None:
            needs = f"{self.name} tables of embeddings need {self.package}"
            raise UsageError(f"{needs}: pip install 'plsc-torch[{self.extra}]'")


class ParquetSets(SetFormat):
    """A file with a row group of each batch."""

    name, suffix, package, extra = "Parquet", ".parquet", "pyarrow", "parquet"

    def is_at(self, path: Path) -> bool:
        """See :meth:`SetFormat.is_at`."""
        return path.is_file()

    @contextmanager
    def open_table(self, path: Path) -> Iterator[OpenTable]:
        """See :meth:`SetFormat.open_table`."""
        self.require()
        from pyarrow import parquet

        with open_regular(path) as file:
            with self.readable(path):
                opened = parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER)
            status, rows = os.fstat(file.fileno()), opened.metadata.num_rows
            state = f"{status.st_size:x}-{status.st_mtime_ns:x}"
            read = partial(opened.iter_batches, use_threads=False)
            yield OpenTable(opened.schema_arrow, rows, status.st_size, state, lambda names, n: read(n, columns=names))

    def write(self, path: Path, schema: "pa.Schema", batches: "Iterable[pa.RecordBatch]") -> None:
        """See :meth:`SetFormat.write`."""
        from pyarrow import parquet

        with atomic_write(path) as tmp_path, parquet.ParquetWriter(tmp_path, schema) as writer:
            for batch in batches:
                writer.write_batch(batch, row_group_size=max(len(batch), 1))


class LanceSets(SetFormat):
    """A folder, of which the newest version is read."""

    name, suffix, package, extra = "Lance", ".lance", "lance", "lance"

    def is_at(self, path: Path) -> bool:
        """See :meth:`SetFormat.is_at`."""
        return path.is_dir() and ((path / "_versions").is_dir() or not any(path.iterdir()))

    @contextmanager
    def open_table(self, path: Path) -> Iterator[OpenTable]:
        """See :meth:`SetFormat.open_table`."""
        self.require()
        from plsc.data.readers.lance import lance_schema, open_lance

        check_links(path, below=path)
        with self.readable(path):
            table = open_lance(path, None)
            schema, rows, version = lance_schema(table), table.count_rows(), table.version
            size = sum(file.stat().st_size for file in (path / "data").iterdir())
            times = [file.stat().st_mtime_ns for file in (path / "_versions").iterdir()]
        read, state = partial(table.to_batches, **_LANCE_READING), f"{version:x}-{size:x}-{max(times):x}"
        yield OpenTable(schema, rows, size, state, lambda names, n: read(names, batch_size=n))

    def write(self, path: Path, schema: "pa.Schema", batches: "Iterable[pa.RecordBatch]") -> None:
        """See :meth:`SetFormat.write`."""
        import lance
        import pyarrow as pa

        failed: list[BaseException] = []  # the library tells the text of an error alone
        named = _named_for_lance(schema)

        def noted() -> "Iterator[pa.RecordBatch]":
            try:
                for batch in batches:
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=named)
            except BaseException as error:
                failed.append(error)
                raise

        with atomic_folder(path) as tmp_path:
            try:
                lance.write_dataset(pa.RecordBatchReader.from_batches(named, noted()), tmp_path)
            except BaseException:
                if failed:
                    raise failed[0] from None
                raise


def _named_for_lance(schema: "pa.Schema") -> "pa.Schema":
    """A schema with names that Lance takes; its metadata has under "columns" the former ones of those that differ."""
    import pyarrow as pa

    names, former = set(schema.names), {}
    for name in filter(_NOT_IN_LANCE.search, schema.names):
        new = _NOT_IN_LANCE.sub("_", name).lstrip("_") or "column"
        while new in names:
            new += "_"
        names.add(new)
        former[new] = name
    if not former:
        return schema
    of = {name: new for new, name in former.items()}
    about = {**json.loads(schema.metadata[ABOUT]), COLUMNS: former}
    fields = [field.with_name(of.get(field.name, field.name)) for field in schema]
    return pa.schema(fields, {**schema.metadata, ABOUT: json.dumps(about)})


FORMATS: tuple[SetFormat, ...] = (ParquetSets(), LanceSets())


def format_named(path: Path) -> SetFormat | None:
    """The format by whose name ``path`` ends, and in which what is there already may be; None for other folders."""
    known = next((each for each in FORMATS if each.suffix == path.suffix), None)
    return known if known is not None and (known.is_at(path) or not path.exists()) else None


def format_at(path: Path) -> SetFormat | None:
    """The format of the table that is at ``path``; None where there is none."""
    return format_named(path) if path.exists() else None
