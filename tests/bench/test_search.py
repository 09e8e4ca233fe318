"""`plsc bench search`: a tiny comparison from end to end, and the meaning of its figures."""

import csv
import json

import numpy as np
import pytest

from plsc.bench import search
from plsc.bench.comparison import BASELINES
from plsc.bench.report import search_table
from plsc.bench.search import (
    PER_IDENTITY,
    SearchComparison,
    compare_searches,
    exact_neighbours,
    make_search_data,
    measure_search,
    search_ratios,
    search_row,
)
from plsc.tools.entry import main

KNOWN = SearchComparison(baselines=str(BASELINES)).known


def bench(*argv):
    return main(["bench", "search", "--rows", "500", "--dim", "16", "--threads", "1", "--seconds", "0.01", *argv])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_search_data(tmp_path_factory.mktemp("data"), 2000, 32)


def test_rows_gather_by_identity(data):
    rows, queries = np.array(data.rows), data.queries
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    cosines = queries @ rows.T
    same = np.sort(cosines, axis=1)[:, -PER_IDENTITY:]
    assert 0.5 < same.mean() < 0.7
    assert abs(cosines.mean()) < 0.02
    truth = np.argsort(-(queries[:256].astype(np.float64) @ rows.astype(np.float64).T), axis=1)[:, :10]
    np.testing.assert_array_equal(data.truth, truth)


def test_exact_neighbours_are_found_over_blocks():
    base = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    queries = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    whole = np.argsort(-(queries.astype(np.float64) @ base.T.astype(np.float64)), axis=1)
    for k in (1, 7, 50):
        blocks = (base[start : start + 6] for start in range(0, 50, 6))
        np.testing.assert_array_equal(exact_neighbours(queries, blocks, k), whole[:, :k])


@pytest.mark.parametrize("name", list(KNOWN))
def test_every_implementation_finds_the_truth(name, data):
    if (reason := KNOWN[name].why_not()) is not None:
        pytest.skip(reason)
    figures = measure_search(KNOWN[name], data, [1, 24], 1, 0.01)
    assert figures["recall"] > 0.999
    assert set(figures["batches"]) == {"1", "24"}
    for timed in figures["batches"].values():
        assert timed["searches"] >= 3
        assert 0 < timed["p50_ms"] <= timed["p99_ms"]
        assert timed["qps"] > 0
    assert figures["batches"]["24"]["note"].startswith("blocks of ") == (name == "faiss-tuned")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rows_ratios_and_files(tmp_path, capsys):
    files = ("--out", str(tmp_path), "--json", str(tmp_path / "r.json"))
    assert bench("--batch", "1", "8", "--rounds", "1", "--contestants", "plsc", "numpy", *files) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    found = [(row["batch"], row["contestant"]) for row in result["rows"]]
    assert found == [(batch, name) for batch in (1, 8) for name in ("plsc", "numpy")]
    for row in result["rows"]:
        assert (row["rows"], row["dim"], row["threads"], row["rounds"], row["failed"]) == (500, 16, 1, 1, False)
        assert row["date"]
        assert row["recall"] == 1.0
        assert row["qps_low"] <= row["qps"] <= row["qps_high"]
    assert [(ratio["batch"], ratio["ours"], ratio["best_other"]) for ratio in result["ratios"]] == [
        (1, "plsc", "numpy"),
        (8, "plsc", "numpy"),
    ]
    with (tmp_path / "search.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "500 rows x 16, 1 thread, the ten best, medians of 1 round:" in shown
    assert "times the best of the others (numpy)" in shown


def turn(rate, late=2.0):
    return {
        "recall": 1.0,
        "memory_mib": 5.0,
        "build_s": 0.1,
        "batches": {"4": {"qps": rate, "p50_ms": 1.0, "p99_ms": late, "searches": 3, "note": ""}},
    }


def test_medians_and_ratios_are_over_the_rounds():
    plan = SearchComparison(("plsc", "numpy", "faiss"), batches=[4], baselines=str(BASELINES))
    turns = {
        "plsc": [turn(100.0, 9.0), turn(40.0), turn(90.0)],
        "numpy": [turn(50.0), turn(10.0), turn(10.0)],
        "faiss": [turn(20.0), turn(20.0), turn(20.0)],
    }
    row = search_row(plan, "plsc", 4, turns["plsc"])
    assert (row["qps"], row["qps_low"], row["qps_high"], row["p99_ms"]) == (90.0, 40.0, 100.0, 2.0)
    (ratio,) = search_ratios([4], turns)
    assert ratio == {"batch": 4, "ours": "plsc", "best_other": "faiss", "times": 2.0}


def test_an_implementation_that_fails_is_a_row_and_not_tried_again(monkeypatch):
    tried = []

    def take(module, task, **options):
        name = task["contestant"]
        tried.append(name)
        return {"reason": "no memory"} if name == "numpy" else turn(10.0)

    monkeypatch.setattr("plsc.bench.comparison.measure_on_ranks", take)
    plan = SearchComparison(("plsc", "numpy"), rows=50, dim=4, batches=[4], rounds=3, baselines=str(BASELINES))
    result = compare_searches(plan, quiet=True)
    assert tried == ["plsc", "numpy", "plsc", "plsc"]
    assert [(row["failed"], row["note"], row["qps"]) for row in result["rows"]] == [
        (False, "", 10.0),
        (True, "no memory", None),
    ]
    assert result["ratios"] == []
    assert "no memory" in search_table(result["rows"], result["ratios"])


@pytest.mark.live
@pytest.mark.slow
def test_a_process_that_ends_early_says_why(monkeypatch):
    monkeypatch.setitem(search.SEARCHES, "plsc-new", search.SEARCHES["plsc"])  # which the worker does not know
    (row,) = compare_searches(SearchComparison(("plsc-new",), 50, 4, [1], 1, 1, 0.01), quiet=True)["rows"]
    assert row["failed"]
    assert "plsc-new" in row["note"]
