"""Slow ranks are named with how slow they are and in what; ranks that are alike are not."""

import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.tiny_runs import run

from plsc.train import failures
from plsc.train.failures import SlowRanks

USUAL = {"data": 0.1, "backbone": 2.0, "head": 1.0}


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_rank_that_waits_for_its_images(world: int) -> None:
    ranks = [dict(USUAL) for _ in range(world)]
    ranks[1]["data"] = 4.0
    line = "rank 1 takes 2.3 times the median of all ranks, mostly in data (4.0 s compared with 0.1 s)"
    assert failures.slow_ranks(ranks) == {1: line}


def test_all_that_are_slow_and_nothing_within_the_usual_spread() -> None:
    factors = [1.0, 1.2, 0.9, 3.0, 1.0, 1.0, 1.4]
    found = failures.slow_ranks([{name: factor * value for name, value in USUAL.items()} for factor in factors])
    assert set(found) == {3, 6}
    assert "mostly in backbone" in found[3]
    assert failures.slow_ranks([USUAL, USUAL]) == {}
    assert failures.slow_ranks([dict.fromkeys(USUAL, 0.0)] * 3) == {}


def test_ranks_are_compared_over_periods_and_reported_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = 100.0, list[str]()
    monkeypatch.setattr(failures.time, "monotonic", lambda: now)
    compared = SlowRanks(lines.append)
    for _ in range(100):
        now += 1.0
        compared.add([USUAL, {**USUAL, "head": 9.0}])
    assert len(lines) == 1
    assert "rank 1 takes 3.6 times" in lines[0]
    now += 1000.0
    compared.add([{**USUAL, "head": 90.0}, USUAL])
    now += 1000.0
    compared.add([USUAL, USUAL])
    assert [line.split(" takes")[0] for line in lines] == ["rank 1", "rank 0"]


def reading_slowly(mesh: Any, out: Path) -> None:
    """Train where the last rank waits for its images."""
    from plsc.data.loader import BatchReader

    read = BatchReader.__getitem__

    def slow(self: Any, request: Any) -> Any:
        time.sleep(0.3 if mesh.rank == mesh.world_size - 1 else 0.0)
        return read(self, request)

    always = patch.multiple(failures, PERIOD_SECONDS=0.5, REPEAT_SECONDS=0.0)  # also after a slow first step
    with patch.object(BatchReader, "__getitem__", slow), always:
        run(mesh, out, {"data.batch_size": 4, "epochs": None, "steps": 8, "checkpoint.every_steps": 0})


@pytest.mark.live
@pytest.mark.slow
def test_a_run_names_the_rank_that_the_others_wait_for(tmp_path: Path, ranks: Any) -> None:
    ranks(3, reading_slowly, tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert re.search(r" rank 2 takes [\d.]+ times the median of all ranks, mostly in data \(", log)
