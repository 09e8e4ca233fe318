"""Embedding sets as Arrow tables and Parquet files: others read the same bits, and plsc takes the files back."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plsc.embedding.arrow_tables import write_parquet
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import SetWriter, ShardRows
from plsc.errors import DataError, UsageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, DIM, SHARD = 70, 8, 32
VECTORS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
LABELS = np.arange(ROWS, dtype=np.int64)[::-1] % 4 - 1  # the first class to be seen is not the first of all
NAMES = ["Zoë", "Ada", "陳"]
ABOUT = {"flip": True, "image_size": 112, "compatible_with": ["old"], "alignment": "five points"}


def make(folder: Path, dtype: str = "float32", *, metadata: bool = True) -> EmbeddingSet:
    """A set of three shards, with an error in row 2, an infinite row 3, and further columns."""
    vectors = VECTORS.astype(dtype)
    vectors[2], vectors[3, 1] = 0, np.inf
    rows = [{"site": f"Å{row % 2}", "key": f"of {row}"} if row % 3 else {} for row in range(ROWS)]
    size = {"dim": DIM, "dtype": dtype, "rows": ROWS, "shard_rows": SHARD}
    writer = SetWriter(folder, {"contract_id": "model-a", **size, **ABOUT}, {"model": "a.onnx"})
    writer.begin()
    for number in range(writer.shard_count):
        part = slice(*writer.shard_range(number))
        keys = [f"é {row}.jpg" for row in range(ROWS)][part]
        about: dict[str, Any] = {"errors": {2: "broken"} if number == 0 else {}}
        about |= {"metadata": rows[part]} if metadata else {}
        columns = vectors[part], np.arange(ROWS)[part] * 10 + 5, LABELS[part], keys
        writer.publish(number, ShardRows(part.start, *columns, **about))
    return writer.finish(NAMES)


class FailingNames(list[str]):
    """Class names that end the process, so to say, when they are looked up in the second shard."""

    looked_up = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked_up += 1
        if self.looked_up > len(NAMES):
            raise KeyboardInterrupt
        return super().__getitem__(index)


def bits(vectors: Any, dtype: str) -> Any:
    return np.asarray(vectors).astype(dtype, copy=False).view(np.uint32 if dtype == "float32" else np.uint16)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_others_read_the_same_bits(tmp_path: Path, dtype: str) -> None:
    source = make(tmp_path / "set", dtype)
    write_parquet(source, tmp_path / "set.parquet")
    expected = bits(np.concatenate([shard.embeddings for shard in source]), dtype)
    table = pq.read_table(tmp_path / "set.parquet")
    assert table.schema.equals(source.to_arrow().schema, check_metadata=True)
    assert table.column("embedding").type == pa.list_(pa.field("element", pa.from_numpy_dtype(dtype)), DIM)
    for read in (table, source.to_arrow()):
        flat = np.concatenate([chunk.flatten().to_numpy() for chunk in read.column("embedding").chunks])
        assert flat.dtype == dtype
        np.testing.assert_array_equal(bits(flat, dtype).reshape(ROWS, DIM), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pandas_and_duckdb_read_the_same_bits(tmp_path: Path, dtype: str) -> None:
    pandas = pytest.importorskip("pandas")
    source, path = make(tmp_path / "set", dtype), tmp_path / "set.parquet"
    write_parquet(source, path)
    expected = np.concatenate([shard.embeddings for shard in source])
    for frame in (source.to_pandas(), pandas.read_parquet(path)):
        np.testing.assert_array_equal(bits(np.stack(frame["embedding"]), dtype), bits(expected, dtype))
        assert frame["id"].tolist() == [row * 10 + 5 for row in range(ROWS)]
    duckdb = pytest.importorskip("duckdb")
    read = duckdb.sql(f"SELECT embedding FROM '{path}' ORDER BY id").fetchall()
    found = np.array([row[0] for row in read], np.float32)
    np.testing.assert_array_equal(bits(found, "float32"), bits(expected.astype(np.float32), "float32"))


def test_a_table_says_of_each_row_what_the_set_says(tmp_path: Path) -> None:
    source = make(tmp_path / "set")
    assert [len(batch) for batch in source.to_batches()] == [32, 32, 6]
    rows = source.to_arrow().to_pylist()
    assert [row["key"] for row in rows] == list(source.keys)
    assert [row["label"] for row in rows] == [None if label < 0 else NAMES[label] for label in LABELS]
    assert [row["class"] for row in rows] == LABELS.tolist()
    assert [number for number, row in enumerate(rows) if row["error"] is not None] == [2]
    assert rows[2]["error"] == "broken"
    assert (rows[4]["site"], rows[4]["metadata.key"]) == ("Å0", "of 4")
    assert (rows[3]["site"], rows[3]["metadata.key"]) == (None, None)


def test_the_schema_states_the_contract(tmp_path: Path) -> None:
    about = json.loads(make(tmp_path / "set").to_arrow().schema.metadata[b"plsc"])
    whole = {"format": "plsc embedding set", "version": 1, "normalized": False, "dim": DIM, "model": "a.onnx"}
    assert about == {**whole, "contract_id": "model-a", **ABOUT}


def test_a_set_without_further_columns_has_none(tmp_path: Path) -> None:
    names = make(tmp_path / "set", metadata=False).to_arrow().schema.names
    assert names == ["key", "embedding", "id", "label", "class", "error"]


def test_a_file_has_a_row_group_of_each_shard_and_appears_whole(
    tmp_path: Path,
) -> None:
    source, path = make(tmp_path / "set"), tmp_path / "out" / "set.parquet"
    path.parent.mkdir()
    whole = source.class_names
    source.class_names = FailingNames(whole)
    with pytest.raises(KeyboardInterrupt):
        write_parquet(source, path)
    assert list(path.parent.iterdir()) == []
    source.class_names = whole
    write_parquet(source, path)
    assert [path.name for path in path.parent.iterdir()] == ["set.parquet"]
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [32, 32, 6]


def test_labels_outside_the_classes_are_named(tmp_path: Path) -> None:
    source = make(tmp_path / "set")
    source.class_names = NAMES[:2]
    with pytest.raises(DataError, match="holds labels outside its 2 classes"):
        source.to_arrow()


def test_a_missing_pyarrow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "set")
    known = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return known(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"need pyarrow: pip install 'plsc-torch\[parquet\]'"):
        source.to_arrow()
