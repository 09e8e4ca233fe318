"""Approximate search with filters, which must never come back short, its choice by latency, and its recall in use."""

import numpy as np
import pytest
from support.clusters import write_set

from plsc.errors import UsageError
from plsc.index import Index, ann, tuning
from plsc.index.ann import ApproximateSearch
from plsc.index.index import check
from plsc.index.recall import MIN_SAMPLES, SAMPLE_EVERY, Recall, RecallMonitor, recall_of
from plsc.index.scan import ExactScan
from plsc.index.tuning import PlanningStopped, plan_search
from plsc.tools.entry import main

ROWS, PER_PERSON, DIM = 3000, 10, 24


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def people(rows, seed):
    """Rows (n, DIM) gathered about their person's direction, and whose they are."""
    centres = np.random.default_rng(0).standard_normal((ROWS // PER_PERSON, DIM))
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(centres), rows)
    return unit(centres[labels] + 0.4 * random.standard_normal((rows, DIM))), labels


def of_slow_scans(search, *_):
    """Milliseconds of a search, where exact ones take 20 and a structure's one."""
    return 20.0 if hasattr(search, "__self__") else 1.0  # the exact search is a method, a structure's a function


@pytest.fixture(scope="module")
def gallery():
    return people(ROWS, 1)


@pytest.fixture(scope="module", params=["ivf", "hnsw"])
def search(request, gallery):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plsc.index.tuning.TRIED", (request.param,))
        patch.setattr("plsc.index.tuning.median_milliseconds", of_slow_scans)
        found = plan_search(ExactScan(gallery[0]), *gallery, 10.0, recall=0.95)
    assert found is not None
    assert found.kind == request.param
    return found


@pytest.mark.slow
def test_the_recall_is_measured_on_rows_outside_the_structure(search, gallery):
    assert len(search.held_out) == 300
    assert search.structure.ntotal == ROWS - 300
    assert min(search.recall.at_1, search.recall.at_10) >= 0.95
    truth = -np.sort(-(gallery[0][search.held_out] @ np.delete(gallery[0], search.held_out, axis=0).T), axis=1)[:, :10]
    assert recall_of(ann.search(search.structure, gallery[0][search.held_out], 10)[0], truth) == search.recall


@pytest.mark.parametrize("share", [None, 0.9, 0.5, 0.3, 0.1, 0.001])
@pytest.mark.parametrize("k", [1, 10, 5000])
def test_a_filter_never_leaves_too_few(search, gallery, share, k):
    vectors, queries = gallery[0], people(40, 2)[0]
    allowed = None if share is None else np.random.default_rng(3).random(ROWS) < share
    scores, rows = search.search(queries, k, allowed=allowed)
    everyone = np.arange(ROWS) if allowed is None else np.flatnonzero(allowed)
    assert rows.shape == scores.shape == (40, min(k, len(everyone)))
    assert set(rows.ravel()) <= set(everyone)
    assert all(len(set(row)) == len(row) for row in rows.tolist())
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_allclose(scores, np.einsum("qd,qkd->qk", queries, vectors[rows]), atol=1e-5)
    truth = -np.sort(-(queries @ vectors[everyone].T), axis=1)[:, : rows.shape[1]]
    assert (scores >= truth[:, -1:] - 1e-5).mean() >= 0.93


@pytest.mark.parametrize("share", [0.7, 0.45, 0.3])
@pytest.mark.parametrize("k", [1, 10, 60, ROWS])
def test_rows_that_are_allowed_far_from_the_query_are_found(search, gallery, share, k):
    """Cells and links near the query hold rows that are not allowed, but a few; so do not the rows held out."""
    vectors, queries = gallery[0], people(40, 2)[0]
    direction = unit(queries[:1])[0]
    queries = unit(queries + 4 * direction)
    allowed = vectors @ direction < np.quantile(vectors @ direction, share)
    assert allowed[search.held_out].any()
    scores, rows = search.search(queries, k, allowed=allowed)
    assert allowed[rows].all()
    truth = -np.sort(-(queries @ vectors[allowed].T), axis=1)[:, :k]
    assert scores.shape == truth.shape
    assert (scores[:, 0] >= truth[:, 0] - 1e-5).mean() >= 0.95
    assert (scores >= truth[:, -1:] - 1e-5).mean() >= 0.95


def test_a_query_that_finds_too_few_is_searched_exactly(gallery):
    """Near the first query lie no rows that may be found; all of them lie in cells near the second."""
    vectors, query = gallery[0], people(1, 2)[0]
    queries = np.concatenate([query, -query])
    structure = ann.train_and_add("ivf", vectors, 0, quiet=True)
    ann.set_effort(structure, "ivf", 1)
    nearest = np.argsort(-(vectors @ query[0]))
    allowed = np.zeros(ROWS, dtype=bool)
    allowed[nearest[-ROWS // 3 :]] = True
    asked = []

    class Counted(ExactScan):
        def search(self, queries, k, *, allowed=None):
            asked.append(len(queries))
            return super().search(queries, k, allowed=allowed)

    none, exact = np.zeros(0, dtype=np.int64), ExactScan(vectors)
    search = ApproximateSearch(structure, "ivf", vectors, none, Counted(vectors), Recall(1, 1, 2))
    _, rows = search.search(queries, 3, allowed=allowed)
    assert asked == [1]
    np.testing.assert_array_equal(rows[0], exact.search(queries, 3, allowed=allowed)[1][0])
    np.testing.assert_array_equal(rows[1], ann.search(structure, queries[1:], 3)[1][0])


def test_rows_held_out_are_found_and_filtered(search, gallery):
    held = search.held_out[:20]
    queries = gallery[0][held]
    np.testing.assert_array_equal(search.search(queries, 1)[1][:, 0], held)
    allowed = np.ones(ROWS, dtype=bool)
    allowed[held] = False
    assert not set(search.search(queries, 5, allowed=allowed)[1].ravel()) & set(held.tolist())


def test_nothing_allowed_and_a_structure_of_other_rows(search, gallery):
    assert search.search(gallery[0][:2], 5, allowed=np.zeros(ROWS, dtype=bool))[1].shape == (2, 0)
    with pytest.raises(UsageError, match="of 3000"):
        ApproximateSearch(search.structure, search.kind, gallery[0], search.held_out[1:], search, search.recall)


def test_exact_is_kept_where_it_is_quick_enough(gallery):
    assert plan_search(ExactScan(gallery[0]), *gallery, 10_000.0) is None
    few = gallery[0][:5]
    assert plan_search(ExactScan(few), few, gallery[1][:5], 0.0) is None, "too few to hold any out"


def test_a_plan_that_nobody_waits_for_ends_with_the_next_rows(gallery, monkeypatch):
    asked = iter([False])
    monkeypatch.setattr("plsc.index.tuning.median_milliseconds", of_slow_scans)
    with pytest.raises(PlanningStopped):
        plan_search(ExactScan(gallery[0]), *gallery, 10.0, stopped=lambda: next(asked, True))


def test_exact_is_kept_where_nothing_is_quicker(gallery, monkeypatch):
    times = iter([5.0, 7.0, 6.0])  # exact, IVF, HNSW
    monkeypatch.setattr("plsc.index.tuning.median_milliseconds", lambda *_: next(times))
    assert plan_search(ExactScan(gallery[0]), *gallery, 1.0, recall=0.5) is None


@pytest.mark.parametrize(
    ("asked", "exact", "structures", "kind"),
    [
        (9.0, 5.0, [], "exact"),
        (2.0, 5.0, [1.0], "ivf"),
        (2.0, 5.0, [3.0, 1.5], "hnsw"),
        (1.0, 5.0, [2.0, 3.0], "ivf"),
        (1.0, 5.0, [6.0, 7.0], "exact"),
    ],
)
def test_an_index_is_exact_unless_that_misses_the_latency(
    gallery, tmp_path, monkeypatch, capsys, asked, exact, structures, kind
):
    write_set(tmp_path / "set", *gallery)
    remaining = iter(structures)

    def time_of(search, *_):
        return exact if hasattr(search, "__self__") else next(remaining)

    monkeypatch.setattr("plsc.index.tuning.median_milliseconds", time_of)
    monkeypatch.setattr("plsc.index.tuning._speed_over_exact", lambda *_: exact / min(structures))
    line = f"index build {tmp_path}/set --out {tmp_path}/idx --latency-ms {asked} --recall 0.9"
    assert main(line.split()) == 0
    index = Index.open(tmp_path / "idx")
    assert index.kind == kind
    chosen = exact if kind == "exact" else min(structures)
    assert index.manifest["latency"] == {"asked_ms": asked, "exact_ms": exact, "ms": chosen}
    assert f"single query {chosen:.2f} ms, exact 5.00, asked {asked:g}" in capsys.readouterr().out
    assert not list(remaining)
    check(tmp_path / "idx")


@pytest.mark.slow
def test_a_kind_that_misses_the_recall_is_passed_over(gallery, monkeypatch):
    def tune(structure, kind, *rest):
        if kind == "ivf":
            raise UsageError("too low")
        return tune_truly(structure, kind, *rest)

    tune_truly = tuning.tune
    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(tuning, "median_milliseconds", of_slow_scans)
    found = plan_search(ExactScan(gallery[0]), *gallery, 10.0, recall=0.9)
    assert found is not None
    assert found.kind == "hnsw"


@pytest.mark.slow
def test_compressed_rows_are_ranked_by_their_true_scores(tmp_path):
    rows, labels = people(11_000, 5)
    write_set(tmp_path / "set", rows, labels)
    manifest = Index.build([tmp_path / "set"], tmp_path / "idx", kind="pq", recall=0.9, quiet=True).manifest
    assert (manifest["kind"], manifest["parameters"]["bytes"]) == ("pq", DIM // 4)
    assert (tmp_path / "idx" / "index.faiss").stat().st_size < rows.nbytes / 3
    index = Index.open(tmp_path / "idx")
    assert check(tmp_path / "idx")["recall"] == manifest["recall"]
    queries = people(40, 6)[0]
    found = index.search(queries, 10)
    stored = index.vectors[found.rows]
    np.testing.assert_allclose(found.scores, np.einsum("qd,qkd->qk", queries, stored), atol=1e-5)
    truth = -np.sort(-(queries @ index.vectors.T), axis=1)[:, :10]
    assert (found.scores >= truth[:, -1:] - 1e-5).mean() >= 0.88
    assert index.search(queries[:2], 11_000).rows.shape == (2, 11_000)


@pytest.mark.parametrize(("dim", "expected"), [(512, 128), (24, 6), (7, 1), (1, 1), (90, 18)])
def test_a_compressed_row_has_a_byte_for_four_numbers_or_more(dim, expected):
    assert ann.code_bytes(dim) == expected


N, D, K = 300, 16, 10  # of the monitor's tests


def units(count, seed):
    return unit(np.random.default_rng(seed).standard_normal((count, D)))


UNITS = units(N, 0)
EXACT = ExactScan(UNITS)


def ask(monitor: RecallMonitor, times: int, missed: int, allowed: np.ndarray | None = None, seed: int = 1) -> None:
    """Searches of SAMPLE_EVERY queries, whose answers lack the ``missed`` best rows; compared a few at a time."""
    for number in range(times):
        queries = units(SAMPLE_EVERY, seed + number)
        scores = EXACT.search(queries, K + missed, allowed=allowed)[0][:, missed:]
        monitor.record(queries, scores, allowed)
        if number % 5 == 4:
            monitor.compare(EXACT)
    monitor.compare(EXACT)


@pytest.mark.parametrize("allowed", [None, np.arange(N) % 2 == 0])
@pytest.mark.parametrize(("missed", "at_1", "at_10"), [(0, 1.0, 1.0), (1, 0.0, 0.9), (4, 0.0, 0.6)])
def test_recall_is_what_callers_got(allowed: np.ndarray | None, missed: int, at_1: float, at_10: float) -> None:
    monitor = RecallMonitor()
    ask(monitor, MIN_SAMPLES, missed, allowed)
    recall = monitor.recall
    assert recall is not None
    assert (recall.at_1, recall.at_10, recall.queries) == (at_1, pytest.approx(at_10), MIN_SAMPLES)


def test_too_few_say_nothing_and_the_newest_count() -> None:
    monitor = RecallMonitor()
    ask(monitor, MIN_SAMPLES - 1, 0)
    assert monitor.recall is None
    ask(monitor, 1000, 4)
    assert monitor.recall is not None
    assert (monitor.recall.at_1, monitor.recall.queries) == (0.0, 1000)


def test_one_query_in_many_is_asked_again_and_a_flood_is_not_kept() -> None:
    class Counting:
        asked = 0

        def search(self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None):
            self.asked += len(queries)
            return EXACT.search(queries, k, allowed=allowed)

    monitor, counting = RecallMonitor(), Counting()
    queries = units(1, 5)
    for _ in range(10 * SAMPLE_EVERY):
        monitor.record(queries, EXACT.search(queries, K)[0], None)
    monitor.compare(counting)
    assert counting.asked == 10
    for _ in range(100):
        monitor.record(units(SAMPLE_EVERY, 6), EXACT.search(units(SAMPLE_EVERY, 6), K)[0], None)
    monitor.compare(counting)
    assert 10 < counting.asked <= 10 + 20
