"""A whole training step on fake CUDA tensors: what is wrong with it, what it costs beside the committed counts."""

import re

import pytest

from gpu_trace import order, ratchet, runtime
from gpu_trace.faults import FAULTS
from gpu_trace.runner import Traced, summaries, trace_all
from gpu_trace.scenarios import SCENARIOS, short_vit
from gpu_trace.tracer import Collective
from gpu_trace.world import GPUS_PER_NODE
from plsc.plan import Hardware, Links, named_device, parse_memory
from plsc.plan.advice import estimate
from plsc.plan.plan_config import plan_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(runtime.missing() is not None, reason=f"no fake CUDA: {runtime.missing()}"),
]
PLANNED = [name for name, scenario in SCENARIOS.items() if scenario.planned]


@pytest.fixture(scope="session")
def traced() -> Traced:
    """The counts of all scenarios, and of steps with a planted fault, by rank."""
    return trace_all([*SCENARIOS, *FAULTS])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operand_is_where_and_as_its_kernel_takes_it(traced: Traced, name: str):
    assert [counts["problems"] for counts in traced[name].values()] == [{}] * len(traced[name])


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.ranks > 1])
def test_ranks_issue_their_collectives_in_one_order(traced: Traced, name: str):
    sequences = {
        rank: [Collective(*fields) for fields in counts["collectives"]] for rank, counts in traced[name].items()
    }
    assert order.differences(sequences) == []
    assert order.stuck(sequences) == []
    assert all(sequences.values())


def test_no_count_is_worse_than_the_committed_one(traced: Traced):
    changes = ratchet.compare(ratchet.committed(), summaries({name: traced[name] for name in SCENARIOS}))
    worse = [str(change) for change in changes if change.worse]
    better = [str(change) for change in changes if not change.worse]
    assert not worse, "\n".join(["more than tests/gpu_trace/counts.json allows:", *worse])
    assert not better, "\n".join([f"no longer as in tests/gpu_trace/counts.json; run {ratchet.UPDATE}:", *better])


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_knows_the_peak_of_device_memory(traced: Traced, name: str):
    scenario = SCENARIOS[name]
    hardware = Hardware(named_device("h100"), parse_memory("80GB"), Links(360e9, 40e9))
    peak = max(counts["peak"] for counts in traced[name].values())
    with short_vit():
        run = plan_config(scenario.config, scenario.classes, scenario.ranks, per_node=GPUS_PER_NODE)
        computed = estimate(run, hardware).memory.computed
    assert 0.97 * peak <= computed <= (1 + scenario.above) * peak


@pytest.mark.parametrize("name", [name for name in PLANNED if SCENARIOS[name].config.parallel.pp > 1])
def test_the_plan_knows_what_the_busiest_rank_of_a_pipeline_sends(traced: Traced, name: str):
    scenario = SCENARIOS[name]
    hardware = Hardware(named_device("h100"), parse_memory("80GB"), Links(1e3, 1e3))  # no latency counts
    with short_vit():
        run = plan_config(scenario.config, scenario.classes, scenario.ranks, per_node=scenario.ranks)
        planned = estimate(run, hardware).timing.parts["pipeline, sends"] * 1e3
    ranks = [map(Collective._make, counts["collectives"]) for counts in traced[name].values()]
    sent = [sum(each.size for each in collectives if each.name == "send") for collectives in ranks]
    assert planned == pytest.approx(max(sent), rel=0.03)


def test_a_tensor_of_the_host_is_named(traced: Traced):
    assert any(
        "inverse_norm" in problem and "is on cpu" in problem for problem in traced["a CPU tensor"][0]["problems"]
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("a copy stream that does not wait", r".*:_Lane\.store reads what .* writes"),
        ("a buffer that is filled too early", r".*:Column\.read writes what .*:_Lane\.load reads"),
        ("a buffer that is stored too early", r".*:Column\.write reads what .*:_Lane\.store writes"),
        ("rows that are computed with too early", r".* (reads|writes) what .*:_Lane\.load writes"),
        ("a verdict that is read too early", r".*:Verdict\.numbers reads what .*:Verdict\.__init__ writes"),
    ],
)
def test_what_nothing_puts_in_order_is_named(traced: Traced, fault: str, says: str):
    problems = traced[fault][0]["problems"]
    assert any(re.match(f"{says}, and nothing puts them in order", problem) for problem in problems), problems


def test_an_int32_offset_is_named(traced: Traced):
    (problem,) = traced["an int32 offset"][0]["problems"]
    assert "sum_rows(weight): on the way to an address, muli reaches 25,599,999,488 in 32 bits" in problem


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("an extra item", r"host waits \d+ -> \d+: plsc/train/micro_batches.py:ClassLoss.losses item 0 -> 1"),
        ("a doubled copy", r"bytes per class [\d,.]+ -> [\d,.]+: .*plsc/head/.*clone 0 -> 2,048"),
    ],
)
def test_a_fault_that_costs_fails_the_ratchet(traced: Traced, fault: str, says: str):
    name = FAULTS[fault][1]
    rows = SCENARIOS[name].rows
    sound = {"torch": ratchet.torch_version(), "scenarios": {name: ratchet.summary(traced[name][0], rows)}}
    changes = ratchet.compare(sound, {name: ratchet.summary(traced[fault][0], rows)})
    assert any(change.worse and re.match(f"{name}: {says}", str(change)) for change in changes), changes


def test_ranks_in_another_order_are_named(traced: Traced):
    sequences = {
        rank: [Collective(*fields) for fields in counts["collectives"]]
        for rank, counts in traced["another order of collectives"].items()
    }
    (line,) = order.differences(sequences)
    assert re.match(r"collective \d+: rank 7 issues all\w+ .*, rank 63 allreduce of float32 over 64 ranks", line)
