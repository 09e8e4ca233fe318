"""The plan beside the counts of traced steps, tests/gpu_trace/counts.json: traffic, collectives and memory within 3%.

That the counts are those of the steps as they are is tested where they are traced (gpu_trace/test_training_step.py).
"""

import json
import re
from pathlib import Path

import pytest
from gpu_trace.scenarios import SCENARIOS, short_vit

from plsc.plan import Hardware, Links, named_device, parse_memory
from plsc.plan.advice import Estimate, estimate
from plsc.plan.plan_config import plan_config

pytestmark = pytest.mark.slow

H100 = named_device("h100")
BYTES_PER_SECOND = 1e3  # so few that no latency counts
TRACED = json.loads((Path(__file__).parent / "gpu_trace" / "counts.json").read_text())["scenarios"]
PLANNED = [name for name, scenario in SCENARIOS.items() if scenario.planned]
# of these, the first rank's collectives are not the busiest's
NOT_PIPELINED = [name for name in PLANNED if SCENARIOS[name].config.parallel.pp == 1]


def planned(name: str) -> Estimate:
    scenario = SCENARIOS[name]
    hardware = Hardware(H100, parse_memory("80GB"), Links(BYTES_PER_SECOND, BYTES_PER_SECOND))
    with short_vit():
        run = plan_config(scenario.config, scenario.classes, scenario.ranks, per_node=scenario.ranks)
        return estimate(run, hardware)


@pytest.mark.parametrize("name", PLANNED)
def test_the_heads_traffic_is_that_of_the_traced_step(name: str):
    parts = planned(name).timing.parts
    traffic = (parts["head, table traffic"] + parts["head, samples' traffic"]) * H100.bandwidth
    traced = sum(TRACED[name]["bytes per class"].values()) * SCENARIOS[name].rows
    assert traffic == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("name", PLANNED)
def test_the_peak_of_memory_is_that_of_the_traced_step(name: str):
    traced = TRACED[name]["peak memory, MiB"]["device"] * 2**20
    assert 0.97 * traced <= planned(name).memory.computed <= (1 + SCENARIOS[name].above) * traced


@pytest.mark.parametrize("name", [name for name in NOT_PIPELINED if SCENARIOS[name].ranks > 1])
def test_collectives_move_what_those_of_the_traced_step_do(name: str):
    timing = planned(name).timing
    exchanging = re.compile("gathered|sums over|scattered|summed|reduce|collectives|broadcast")
    both = (*timing.parts.items(), *timing.hidden.items())
    moved = BYTES_PER_SECOND * sum(seconds for part, seconds in both if exchanging.search(part))
    assert moved == pytest.approx(
        sum(map(sent, *zip(*TRACED[name]["collectives, bytes"].items(), strict=True))), rel=0.03
    )


def sent(collective: str, size: int) -> float:
    """Bytes that a rank sends in a ring, where ``size`` are those that go in and come out."""
    kind, ranks = collective.split()[0], int(collective.split()[-2])
    if kind == "allreduce":
        return 2 * size * (ranks - 1) / ranks
    return size * (ranks - 1) / (ranks if kind == "broadcast" else ranks + 1)
