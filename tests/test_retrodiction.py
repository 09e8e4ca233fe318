"""Published throughput: the rows are sound, and the planner's bounds are those that explain them."""

import csv
import importlib
from collections.abc import Callable
from dataclasses import replace
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from plsc import config as configuration
from plsc.plan import Links, named_device
from plsc.plan.advice import profile_of
from plsc.plan.backbone import BackboneProfile
from plsc.plan.backbone_timing import Efficiency, backbone_seconds
from plsc.plan.plan_config import PlanConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def rows(name: str) -> list[dict[str, str]]:
    with (BENCHMARKS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_published_row_names_its_source():
    published = rows("published_throughput.csv")
    assert len(published) > 150
    for row in published:
        repository, _, rest = row["source"].partition("@")
        commit, _, path = rest.partition(":")
        assert repository in ("deepinsight/insightface", "PaddlePaddle/PLSC")
        assert len(commit) == 8
        assert path
        assert float(row["images_per_second"]) > 0


def test_the_committed_prediction_covers_every_row_and_the_held_out_half_is_within_15_percent():
    published, predicted = rows("published_throughput.csv"), rows("results/retrodiction.csv")
    assert [float(row["published_images_per_second"]) for row in predicted] == [
        float(row["images_per_second"]) for row in published
    ]
    halves = [row["half"] for row in predicted if row["error"]]
    assert halves == [("fitted", "held out")[number % 2] for number in range(len(halves))]
    assert len(halves) > 140
    assert median(abs(float(row["error"])) for row in predicted if row["half"] == "held out") <= 0.15


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_the_peers_heads_cost_what_they_share_out(benchmark: Callable[[str], Any]):
    retrodiction = benchmark("retrodiction")
    v100, links = named_device("v100"), Links(120e9, 10e9)
    seconds = {
        (row.head, row.classes): retrodiction.head_seconds(row, v100, links)
        for row in retrodiction.read_rows()
        if row.source.endswith("speed_benchmark.md")
    }
    million = 10**6
    data, model, sampled = (seconds[head, million] for head in ("data_parallel", "model_parallel", "partial_fc"))
    assert sampled[0] < 0.15 * model[0] < 0.15 * data[0]
    assert data[1] == pytest.approx(2 * 7 / 8 * 4 * 512 * million / 120e9, rel=0.01)
    assert model[1] < 0.001 < data[1]
    assert model[0] > 6 * 1024 * million / 8 * 512 / v100.products["fp32"]
    assert seconds["model_parallel", 2 * million][0] == pytest.approx(2 * model[0])


def test_the_search_finds_the_least(benchmark: Callable[[str], Any]):
    goal = (0.31, -1.2, -9.8)
    found = benchmark("retrodiction").search(lambda point: sum(map(abs, map(sub, point, goal))), (0.0, 0.0, -10.0))
    assert found == pytest.approx(goal, abs=0.011)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_link_is_shared_by_the_ranks_of_a_node(benchmark: Callable[[str], Any], ranks: int):
    predicted = benchmark("slow_collectives").predicted
    rows, rate = 4 * 512 * 512, 12.5e6 * 1448 / 1514
    assert predicted("all-gather", 100, ranks) == pytest.approx((ranks - 1) * rows / rate, rel=0.01)
    assert predicted("all-reduce", 100, ranks) == pytest.approx(2 * (ranks - 1) / ranks * 8e6 / rate, rel=0.01)


def profile(precision: str = "fp32") -> BackboneProfile:
    config = configuration.from_dict({"backbone": "resnet8", "precision": precision, "data": {"image_size": 112}})
    return profile_of(PlanConfig(config, 1000, world=1, per_node=1, head_ranks=1))


def test_float32_convolutions_of_3x3_take_winograd_where_tf32_is_off_or_not_there():
    def bound(device: str, *, tf32: bool) -> float:
        unhindered = replace(named_device(device), bandwidth=1e18)
        efficiency = Efficiency(backbone=1.0, tf32=tf32)
        return backbone_seconds(profile(), unhindered, channels_last=False, efficiency=efficiency)

    plain = profile().flops / named_device("v100").products["fp32"]
    assert plain / 2.25 < bound("v100", tf32=False) < plain
    assert bound("v100", tf32=True) == pytest.approx(bound("v100", tf32=False))
    assert bound("a100", tf32=True) < bound("a100", tf32=False) / 2


def test_half_precision_pays_for_channels_that_are_not_last():
    device = replace(named_device("a100"), products=dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e30))
    planned = profile("bf16")
    first, last = (backbone_seconds(planned, device, channels_last=is_last) for is_last in (False, True))
    moved = sum(operation.traffic for operation in planned.operations) / device.bandwidth
    assert last * Efficiency().backbone == pytest.approx(moved)
    transposed = 2 * sum(operation.convolved for operation in planned.operations) / device.bandwidth
    assert (first - last) * Efficiency().backbone == pytest.approx(transposed)
    assert transposed > 0


def test_operations_add_their_seconds():
    planned = profile("bf16")
    device = named_device("h100")
    slow, fast = (
        backbone_seconds(planned, device, channels_last=True, efficiency=Efficiency(operation=seconds))
        for seconds in (1e-4, 0.0)
    )
    assert slow - fast == pytest.approx(1e-4 * len(planned.operations))
