"""Embedding sets as Arrow tables, for pandas, DuckDB, LanceDB, Polars, Spark and whatever else reads these.

A table has these columns; ``set_of_table`` of :mod:`plsc.embedding.table_sets` makes a set of it again:

    key          string         the origin of the row
    embedding    fixed_size_list<float32 or float16, dim>     as the set has it, not normalised; zeros where it failed
    id           int64          unique in the set
    label        string         the name of the class, null for none
    class        int64          the number of the class in the set, -1 for none
    error        string         why there is no embedding, null where there is one
    …            string         each further column of the source; ``metadata.NAME`` where NAME stands above

The schema's metadata has under ``plsc`` a JSON object: the contract, as the set's manifest states it, and under
``empty_classes`` the numbers of the classes without rows by their names.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plsc.embedding.embedding_set import FORMAT, VERSION, EmbeddingSet, Shard
from plsc.embedding.metadata import read_metadata
from plsc.embedding.table_formats import ABOUT, format_named
from plsc.errors import DataError, UsageError
from plsc.files import LARGEST_JSON, remove_leftovers
from plsc.progress import note

if TYPE_CHECKING:
    import pyarrow as pa

_OF_MODEL = ("contract_id", "compatible_with", "image_size", "flip", "alignment", "precision", "model")
STATED = (*_OF_MODEL, "data_id", "data")
OWN_COLUMNS = ("key", "embedding", "id", "label", "class", "error")
EMPTY_CLASSES = "empty_classes"
PREFIX = "metadata."


def load_pyarrow() -> Any:
    """The package pyarrow; :class:`UsageError` where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError("Arrow tables of embeddings need pyarrow: pip install 'plsc-torch[parquet]'") from None
    return pyarrow


def schema_of(source: EmbeddingSet) -> "pa.Schema":
    """The schema of all tables of a set. Reads the metadata of every row, where the set has some."""
    pa = load_pyarrow()
    number = pa.field("element", pa.from_numpy_dtype(source.manifest["dtype"]))  # the name that Parquet gives it
    fields = [
        pa.field("key", pa.string(), nullable=False),
        pa.field("embedding", pa.list_(number, source.dim)),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("class", pa.int64(), nullable=False),
        pa.field("error", pa.string()),
    ]
    names: dict[str, None] = {}
    for row in range(len(source)) if source.has_metadata else ():
        names.update(dict.fromkeys(source.metadata(row)))
    stated = {name: source.manifest[name] for name in STATED if name in source.manifest}
    about = {"format": FORMAT, "version": VERSION, "normalized": False, "dim": source.dim, **stated}
    about |= {EMPTY_CLASSES: empty} if (empty := _empty_classes(source)) else {}
    return pa.schema([*fields, *(pa.field(_column(name), pa.string()) for name in names)], {ABOUT: json.dumps(about)})


def batches_of(source: EmbeddingSet, schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
    """Yield one batch of each shard, whose embeddings are not copied but mapped.

    Args:
        source: the set.
        schema: its :func:`schema_of`.

    Raises:
        DataError: a label is outside the classes.
    """
    pa = load_pyarrow()
    names = schema.names[len(OWN_COLUMNS) :]
    for shard in source:
        labels, classes = shard.labels.tolist(), len(source.class_names)
        if labels and not -1 <= min(labels) <= max(labels) < classes:
            raise DataError(f"{source.path} holds labels outside its {classes} classes; embed it again")
        known = {label: source.class_names[label] for label in set(labels) - {-1}}
        flat = pa.array(shard.embeddings.reshape(-1))
        columns = [
            pa.array(list(shard.keys), pa.string()),
            pa.FixedSizeListArray.from_arrays(flat, type=schema.field("embedding").type),
            pa.array(shard.ids),
            pa.array([known.get(label) for label in labels], pa.string()),
            pa.array(shard.labels),
            pa.array([shard.errors.get(shard.start + row) for row in range(len(shard))], pa.string()),
        ]
        more = _metadata(source, shard, names) if names else []
        yield pa.RecordBatch.from_arrays([*columns, *(pa.array(texts, pa.string()) for texts in more)], schema=schema)


def write_table(source: EmbeddingSet, path: Path) -> None:
    """Write a set as a table of the format by whose name ``path`` ends; it appears whole, or not at all."""
    schema = schema_of(source)
    if (found := format_named(path)) is None:
        raise UsageError(f"{path} is no name of a table, or a folder that holds something else; name another")
    remove_leftovers(path)
    found.write(path, schema, batches_of(source, schema))


def _empty_classes(source: EmbeddingSet) -> dict[str, int]:
    has_rows = np.zeros(len(source.class_names) + 1, bool)
    for shard in source:
        has_rows[np.clip(shard.labels, -1, len(source.class_names))] = True
    empty = {source.class_names[label]: label for label in np.flatnonzero(~has_rows[:-1]).tolist()}
    if len(json.dumps(empty)) > LARGEST_JSON:  # readers bound what a schema may hold
        note(f"{source.path}: the names of {len(empty):,} classes without rows are too many, and left out")
        return {}
    return empty


def _metadata(source: EmbeddingSet, shard: Shard, names: list[str]) -> list[list[str | None]]:
    rows = [read_metadata(shard.metadata, row, source.path) for row in range(len(shard))]
    return [[_text(row, name.removeprefix(PREFIX)) for row in rows] for name in names]


def _column(name: str) -> str:
    return PREFIX + name if name in OWN_COLUMNS or name.startswith(PREFIX) else name


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
