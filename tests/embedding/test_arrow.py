"""Embedding sets as Arrow tables, in Parquet and Lance: others read the same bits, and plsc takes them back."""

import builtins
import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plsc.embedding import table_sets
from plsc.embedding.arrow_tables import write_table
from plsc.embedding.embedding_set import EmbeddingSet, is_embedding_set
from plsc.embedding.set_writer import SetWriter, ShardRows, write_embedding_set
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import MANIFEST
from plsc.index import Index
from plsc.signing import VERIFY_KEY

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
lance = pytest.importorskip("lance")

of_both = pytest.mark.parametrize("name", ["x.parquet", "x.lance"])

ROWS, DIM, SHARD = 70, 8, 32
VECTORS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
LABELS = np.arange(ROWS, dtype=np.int64)[::-1] % 4 - 1  # the first class to be seen is not the first of all
NAMES = ["Zoë", "Ada", "陳"]
ABOUT = {"flip": True, "image_size": 112, "compatible_with": ["old"], "alignment": "five points"}


def make(folder: Path, dtype: str = "float32", *, metadata: bool = True, whole: bool = False) -> EmbeddingSet:
    """A set of three shards and further columns; unless it is ``whole``, row 2 is an error and row 3 infinite."""
    vectors = VECTORS.astype(dtype)
    if not whole:
        vectors[2], vectors[3, 1] = 0, np.inf
    rows = [{"site": f"Å{row % 2}", "key": f"of {row}"} if row % 3 else {} for row in range(ROWS)]
    size = {"dim": DIM, "dtype": dtype, "rows": ROWS, "shard_rows": SHARD}
    writer = SetWriter(folder, {"contract_id": "model-a", **size, **ABOUT}, {"model": "a.onnx"})
    writer.begin()
    for number in range(writer.shard_count):
        part = slice(*writer.shard_range(number))
        keys = [f"é {row}.jpg" for row in range(ROWS)][part]
        about: dict[str, Any] = {"errors": {2: "broken"} if number == 0 and not whole else {}}
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
    write_table(source, tmp_path / "set.parquet")
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
    import duckdb
    import pandas

    source, path = make(tmp_path / "set", dtype), tmp_path / "set.parquet"
    write_table(source, path)
    expected = np.concatenate([shard.embeddings for shard in source])
    for frame in (source.to_pandas(), pandas.read_parquet(path)):
        np.testing.assert_array_equal(bits(np.stack(frame["embedding"]), dtype), bits(expected, dtype))
        assert frame["id"].tolist() == [row * 10 + 5 for row in range(ROWS)]
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


@of_both
def test_a_table_appears_whole(tmp_path: Path, name: str) -> None:
    source, path = make(tmp_path / "set"), tmp_path / "out" / name
    path.parent.mkdir()
    left = path.parent / f".{name}.0123abcd.{2**40}.tmp"  # by a process that was killed
    if name == "x.parquet":
        left.touch()
    else:
        (left / "data").mkdir(parents=True)
    whole = source.class_names
    source.class_names = FailingNames(whole)
    with pytest.raises(KeyboardInterrupt):
        write_table(source, path)
    assert list(path.parent.iterdir()) == []
    source.class_names = whole
    write_table(source, path)
    assert [path.name for path in path.parent.iterdir()] == [name]


def test_a_file_has_a_row_group_of_each_shard(tmp_path: Path) -> None:
    write_table(make(tmp_path / "set"), tmp_path / "x.parquet")
    metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
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


def table(path: Path, /, **columns: Any) -> Path:
    """A stranger's table."""
    if path.suffix == ".lance":
        lance.write_dataset(pa.table(columns), path, mode="overwrite", max_rows_per_file=40)
    else:
        pq.write_table(pa.table(columns), path)
    return path


def vectors(rows: Any, kind: Any = None) -> Any:
    return pa.array([None if row is None else list(row) for row in rows], kind or pa.list_(pa.float32()))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}


@of_both
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_set_comes_back_as_it_was(tmp_path: Path, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_sets, "_SHARD_ROWS", SHARD)
    monkeypatch.setattr(table_sets, "_ROWS_AT_ONCE", 5)  # batches that end neither with row groups nor with shards
    source, path = make(tmp_path / "set", dtype), tmp_path / name
    write_table(source, path)
    back = EmbeddingSet(path)
    assert (back.path, list(back.class_names)) == (path, NAMES)
    assert content(back.folder) == content(source.folder)
    assert (back.errors, back.contract_id) == (source.errors, "model-a")
    assert [back.metadata(row) for row in range(ROWS)] == [source.metadata(row) for row in range(ROWS)]
    assert {name: back.manifest[name] for name in ABOUT} == ABOUT
    Index.build(source, tmp_path / "a.idx", quiet=True)
    Index.build(path, tmp_path / "b.idx", quiet=True)
    assert content(tmp_path / "a.idx") == content(tmp_path / "b.idx")


@of_both
def test_a_table_is_made_a_set_once_until_it_is_another(tmp_path: Path, name: str) -> None:
    path = table(tmp_path / name, vector=vectors(VECTORS))
    first = EmbeddingSet(path).folder
    stamp = (first / MANIFEST).stat().st_mtime_ns
    assert EmbeddingSet(path).folder == first
    assert (first / MANIFEST).stat().st_mtime_ns == stamp
    table(path, vector=vectors(VECTORS[:50]))
    second = EmbeddingSet(path)
    assert len(second) == 50
    assert list(first.parent.iterdir()) == [second.folder]


def test_of_several_processes_one_makes_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "x.parquet", vector=vectors(VECTORS))
    lock, made = fcntl.flock, []

    def lost(descriptor: int, operation: int) -> None:
        """Another process has the lock first, and makes the set."""
        monkeypatch.setattr(fcntl, "flock", lock)
        made.append(EmbeddingSet(path).folder)
        made.append((made[0] / MANIFEST).stat().st_mtime_ns)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lost)
    folder = EmbeddingSet(path).folder
    assert [folder, (folder / MANIFEST).stat().st_mtime_ns] == made


@pytest.mark.parametrize("labels", ["all", "some", "none"])
def test_classes_without_rows_stay(tmp_path: Path, labels: str) -> None:
    given = {"all": [0, 1, 2, 3], "some": [2, -1, 2, 0], "none": [-1] * 4}[labels]
    about: dict[str, Any] = {"contract_id": "a", "labels": np.array(given), "class_names": ["d", "c", "b", "a"]}
    write_table(write_embedding_set(tmp_path / "set", VECTORS[:4], **about), tmp_path / "x.parquet")
    back = EmbeddingSet(tmp_path / "x.parquet")
    assert (list(back.class_names), back.labels.tolist()) == (["d", "c", "b", "a"], given)
    whole = pq.read_table(tmp_path / "x.parquet")
    pq.write_table(whole.slice(0, 1), tmp_path / "y.parquet")  # of a part, some classes are not known any more
    part = EmbeddingSet(tmp_path / "y.parquet")
    assert [part.class_names[label] for label in part.labels[part.labels >= 0]] == [
        "dcba"[each] for each in given[:1] if each >= 0
    ]


def test_names_that_lance_does_not_take_come_back(tmp_path: Path) -> None:
    names = ["a.b", "a_b", "_rowid", "rowid", "`x`", "", "metadata.key", "key"]
    rows = [dict.fromkeys(names, str(row)) for row in range(2)]
    writer = SetWriter(
        tmp_path / "set", {"contract_id": "a", "dim": DIM, "dtype": "float32", "rows": 2, "shard_rows": 2}
    )
    writer.begin()
    writer.publish(0, ShardRows(0, VECTORS[:2], np.arange(2), np.full(2, -1), ["a", "b"], metadata=rows))
    write_table(writer.finish([]), tmp_path / "x.lance")
    found = EmbeddingSet(tmp_path / "x.lance")
    assert [found.metadata(row) for row in range(2)] == rows
    assert "rowid_" in lance.dataset(tmp_path / "x.lance").schema.names


def test_a_conversion_that_fails_leaves_nothing_and_goes_well_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sets, "_SHARD_ROWS", SHARD)
    path = table(tmp_path / "x.parquet", vector=vectors(VECTORS))
    publish = SetWriter.publish

    def stopped(writer: SetWriter, number: int, rows: ShardRows) -> None:
        if number == 1:
            raise KeyboardInterrupt
        publish(writer, number, rows)

    monkeypatch.setattr(SetWriter, "publish", stopped)
    with pytest.raises(KeyboardInterrupt):
        EmbeddingSet(path)
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]
    monkeypatch.setattr(SetWriter, "publish", publish)
    np.testing.assert_array_equal(EmbeddingSet(path).rows(0, ROWS), VECTORS)


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed", "double"])
def test_strangers_columns_are_taken(tmp_path: Path, kind: str) -> None:
    double = pa.list_(pa.float64())
    lists = {"large_list": pa.large_list(pa.float32()), "fixed": pa.list_(pa.float32(), 2), "double": double}
    rows = [[1, 2], None, [3, np.nan], [np.inf, 4], [0, 0], [5, 6]]
    path = table(
        tmp_path / "x.parquet",
        vector=vectors(rows, lists.get(kind)),
        path=["a", "b", None, "d", "e", "f"],
        id=[7, 6, 5, 4, 3, 2],
        label=pa.array(["Zoë", "Ada", None, "Ada", "Zoë", "Ada"]).dictionary_encode(),
        age=[1, None, 3, 4, 5, 6],
        nested=[[1]] * 6,
        born=pa.array([0, None, 2, 3, 4, 5], pa.date32()),
        seen=pa.array([0] * 6, pa.timestamp("ms", "Europe/Berlin")),
        views=pa.array(["Å", *"bcdef"], pa.string_view()),
        price=pa.array([1] * 6, pa.int32()).cast(pa.decimal128(12, 2)),
    )
    found = EmbeddingSet(path)
    assert (found.contract_id, list(found.keys), found.ids.tolist()) == ("unknown", list("ab2def"), [7, 6, 5, 4, 3, 2])
    assert (list(found.class_names), found.labels.tolist()) == (["Ada", "Zoë"], [1, 0, -1, 0, 1, 0])
    np.testing.assert_array_equal(found.rows(0, 6), [row or [0, 0] for row in rows])
    assert list(found.errors) == [1]
    assert [found.metadata(row) for row in (0, 1)] == [
        {"age": "1", "born": "1970-01-01", "seen": "1970-01-01 00:00:00.000", "views": "Å", "price": "1.00"},
        {"seen": "1970-01-01 00:00:00.000", "views": "b", "price": "1.00"},
    ]
    index = Index.build(path, tmp_path / "x.idx", quiet=True)
    assert index.manifest["left_out"] == {"error": 1, "not_finite": 2, "zero": 1}


def test_numbers_as_labels_and_keys(tmp_path: Path) -> None:
    path = table(tmp_path / "x.parquet", embedding=vectors(VECTORS[:4]), id=[3, 1, 2, 0], label=[10, -1, 9, 10])
    found = EmbeddingSet(path)
    assert (list(found.class_names), found.labels.tolist()) == (["9", "10"], [1, -1, 0, 1])
    assert list(found.keys) == ["3", "1", "2", "0"]


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ({"vector": [[1.0, 2.0], [1.0, 2.0, 3.0]]}, DataError, r"row 1 of .* a vector of 3, and those before have 2"),
        ({"vectors": [[1.0]]}, UsageError, r"no column of embeddings \(embedding, embeddings, vector\), but 'vectors'"),
        ({"vector": [[1, 2]]}, UsageError, r"is list<element: int64>, and embeddings are lists of floating point"),
        ({"vector": [1.0]}, UsageError, r"is double, and embeddings are lists"),
        ({"vector": pa.array([[], []], pa.list_(pa.float32()))}, DataError, r"no embedding of 1 to 1,048,576 numbers"),
        ({"vector": pa.array([None], pa.list_(pa.float32()))}, DataError, r"no embedding of 1 to"),
        ({"vector": pa.array([], pa.list_(pa.float32()))}, DataError, r"claims 0 rows"),
        ({"vector": [[1.0]], "label": [0.5]}, UsageError, r"is double, and labels are texts or whole numbers"),
        ({"vector": [[1.0]] * 2, "id": [1, None]}, DataError, r"rows without an id"),
        ({"vector": [[1.0]], "id": pa.array([2**63], pa.uint64())}, DataError, r"cannot be read as Parquet"),
    ],
)
def test_what_is_no_set_is_told_in_a_line(tmp_path: Path, columns: Any, error: type[Exception], text: str) -> None:
    path = table(tmp_path / "x.parquet", **columns)
    with pytest.raises(error, match=text) as told:
        EmbeddingSet(path)
    assert "\n" not in str(told.value)
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]


@pytest.mark.parametrize("about", [b"{", b"[]", b'{"dim": 8}', b'{"contract_id": 3}'])
def test_a_contract_that_is_none_is_refused(tmp_path: Path, about: bytes) -> None:
    pq.write_table(
        pa.table({"embedding": vectors(VECTORS)}).replace_schema_metadata({b"plsc": about}), tmp_path / "x.parquet"
    )
    with pytest.raises(DataError, match="states its contract wrongly"):
        EmbeddingSet(tmp_path / "x.parquet")


def test_every_cut_file_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "x.parquet", vector=vectors(VECTORS[:3]))
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            EmbeddingSet(path)


def test_a_cut_table_in_lance_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "x.lance", vector=vectors(VECTORS[:3]))
    EmbeddingSet(path)
    for file in [*(path / "data").iterdir(), *(path / "_versions").glob("*.manifest")]:
        whole = file.read_bytes()
        for length in range(3, len(whole), 101):
            file.write_bytes(whole[:length])
            with pytest.raises(DataError, match=r"x\.lance cannot be read as Lance: [^\n]*; use another copy"):
                EmbeddingSet(path)
        file.write_bytes(whole)


@pytest.mark.parametrize("suffix", [".parquet", ".lance"])
def test_a_table_of_pictures_is_no_set(tmp_path: Path, suffix: str) -> None:
    columns = {"embedding": vectors(VECTORS[:1])}
    assert is_embedding_set(table(tmp_path / f"a{suffix}", **columns))
    assert not is_embedding_set(table(tmp_path / f"b{suffix}", **columns, image=[b"picture"]))
    assert not is_embedding_set(table(tmp_path / f"c{suffix}", image=[b"picture"]))
    assert not is_embedding_set(tmp_path / f"none{suffix}")


def test_a_folder_is_a_set_whatever_its_name(tmp_path: Path) -> None:
    write_embedding_set(tmp_path / "x.lance", VECTORS, contract_id="a")
    assert is_embedding_set(tmp_path / "x.lance")
    assert len(EmbeddingSet(tmp_path / "x.lance")) == ROWS


def test_a_table_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "x.lance", vector=vectors(VECTORS))
    file = next((path / "data").iterdir())
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="it lies outside of"):
        EmbeddingSet(path)


def test_what_is_said_names_the_table(tmp_path: Path) -> None:
    path = table(tmp_path / "x.parquet", vector=vectors(VECTORS), id=[1] * ROWS)
    with pytest.raises(DataError, match=r"^\S*/x\.parquet uses an id twice"):
        Index.build(path, tmp_path / "x.idx", quiet=True)
    path = table(tmp_path / "y.parquet", vector=vectors(VECTORS))
    with pytest.raises(UsageError, match=r"^\S*/y\.parquet is given twice"):
        Index.build([path, path], tmp_path / "x.idx", quiet=True)
    index = Index.build(path, tmp_path / "x.idx", quiet=True)
    assert index.manifest["sets"][0]["path"] == str(path)
    assert str(path) in repr(EmbeddingSet(path))


@of_both
def test_a_table_is_refused_where_signatures_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = table(tmp_path / name, vector=vectors(VECTORS))
    EmbeddingSet(path)
    monkeypatch.setenv(VERIFY_KEY, "key.pem")
    with pytest.raises(IntegrityError, match="carries no signature"):
        EmbeddingSet(path)
