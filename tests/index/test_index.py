"""Searching: against brute force in numpy, on clustered data; what must be refused, and damage that must be named."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import Vectors, clustered, write_set

from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.set_writer import write_embedding_set
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import read_manifest, write_manifest
from plsc.index import Index
from plsc.index.build import build
from plsc.index.index import check
from plsc.index.query import answer, open_queries
from plsc.index.recall import choose_held_out
from plsc.index.tuning import BuildOptions


def brute_force(queries: Vectors, base: Vectors, k: int) -> npt.NDArray[np.float64]:
    unit = [x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (queries, base)]
    return -np.sort(-(unit[0] @ unit[1].T), axis=1)[:, :k]


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingSet:
    vectors, labels = clustered(400, 10, 32)
    return write_set(tmp_path_factory.mktemp("faces") / "set", vectors, labels)


@pytest.fixture(scope="module")
def exact(faces: EmbeddingSet, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """An exact index of all of them."""
    return Index.build([faces], tmp_path_factory.mktemp("exact") / "idx", quiet=True)


@pytest.mark.parametrize("kind", ["exact", "ivf", "hnsw"])
def test_search_against_brute_force(faces: EmbeddingSet, tmp_path: Path, kind: str) -> None:
    index = Index.build([faces], tmp_path / "idx", kind=kind, recall=0.97, quiet=True)
    assert (index.kind, len(index), index.manifest["left_out"]) == (
        kind,
        4000,
        {"error": 0, "not_finite": 0, "zero": 0},
    )
    queries, _ = clustered(400, 2, 32, seed=1)
    found, truth = index.search(queries, 10), brute_force(queries, faces.rows(0, 4000), 10)
    assert found.scores.shape == found.ids.shape == (800, 10)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    assert len({tuple(sorted(set(row))) for row in found.ids[:5].tolist()}) == 5
    hits = (found.scores >= truth[:, -1:] - 1e-5).mean()
    assert hits >= (1 if kind == "exact" else 0.95)
    stored = faces.rows(0, 4000).astype(np.float64)
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    np.testing.assert_allclose(found.scores, np.einsum("qd,qkd->qk", unit, stored[found.ids]), atol=2e-6)
    np.testing.assert_array_equal(found.labels, faces.labels[found.ids])
    assert [index.keys[row] for row in found.rows[0]] == [str(number) for number in found.ids[0]]
    report = check(tmp_path / "idx")
    assert report["recall"] == report["recall_stored"]
    assert report["recall"]["recall@10"] >= 0.97
    assert report["recall"]["recall@1"] >= 0.97


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_the_effort_grows_with_the_number_of_neighbours(tmp_path: Path, kind: str) -> None:
    rows, labels = clustered(1000, 4, 32, spread=1.0)
    queries, _ = clustered(1000, 1, 32, seed=1, spread=1.0)
    index = Index.build(
        [write_set(tmp_path / "set", rows, labels)], tmp_path / "idx", kind=kind, recall=0.95, quiet=True
    )
    announced = min(index.manifest["recall"]["recall@1"], index.manifest["recall"]["recall@10"])
    truth = brute_force(queries, rows, 300)
    for k in (1, 10, 30, 100, 300):
        recall = (index.search(queries, k).scores >= truth[:, k - 1 : k] - 1e-5).mean()
        assert recall >= announced - 0.02, k


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_held_out_rows_are_outside_the_structure_and_still_found(faces, tmp_path, kind):
    index = Index.build([faces], tmp_path / "idx", kind=kind, recall=0.9, quiet=True)
    assert index.held_out == 400
    assert index.structure.ntotal == 3600
    found = index.search(index.held_out_vectors, 1)
    np.testing.assert_array_equal(found.rows[:, 0], np.arange(3600, 4000))
    np.testing.assert_allclose(found.scores[:, 0], 1, atol=1e-6)
    assert len(set(index.labels[3600:].tolist())) == 400, "one held-out row of each identity"


def test_more_neighbours_than_cells_hold_and_than_there_are(faces: EmbeddingSet, tmp_path: Path) -> None:
    index = Index.build([faces], tmp_path / "idx", kind="ivf", recall=0.5, quiet=True)
    query = faces.rows(7, 9)
    for k in (3999, 4000, 10**6):
        found = index.search(query, k)
        assert found.ids.shape == (2, min(k, 4000))
        assert len(set(found.ids[0].tolist())) == min(k, 4000)
        np.testing.assert_allclose(found.scores, brute_force(query, faces.rows(0, 4000), k), atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), dim=st.integers(1, 9), k=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_exact_search_of_any_size(tmp_path_factory, rows, dim, k, seed):
    folder = tmp_path_factory.mktemp("any")
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((rows, dim)).astype(np.float32)
    queries = random.standard_normal((3, dim)).astype(np.float32)
    index = Index.build([write_set(folder / "set", vectors)], folder / "idx", quiet=True)
    found = index.search(queries, k)
    np.testing.assert_allclose(found.scores, brute_force(queries, vectors, k), atol=1e-6)
    assert index.search(vectors, 1).scores.min() > 1 - 1e-6


def test_rows_that_cannot_be_searched_are_left_out_and_counted(tmp_path: Path) -> None:
    vectors, labels = clustered(5, 8, 16)
    vectors[3], vectors[4, 2], vectors[5, 0], vectors[6] = 0, np.nan, np.inf, 0
    index = Index.build(
        [write_set(tmp_path / "set", vectors, labels, errors={3: "broken"})], tmp_path / "idx", quiet=True
    )
    assert index.manifest["left_out"] == {"error": 1, "not_finite": 2, "zero": 1}
    assert len(index) == 36
    assert not set(index.search(vectors[7:8], 40).ids[0].tolist()) & {3, 4, 5, 6}
    check(tmp_path / "idx")


def test_several_sets(tmp_path: Path) -> None:
    vectors, _ = clustered(4, 5, 8)
    first = write_embedding_set(
        tmp_path / "a", vectors[:12], contract_id="m", labels=np.arange(12) % 2, class_names=["Ada", "Bo"]
    )
    second = write_embedding_set(
        tmp_path / "b",
        vectors[12:],
        contract_id="m",
        labels=np.arange(8) % 2,
        class_names=["Bo", "Cy"],
        keys=[f"b{n}" for n in range(8)],
    )
    third = write_embedding_set(tmp_path / "c", vectors[:1] * 2, contract_id="m", ids=np.array([-7]))
    index = Index.build([first, second, third], tmp_path / "idx", quiet=True)
    assert list(index.class_names) == ["Ada", "Bo", "Cy"]
    assert sorted(index.ids.tolist()) == [-7, *range(20)]
    found = index.search(vectors[12:], 1)
    assert [index.keys[row] for row in found.rows[:, 0]] == [f"b{n}" for n in range(8)]
    assert [index.class_name(label) for label in found.labels[:, 0]] == ["Bo", "Cy"] * 4
    twins = index.search(vectors[:1], 2)  # the third set's only row is the same direction as the first's first
    assert set(twins.ids[0].tolist()) == {0, -7}
    np.testing.assert_allclose(twins.scores[0], 1, atol=1e-6)
    assert index.class_name(int(index.labels[index.ids == -7][0])) is None


@pytest.mark.parametrize("kind", ["exact", "ivf", "hnsw"])
def test_every_flipped_bit_is_named_before_faiss_reads_it(faces: EmbeddingSet, tmp_path: Path, kind: str) -> None:
    Index.build([faces], tmp_path / "idx", kind=kind, recall=0.5, quiet=True)
    files = sorted((tmp_path / "idx").iterdir())
    assert len(files) == (8 if kind == "exact" else 9)
    for path in files:
        sound = path.read_bytes()
        place = len(sound) // 2
        for damaged in (sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :], sound[:place]):
            path.write_bytes(damaged)
            with pytest.raises(IntegrityError, match=path.name):
                Index.open(tmp_path / "idx")
            with pytest.raises(IntegrityError, match=path.name):
                check(tmp_path / "idx")
        path.write_bytes(sound)
    (tmp_path / "idx" / files[0].name).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        Index.open(tmp_path / "idx")


def test_check_measures_instead_of_repeating(faces: EmbeddingSet, tmp_path: Path) -> None:
    """A manifest that claims more than the structure finds is found out, though every hash is right."""
    Index.build([faces], tmp_path / "idx", kind="ivf", recall=0.97, quiet=True)
    manifest = read_manifest(tmp_path / "idx", "plsc index", 1)
    manifest["parameters"]["nprobe"] = 1
    manifest["recall"]["recall@1"] = 1.0
    write_manifest(tmp_path / "idx", manifest)
    with pytest.raises(IntegrityError, match=r"has recall@1 0\.\d+ and was built with 1\.0000"):
        check(tmp_path / "idx")


def test_wrong_requests_to_build(faces: EmbeddingSet, tmp_path: Path) -> None:
    vectors = np.eye(4, dtype=np.float32)
    small, other = write_set(tmp_path / "s", vectors), write_set(tmp_path / "o", vectors, contract="n")
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, UsageError, "no embedding set"),
        ([small, other], {}, UsageError, "cannot be compared"),
        ([small, tmp_path / "s"], {}, UsageError, "given twice"),
        ([small, write_set(tmp_path / "w", np.eye(5, dtype=np.float32))], {}, UsageError, "w holds vectors of 5"),
        ([small], {"recall_at": 5}, UsageError, "recall at 5"),
        ([small], {"kind": "best"}, UsageError, "no kind 'best'"),
        ([small], {"kind": "ivf"}, UsageError, "ivf needs 400 rows and there are 4"),
        ([small], {"kind": "hnsw"}, UsageError, "hnsw needs 20 rows"),
        ([small], {"recall": 1.5}, UsageError, "recall 1.5"),
        *(([small], {"latency_ms": latency}, UsageError, "it lies above 0") for latency in (0, -1.0, float("nan"))),
        ([tmp_path / "missing"], {}, UsageError, "there is no folder .*missing"),
        ([faces.folder.parent], {}, DataError, "is no plsc embedding set"),
    ]
    for sets, more, error, text in wrong:
        with pytest.raises(error, match=text):
            build(sets, tmp_path / "idx", BuildOptions(quiet=True, **more))
        assert not (tmp_path / "idx").exists()
    empty = write_set(tmp_path / "e", np.empty((0, 4), np.float32))
    zeros = write_set(tmp_path / "z", np.zeros((3, 4), np.float32))
    for nothing in (empty, zeros):
        with pytest.raises(DataError, match="no embedding that can be searched"):
            build([nothing], tmp_path / "idx", BuildOptions(quiet=True))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UsageError, match="holds no index"):
        build([small], tmp_path / "taken", BuildOptions(quiet=True))
    with pytest.raises(UsageError, match="cannot write"):
        build([small], Path("/proc/idx"), BuildOptions(quiet=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "o", "s", "taken", "w", "z"], (
        "nothing is left behind"
    )


def test_a_damaged_set_is_refused_and_a_rebuild_replaces(faces: EmbeddingSet, tmp_path: Path) -> None:
    vectors, labels = clustered(3, 4, 8)
    source = write_set(tmp_path / "set", vectors, labels)
    Index.build([source], tmp_path / "idx", quiet=True)
    with pytest.raises(UsageError, match="exists already: give overwrite=True"):
        Index.build([faces], tmp_path / "idx", quiet=True)
    assert Index.build([faces], tmp_path / "idx", overwrite=True, quiet=True).dim == 32
    path = tmp_path / "set" / "shard-00000" / "embeddings.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(IntegrityError, match=r"embeddings\.npy is corrupt"):
        Index.build([tmp_path / "set"], tmp_path / "idx", overwrite=True, quiet=True)
    assert Index.open(tmp_path / "idx").dim == 32, "the older index stays"


def test_wrong_queries(faces: EmbeddingSet, exact: Index, tmp_path: Path) -> None:
    good = faces.rows(0, 2)
    for k in (0, -1):
        with pytest.raises(UsageError, match=f"at least 1, not {k}"):
            exact.search(good, k)
    bad = good.copy()
    bad[1, 3] = np.nan
    for queries, text in (
        (good[0], r"float32\[32\]; they are numbers of shape \[n, 32\]"),
        (good[:, :5], r"\[2, 5\]; they are numbers"),
        (bad, "vector 1 holds NaN"),
        (good * 0, "vector 0 is zero, which has no direction"),
        ([["a"] * 32], "are numbers of shape"),
        ([[1.0] * 32, [1.0]], "rows of different lengths"),
    ):
        with pytest.raises(UsageError, match=text):
            exact.search(queries, 1)
    assert exact.search(np.empty((0, 32)), 5).ids.shape == (0, 5)
    with pytest.raises(UsageError, match=r"there is no folder .*elsewhere"):
        Index.open(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="is no plsc index"):
        Index.open(faces.folder)


@pytest.mark.parametrize("factor", [1e-200, 1e-300, 1e200, 1e300])
def test_the_length_of_a_query_does_not_matter(faces: EmbeddingSet, exact: Index, factor: float) -> None:
    """Even where its square is no number that float64 can hold."""
    good = faces.rows(0, 4).astype(np.float64)
    expected, found = exact.search(good, 3), exact.search(good * factor, 3)
    assert np.array_equal(found.rows, expected.rows)
    assert np.allclose(found.scores, expected.scores, atol=1e-6)


def test_queries_from_a_set(faces: EmbeddingSet, exact: Index, tmp_path: Path) -> None:
    vectors = faces.rows(0, 4)
    vectors[1], vectors[2, 0] = 0, np.inf
    write_set(tmp_path / "q", vectors, keys=["a", "b", "c", "d"], errors={3: "broken JPEG"})
    answers = answer(exact, open_queries(exact, tmp_path / "q"), 2)
    assert [a["query"] for a in answers] == ["a", "b", "c", "d"]
    best = answers[0]["matches"][0]
    assert best["key"] == "0"
    assert best["class"] == f"id{best['label']}" == f"id{faces.labels[0]}"
    assert best["score"] == pytest.approx(1, abs=1e-6)
    assert [len(a["matches"]) for a in answers] == [2, 0, 0, 0]
    assert "zero" in answers[1]["error"]
    assert "finite" in answers[2]["error"]
    assert answers[3]["error"] == "broken JPEG"
    write_set(tmp_path / "other", vectors[:1], contract="another")
    with pytest.raises(UsageError, match="another model or preprocessing"):
        open_queries(exact, tmp_path / "other")
    with pytest.raises(UsageError, match="there is no"):
        open_queries(exact, tmp_path / "nothing.jpg")


def test_held_out_rows_prefer_identities_that_stay_known() -> None:
    labels = np.array([0] * 50 + [1] * 30 + list(range(2, 22)) + [-1] * 100)
    chosen = choose_held_out(labels, 2, seed=1)
    assert sorted(labels[chosen].tolist()) == [0, 1]
    assert len(choose_held_out(labels, 1000, seed=1)) == 20
    assert len(choose_held_out(labels[:5], 1000, seed=1)) == 0


def test_a_recall_of_the_nearest_alone_takes_less_effort(faces: EmbeddingSet, tmp_path: Path) -> None:
    ten = Index.build([faces], tmp_path / "ten", kind="ivf", recall=0.98, quiet=True).manifest
    one = Index.build([faces], tmp_path / "one", kind="ivf", recall=0.98, recall_at=1, quiet=True).manifest
    assert one["parameters"]["nprobe"] < ten["parameters"]["nprobe"]
    assert min(ten["recall"]["recall@1"], ten["recall"]["recall@10"]) >= 0.98
    assert one["recall"]["recall@1"] >= 0.98 > one["recall"]["recall@10"]


def test_a_recall_out_of_reach_is_said_and_leaves_nothing(faces, tmp_path, monkeypatch):
    monkeypatch.setattr("plsc.index.ann.HNSW_MAX_EFFORT", 16)
    with pytest.raises(UsageError, match=r"hnsw finds 0\.\d+ of the nearest rows at most, and --recall asks for 1"):
        Index.build([faces], tmp_path / "idx", kind="hnsw", recall=1.0, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_ivf_only_where_it_is_faster(faces: EmbeddingSet, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plsc.index.build.EXACT_UP_TO", 1000)
        for speed, kind in ((3.0, "ivf"), (0.5, "exact")):
            patch.setattr("plsc.index.tuning._speed_over_exact", lambda *_, speed=speed: speed)
            index = Index.build([faces], tmp_path / "idx", overwrite=True, recall=0.9, quiet=True)
            assert index.kind == kind
            assert (tmp_path / "idx" / "index.faiss").exists() == (kind == "ivf")
            assert check(tmp_path / "idx")["kind"] == kind
