"""`plsc bench serve`: its parts on a tiny gallery, and the meaning of its figures."""

import csv

import pytest
from support.live_service import DIM, live_service

from plsc.bench.harness import write_csv
from plsc.bench.report import draw_serving, serve_table
from plsc.bench.search import make_search_data
from plsc.bench.serve import (
    BARE,
    BARE_AT_BATCH,
    BATCHED,
    LABELS,
    UNBATCHED,
    ServeComparison,
    search_batches,
    serve_ratios,
    serve_row,
)
from plsc.bench.serve_worker import COLLECTION, FORMS, make_gallery, measure_store, send_load

COMPARISON = ServeComparison(rows=100, dim=DIM, clients=(1, 4), rounds=3)


def turn(rates: dict[str, float]) -> dict[tuple[str, int], dict[str, float]]:
    """A round in which four callers get four times the rate of one."""
    return {
        (name, clients): {"qps": rate * clients, "p50_ms": 1.0, "p99_ms": 2.0, "mean_batch": float(clients)}
        for name, rate in rates.items()
        for clients in (1, 4)
    }


TURNS = [turn({BATCHED: 10.0 * speed, UNBATCHED: 5.0, BARE: 20.0, BARE_AT_BATCH: 12.5}) for speed in (1, 2, 4)]


def test_ratios_are_medians_of_the_rounds_own():
    assert serve_ratios(COMPARISON, TURNS) == [
        {"clients": clients, "times_unbatched": 4.0, "share_of_bare": 1.0, "share_of_bare_at_batch": 1.6}
        for clients in (1, 4)
    ]
    row = serve_row(COMPARISON, BATCHED, 4, TURNS)
    assert (row["qps"], row["qps_low"], row["qps_high"], row["mean_batch"]) == (80.0, 40.0, 160.0, 4.0)


def test_the_report(tmp_path):
    rows = [serve_row(COMPARISON, name, clients, TURNS) for clients in (1, 4) for name in LABELS]
    text = serve_table(rows, serve_ratios(COMPARISON, TURNS))
    assert "4.00 times the unbatched rate; 160% of the store alone in the same batches, 100% with all" in text
    draw_serving(rows, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    write_csv(rows, tmp_path / "serve.csv")
    lines = (tmp_path / "serve.csv").read_text(encoding="utf-8").splitlines()
    assert [line["contestant"] for line in csv.DictReader(lines)] == list(LABELS) * 2


def test_a_gallery_is_made_and_the_bare_store_measured(tmp_path):
    assert make_gallery({"data": str(tmp_path), "rows": 300, "dim": DIM})["seconds"] > 0
    figures = measure_store({"data": str(tmp_path), "batch": 4, "threads": 1, "seconds": 0.05})
    assert figures["qps"] > 0
    assert figures["p99_ms"] >= figures["p50_ms"] > 0


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_callers_ask_and_count_answers_alone(tmp_path, form):
    data = make_search_data(tmp_path, 50, DIM)
    with live_service(tmp_path, metrics_port=0) as live:
        place = live.collection(COLLECTION)
        faces = [{"vector": row.tolist()} for row in data.rows]
        live.ask("POST", f"{place}/persons", {"persons": [{"faces": [face]} for face in faces]})
        task = {
            "data": str(tmp_path),
            "address": live.server.address,
            "path": f"{place}/search",
            "clients": 3,
            "form": form,
        }
        seconds, figures = load_until_answered(task)
        asked, batches = search_batches(str(live.server.metrics_address))
        assert 3 <= figures["answers"] <= asked
        assert batches <= asked
        assert figures["qps"] == figures["answers"] / seconds
        with pytest.raises(ConnectionError, match="404"):
            load_until_answered({**task, "path": "/v1/collections/nowhere/search"})


def load_until_answered(task):
    """The figures of a load, and its seconds: more of them where the machine has answered none in a few."""
    for seconds in (0.2, 2.0, 20.0):
        figures = send_load({**task, "seconds": seconds})
        if figures["answers"] >= 3:
            break
    return seconds, figures
