"""The plan of the backbone's strategies: bytes and seconds against arithmetic, and the choice of "auto"."""

import itertools
import math
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from plsc import config as configuration
from plsc.devices import GIB
from plsc.errors import UsageError
from plsc.models import create
from plsc.optim.eight_bit_adamw import EightBitAdamW
from plsc.parallel.gradient_compression import (
    HOOKS,
    ExchangeOptions,
    GradientExchange,
    PlannedExchange,
    gradient_exchange,
)
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies import STRATEGIES
from plsc.parallel.strategies.zero import ZeroOptimizer
from plsc.plan import CapacityError, Hardware, Links, choose_strategy, named_device, plan
from plsc.plan.advice import Estimate, estimate, fastest, profile_of
from plsc.plan.backbone_memory import exchange_of, held_stage
from plsc.plan.plan_config import PlanConfig, plan_config
from plsc.plan.planner import as_text
from plsc.plan.strategy_choice import MARGIN, candidates, fits
from plsc.tools.entry import main

INSIDE, BETWEEN = 360e9, 40e9
CARD = Hardware(named_device("h100"), 78 * GIB, Links(INSIDE, BETWEEN), 512 * GIB)
VIT, CONV = "vit_tiny", "iresnet18"


def run(world: int = 8, backbone: str = CONV, accumulate: int = 1, **parallel: object) -> PlanConfig:
    tree = {
        "backbone": backbone,
        "embedding_dim": 64,
        "precision": "bf16",
        "data": {"image_size": 64, "batch_size": 32},
        "optim": {"accumulate": accumulate},
        "parallel": parallel,
    }
    return plan_config(configuration.from_dict(tree), 100_000, world, 8)


def planned(*args: Any, **parallel: Any) -> Estimate:
    return estimate(run(*args, **parallel), CARD)


def module(backbone: str = CONV) -> nn.Module:
    with torch.device("meta"):
        return create(backbone, embedding_dim=64, image_size=64)


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in net.parameters() if weight.requires_grad]


def rows_of_rank(weights: list[nn.Parameter], ranks: int) -> int:
    """Bytes of the fullest rank where each weight is cut along its first dimension."""
    return sum(4 * math.ceil(len(w) / ranks) * w[0].numel() for w in weights)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks"), [(8, 8), (64, 64), (1024, 1024)])
def test_fsdp_keeps_a_share_of_weights_and_states(world, ranks):
    kept = planned(world, strategy="fsdp").memory.kept
    assert kept["backbone weights"] == rows_of_rank(list(module().parameters()), ranks)
    assert kept["backbone optimizer state"] == rows_of_rank(trained(module()), ranks)
    assert "backbone gradients" not in kept


def test_hsdp_shards_over_its_ranks_alone():
    whole, node = (planned(64, strategy="fsdp"), planned(64, strategy="hsdp"))
    eight = planned(64, strategy="hsdp", shard_ranks=8)
    assert node.memory == eight.memory
    assert node.memory.kept["backbone weights"] == planned(8, strategy="fsdp").memory.kept["backbone weights"]
    assert node.memory.total > whole.memory.total


@pytest.mark.parametrize("world", [2, 5, 8])
def test_zero1_spreads_the_states_weight_by_weight(world):
    kept = planned(world, strategy="zero1").memory.kept
    plain = planned(world).memory.kept
    states = kept.pop("backbone optimizer state")
    whole = plain.pop("backbone optimizer state")
    assert kept == plain
    largest = max(weight.nbytes for weight in trained(module()))
    assert max(largest, whole / world) <= states <= max(largest, whole / world) + largest


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_moments_in_8_bits_are_those_that_the_optimizer_keeps(strategy):
    asked = run(4, strategy=strategy)
    optim = replace(asked.config.optim, name="adamw", state_dtype="int8")
    asked = replace(asked, config=replace(asked.config, optim=optim))
    states = estimate(asked, CARD).memory.kept["backbone optimizer state"]
    cut = 4 if strategy == "fsdp" else 1
    parts = [nn.Parameter(w.detach()[: math.ceil(len(w) / cut)]) for w in trained(module())]
    optimizer = EightBitAdamW([{"params": parts}], 0.1, compiled=False)
    kept = [sum(value.nbytes for name, value in optimizer.state[w].items() if name != "step") for w in parts]
    if strategy == "zero1":
        assert max(*kept, sum(kept) / 4) <= states < 1.2 * max(*kept, sum(kept) / 4)
    else:
        assert states == sum(kept)


@pytest.mark.feature("frozen")
def test_what_is_frozen_for_good_has_no_gradient_and_no_state():
    from plsc.features.frozen.config import FrozenConfig

    asked = run(1)
    frozen = replace(asked, config=asked.config.with_section(FrozenConfig(("layer[1-3].*", "conv1.*"))))
    kept = estimate(frozen, CARD).memory.kept
    begun = ("layer1.", "layer2.", "layer3.", "conv1.")
    left = [w for name, w in module().named_parameters() if w.requires_grad and not name.startswith(begun)]
    assert kept["backbone optimizer state"] == sum(weight.nbytes for weight in left)
    assert estimate(frozen, CARD).memory.phases["backbone, update"] < planned(1).memory.phases["backbone, update"] / 1.2
    thawing = configuration.from_dict({"stage": [{"from_step": 9, "frozen": []}], "steps": 99})
    later = replace(frozen, config=replace(frozen.config, stage=thawing.stage, steps=99))
    assert estimate(later, CARD).memory == planned(1).memory


def test_zero2_gathers_once_for_more_memory_and_less_traffic():
    once, twice = planned(64, strategy="zero2"), planned(64, strategy="fsdp")
    assert once.memory.kept == twice.memory.kept
    assert twice.memory.total < once.memory.total < planned(64).memory.total
    gathered = ("backbone, weights gathered, not hidden", "backbone, weights gathered")
    moved = [sum({**each.timing.parts, **each.timing.hidden}[part] for part in gathered) for each in (once, twice)]
    assert 0.45 < moved[0] / moved[1] < 0.6  # what is left, the root, is gathered once by both


def test_offload_moves_state_to_the_host():
    device, host = planned(8, strategy="fsdp"), planned(8, strategy="fsdp", offload=True)
    assert "backbone weights" not in host.memory.kept
    moved = rows_of_rank(list(module().parameters()), 8) + 2 * rows_of_rank(trained(module()), 8)
    assert host.memory.offloaded == moved
    assert host.memory.total < device.memory.total
    assert host.timing.seconds > device.timing.seconds
    crowded = replace(CARD, host_memory=8 * moved - 1)
    assert host.fits
    assert not estimate(run(8, strategy="fsdp", offload=True), crowded).fits
    assert not estimate(run(8, strategy="fsdp", offload=True), replace(CARD, host_memory=None)).fits


def test_ddp_moves_twice_the_gradients_and_hides_most():
    weights = sum(weight.nbytes for weight in trained(module()))
    timing = planned(8).timing
    total = timing.hidden["backbone, all-reduce"] + timing.parts["backbone, all-reduce not hidden"]
    assert total == pytest.approx(2 * weights * 7 / 8 / INSIDE, rel=0.2, abs=3 * 10e-6)
    assert timing.hidden["backbone, all-reduce"] > 0


def test_a_ring_over_nodes_takes_the_links_of_all_their_ranks():
    links = Links(INSIDE, BETWEEN)
    assert links.seconds(1e9, 64, 8) == pytest.approx(1e9 / (8 * BETWEEN), rel=0.1)
    assert links.seconds(1e9, 8, 8) == pytest.approx(1e9 / INSIDE, rel=0.1)
    assert links.seconds(1e9, 8, 8, stride=8) == pytest.approx(1e9 / BETWEEN, rel=0.1)
    assert links.seconds(1e9, 16, 8, stride=4) == pytest.approx(1e9 / (2 * BETWEEN), rel=0.1)
    assert links.seconds(1e9, 1, 8) == 0


def test_fsdp_moves_half_as_much_again_as_ddp():
    """Rajbhandari et al., section 7.2: 3 times the weights instead of twice."""
    hardware = replace(CARD, links=Links(1e9, 1e9))

    def moved(strategy: str) -> float:
        timing = estimate(run(8, strategy=strategy), hardware).timing
        both = (*timing.parts.items(), *timing.hidden.items())
        return sum(seconds for name, seconds in both if "reduce" in name or "weights gathered" in name)

    assert moved("fsdp") / moved("ddp") == pytest.approx(1.5, rel=0.05)


def test_hsdp_keeps_gathers_within_nodes():
    slow = replace(CARD, links=Links(INSIDE, 1e9))
    fsdp, hsdp, ddp = (estimate(run(64, strategy=name), slow).timing for name in ("fsdp", "hsdp", "ddp"))
    assert hsdp.seconds < fsdp.seconds
    assert hsdp.seconds < ddp.seconds
    crossing = 2 * rows_of_rank(trained(module()), 8) * 7 / 8 / 1e9
    reduced = hsdp.hidden.get("backbone, reduce-scatter", 0) + hsdp.parts["backbone, reduce-scatter not hidden"]
    assert reduced == pytest.approx(crossing, rel=0.15)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_sends_what_its_exchange_counts(hook):
    asked = run(8, comm_hook=hook)
    net = module()
    exchange = gradient_exchange(hook, net, Mesh(0, 8, 0, torch.device("meta")), ExchangeOptions())
    parameters = held_stage(asked, profile_of(asked), 0).parameters
    assert exchange_of(asked, parameters).sent == exchange.sent_bytes(trained(net), 10**6)


def test_a_strangers_hook_is_planned_by_what_its_class_says(monkeypatch):
    class Silent(GradientExchange):
        pass

    class Halved(GradientExchange):
        @classmethod
        def planned(cls, weights, options, states):
            whole = sum(weight.nbytes for weight in weights)
            return PlannedExchange(whole // 2, traffic=7 * whole, kept={"what was left": whole}, transient=whole)

    monkeypatch.setitem(HOOKS, "silent", Silent)
    monkeypatch.setitem(HOOKS, "halved", Halved)
    plain, whole = planned(), sum(weight.nbytes for weight in trained(module()))
    silent, halved = planned(comm_hook="silent"), planned(comm_hook="halved")
    assert (silent.memory, silent.timing) == (plain.memory, plain.timing)
    assert halved.memory.kept == plain.memory.kept | {"what was left": whole}
    assert halved.memory.phases["backbone, update"] == plain.memory.phases["backbone, update"] + whole
    assert halved.timing.parts["backbone, gradients compressed"] == 7 * whole / CARD.device.bandwidth
    sent = "backbone, all-reduce"
    halves, wholes = (each.timing.hidden[sent] + each.timing.parts[f"{sent} not hidden"] for each in (halved, plain))
    assert halves < 0.6 * wholes


def test_a_strangers_strategy_is_planned_by_what_its_class_says(monkeypatch):
    class Counted(ZeroOptimizer):
        pass

    monkeypatch.setitem(STRATEGIES, "counted", Counted)
    counted, zero1, ddp = (estimate(run(8).placed(strategy=name), CARD) for name in ("counted", "zero1", "ddp"))
    assert (counted.memory, counted.timing) == (zero1.memory, zero1.timing)
    assert counted.memory != ddp.memory


def test_hooks_pay_on_slow_links_and_cost_on_fast_ones():
    slow = replace(CARD, links=Links(1e9, 1e9))
    for hook in ("bf16", "powersgd", "dgc"):
        assert estimate(run(8, comm_hook=hook), slow).timing.seconds < estimate(run(8), slow).timing.seconds
    plain, dgc = planned(8), planned(8, comm_hook="dgc")
    large = sum(weight.nbytes for weight in trained(module()) if weight.numel() >= 16384)
    assert dgc.memory.kept["backbone gradients not sent"] == large
    assert dgc.timing.seconds > plain.timing.seconds


def test_ranks_of_a_pipeline_have_the_weights_that_training_gives_them():
    """The token that takes the place of dropped patches is used behind the last block."""
    asked = run(8, "vit_base", pp=2, pp_schedule="interleaved")
    first, last = ({each.name for each in held_stage(asked, profile_of(asked), rank).parameters} for rank in (0, 1))
    assert first | last == {name for name, _ in module("vit_base").named_parameters()}
    assert not first & last
    assert {"mask_token", "norm.weight", "feature.0.weight", "blocks.6.norm1.weight", "blocks.23.norm1.weight"} <= last
    assert {"pos_embed", "patch_embed.proj.weight", "blocks.0.norm1.weight", "blocks.12.norm1.weight"} <= first


def test_offload_is_neither_planned_nor_chosen_where_no_ranks_share_weights():
    alone = run(8, VIT, tp=8, strategy="fsdp")
    assert not [each for each in candidates(alone) if each.config.parallel.offload]
    offloaded = alone.placed(offload=True).config
    with pytest.raises(UsageError, match="tp = 8 leave none on 8 ranks"):
        plan(offloaded, 100_000, CARD, gpus=8)


def test_the_plan_shows_every_strategy_and_json_has_them():
    result = plan(run().config, 100_000, CARD, gpus=64)
    text = as_text(result)
    for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp, shard_ranks = 8", "fsdp, offload"):
        assert f"\n  {name} " in text
    tree = result.as_dict()
    assert [each["strategy"] for each in tree["strategies"]] == ["ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp"]
    assert tree["configured"]["strategy"] == "ddp"


# "auto"

LINKS = {"fast": Links(360e9, 40e9), "ethernet": Links(26e9, 1.5e9), "slow": Links(26e9, 0.05e9)}
MEMORIES = {VIT: (1.9, 2.1, 78), CONV: (1.9, 2.3, 2.6, 3, 78)}
CASES = [
    pytest.param(backbone, world, memory, links, id=f"{backbone}-{world}-{memory:g}GiB-{links}")
    for backbone in (VIT, CONV)
    for world, memory, links in itertools.product((1, 8, 64), MEMORIES[backbone], LINKS)
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "world", "memory", "links"), CASES)
def test_auto_picks_what_an_exhaustive_search_does(backbone, world, memory, links):
    asked = run(world, backbone, strategy="auto")
    hardware = replace(CARD, memory=int(memory * GIB), links=LINKS[links])
    found = [each for each in (estimate(each, hardware) for each in candidates(asked)) if fits(each, hardware)]
    if not found:
        with pytest.raises(CapacityError, match="finds nothing that fits"):
            choose_strategy(asked, hardware)
        return
    choice = choose_strategy(asked, hardware)
    assert choice.estimate.run == fastest(found).run
    assert choice.estimate.memory.total <= (1 - MARGIN) * hardware.memory
    assert choice.config.parallel.strategy != "auto"
    assert len(choice.why) == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_auto_keeps_the_global_batch_and_that_of_batch_normalisation():
    asked = run(16, VIT, 3, strategy="auto")
    plain = asked.placed(strategy="ddp")
    for each in candidates(asked):
        assert each.samples == plain.samples
        assert each.batch == plain.batch


def test_auto_is_ddp_where_it_fits_a_cpu():
    cpu = replace(named_device("h100"), kind="cpu")
    roomy = Hardware(cpu, 8 * GIB, Links(1e9, 1e9), 64 * GIB)
    assert choose_strategy(run(4, strategy="auto"), roomy).config.parallel.strategy == "ddp"


def test_auto_leaves_ddp_for_memory_and_says_so():
    asked = run(8, strategy="auto")
    most = estimate(asked.placed(strategy="ddp"), CARD).memory.total
    tight = replace(CARD, memory=int(most / (1 - MARGIN)) - 1)
    choice = choose_strategy(asked, tight)
    assert choice.config.parallel.strategy != "ddp"
    assert choice.why[0].startswith("ddp does not fit: it takes")
    assert choice.why[1].startswith(f"chosen: {choice.config.parallel.strategy}")


@pytest.mark.slow
def test_the_command_resolves_auto(tmp_path, capsys):
    recipe = tmp_path / "run.toml"
    recipe.write_text(f'backbone = "{CONV}"\n[data]\nimage_size = 64\nbatch_size = 32\n')
    base = ["plan", str(recipe), "--classes", "100000", "--gpus", "8", "--gpu-memory", "78GiB"]
    assert main([*base, "--strategy", "auto"]) == 0
    assert '"auto" is resolved' in capsys.readouterr().out
    assert main([*base, "--strategy", "hsdp", "--shard-ranks", "4", "--comm-hook", "bf16"]) == 0
    assert "backbone: hsdp, shard_ranks = 4, comm_hook bf16" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_resolves_auto_and_writes_what_it_chose(tmp_path):
    out = tmp_path / "run"
    options = {"backbone": "resnet8", "embedding_dim": "16", "steps": "1", "precision": "fp32"}
    options |= {"data.train": "avatars:6x4", "data.image_size": "32", "data.batch_size": "4", "data.workers": "0"}
    options |= {"parallel.strategy": "auto"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    recipe = tmp_path / "run.toml"
    recipe.write_text("")
    assert main(["train", str(recipe), "--out", str(out), *words]) == 0
    assert tomllib.loads((out / "config.toml").read_text())["parallel"]["strategy"] == "ddp"
    assert "chosen: ddp" in (out / "train.log").read_text()
