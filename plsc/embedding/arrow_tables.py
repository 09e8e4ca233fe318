"""Embedding sets as Arrow tables and Parquet files, for pandas, DuckDB, Polars, Spark and whatever else reads these.

A table has these columns; ``set_of_parquet`` of :mod:`plsc.embedding.parquet_sets` makes a set of it again:

    key          string         the origin of the row
    embedding    fixed_size_list<float32 or float16, dim>     as the set has it, not normalised; zeros where it failed
    id           int64          unique in the set
    label        string         the name of the class, null for none
    class        int64          the number of the class in the set, -1 for none
    error        string         why there is no embedding, null where there is one
    …            string         each further column of the source; ``metadata.NAME`` where NAME stands above

The schema's metadata has under ``plsc`` a JSON object: the contract, as the set's manifest states it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.embedding.embedding_set import FORMAT, VERSION, EmbeddingSet, Shard
from plsc.embedding.metadata import read_metadata
from plsc.errors import DataError, UsageError
from plsc.files import atomic_write, remove_leftovers

if TYPE_CHECKING:
    import pyarrow as pa

ABOUT = b"plsc"
_OF_MODEL = ("contract_id", "compatible_with", "image_size", "flip", "alignment", "precision", "model")
STATED = (*_OF_MODEL, "data_id", "data")
OWN_COLUMNS = ("key", "embedding", "id", "label", "class", "error")
PREFIX = "metadata."


def load_pyarrow() -> Any:
    """The package pyarrow; :class:`UsageError` where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            "Arrow and Parquet tables of embeddings need pyarrow: pip install 'plsc-torch[parquet]'"
        ) from None
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
            raise DataError(f"{source.folder} holds labels outside its {classes} classes; embed it again")
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


def write_parquet(source: EmbeddingSet, path: Path) -> None:
    """Write a set as the Parquet file ``path``, a row group of each shard; it appears whole, or not at all."""
    schema = schema_of(source)  # which tells of a missing pyarrow
    from pyarrow import parquet

    remove_leftovers(path)
    with atomic_write(path) as tmp_path, parquet.ParquetWriter(tmp_path, schema) as writer:
        for batch in batches_of(source, schema):
            writer.write_batch(batch, row_group_size=max(len(batch), 1))


def _metadata(source: EmbeddingSet, shard: Shard, names: list[str]) -> list[list[str | None]]:
    rows = [read_metadata(shard.metadata, row, source.folder) for row in range(len(shard))]
    return [[_text(row, name.removeprefix(PREFIX)) for row in rows] for name in names]


def _column(name: str) -> str:
    return PREFIX + name if name in OWN_COLUMNS or name.startswith(PREFIX) else name


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
