"""Parquet files that are taken as embedding sets: our own, and strangers' with a column of vectors.

A file is made a set once, row by row, in a folder beside it: ``.plsc-index/X.parquet-….emb``, or in the user's cache.
The folder's name has the file's size and time, so that another file is made a set anew.

Columns: ``embedding``, ``embeddings`` or ``vector``, lists of floating point numbers; ``key``, ``path`` or ``id`` for
the key; whole numbers ``id``; ``label``, texts or numbers. Other single values become metadata. Of a file that does not
state its contract (:mod:`plsc.embedding.arrow_tables`), it is "unknown".
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.shard_index import index_folder
from plsc.embedding.arrow_tables import ABOUT, OWN_COLUMNS, PREFIX, STATED, load_pyarrow
from plsc.embedding.columns import Array, Int64
from plsc.embedding.contracts import UNKNOWN_CONTRACT
from plsc.embedding.embedding_set import FORMAT, LARGEST_DIM
from plsc.embedding.set_writer import SetWriter, ShardRows
from plsc.errors import DataError, IntegrityError, PlscError, UsageError, first_line
from plsc.files import atomic_folder, holds_manifest, remove_leftovers
from plsc.regular_files import open_regular
from plsc.signing import is_asked_for

SUFFIX = ".parquet"
NO_VECTOR = "the file has no embedding for it"
_VECTORS = ("embedding", "embeddings", "vector")
_KEYS = ("key", "path", "id")
_SHARD_ROWS, _SHARD_BYTES = 32768, 1 << 26
_AT_ONCE = 4096  # rows
_BUFFER = 1 << 20  # bytes: a row group's columns are streamed, not read whole


def is_parquet_set(source: str | Path) -> bool:
    """Whether ``source`` is a Parquet file of embeddings, and not one of pictures."""
    path = Path(source)
    if path.suffix != SUFFIX or not path.is_file():
        return False
    try:
        with _opened(path) as file:
            return bool(_Columns(file.schema_arrow, path).about) or not _has_pictures(file.schema_arrow)
    except PlscError:
        return False


def set_of_parquet(path: Path) -> Path:
    """Make a Parquet file a set, unless it was made one before; returns the set's folder, which appears whole.

    Raises:
        UsageError: it has no column of vectors, or pyarrow is not installed.
        DataError: it cannot be read, or its vectors are of several lengths.
        IntegrityError: signatures are asked for, which such a file has none of.
    """
    if is_asked_for():
        raise IntegrityError(f"{path} is Parquet, which carries no signature; sign an embedding set, and give that")
    with _opened(path) as file:
        root, status = index_folder(path), path.stat()
        place = hashlib.sha256(os.path.relpath(path.absolute(), root).encode()).hexdigest()[:8]
        name = f"{path.name}-{place}"
        folder = root / f"{name}.{status.st_size:x}-{status.st_mtime_ns:x}.emb"
        if not holds_manifest(folder, FORMAT):
            remove_leftovers(folder)
            with atomic_folder(folder) as tmp_path:
                _convert(file, path, tmp_path)
            for former in root.glob(f"{escape(name)}.*.emb"):
                if former != folder:
                    shutil.rmtree(former, ignore_errors=True)
    return folder


class _Columns:
    """Which columns of a schema hold what; ``about`` is what one of our own files states, {} of others."""

    def __init__(self, schema: Any, path: Path) -> None:
        self._schema, self._path = schema, path
        names = list(schema.names)
        types = {name: schema.field(names.index(name)).type for name in names if names.count(name) == 1}
        self.about = self._about()
        self.vectors = next((name for name in _VECTORS if name in types), "")
        listed = ", ".join(map(repr, names[:20]))
        if not self.vectors:
            raise UsageError(f"{path} has no column of embeddings ({', '.join(_VECTORS)}), but {listed or 'none'}")
        kind = types[self.vectors]
        if not _is_list(kind) or not load_pyarrow().types.is_floating(kind.value_type):
            found = f"the column {self.vectors!r} of {path} is {str(kind)[:80]}"
            raise UsageError(f"{found}, and embeddings are lists of floating point numbers; store it so")
        self.dtype = "float16" if kind.value_type.bit_width == 16 else "float32"
        singles = [name for name, kind in types.items() if _is_single(kind)]
        self.key = next((name for name in _KEYS if name in singles), "")
        self.id = "id" if "id" in singles and _is_integer(types["id"]) else ""
        self.label = "label" if "label" in types else ""
        if self.label and (self.label not in singles or load_pyarrow().types.is_floating(types["label"])):
            label = str(types["label"])[:80]
            raise UsageError(f"the column 'label' of {path} is {label}, and labels are texts or whole numbers")
        own = OWN_COLUMNS if self.about else (self.key, self.id, self.label)
        self.number = "class" if self.about and self.label and _is_integer(types.get("class")) else self.label
        self.error = "error" if self.about and "error" in singles else ""
        self.texts = [name for name in singles if name not in own]
        self.wanted = [*{self.vectors, self.key, self.id, self.label, self.error, *self.texts} - {""}]

    def _about(self) -> dict[str, Any]:
        try:
            about = json.loads((self._schema.metadata or {}).get(ABOUT, b"{}"))
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict) or (about and not isinstance(about.get("contract_id"), str)):
            raise DataError(f"{self._path} states its contract wrongly, under 'plsc' in its schema; use another copy")
        return about


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    load_pyarrow()
    from pyarrow import parquet

    with open_regular(path) as file:
        with _readable(path):
            opened = parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER)
        yield opened


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say in one line that what the block reads is no sound Parquet."""
    try:
        yield
    except (load_pyarrow().ArrowException, OSError, ValueError, MemoryError) as error:
        if isinstance(error, PlscError):
            raise
        raise DataError(f"{path} cannot be read as Parquet: {first_line(error)}; use another copy") from None


def _convert(file: Any, path: Path, folder: Path) -> None:
    columns, rows, size = _Columns(file.schema_arrow, path), file.metadata.num_rows, path.stat().st_size
    if not 0 < rows <= size:
        raise DataError(f"{path} claims {rows:,} rows in its {size:,} bytes; use another copy")
    dim = _dim(file, columns, path)
    stated = {name: columns.about[name] for name in STATED if name in columns.about}
    settings = {"contract_id": UNKNOWN_CONTRACT, **stated, "dim": dim, "dtype": columns.dtype, "rows": rows}
    shard_rows = max(1, min(_SHARD_ROWS, _SHARD_BYTES // (4 * dim)))
    writer = SetWriter(folder, {**settings, "shard_rows": shard_rows})
    writer.begin()
    class_names = _class_names(file, columns, path)
    start = 0
    for number, shard in enumerate(_shards(file, columns, class_names, dim, shard_rows, path)):
        writer.publish(number, shard)
        start += len(shard.ids)
    if start != rows:
        raise DataError(f"{path} has {start:,} rows and claims {rows:,}; use another copy")
    writer.finish(class_names)


def _dim(file: Any, columns: _Columns, path: Path) -> int:
    """The length of the first vector."""
    dim = 0
    with _readable(path):
        for batch in file.iter_batches(_AT_ONCE, columns=[columns.vectors], use_threads=False):
            if len(given := _column(batch, columns.vectors).drop_null()):
                dim = len(given[0])
                break
    if not 0 < dim <= LARGEST_DIM:
        raise DataError(f"{path} holds no embedding of 1 to {LARGEST_DIM:,} numbers; store some")
    return dim


def _class_names(file: Any, columns: _Columns, path: Path) -> list[str]:
    """The names of the classes in the order of their numbers, which are strangers' labels themselves."""
    found: dict[str, Any] = {}
    if columns.label:
        with _readable(path):
            for batch in file.iter_batches(_AT_ONCE, columns=[columns.label, columns.number], use_threads=False):
                names, numbers = (_labels(_column(batch, name)) for name in (columns.label, columns.number))
                pairs = {(name, number) for name, number in zip(names, numbers, strict=True) if name is not None}
                found.update((str(name), number) for name, number in pairs if number is not None)
    return sorted(found, key=lambda name: found[name])


def _shards(
    file: Any, columns: _Columns, class_names: Iterable[str], dim: int, shard_rows: int, path: Path
) -> Iterator[ShardRows]:
    pa, numbers, start = load_pyarrow(), {name: number for number, name in enumerate(class_names)}, 0
    pending: list[Any] = []
    with _readable(path):
        batches = file.iter_batches(min(shard_rows, _AT_ONCE), columns=columns.wanted, use_threads=False)
    more = True
    while more:
        with _readable(path):
            more = (batch := next(batches, None)) is not None
            pending += [pa.Table.from_batches([batch])] if more else []
            waiting = sum(map(len, pending))
            if waiting < (shard_rows if more else 1):
                continue
            table = pa.concat_tables(pending)
            pending = [table.slice(shard_rows)]
            shard = _rows(table.slice(0, shard_rows), columns, numbers, dim, start, path)
        yield shard
        start += len(shard.ids)


def _rows(table: Any, columns: _Columns, numbers: dict[str, int], dim: int, start: int, path: Path) -> ShardRows:
    count = len(table)
    vectors, given = _vectors(_column(table, columns.vectors), columns.dtype, dim, start, path)
    labels = _labels(_column(table, columns.label)) if columns.label else [None] * count
    keys = _texts(table, columns.key)
    errors = {start + row: text for row, text in enumerate(_texts(table, columns.error)) if text is not None}
    errors |= {start + int(row): NO_VECTOR for row in np.flatnonzero(~given) if start + int(row) not in errors}
    names = [name.removeprefix(PREFIX) if columns.about else name for name in columns.texts]
    texts = [_texts(table, name) for name in columns.texts]
    return ShardRows(
        start,
        vectors,
        ids=_ids(_column(table, columns.id), path) if columns.id else np.arange(start, start + count, dtype=np.int64),
        labels=np.array([-1 if label is None else numbers.get(str(label), -1) for label in labels], dtype=np.int64),
        keys=[str(start + row) if key is None else key for row, key in enumerate(keys)],
        errors=errors,
        metadata=[
            {name: text for name, text in zip(names, row, strict=True) if text is not None}
            for row in zip(*texts, strict=True)
        ],
    )


def _vectors(array: Any, dtype: str, dim: int, start: int, path: Path) -> tuple[Array, Array]:
    """The vectors (n, dim), zeros where there is none, and a mask (n,) of where there is one."""
    from pyarrow import compute

    given = np.asarray(array.is_valid())
    lengths = compute.list_value_length(array).fill_null(dim).to_numpy(zero_copy_only=False)
    if len(others := np.flatnonzero(lengths != dim)):
        row = int(others[0])
        found = f"row {start + row:,} of {path} has a vector of {lengths[row]}, and those before have {dim}"
        raise DataError(f"{found}; embed all with one model")
    rows = np.zeros((len(array), dim), dtype)
    with np.errstate(over="ignore"):  # what overflows is infinite, and left out of an index
        values = array.drop_null().flatten().to_numpy(zero_copy_only=False).astype(dtype)  # null becomes NaN
    rows[given] = values.reshape(-1, dim)
    return rows, given


def _ids(array: Any, path: Path) -> Int64:
    if array.null_count:
        raise DataError(f"{path} has rows without an id; give each its own, or leave the column out")
    return np.asarray(array.cast(load_pyarrow().int64()), np.int64)


def _labels(array: Any) -> list[str | int | None]:
    return [None if isinstance(value, int) and value < 0 else value for value in array.to_pylist()]


def _texts(table: Any, name: str) -> list[str | None]:
    """The values of a column as texts, None where there is none or no such column."""
    if not name:
        return [None] * len(table)
    texts: list[str | None] = _column(table, name).cast(load_pyarrow().string()).to_pylist()
    return texts


def _column(table: Any, name: str) -> Any:
    """A column as one array without dictionary, whose offsets lie in its buffers and whose texts are UTF-8."""
    array = table.column(table.schema.get_field_index(name))
    array = array.combine_chunks() if hasattr(array, "chunks") else array
    array.validate(full=True)
    return array.dictionary_decode() if load_pyarrow().types.is_dictionary(array.type) else array


def _has_pictures(schema: Any) -> bool:
    kinds = load_pyarrow().types
    return any(kinds.is_binary(kind) or kinds.is_large_binary(kind) or (kinds.is_struct(kind)) for kind in schema.types)


def _is_list(kind: Any) -> bool:
    kinds = load_pyarrow().types
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _is_integer(kind: Any) -> bool:
    return kind is not None and bool(load_pyarrow().types.is_integer(kind))


def _is_single(kind: Any) -> bool:
    kinds = load_pyarrow().types
    value = kind.value_type if kinds.is_dictionary(kind) else kind
    tests = (kinds.is_string, kinds.is_large_string, kinds.is_integer, kinds.is_floating, kinds.is_boolean)
    return any(test(value) for test in tests)
