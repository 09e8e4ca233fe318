"""The embedding set's promises: what goes in comes out, contracts stay apart, damage is named."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.embedding.columns import open_strings, save_strings
from plsc.embedding.embedding_set import EmbeddingSet, same_contract
from plsc.embedding.set_writer import sole_writer, write_embedding_set
from plsc.errors import DataError, IntegrityError, UsageError


def make(folder: Path, rows: int = 70, *, contract: str = "model-a", dtype: str = "float32") -> EmbeddingSet:
    random = np.random.default_rng(rows)
    return write_embedding_set(
        folder,
        random.standard_normal((rows, 8)).astype(np.float32),
        contract_id=contract,
        labels=np.arange(rows, dtype=np.int64) % 3,
        class_names=["Ada", "Bjørn", "陳"],
        ids=np.arange(rows) * 10 + 5,
        keys=[f"photo é {row}.jpg" for row in range(rows)],
        errors={2: "broken"} if rows > 2 else {},
        dtype=dtype,
        shard_rows=32,
    )


def every_file(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    made = make(tmp_path / "set")
    expected = np.random.default_rng(70).standard_normal((70, 8)).astype(np.float32)
    assert (len(made), made.dim, made.contract_id) == (70, 8, "model-a")
    assert [len(shard) for shard in made] == [32, 32, 6]
    np.testing.assert_array_equal(made.rows(0, 70), expected)
    np.testing.assert_array_equal(np.concatenate([shard.embeddings for shard in made]), expected)
    np.testing.assert_array_equal(made.ids, np.arange(70) * 10 + 5)
    np.testing.assert_array_equal(made.labels, np.arange(70) % 3)
    assert made.keys[69] == made.keys[-1] == "photo é 69.jpg"
    assert list(made.keys) == [f"photo é {row}.jpg" for row in range(70)]
    assert list(made.class_names) == ["Ada", "Bjørn", "陳"]
    assert made.errors == {2: "broken"}
    made.verify()


@settings(max_examples=40, deadline=None)
@given(bounds=st.tuples(st.integers(0, 70), st.integers(0, 70)).map(sorted))
def test_any_range_of_rows(tmp_path_factory: pytest.TempPathFactory, bounds: list[int]) -> None:
    folder = tmp_path_factory.getbasetemp() / "ranges"
    whole = EmbeddingSet(folder) if folder.exists() else make(folder)
    expected = np.random.default_rng(70).standard_normal((70, 8)).astype(np.float32)
    np.testing.assert_array_equal(whole.rows(*bounds), expected[bounds[0] : bounds[1]])


@settings(max_examples=40, deadline=None)
@given(strings=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_come_back(tmp_path_factory: pytest.TempPathFactory, strings: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp()
    save_strings(folder, "names", iter([*strings, "x" * 70_000, "\udcff", ""]))
    stored = open_strings(folder.joinpath, "names", len(strings) + 3)
    assert list(stored) == [*strings, "x" * 70_000, "?", ""]
    assert np.load(folder / "names.npy", allow_pickle=False).dtype == np.uint8


def test_float16_halves_the_size_and_reads_as_float32(tmp_path: Path) -> None:
    half, full = make(tmp_path / "half", dtype="float16"), make(tmp_path / "full")
    assert half.shards[0].embeddings.dtype == np.float16
    assert half.rows(0, 70).dtype == np.float32
    np.testing.assert_allclose(half.rows(0, 70), full.rows(0, 70), rtol=1e-3)


def test_an_empty_set(tmp_path: Path) -> None:
    empty = write_embedding_set(tmp_path / "set", np.empty((0, 4), np.float32), contract_id="m")
    assert (len(empty), empty.labels.tolist(), list(empty.keys), dict(empty.errors)) == (0, [], [], {})
    assert empty.rows(0, 0).shape == (0, 4)


def test_every_flipped_bit_and_every_cut_is_named(tmp_path: Path) -> None:
    make(tmp_path / "set")
    random = np.random.default_rng(0)
    files = every_file(tmp_path / "set")
    assert len(files) > 15
    for path in files:
        sound = path.read_bytes()
        place = int(random.integers(len(sound)))
        for damaged in (sound[:place] + bytes([sound[place] ^ 16]) + sound[place + 1 :], sound[:-1], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.raises((IntegrityError, DataError), match=path.parent.name) as caught:
                EmbeddingSet(tmp_path / "set", verify=True)
            assert path.name in str(caught.value) or "no plsc embedding s" in str(caught.value)
        path.write_bytes(sound)
    EmbeddingSet(tmp_path / "set", verify=True)


def test_a_cut_file_is_noticed_without_hashing(tmp_path: Path) -> None:
    make(tmp_path / "set")
    path = tmp_path / "set" / "shard-00001" / "labels.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match=r"labels\.npy has \d+ bytes instead of"):
        EmbeddingSet(tmp_path / "set")


def test_contracts_do_not_mix(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b", contract="model-b")
    assert same_contract([first, EmbeddingSet(tmp_path / "a")]) == "model-a"
    with pytest.raises(UsageError, match=r"b was embedded by another model.*model-b.*model-a"):
        same_contract([first, second])
    with pytest.raises(UsageError, match=r"begun with the model \(contract_id\) model-a, and now it is model-c"):
        make(tmp_path / "a", contract="model-c")


def test_wrong_requests(tmp_path: Path) -> None:
    vectors = np.ones((3, 2), np.float32)
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere"):
        EmbeddingSet(tmp_path / "nowhere")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match="is no plsc embedding set"):
        EmbeddingSet(tmp_path / "hollow")
    with pytest.raises(UsageError, match="labels reach 5"):
        write_embedding_set(tmp_path / "x", vectors, contract_id="m", labels=np.array([0, 1, 5]), class_names="ab")
    with pytest.raises(UsageError, match="not unique"):
        write_embedding_set(tmp_path / "x", vectors, contract_id="m", ids=np.array([1, 1, 2]))
    with pytest.raises(UsageError, match="no dtype 'int8'"):
        write_embedding_set(tmp_path / "x", vectors, contract_id="m", dtype="int8")
    with pytest.raises(UsageError, match=r"rows .2, 9. do not lie in the 3 rows"):
        write_embedding_set(tmp_path / "y", vectors, contract_id="m").rows(2, 9)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty and holds no embedding set"):
        write_embedding_set(tmp_path / "full", vectors, contract_id="m")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "precious"


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "set"), pytest.raises(UsageError, match="being written by another"):
        make(tmp_path / "set")
    make(tmp_path / "set")
