"""Tables that are taken as embedding sets: our own, and strangers' with a column of vectors.

A table is made a set once, row by row, in a folder beside it: ``.plsc-index/X.parquet-….emb``, or in the user's cache.
The folder's name has the table's size and time, so that another table is made a set anew.

Columns: ``embedding``, ``embeddings`` or ``vector``, lists of floating point numbers; ``key``, ``path`` or ``id`` for
the key; whole numbers ``id``; ``label``, texts or numbers. Other single values become metadata. Of a table that does
not state its contract (:mod:`plsc.embedding.arrow_tables`), it is "unknown".
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from plsc.data.readers.table_columns import as_numbers, as_texts, checked, is_scalar, label_kind, packed
from plsc.data.shard_index import index_folder
from plsc.embedding.arrow_tables import EMPTY_CLASSES, OWN_COLUMNS, PREFIX, STATED, load_pyarrow
from plsc.embedding.columns import Array, Float32, Int64, searchable
from plsc.embedding.contracts import UNKNOWN_CONTRACT
from plsc.embedding.embedding_set import FORMAT, LARGEST_DIM, EmbeddingSet
from plsc.embedding.set_writer import SetWriter, ShardRows, sole_writer
from plsc.embedding.table_formats import ABOUT, COLUMNS, OpenTable, SetFormat, format_at
from plsc.errors import DataError, IntegrityError, PlscError, UsageError
from plsc.files import atomic_folder, holds_manifest, remove_leftovers
from plsc.signing import is_asked_for

Value = TypeVar("Value")
NO_VECTOR = "the table has no embedding for it"
_VECTORS = ("embedding", "embeddings", "vector")
_KEYS = ("key", "path", "id")
_SHARD_ROWS, _SHARD_BYTES = 32768, 1 << 26
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 16384, 1 << 23
_MARKED_ROWS = 1 << 20  # of a shard


def is_table_set(path: Path) -> bool:
    """Whether ``path`` is a table of embeddings, and not one of pictures."""
    if (found := format_at(path)) is None:
        return False
    try:
        with found.open_table(path) as table:
            return bool(_Columns(table.schema, path).about) or not _has_pictures(table.schema)
    except PlscError:
        return False


def set_of_table(path: Path, found: SetFormat) -> Path:
    """Make a table a set, unless it was made one before; returns the set's folder, which appears whole.

    Raises:
        UsageError: it has no column of vectors, or what reads it is not installed.
        DataError: it cannot be read, or its vectors are of several lengths.
        IntegrityError: signatures are asked for, which a table has none of.
    """
    if is_asked_for():
        raise IntegrityError(
            f"{path} is {found.name}, which carries no signature; sign an embedding set, and give that"
        )
    with found.open_table(path) as table:
        root = index_folder(path)
        place = hashlib.sha256(os.path.relpath(path.absolute(), root).encode()).hexdigest()[:8]
        name = f"{path.name}-{place}"
        folder = root / f"{name}.{table.state}.emb"
        with sole_writer(root, wait=True):  # ranks want the set at once
            if not holds_manifest(folder, FORMAT):
                remove_leftovers(folder)
                with atomic_folder(folder) as tmp_path:
                    _TableRows(table, path, found).convert(tmp_path)
                for former in root.glob(f"{escape(name)}.*.emb"):
                    if former != folder:
                        shutil.rmtree(former, ignore_errors=True)
    return folder


def _refuse_signed(path: Path, found: SetFormat) -> None:
    if is_asked_for():
        raise IntegrityError(
            f"{path} is {found.name}, which carries no signature; sign an embedding set, and give that"
        )


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
        kinds = load_pyarrow().types
        if not (kinds.is_nested(kind) and kinds.is_floating(getattr(kind, "value_type", kind))):
            found = f"the column {self.vectors!r} of {path} is {str(kind)[:80]}"
            raise UsageError(f"{found}, and embeddings are lists of floating point numbers; store it so")
        self.dtype = "float16" if kind.value_type.bit_width == 16 else "float32"
        singles = [name for name, kind in types.items() if is_scalar(kind)]
        self.key = next((name for name in _KEYS if name in singles), "")
        self.id = "id" if label_kind(types.get("id")) == "a number" else ""
        self.label = "label" if "label" in types else ""
        if self.label and label_kind(types["label"]) not in ("a text", "a number"):
            label = str(types["label"])[:80]
            raise UsageError(f"the column 'label' of {path} is {label}, and labels are texts or whole numbers")
        own = OWN_COLUMNS if self.about else (self.key, self.id, self.label)
        self.number = (
            "class" if self.about and self.label and label_kind(types.get("class")) == "a number" else self.label
        )
        self.error = "error" if self.about and "error" in singles else ""
        former = {name: str(self.about.get(COLUMNS, {}).get(name, name)) for name in singles if name not in own}
        self.texts = {own.removeprefix(PREFIX if self.about else ""): name for name, own in former.items()}
        self.wanted = [*{self.vectors, self.key, self.id, self.label, self.error, *self.texts.values()} - {""}]

    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] | None = json.loads((self._schema.metadata or {}).get(ABOUT, b"{}"))
        except (ValueError, RecursionError):
            about = None
        about = about if isinstance(about, dict) else {"contract_id": None}
        empty, columns = (about.get(name, {}) for name in (EMPTY_CLASSES, COLUMNS))
        is_sound = isinstance(empty, dict) and isinstance(columns, dict) and {int} >= set(map(type, empty.values()))
        if not is_sound or (about and not isinstance(about.get("contract_id"), str)):
            raise DataError(f"{self._path} states its contract wrongly, under 'plsc' in its schema; use another copy")
        return about


class StreamedSet(EmbeddingSet):
    """A table whose vectors are read from it whenever they are asked for, in the order of their rows.

    Its folder has all else, and what of each vector tells whether it can be searched. Others take no such set.
    """

    def __init__(self, path: Path, rows: "_TableRows", folder: Path) -> None:
        rows.convert(folder, marks=True)
        super().__init__(folder, own=True)
        self.path, self.dim, self._rows = path, rows.dim, rows
        self._window, self._first = np.empty((0, self.dim), np.float32), len(self) + 1

    def rows(self, start: int, stop: int) -> Float32:
        """See :meth:`EmbeddingSet.rows`; quick where each call begins behind the one before."""
        if start < self._first:
            self._window, self._first, self._vectors = self._window[:0], 0, ahead(self._rows.vectors())
        while self._first + len(self._window) < stop:
            gone = min(max(start - self._first, 0), len(self._window))
            self._window = np.concatenate([self._window[gone:], next(self._vectors)])
            self._first += gone
        return self._window[start - self._first : stop - self._first].astype(np.float32)

    def marks(self, start: int, stop: int) -> Float32:
        """See :meth:`EmbeddingSet.marks`."""
        return super().rows(start, stop)


@contextmanager
def streamed(path: Path, found: SetFormat, folder: Path) -> Iterator[EmbeddingSet]:
    """Open a table whose vectors stay where they are; ``folder`` gets all else. Raises as :func:`set_of_table`."""
    _refuse_signed(path, found)
    with found.open_table(path) as table:
        yield StreamedSet(path, _TableRows(table, path, found), folder)


class _TableRows:
    """The rows of an open table."""

    def __init__(self, table: OpenTable, path: Path, found: SetFormat) -> None:
        self._table, self._path, self._format = table, path, found
        self._columns = _Columns(table.schema, path)
        if not 0 < table.rows <= table.size:
            raise DataError(f"{path} claims {table.rows:,} rows in its {table.size:,} bytes; use another copy")
        self._at_once = 64  # rows, while nobody knows how long they are
        self.dim = self._dim()
        self._at_once = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // (4 * self.dim)))
        self.class_names = self._class_names()

    def convert(self, folder: Path, *, marks: bool = False) -> None:
        """Write the rows as the embedding set ``folder``.

        Args:
            folder: of the set.
            marks: instead of each vector, write one number: 1, or 0 of a vector of zeros, or NaN of one that is not
                finite.
        """
        columns, rows = self._columns, self._table.rows
        stated = {name: columns.about[name] for name in STATED if name in columns.about}
        size = {"dim": 1 if marks else self.dim, "dtype": columns.dtype, "rows": rows}
        settings = {"contract_id": UNKNOWN_CONTRACT, **stated, **size}
        shard_rows = _MARKED_ROWS if marks else max(1, min(_SHARD_ROWS, _SHARD_BYTES // (4 * self.dim)))
        writer = SetWriter(folder, {**settings, "shard_rows": shard_rows})
        writer.begin()
        start = 0
        for number, shard in enumerate(self._shards(shard_rows, marks)):
            writer.publish(number, shard)
            start += len(shard.ids)
        if start != rows:
            raise DataError(f"{self._path} has {start:,} rows and claims {rows:,}; use another copy")
        writer.finish(self.class_names)

    def vectors(self) -> Iterator[Array]:
        """Yield all vectors (n, dim) in order, some rows at a time, zeros where there is none."""
        start = 0
        for batch in self._batches([self._columns.vectors]):
            with self._format.readable(self._path):
                yield self._vectors(_column(batch, self._columns.vectors), start)[0]
            start += len(batch)

    def _marked(self, batch: Any, start: int) -> Any:
        """A batch with a mark in the place of each vector."""
        pa, name = load_pyarrow(), self._columns.vectors
        vectors, given = self._vectors(_column(batch, name), start)
        finite, usable = searchable(vectors)
        marks = pa.array(np.where(finite, usable, np.nan).astype(self._columns.dtype))
        array = pa.FixedSizeListArray.from_arrays(marks, 1, mask=pa.array(~given))
        return batch.set_column(batch.schema.get_field_index(name), name, array)

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        with self._format.readable(self._path):
            yield from self._table.batches(columns, self._at_once)

    def _dim(self) -> int:
        """The length of the first vector."""
        dim = 0
        for batch in self._batches([self._columns.vectors]):
            if len(given := _column(batch, self._columns.vectors).drop_null()):
                dim = len(given[0])
                break
        if not 0 < dim <= LARGEST_DIM:
            raise DataError(f"{self._path} holds no embedding of 1 to {LARGEST_DIM:,} numbers; store some")
        return dim

    def _class_names(self) -> list[str]:
        """The names of the classes in the order of their numbers, which are strangers' labels themselves."""
        columns = self._columns
        found: dict[str, Any] = {str(name): number for name, number in columns.about.get(EMPTY_CLASSES, {}).items()}
        if columns.label:
            for batch in self._batches([*{columns.label, columns.number}]):
                names, numbers = (_labels(_column(batch, name)) for name in (columns.label, columns.number))
                pairs = set(zip(names.to_pylist(), numbers.to_pylist(), strict=True))
                found.update((str(name), number) for name, number in pairs if name is not None and number is not None)
        return sorted(found, key=lambda name: found[name])

    def _shards(self, shard_rows: int, marks: bool) -> Iterator[ShardRows]:
        pa, start, dim, read = load_pyarrow(), 0, 1 if marks else self.dim, 0
        numbers = {name: number for number, name in enumerate(self.class_names)}
        pending: list[Any] = []
        for batch in chain(ahead(self._batches(self._columns.wanted)), [None]):
            with self._format.readable(self._path):
                if batch is not None:
                    pending.append(pa.Table.from_batches([self._marked(batch, read) if marks else batch]))
                    read += len(batch)
                while (waiting := read - start) >= shard_rows or (batch is None and waiting):
                    table = pa.concat_tables(pending)
                    pending = [table.slice(shard_rows)]
                    yield (shard := self._rows(table.slice(0, shard_rows), numbers, start, dim))
                    start += len(shard.ids)

    def _rows(self, table: Any, numbers: Mapping[str, int], start: int, dim: int) -> ShardRows:
        columns, count = self._columns, len(table)
        vectors, given = self._vectors(_column(table, columns.vectors), start, dim)
        told = _texts(table, columns.error).to_pylist() if columns.error else []
        errors = {start + row: text for row, text in enumerate(told) if text is not None}
        errors |= {start + int(row): NO_VECTOR for row in np.flatnonzero(~given) if start + int(row) not in errors}
        texts = [_texts(table, name).to_pylist() for name in columns.texts.values()]
        return ShardRows(
            start,
            vectors,
            ids=self._ids(_column(table, columns.id)) if columns.id else np.arange(start, start + count),
            labels=_class_numbers(_labels(_column(table, columns.label)), numbers)
            if columns.label
            else np.full(count, -1, np.int64),
            keys=_keys(_texts(table, columns.key), start)
            if columns.key
            else list(map(str, range(start, start + count))),
            errors=errors,
            metadata=[
                {name: text for name, text in zip(columns.texts, row, strict=True) if text is not None}
                for row in zip(*texts, strict=True)
            ],
        )

    def _vectors(self, array: Any, start: int, dim: int | None = None) -> tuple[Array, Array]:
        """The vectors (n, dim), zeros where there is none, and a mask (n,) of where there is one."""
        from pyarrow import compute

        dim = dim or self.dim
        given = np.asarray(array.is_valid())
        lengths = compute.list_value_length(array).fill_null(dim).to_numpy(zero_copy_only=False)
        if len(others := np.flatnonzero(lengths != dim)):
            row = int(others[0])
            found = f"row {start + row:,} of {self._path} has a vector of {lengths[row]}, and those before have {dim}"
            raise DataError(f"{found}; embed all with one model")
        with np.errstate(over="ignore"):  # what overflows is infinite, and left out of an index
            values = array.drop_null().flatten().to_numpy(zero_copy_only=False)  # null becomes NaN
            values = values.astype(self._columns.dtype, copy=False).reshape(-1, dim)
        if given.all():
            return values, given
        rows = np.zeros((len(array), dim), self._columns.dtype)
        rows[given] = values
        return rows, given

    def _ids(self, array: Any) -> Int64:
        if array.null_count:
            raise DataError(f"{self._path} has rows without an id; give each its own, or leave the column out")
        return np.asarray(array.cast(load_pyarrow().int64()), np.int64)


def ahead(values: Iterator[Value]) -> Iterator[Value]:
    """Yield ``values``, of which a thread makes the next while one is in use."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, values, None)
        while (value := waiting.result()) is not None:
            waiting = thread.submit(next, values, None)
            yield value


def _column(table: Any, name: str) -> Any:
    """A column as one sound array."""
    array = table.column(table.schema.get_field_index(name))
    return checked(array.combine_chunks() if hasattr(array, "chunks") else array)


def _texts(table: Any, name: str) -> Any:
    """The values of a column as texts, which are UTF-8."""
    array = table.column(table.schema.get_field_index(name))
    array = array.combine_chunks() if hasattr(array, "chunks") else array
    return as_texts(array).cast(load_pyarrow().large_string())


def _labels(array: Any) -> Any:
    """Labels as texts or numbers, null where there is none; numbers below 0 are none."""
    pa = load_pyarrow()
    if not pa.types.is_integer(array.type):
        return array.cast(pa.large_string())
    from pyarrow import compute

    return compute.if_else(compute.less(array, 0), None, array)


def _class_numbers(labels: Any, numbers: Mapping[str, int]) -> Int64:
    """The number (n,) of each label's class, -1 for none."""
    encoded = labels.dictionary_encode()
    known = np.array([*(numbers.get(str(name), -1) for name in encoded.dictionary.to_pylist()), -1], np.int64)
    return known[as_numbers(encoded.indices)]  # of null the last


def _keys(texts: Any, start: int) -> Any:
    """Texts, with its number in the place of each that is missing."""
    if texts.null_count:
        pa = load_pyarrow()
        from pyarrow import compute

        texts = compute.coalesce(texts, pa.array(range(start, start + len(texts))).cast(pa.large_string()))
    return packed(texts)


def _has_pictures(schema: Any) -> bool:
    kinds = load_pyarrow().types
    return any(kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_struct(kind) for kind in schema.types)
