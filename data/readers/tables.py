"""Pictures in the rows of Arrow tables: which column holds what, and where the bytes of each picture lie.

A picture that lies in its file as it is, is read there. Others are unpacked once into a file beside the index, in
which all pictures of a shard follow one another: a Parquet file has no place for one row, and compressed buffers none.
"""

import hashlib
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plsc.data.block_cache import BlockCache
from plsc.data.objects import Ranges, open_ranges
from plsc.data.readers.table_columns import Columns, Rows, picture_faults, picture_sizes
from plsc.data.shard_index import index_folder, shard_stamps
from plsc.data.shards import Scanned, ShardFormat
from plsc.errors import DataError, PlscError, UsageError, first_line
from plsc.files import atomic_write, remove_leftovers, storage_errors

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_UNPACKED = 100  # times a shard's bytes: pictures are compressed already
_OF_A_SET = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(?:-[0-9a-f]+)?\.\w+")  # as the hub names a split's files


class Table(NamedTuple):
    """An open shard.

    Attributes:
        schema: of its rows.
        batches: reads the named columns, batch by batch.
    """

    schema: "pa.Schema"
    batches: Callable[[list[str]], Any]


class TableFormat(ShardFormat):
    """Tables of Arrow's types."""

    scans_objects = True
    noun = "row"
    kind: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {
        "image": "the column of pictures; default: the only one that can be",
        "label": "the column of labels; default: label, labels, cls, identity or class_id; empty: none",
        "key": "the column of names; default: key, id, __key__, path or the picture's own path; empty: rows' numbers",
    }

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._shards: list[Path] = []
        self._first: dict[str, str] | None = None

    @abstractmethod
    def open_table(self, shard: Path) -> AbstractContextManager[Table]:
        """Open a shard; errors of pyarrow and OSError mean that it cannot be read."""

    @abstractmethod
    def gather(self, shard: Path, table: Table, columns: Columns, rows: Rows) -> None:
        """Add each batch of an open shard to ``rows``; errors as of :meth:`open_table`."""

    def check(self, shards: Sequence[Path]) -> None:
        """See :meth:`ShardFormat.check`."""
        self._shards = list(shards)

    def scan(self, shard: Path) -> Scanned:
        """See :meth:`ShardFormat.scan`."""
        import pyarrow as pa

        try:
            with self.open_table(shard) as table:
                columns = Columns(table.schema, self.given, shard)
                self._check_columns(shard, columns)
                rows = Rows(columns, shard)
                self.gather(shard, table, columns, rows)
                return rows.scanned()
        except PlscError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise self.unreadable(shard, error) from None

    def unreadable(self, shard: Path, error: BaseException) -> DataError:
        """What is said of a shard that cannot be read at all."""
        return DataError(f"{shard} cannot be read as {self.kind}: {first_line(error)}; use another copy")

    def _check_columns(self, shard: Path, columns: Columns) -> None:
        if self._first is None:
            self._first = columns.uses
            if self._shards and shard != self._shards[0]:
                with self.open_table(self._shards[0]) as table:
                    self._first = Columns(table.schema, self.given, self._shards[0]).uses
        for name in sorted(self._first.keys() | columns.uses.keys()):
            own, others = columns.uses.get(name, "missing"), self._first.get(name, "missing")
            if own != others:
                first = self._shards[0].name if self._shards else "the first shard"
                raise UsageError(
                    f"the column {name!r} of {shard} is {own}, and that of {first} {others}; name files of one kind"
                )


class TableFiles(TableFormat):
    """Files whose batches come with the mapped file in which their buffers may lie, or None.

    A place is (offset, size): in the shard, or from ~offset on in its unpacked file.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._stamps: dict[Path, bytes] = {}

    @classmethod
    def find(cls, source: str, given: Mapping[str, str], cache: BlockCache | None = None) -> list[Path] | None:
        """See :meth:`ShardFormat.find`; of a folder, all have to be the parts of one split."""
        shards = super().find(source, given, cache)
        is_prefix = source.endswith("/") or not source.lower().endswith(cls.suffixes)
        if shards and (is_prefix if cache is not None else Path(source).is_dir()):
            _check_parts(source, [shard.name for shard in shards])
        return shards

    def check(self, shards: Sequence[Path]) -> None:
        """Note what the shards are now, so that others that take their places are not read for them."""
        super().check(shards)
        self._stamps = {shard: shard_stamps([shard]) for shard in shards}

    def gather(self, shard: Path, table: Table, columns: Columns, rows: Rows) -> None:
        """See :meth:`TableFormat.gather`."""
        with _Unpacked(self, shard) as unpacked, closing(table.batches(columns.wanted)) as batches:
            for batch, memory in batches:
                pictures, paths = columns.pictures(batch)
                sizes = picture_sizes(pictures)
                places = np.stack([_offsets(pictures, memory, unpacked), sizes], 1)
                rows.add(batch, places, picture_faults(sizes, paths), paths)

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """See :meth:`ShardFormat.read`."""
        offset, size = place.tolist()
        try:
            files = self.opened(shard, lambda path: _Files(self, path))
            content = files.own.read(offset, size) if offset >= 0 else files.unpacked.read(~offset, size)
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror or error}") from None
        if len(content) != size:
            raise ValueError("the file has become shorter")
        return content

    def unpacked_path(self, shard: Path) -> Path:
        """The file of a shard's unpacked pictures, whether it exists or not: another one once the shard has changed."""
        root = index_folder(shard)
        place = os.path.relpath(shard.absolute(), root) if isinstance(shard, Path) else str(shard)
        of = hashlib.sha256(repr((place, self.given.get("image"))).encode())
        state = hashlib.sha256(self._stamps.setdefault(shard, shard_stamps([shard]))).hexdigest()[:16]
        return root / f"{shard.name}-{of.hexdigest()[:8]}.{state}.images"

    def check_unchanged(self, shard: Path) -> None:
        """DataError where a shard is no longer the one that was checked."""
        if self._stamps.setdefault(shard, shard_stamps([shard])) != shard_stamps([shard]):
            raise DataError(f"{shard} has changed since its rows were found; begin again")


class _Files:
    """The files that pictures of a shard are read from, each opened when it is needed."""

    def __init__(self, table_format: TableFiles, shard: Path) -> None:
        self._format, self._shard = table_format, shard

    @cached_property
    def own(self) -> Ranges:
        """The shard."""
        return open_ranges(self._shard)

    @cached_property
    def unpacked(self) -> Ranges:
        """Its unpacked pictures, which are unpacked again where somebody made room, and kept the index."""
        path = self._format.unpacked_path(self._shard)
        if not path.exists():
            self._format.check_unchanged(self._shard)
            self._format.scan(self._shard)
        return open_ranges(path)


class _Unpacked:
    """Appends pictures to the unpacked file of a shard; where that exists, tells only where they are in it."""

    def __init__(self, table_format: TableFiles, shard: Path) -> None:
        self._format, self._shard = table_format, shard
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._path = shard
        self._size, self._most = 0, -1

    def __enter__(self) -> "_Unpacked":
        return self

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:  # of reading: no matter of the disk that is written to
            self._stack.__exit__(*error)
            return
        with storage_errors(self._path):
            self._stack.close()

    def append(self, content: memoryview) -> int:
        """Return where ``content`` begins."""
        if self._most < 0:
            self._most = _MOST_UNPACKED * open_ranges(self._shard).size
            self._path = self._format.unpacked_path(self._shard)
            self._begin(self._path)
        start, self._size = self._size, self._size + len(content)
        if self._size > self._most:
            raise DataError(f"the pictures of {self._shard} have over {_MOST_UNPACKED} times its bytes; it is no data")
        if self._file is not None:
            with storage_errors(self._path):
                self._file.write(content)
        return start

    def _begin(self, path: Path) -> None:
        if path.exists():
            return
        of_shard = path.name.removesuffix(".images").rpartition(".")[0]
        remove_leftovers(path.with_name(of_shard))
        for former in path.parent.glob(f"{escape(of_shard)}.*.images"):
            former.unlink(missing_ok=True)  # before, for both might not have room; whoever has it open reads on
        enter = self._stack.enter_context
        self._file = enter(enter(atomic_write(path)).open("wb"))


def _offsets(pictures: "pa.Array", memory: "pa.Buffer | None", unpacked: _Unpacked) -> NDArray[np.int64]:
    """Where each picture (n,) begins: in the mapped file if it lies there, else ~ of that in the unpacked one."""
    _, ends, content = pictures.buffers()
    if not len(pictures) or content is None:
        return np.zeros(len(pictures), np.int64)
    width = np.int32 if str(pictures.type) == "binary" else np.int64
    starts = np.frombuffer(ends, width)[pictures.offset : pictures.offset + len(pictures) + 1].astype(np.int64)
    first, last = int(starts[0]), int(starts[-1])
    if memory is not None and 0 <= content.address - memory.address <= memory.size - content.size:
        places: NDArray[np.int64] = starts[:-1] + (content.address - memory.address)
    else:
        places = ~(starts[:-1] - first + unpacked.append(memoryview(content)[first:last]))
    return places


def _check_parts(folder: str, names: Sequence[str]) -> None:
    """UsageError where the files of a folder are parts of several splits, or parts of one are missing."""
    parts: dict[tuple[str, int], set[int]] = {}
    for found in filter(None, map(_OF_A_SET.fullmatch, names)):
        parts.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    if len(parts) > 1:
        listed = ", ".join(f"{name}-*-of-{total:05d}*" for name, total in sorted(parts))
        raise UsageError(f"{folder} holds several sets: {listed}; name one of them, in quotes")
    for (name, total), numbers in parts.items():
        missing = set(range(min(total, 2 * len(numbers) + 1))) - numbers
        if missing:
            raise UsageError(
                f"{folder} holds {len(numbers)} of {total} parts: {name}-{min(missing):05d}-of-{total:05d} is missing; "
                "fetch it, or name the files that are to be read"
            )
