"""One exported set is read bit for bit by those whom it is for, and what they write is indexed bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.stores import milvus_server

from plsc.embedding.arrow_tables import write_table
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import SetWriter, ShardRows
from plsc.index import Index
from plsc.tools.entry import main

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
lance = pytest.importorskip("lance")

ROWS, DIM, SHARD = 50, 8, 32
# All finite: some of those who read have no NaN. Row 7 is no embedding; others have tiny, huge and negative zero bits.
VECTORS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
VECTORS[3, :4] = [-0.0, 1e-42, 3e38, np.nextafter(np.float32(1), np.float32(2))]
VECTORS[7] = 0
KEYS = [f"é {row}.jpg" for row in range(ROWS)]
SITES = [f"Å{row % 2}" if row % 3 else None for row in range(ROWS)]
NAMES = ["Ada", "nobody", "Zoë"]
LABELS = np.where(np.arange(ROWS) % 3 == 1, -1, np.arange(ROWS) % 3).astype(np.int64)
ERROR = "cannot decode"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one set, as ``set.parquet`` and ``set.lance``."""
    folder = tmp_path_factory.mktemp("sets")
    size = {"dim": DIM, "dtype": "float32", "rows": ROWS, "shard_rows": SHARD}
    writer = SetWriter(folder / "set.emb", {"contract_id": "model-a", **size})
    writer.begin()
    metadata = [{} if site is None else {"site": site} for site in SITES]
    for number in range(writer.shard_count):
        start, stop = writer.shard_range(number)
        part = slice(start, stop)
        columns = VECTORS[part], np.arange(start, stop) + 2**40, LABELS[part], KEYS[part]
        writer.publish(number, ShardRows(start, *columns, {7: ERROR} if not number else {}, metadata[part]))
    made = writer.finish(NAMES)
    write_table(made, folder / "set.parquet")
    write_table(made, folder / "set.lance")
    return folder


def bits(vectors: Any) -> npt.NDArray[np.uint32]:
    rows = np.stack([np.asarray(row) for row in vectors])
    assert rows.dtype in (np.float32, np.float64)
    return rows.astype(np.float32).view(np.uint32)


def of_arrow(table: Any) -> dict[str, list[Any]]:
    return {name: table.column(name).to_pylist() for name in table.schema.names}


def of_frame(frame: Any) -> dict[str, list[Any]]:
    whole = frame.astype(object).where(frame.notna(), None)  # pandas has NaN where there is no text
    return {name: whole[name].tolist() for name in frame.columns}


def by_pandas(path: Path) -> dict[str, list[Any]]:
    pandas = pytest.importorskip("pandas")
    return of_frame(pandas.read_parquet(path / "set.parquet"))


def by_duckdb(path: Path) -> dict[str, list[Any]]:
    duckdb = pytest.importorskip("duckdb")
    return of_arrow(duckdb.sql(f"SELECT * FROM '{path / 'set.parquet'}' ORDER BY id").to_arrow_table())


def by_lancedb(path: Path) -> dict[str, list[Any]]:
    lancedb = pytest.importorskip("lancedb")
    return of_arrow(lancedb.connect(path).open_table("set").to_arrow())


def by_lancedb_of_parquet(path: Path) -> dict[str, list[Any]]:
    lancedb = pytest.importorskip("lancedb")
    made = lancedb.connect(path / "db").create_table("taken", pq.read_table(path / "set.parquet"), mode="overwrite")
    return of_arrow(made.to_arrow())


READERS: dict[str, Callable[[Path], dict[str, list[Any]]]] = {
    "pyarrow": lambda path: of_arrow(pq.read_table(path / "set.parquet")),
    "pylance": lambda path: of_arrow(lance.dataset(path / "set.lance").to_table()),
    "pandas": by_pandas,
    "duckdb": by_duckdb,
    "lancedb": by_lancedb,
    "lancedb of parquet": by_lancedb_of_parquet,
}


def check(rows: dict[str, list[Any]]) -> None:
    assert list(rows) == ["key", "embedding", "id", "label", "class", "error", "site"]
    np.testing.assert_array_equal(bits(rows["embedding"]), VECTORS.view(np.uint32))
    assert (rows["key"], rows["site"]) == (KEYS, SITES)
    assert rows["id"] == [row + 2**40 for row in range(ROWS)]
    assert rows["class"] == LABELS.tolist()
    assert rows["label"] == [None if label < 0 else NAMES[label] for label in LABELS]
    assert rows["error"] == [ERROR if row == 7 else None for row in range(ROWS)]


@pytest.mark.parametrize("reader", READERS)
def test_others_read_what_was_exported(folder: Path, reader: str) -> None:
    check(READERS[reader](folder))


def test_lancedb_finds_the_nearest_rows_of_an_exported_table(folder: Path) -> None:
    lancedb = pytest.importorskip("lancedb")
    found = lancedb.connect(folder).open_table("set").search(VECTORS[9].tolist()).limit(1).to_list()
    assert [row["key"] for row in found] == [KEYS[9]]


def test_qdrant_keeps_what_was_exported(folder: Path) -> None:
    """By the inner product: for cosines its local mode stores unit vectors, and each search changes them again."""
    client_of = pytest.importorskip("qdrant_client")
    client = client_of.QdrantClient(":memory:")
    client.create_collection("faces", client_of.models.VectorParams(size=DIM, distance=client_of.models.Distance.DOT))
    rows = pq.read_table(folder / "set.parquet").to_pylist()
    points = [client_of.models.PointStruct(id=row.pop("id"), vector=row.pop("embedding"), payload=row) for row in rows]
    client.upsert("faces", points)
    found = client.retrieve("faces", [point.id for point in points], with_vectors=True)
    whole = [{**(point.payload or {}), "id": point.id, "embedding": point.vector} for point in found]
    names = ["key", "embedding", "id", "label", "class", "error", "site"]
    check({name: [row[name] for row in sorted(whole, key=lambda row: row["id"])] for name in names})
    client.close()


@pytest.mark.live
def test_milvus_keeps_what_was_exported(folder: Path, tmp_path: Path) -> None:
    milvus = pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    with milvus_server(tmp_path) as uri:
        client = milvus.MilvusClient(uri=uri)
        schema = client.create_schema(enable_dynamic_field=True)  # for all but the id and the vector
        schema.add_field("id", milvus.DataType.INT64, is_primary=True)
        schema.add_field("embedding", milvus.DataType.FLOAT_VECTOR, dim=DIM)
        index = client.prepare_index_params()
        index.add_index("embedding", index_type="FLAT", metric_type="IP")
        client.create_collection("faces", schema=schema, index_params=index)
        client.insert("faces", pq.read_table(folder / "set.parquet").to_pylist())
        names = ["key", "embedding", "id", "label", "class", "error", "site"]
        found = client.query("faces", filter="id >= 0", output_fields=names, limit=ROWS)
        client.close()
    rows = sorted(found, key=lambda row: row["id"])
    check({name: [row.get(name) for row in rows] for name in names})


# --- the way back ---

COLUMNS = {"key": KEYS, "vector": [row.tolist() for row in VECTORS], "label": SITES}


def table() -> Any:
    kind = pa.list_(pa.float32(), DIM)
    return pa.table({**COLUMNS, "vector": pa.array(COLUMNS["vector"], kind)})


def from_pandas(path: Path) -> Path:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**COLUMNS, "vector": list(VECTORS)})
    frame.to_parquet(path / "x.parquet")
    return path / "x.parquet"


def from_duckdb(path: Path) -> Path:
    duckdb = pytest.importorskip("duckdb")
    duckdb.from_arrow(table()).write_parquet(str(path / "x.parquet"))
    return path / "x.parquet"


def from_lancedb(path: Path) -> Path:
    lancedb = pytest.importorskip("lancedb")
    given = table()
    made = lancedb.connect(path).create_table("x", given.slice(0, 20))
    made.add(given.slice(20))
    made.add(given.slice(0, 5).set_column(0, "key", pa.array(["gone"] * 5)))
    made.delete("key = 'gone'")
    return path / "x.lance"


def from_pyarrow(path: Path) -> Path:
    pq.write_table(table(), path / "x.parquet", row_group_size=9)
    return path / "x.parquet"


def from_pylance(path: Path) -> Path:
    lance.write_dataset(table(), path / "x.lance", max_rows_per_file=9)
    return path / "x.lance"


@pytest.mark.parametrize("write", [from_pandas, from_duckdb, from_lancedb, from_pyarrow, from_pylance])
def test_what_others_write_is_indexed(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    source = write(tmp_path)
    found = EmbeddingSet(source)
    np.testing.assert_array_equal(bits(found.rows(0, ROWS)), VECTORS.view(np.uint32))
    assert list(found.keys) == KEYS
    assert [None if label < 0 else found.class_names[label] for label in found.labels] == SITES
    assert main(["index", "build", str(source), "--out", str(tmp_path / "x.idx")]) == 0
    index = Index(tmp_path / "x.idx")
    assert index.manifest["left_out"] == {"error": 0, "not_finite": 0, "zero": 1}
    assert index.manifest["sets"][0]["path"] == str(source)
    usable = np.delete(np.arange(ROWS), 7)
    assert index.search(VECTORS[usable], 1).rows[:, 0].tolist() == list(range(ROWS - 1))
    assert [index.keys[row] for row in range(ROWS - 1)] == [KEYS[row] for row in usable]


def test_the_contract_comes_along_in_lance(folder: Path) -> None:
    about = json.loads(lance.dataset(folder / "set.lance").schema.metadata[b"plsc"])
    assert (about["contract_id"], about["dim"], about["empty_classes"]) == ("model-a", DIM, {"nobody": 1})
    found = EmbeddingSet(folder / "set.lance")
    assert (found.contract_id, list(found.class_names)) == ("model-a", NAMES)
    assert found.labels.tolist() == LABELS.tolist()
