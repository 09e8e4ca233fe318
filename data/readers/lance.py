"""Tables in Lance: ``X.lance``, a folder that pylance writes, is one shard. It reads those of object stores itself."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from plsc.data.object_requests import reason
from plsc.data.objects import ObjectFile
from plsc.data.readers import lance_rows
from plsc.data.readers.table_columns import Columns, Rows, picture_faults
from plsc.data.readers.tables import Table, TableFormat
from plsc.errors import PlscError, UsageError
from plsc.regular_files import ALLOW_OUTSIDE, LARGEST_PICTURE, check_links

if TYPE_CHECKING:
    import pyarrow as pa

_EXTERNAL = 3  # the kind of a blob that is a file of any place
_BLOB = b"lance-encoding:blob"
_PLACE_IN_SOURCE = re.compile(r", /\S+:\d+:\d+.*")  # of the library's own, in its messages


class LanceFormat(TableFormat):
    """Rows of one version of a table, the newest one there is when the data set is opened.

    Images are a column of binary values, of structs (bytes, path) or of blobs. Rows are located by their numbers in the
    version, which never changes. A table is opened anew in each process: what is open does not survive a fork
    (plsc/data/readers/lance_rows.py).
    """

    suffixes = (".lance",)
    are_folders = True
    kind = "a table in Lance"
    options: ClassVar[Mapping[str, str]] = {**TableFormat.options, "version": "of the table"}

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._versions: dict[Path, int] = {}
        self._manifests: dict[Path, Path] = {}
        self._images: dict[Path, tuple[str, bool]] = {}  # the column of images, and whether they are blobs

    def check(self, shards: Sequence[Path]) -> None:
        """See :meth:`ShardFormat.check`; fixes the version of each table."""
        super().check(shards)
        text = self.given.get("version")
        if text is not None and not text.isdecimal():
            raise UsageError(f"?version={text} is no number of a table's version")
        for shard in shards:
            if isinstance(shard, Path) and not shard.exists():
                raise UsageError(f"there is no {shard}")
            try:
                with lance_faults():
                    newest = open_lance(shard, None).version
                    manifests = {file.name: file for file in _files(shard, "_versions")}
            except ValueError as error:
                raise self.unreadable(shard, error) from None
            version = newest if text is None else int(text)
            names = (f"{2**64 - 1 - version:020d}.manifest", f"{version}.manifest")  # of later tables, and of earlier
            found = next((manifests[name] for name in names if name in manifests), None)
            if found is None:
                raise UsageError(f"{shard} has no version {version}; its newest one is {newest}")
            self._versions[shard], self._manifests[shard] = version, found
            with contextlib.suppress(ValueError, PlscError):  # which is told where the rows are read
                self._images[shard] = self._image_column(shard, self._open(shard))

    def stamped(self, shard: Path) -> list[Path]:
        """See :meth:`ShardFormat.stamped`; a version's files are never changed, and its manifest names them."""
        return [self._manifests[shard]]

    def size(self, shard: Path, stamped: int) -> int:
        """See :meth:`ShardFormat.size`."""
        files = _files(shard, "data")
        return sum(file.size if isinstance(file, ObjectFile) else file.stat().st_size for file in files)

    @contextmanager
    def open_table(self, shard: Path) -> Iterator[Table]:
        """See :meth:`TableFormat.open_table`."""
        if isinstance(shard, Path):
            check_links(shard, below=shard)
        with lance_faults():
            table = self._open(shard)
            yield Table(lance_schema(table), table.to_batches)

    def gather(self, shard: Path, table: Table, columns: Columns, rows: Rows) -> None:
        """See :meth:`TableFormat.gather`; of images, what is known without their bytes."""
        is_blob = _is_blob(table.schema, columns.image)
        known = columns.image if is_blob else f"{columns.image}.path" if columns.has_paths else ""
        wanted = [name for name in columns.wanted if name != columns.image] + ([known] if known else [])
        first = 0
        for batch in table.batches(wanted):
            faults = _blob_faults(batch.column(known)) if is_blob else {}
            paths = batch.column(known) if columns.has_paths else None
            rows.add(batch, np.arange(first, first + len(batch))[:, None], faults, paths)
            first += len(batch)

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """See :meth:`ShardFormat.read`."""
        number, most = int(place[0]), LARGEST_PICTURE + 1
        with lance_faults():
            if lance_rows.is_forked():
                about = _place(shard), self._versions[shard], *self._images[shard]
                image = lance_rows.read_elsewhere(*about, number, most)
            else:
                table = self.opened(Path(f"{shard}/{os.getpid()}"), lambda _: self._open(shard))
                image = lance_rows.read_row(table, *self._image_column(shard, table), number, most)
        image = (image["bytes"] if isinstance(image, dict) else image) or b""
        if why := picture_faults(np.array([len(image)])):
            raise ValueError(why[0])
        return bytes(image)

    def _open(self, shard: Path) -> Any:
        with lance_faults():
            return open_lance(shard, self._versions[shard])

    def _image_column(self, shard: Path, table: Any) -> tuple[str, bool]:
        if shard not in self._images:
            schema = lance_schema(table)
            column = Columns(schema, self.given, shard).image
            self._images[shard] = column, _is_blob(schema, column)
        return self._images[shard]


def open_lance(shard: Path, version: int | None) -> Any:
    return lance_rows.open_lance(_place(shard), version)


def _place(shard: Path) -> str:
    return str(shard.absolute() if isinstance(shard, Path) else shard)


def _files(shard: Path, folder: str) -> list[Any]:
    """The files of a table's ``folder``, of the disk or of a store."""
    return shard.below(folder).files(("",)) if isinstance(shard, ObjectFile) else list((shard / folder).iterdir())


@contextmanager
def lance_faults() -> Iterator[None]:
    """Turn what the library raises for damaged files into ValueError; a failed assertion of its is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, PlscError) or not (
            isinstance(error, OSError | ValueError | RuntimeError | LookupError)
            or type(error).__name__ == "PanicException"
        ):
            raise
        raise ValueError(_PLACE_IN_SOURCE.sub("", reason(str(error)))) from None


def lance_schema(table: Any) -> "pa.Schema":
    """A table's, in which blobs of all versions are binary values that are marked."""
    import pyarrow as pa

    marked = {_BLOB: b"true"}
    fields = [
        pa.field(column.name, pa.large_binary(), metadata=marked)
        if getattr(column.type, "extension_name", "") == "lance.blob.v2"
        else column
        for column in table.schema
    ]
    return pa.schema(fields, table.schema.metadata)


def _is_blob(schema: "pa.Schema", column: str) -> bool:
    return (schema.field(column).metadata or {}).get(_BLOB) == b"true"


def _blob_faults(blobs: "pa.Array") -> dict[int, str]:
    """Why blobs are not read, by row: a table from elsewhere may name files of the reader's own."""
    values = {blobs.type.field(number).name: values for number, values in enumerate(blobs.flatten())}
    sizes = np.asarray(values["size"].fill_null(0)).astype(np.int64)
    if "kind" not in values:
        return picture_faults(sizes)
    outside = np.asarray(values["kind"].fill_null(0)) == _EXTERNAL  # whose sizes are not told
    faults = picture_faults(np.where(outside, 1, sizes))
    if os.environ.get(ALLOW_OUTSIDE) != "1":
        why = f"it lies outside of the table; --allow-outside ({ALLOW_OUTSIDE}=1) reads it"
        faults |= dict.fromkeys(np.flatnonzero(outside).tolist(), why)
    return faults
