"""The plan: bytes against a real step and published figures, seconds against arithmetic, advice that holds."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plsc import config as configuration
from plsc.config import Config
from plsc.devices import GIB, known_device
from plsc.errors import UsageError
from plsc.head.sampling import ClassSampler
from plsc.models import create
from plsc.plan import CapacityError, Hardware, Links, Plan, link_speed, named_device, parse_memory, plan
from plsc.plan.advice import estimate, largest_classes, storages
from plsc.plan.backbone import profile_backbone
from plsc.plan.devices import Collective, with_speeds
from plsc.plan.memory import row_bytes
from plsc.plan.plan_config import PlanConfig
from plsc.plan.planner import as_text
from plsc.tools.entry import main

ROOT = Path(__file__).parents[1]
H100 = named_device("h100")
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
CARD = Hardware(H100, parse_memory("80GB"), Links(360e9, 40e9))


def settings(
    weights: str = "bfloat16",
    momentum: str = "int8",
    batch: int = 32,
    *,
    head: dict[str, Any] | None = None,
    **more: Any,
) -> Config:
    table = {"weight_dtype": weights, "momentum_dtype": momentum, **(head or {})}
    base = {"backbone": "resnet8", "precision": "bf16", "data": {"image_size": 48, "batch_size": batch}}
    return configuration.from_dict({"embedding_dim": 512, **base, "head": table, **more})


def one_rank(config: Config, classes: int) -> PlanConfig:
    return PlanConfig(config, classes, world=1, per_node=1, head_ranks=1)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--classes", "60000", "--weights", "float32", "--momentum", "float32"],
        ["--classes", "150000", "--weights", "bfloat16", "--momentum", "int8"],
        ["--classes", "500", "--dim", "128", "--backbone", "mobilefacenet", "--precision", "bf16", "--batch", "32"],
    ],
    ids=["table", "low precision", "activations"],
)
def test_planned_bytes_are_those_of_a_real_step(arguments):
    script = ROOT / "benchmarks" / "plan_memory.py"
    command = [sys.executable, str(script), "--measure-here", "--image-size", "64", "--batch", "16", *arguments]
    done = subprocess.run(command, env=os.environ | RETURN_MEMORY, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["planned_state_bytes"] == figures["state_bytes"]
    assert figures["planned_peak_bytes"] == pytest.approx(figures["peak_bytes"], rel=0.05)


def test_a_micro_batch_visits_the_classes_of_its_own_samples():
    accumulating = settings(optim={"accumulate": 4}, head={"sample_rate": 0.0})
    run = PlanConfig(accumulating, 100_000, world=8, per_node=8, head_ranks=4)
    # 4 times 8 ranks with 32 images each, of which a group of 4 shards sees all
    sampler = ClassSampler(0, 25_000, 0.0, 0, torch.device("cpu"))
    micro_batches = [sampler.draw(torch.arange(256) * 4 * 97 + first, 0) for first in range(4)]
    assert run.visited_rows == pytest.approx(len(micro_batches[0]), rel=0.05)
    assert run.updated_rows == pytest.approx(len(torch.cat(micro_batches).unique()), rel=0.05)


def test_each_micro_batch_waits_for_the_second_pass():
    """Its embeddings do, gathered in bfloat16, and the int64 numbers of its sampled classes."""
    configs = (settings(head={"sample_rate": 0.1}, optim={"accumulate": count}) for count in (2, 3))
    runs = (PlanConfig(config, 100_000, world=8, per_node=8, head_ranks=4) for config in configs)
    two, three = (estimate(run, CARD).memory.phases["head, first pass"] for run in runs)
    assert three - two == 4 * 32 * 512 * 2 + 100_000 // 4 // 10 * 8


def test_a_row_takes_its_state_and_its_norm():
    rows = {("float32", "float32"): 4096, ("bfloat16", "bfloat16"): 2048, ("bfloat16", "int8"): 1540}
    rows |= {("bfloat16", "none"): 1024}
    assert {stored: sum(row_bytes(settings(*stored)).values()) - 4 for stored in rows} == rows
    config = settings("bfloat16", "int8", optim={"name": "adamw"})
    assert sum(row_bytes(config).values()) == 512 * (2 + 1 + 2) + 4 + 4
    assert ("bfloat16", "none") not in list(storages(one_rank(config, 10)))


def test_45_million_classes_fit_one_80_gb_card_in_one_storage_with_momentum():
    every = list(storages(one_rank(settings(), 1)))
    fits = [each for each in every if estimate(one_rank(settings(*each, batch=512), 45_000_000), CARD).fits]
    assert fits == [("bfloat16", "int8"), ("bfloat16", "none")]
    assert len(every) > len(fits)


def test_what_would_leave_less_than_a_hundredth_of_a_card_is_not_promised():
    config = configuration.from_dict({"precision": "bf16", "head": configuration.to_dict(settings())["head"]})
    fifty, forty_five = (estimate(one_rank(config, millions * 10**6), CARD) for millions in (50, 45))
    assert 0 < CARD.memory - fifty.memory.total < 0.01 * CARD.memory
    assert not fifty.fits
    assert forty_five.fits
    assert CARD.memory - forty_five.memory.total > 0.09 * CARD.memory
    assert "DOES NOT FIT in 77.2 GiB" in as_text(plan(config, 50_000_000, CARD))


@pytest.mark.parametrize(("batch", "measured"), [(512, 0.332), (1024, 0.537), (2048, 0.960)])
def test_a_step_of_fifty_million_classes_takes_what_an_h100_took(batch, measured):
    """benchmarks/results/head_gpu.csv: one GPU, D = 512, bfloat16 rows with int8 momentum, all classes."""
    hardware = replace(CARD, device=with_speeds(H100, 774.0, 2970.0))
    timing = estimate(one_rank(settings(batch=batch), 50_000_000), hardware).timing
    assert timing.parts["head, products"] + timing.parts["head, table traffic"] == pytest.approx(measured, rel=0.1)
    assert not any("gather" in name or "reduce" in name for name in timing.parts)


def test_kept_exponentials_spare_a_quarter_of_the_products_and_take_their_memory():
    without, kept = (
        one_rank(settings(batch=1024, head=head), 10_000_000) for head in ({}, {"exponentials_memory": "21GB"})
    )
    before, after = estimate(without, CARD), estimate(kept, CARD)
    assert after.memory.computed - before.memory.computed == pytest.approx(2 * 1024 * 10_000_000, rel=0.03)
    products = [4 * 2 * each * 1024 * 10_000_000 * 512 / 791e12 for each in (1, 0.75)]
    spared = sum(before.timing.parts[part] - after.timing.parts[part] for part in before.timing.parts)
    assert spared > products[0] - products[1]  # and what is moved around that product
    assert after.timing.seconds < before.timing.seconds


@pytest.mark.parametrize(
    ("batch", "head"),
    [
        (1023, {}),  # no multiple of 8
        (16, {}),  # whose passes store no weights
        (1024, {"centers": 3}),
        (1024, {"margin": "curricularface"}),
        (1024, {"exponentials_memory": "1MB"}),  # less than a chunk
        # which no second pass follows
        pytest.param(1024, {"frozen": {"rows": "all"}}, marks=pytest.mark.feature("frozen")),
    ],
    ids=str,
)
def test_exponentials_that_are_not_kept_take_no_memory(batch, head):
    given = {"exponentials_memory": "21GB", **head}
    more = {"frozen": given.pop("frozen")} if "frozen" in given else {}
    kept = estimate(one_rank(settings(batch=batch, head=given, **more), 1_000_000), CARD)
    del given["exponentials_memory"]
    without = estimate(one_rank(settings(batch=batch, head=given, **more), 1_000_000), CARD)
    assert (kept.memory, kept.timing) == (without.memory, without.timing)


def test_advice_says_what_memory_to_spare_would_do():
    result = plan(settings(batch=1024), 10_000_000, CARD)
    found = re.search(
        r'head.exponentials_memory = "(\d+)GiB" would make a step ([\d.]+) times as fast', as_text(result)
    )
    assert found is not None
    told = plan(settings(batch=1024, head={"exponentials_memory": f"{found[1]}GiB"}), 10_000_000, CARD)
    assert told.configured.fits
    assert result.configured.timing.seconds / told.configured.timing.seconds == pytest.approx(float(found[2]), abs=0.01)
    assert "exponentials_memory" not in as_text(told).partition("Recommended")[0]
    assert "would make a step" not in as_text(told)


def test_float32_products_take_the_speed_of_their_precision():
    """By NVIDIA's data sheet: 67 TFLOP/s in float32, 494.5 in TF32, 989 in bfloat16."""

    def products(precision: str, weights: str = "float32") -> float:
        head = {"fp32_precision": precision, "margin": "curricularface"}  # PyTorch's passes
        run = one_rank(settings(weights, "float32", head=head), 1_000_000)
        planned = estimate(run, CARD)
        assert planned.as_dict()["fp32_precision"] == precision
        return planned.timing.parts["head, products"]

    assert products("ieee") / products("tf32") == pytest.approx(494.5 / 67)
    assert products("bf16x3") == pytest.approx(3 * products("ieee", "bfloat16"))
    assert products("tf32", "bfloat16") == products("ieee", "bfloat16")
    for name in ("ieee", "tf32"):
        told = as_text(plan(settings("float32", "float32", head={"fp32_precision": name}), 1000, CARD))
        assert f"stored as float32 + float32, products in {name}" in told


def test_the_time_follows_the_speeds():
    run = replace(one_rank(settings(), 100_000), world=8, per_node=8, head_ranks=8)
    slow = replace(CARD, device=with_speeds(H100, 79.1, 300.0), links=Links(1e9, 1e9))
    fast, slowed = (estimate(run, hardware).timing for hardware in (CARD, slow))
    assert slowed.parts["head, products"] == pytest.approx(10 * fast.parts["head, products"], rel=0.01)
    assert set(fast.parts) == set(slowed.parts)
    assert all(slowed.parts[name] > fast.parts[name] for name in fast.parts)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_rings_latency_is_linear_in_its_ranks(collective: Collective):
    links = Links(360e9, 40e9)

    def hops(ranks: int) -> float:
        return links.seconds(0.0, ranks, 8, collective=collective)

    if collective == "all_reduce":  # of nothing, a tree is faster: it grows by the doublings of the nodes
        assert hops(512) - hops(256) == pytest.approx(hops(1024) - hops(512))
    else:
        assert hops(2048) - hops(1024) == pytest.approx(2 * (hops(1024) - hops(512)))
        assert hops(1024) > 2e-3
    large = [links.seconds(1e11, ranks, 8, collective=collective) for ranks in (64, 1024)]
    assert large == pytest.approx(2 * [1e11 / (8 * 40e9)], rel=0.02)


def test_one_rank_per_node_takes_pat_where_a_ring_would_wait():
    links = Links(360e9, 40e9)
    gathered, reduced = (links.seconds(0.0, 256, 1, collective=name) for name in ("all_gather", "broadcast"))
    assert gathered < 0.75 * reduced


def test_a_backbone_is_profiled_as_it_computes():
    backbone = create("resnet8", embedding_dim=64, image_size=48)
    profile = profile_backbone(backbone, 4, 48, "fp32", keep_gradients=True)
    own = {p.untyped_storage().data_ptr() for p in (*backbone.parameters(), *backbone.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        backbone(torch.randn(4, 3, 48, 48)).sum().backward()
    assert profile.flops == counter.get_total_flops()
    assert sum(saved.values()) <= profile.activations <= 1.1 * sum(saved.values())
    assert profile.peak >= max(profile.activations, profile.weights)
    assert profile.weights == sum(p.nbytes for p in backbone.parameters())


def test_activations_grow_with_the_batch_and_shrink_with_the_precision():
    backbone = create("resnet8", embedding_dim=64, image_size=48)
    small, large, half = (
        profile_backbone(backbone, images, 48, precision, keep_gradients=False)
        for images, precision in ((8, "fp32"), (64, "fp32"), (64, "bf16"))
    )
    assert large.activations == pytest.approx(8 * small.activations, rel=0.01)
    assert 0.4 * large.activations < half.activations < 0.85 * large.activations


@pytest.mark.exhaustive
def test_a_timm_model_is_planned_too():
    run = one_rank(settings(backbone="timm:resnet18"), 1000)
    assert estimate(run, CARD).memory.kept["backbone weights"] > 40e6


@pytest.mark.parametrize("world", [1, 6])
@pytest.mark.parametrize("centers", [1, 3])
@pytest.mark.parametrize("storage", [("float32", "float32"), ("bfloat16", "int8")])
def test_the_largest_number_of_classes_is_the_edge(world, centers, storage):
    config = settings(*storage, head={"centers": centers})
    run = replace(one_rank(config, 1), world=world, per_node=6, head_ranks=world)
    most = largest_classes(run, CARD)
    assert estimate(replace(run, classes=most), CARD).fits
    assert not estimate(replace(run, classes=most + world), CARD).fits


def test_groups_stop_what_is_gathered_from_growing():
    def features(world: int, ranks: int) -> float:
        run = replace(one_rank(settings(batch=128), 1_000_000), world=world, per_node=8, head_ranks=ranks)
        return estimate(run, CARD).timing.parts["head, features gathered"]

    assert features(64, 8) == features(8, 8)
    assert features(64, 64) > 4 * features(8, 8)


def test_a_table_elsewhere_leaves_the_gpu_free_and_costs_its_bus():
    def planned(placement: str, sample_rate: float = 1.0) -> Plan:
        config = settings(batch=256, head={"placement": placement, "sample_rate": sample_rate})
        return plan(config, 20_000_000, replace(CARD, host_memory=100 * GIB))

    device, host, file = (planned(placement).configured for placement in ("device", "host", "mmap:table.bin"))
    assert host.memory.host == file.memory.host == 20_000_000 * 1544 > host.memory.total
    assert device.memory.total > 20_000_000 * 1544
    assert host.timing.seconds == file.timing.seconds > device.timing.seconds
    assert host.timing.parts["host bus, not hidden"] > 0
    assert all(estimate.fits for estimate in (device, host, file))
    for rate, row in ((1.0, 1544 + 1024), (0.5, 1544)):  # an exact step's weights come once more, for the second pass
        timing = planned("host", rate).configured.timing
        seconds = timing.parts.get("host bus, not hidden", 0.0) + timing.hidden["host bus"]
        assert seconds * CARD.links.bus == pytest.approx(rate * 20_000_000 * row)


def test_a_journaled_table_is_in_checkpoints_where_it_is_advised_to_lie_on_the_device():
    result = plan(settings(head={"placement": "mmap:table", "journal": True, "sample_rate": 0.1}), 100_000, CARD)
    advised, configured = result.advice.choice, result.configured
    assert (advised.run.placement, configured.run.placement) == ("device", "mmap")
    row = sum(size for name, size in row_bytes(advised.run.config).items() if name != "1/norms")
    assert advised.memory.checkpoint - configured.memory.checkpoint == 100_000 * row


def test_groups_are_those_of_the_configuration():
    config = settings(batch=128, head_ranks=8)
    grouped = plan(config, 1_000_000, CARD, gpus=64).configured
    assert (grouped.run.head_ranks, grouped.run.rows) == (8, 125_000)
    whole = 8 * 512 * 125_000 * 7 / 8 / CARD.links.between
    timing, summed = grouped.timing, "head, replicas' gradients summed"
    waited, hidden = timing.parts[summed], timing.hidden[summed]
    assert waited + hidden == pytest.approx(whole, rel=0.01)
    assert 0 < hidden <= timing.parts["head, products"] / 2
    with pytest.raises(UsageError, match="head_ranks"):
        plan(config, 1_000_000, CARD, gpus=12)


def test_advice_fits_is_exact_and_says_why():
    result = plan(settings("float32", "float32"), 50_000_000, CARD)
    assert not result.configured.fits
    choice = result.advice.choice
    assert choice.fits
    assert choice.run.storage == ("bfloat16", "int8")
    assert choice.run.config.head.sample_rate == 1
    assert set(result.advice.why) == {"change", "storage", "sampling", "placement", "groups"}
    assert result.advice.why["change"].startswith("as configured it does not fit: a GPU would need 19")
    text = as_text(result)
    assert "DOES NOT FIT" in text
    assert all(sentence in text for sentence in result.advice.why.values())


@pytest.mark.parametrize("momentum", ["bfloat16", "int8", "none"])
def test_what_is_configured_stays_unless_something_is_faster(momentum: str):
    result = plan(settings("bfloat16", momentum, batch=256), 2_000_000, CARD, gpus=8)
    choice, configured = result.advice.choice, result.configured
    if choice.run == configured.run:
        assert result.advice.why["change"].startswith("none: ")
        assert "Recommended: as configured, stored as" in as_text(result)
    else:
        assert choice.timing.seconds < configured.timing.seconds / 1.02
        assert result.advice.why["change"].endswith("% faster than as configured.")
    assert momentum != "int8" or choice.run == configured.run


def test_every_change_has_its_reason():
    float32 = plan(settings("float32", "float32", batch=256), 2_000_000, CARD, gpus=8).advice
    assert float32.choice.run.storage != ("float32", "float32")
    assert re.fullmatch(r"\d+\.\d% faster than as configured\.", float32.why["change"])
    config = settings("bfloat16", "float32", batch=128, precision="auto", head={"sample_rate": 0.1})
    sampled = plan(config, 20_000_000, CARD, gpus=8).advice
    assert sampled.choice.run.config.head.sample_rate == 1
    expected = r"exact in place of sampled at 0\.1: every class .* \d+\.\d% (slower|faster) than as configured\."
    assert re.fullmatch(expected, sampled.why["change"])


def test_sampling_is_advised_only_for_a_rate_that_exact_misses():
    def advised(wanted: float | None) -> tuple[float, float]:
        choice = plan(settings(batch=256), 20_000_000, CARD, wanted=wanted).advice.choice
        return choice.run.config.head.sample_rate, choice.timing.images_per_second

    rate, exact = advised(None)
    assert rate == 1
    assert advised(0.9 * exact) == (1, exact)
    rate, reached = advised(3 * exact)
    assert 0 < rate < 1
    assert reached >= 3 * exact
    assert advised(1e12) == (1, exact)


def test_nothing_fits_until_what_the_error_says_is_done():
    card = replace(CARD, memory=24 * GIB)
    with pytest.raises(CapacityError, match=r"--gpus 4\b") as caught:
        plan(settings(), 50_000_000, card)
    assert "\n" not in str(caught.value)
    assert plan(settings(), 50_000_000, card, gpus=4).advice.choice.fits
    host = plan(settings(), 50_000_000, replace(card, host_memory=200 * GIB)).advice.choice
    assert host.run.placement == "host"
    assert host.memory.total < 24 * GIB < host.memory.host < 200 * GIB
    with pytest.raises(CapacityError, match=r"lower data\.batch_size"):
        plan(settings(batch=4096), 1000, replace(CARD, memory=2 * GIB))


def test_a_cards_memory_is_what_is_sold_or_what_is_usable():
    """What is no amount at all is refused as everywhere (tests/test_sizes.py)."""
    amounts = {"80GB": 78 * GIB, "80 gb": 78 * GIB, "78GiB": 78 * GIB, "84e9": 84_000_000_000, "512MiB": GIB // 2}
    assert {text: parse_memory(text) for text in amounts} == amounts
    for text in ("80", "80 bananas"):
        with pytest.raises(UsageError, match="80GB"):
            parse_memory(text)


def test_links_are_named_or_given():
    assert link_speed("100", H100, "--link") == 100e9
    nvlink, infiniband, pcie = (link_speed(name, H100, "--link") for name in ("nvlink", "infiniband", "pcie"))
    assert nvlink > infiniband > pcie
    for text in ("rope", "0", "-1", "nan", "inf"):
        with pytest.raises(UsageError, match="--link"):
            link_speed(text, H100, "--link")
    with pytest.raises(UsageError, match="nvlink"):
        link_speed("nvlink", named_device("l40s"), "--link")


def test_the_command_counts_the_data_and_writes_json(tmp_path, capsys):
    out = tmp_path / "plan.json"
    recipe = str(ROOT / "configs" / "avatars_quickstart.toml")
    assert main(["plan", recipe, "--gpus", "2", "--gpu-memory", "16GiB", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["classes"], result["gpus"], result["gpu_memory"]) == (2000, 2, 16 * GIB)
    for name in ("configured", "recommended"):
        part = result[name]
        assert part["fits"]
        assert part["seconds"] == pytest.approx(sum(part["seconds_by_part"].values()))
        kept, phases, allowed = (part["memory"][key] for key in ("kept", "step_phases", "allowed"))
        assert part["memory"]["total"] == sum(kept.values()) + max(phases.values()) + sum(allowed.values())
    assert result["epoch_seconds"] == pytest.approx(60000 / result["configured"]["images_per_second"])
    assert "not a measurement" in capsys.readouterr().out


def test_the_recommendation_is_toml_that_gives_it(tmp_path, capsys):
    out = tmp_path / "plan.json"
    recipe = tmp_path / "run.toml"
    recipe.write_text('backbone = "resnet8"\nepochs = 3\n[head]\nsample_rate = 0.1\n[data]\ntrain = "faces"\n')
    arguments = ["--classes", "2M", "--images", "600k", "--gpus", "8", "--gpu-memory", "16GiB", "--json", str(out)]
    assert main(["plan", str(recipe), *arguments]) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert result["classes"] == 2_000_000
    assert result["gpu_hours"] == pytest.approx(3 * 600_000 / result["configured"]["images_per_second"] / 3600 * 8)
    assert "with a median error of 22.6%; of plsc's own, an H100 confirmed" in printed
    pasted = tomllib.loads(result["recommended"]["toml"])
    assert pasted["head"]["sample_rate"] == 1.0
    assert set(pasted) <= {"head", "head_ranks"}
    changes = [word for key, value in pasted["head"].items() for word in (f"--head.{key}", str(value))]
    head_ranks = ["--head_ranks", str(pasted["head_ranks"])] if "head_ranks" in pasted else []
    assert main(["plan", str(recipe), *changes, *head_ranks, *arguments, "--overwrite"]) == 0
    again = json.loads(out.read_text())
    assert again["configured"]["seconds"] == again["recommended"]["seconds"] == result["recommended"]["seconds"]
    assert again["recommended"]["toml"] == ""
    assert "to change in the configuration" in printed
    assert "to change in the configuration" not in capsys.readouterr().out


def test_a_driver_s_name_tells_the_data_sheet() -> None:
    sheets = {
        "NVIDIA A30": "a30",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA RTX A3000 Laptop GPU": None,
        "NVIDIA RTX A1000": None,
    }
    found = {name: known_device(name) for name in sheets}
    assert {name: device.name if device else None for name, device in found.items()} == sheets


@pytest.mark.parametrize(
    ("device", "precision", "speed"), [("v100", "fp16", 125e12), ("t4", "fp16", 65e12), ("p100", "fp32", 9.3e12)]
)
def test_a_gpu_before_ampere_is_recommended_what_it_has(device: str, precision: str, speed: float) -> None:
    hardware = Hardware(named_device(device), named_device(device).memory, Links(1e10, 1e10))
    assert not {"bf16", "tf32"} & set(hardware.device.products)
    assert max(hardware.device.products.values()) == pytest.approx(0.8 * speed)
    config = settings("float32", "float32", head={"fp32_precision": "tf32"})  # and bf16
    result = plan(config, 10_000, hardware)
    asked, advised = result.configured.timing, result.advice.choice.timing
    if precision == "fp16":
        assert advised.parts["backbone, forward and backward"] < asked.parts["backbone, forward and backward"]
    assert advised.parts["head, products"] == asked.parts["head, products"]  # in fp32 both
    pasted = tomllib.loads(result.recommended_toml)
    assert pasted["precision"] == precision
    assert pasted["head"]["fp32_precision"] == "ieee"
    told = as_text(result)
    why = f"precision = {precision} in place of bf16, head.fp32_precision = ieee in place of tf32"
    assert f"{why}: {device} has no bf16 and no tf32 units." in told
    assert f"bf16 ({device} has no bf16 units), " in told
    assert f"stored as float32 + float32, products in fp32: {device} has no tf32 units, exact" in told
    assert "products in tf32" not in told
    for fp32_precision, units in (("tf32", "tf32"), ("bf16x3", "bf16")):
        own = settings("float32", "float32", precision="auto", head={"fp32_precision": fp32_precision})
        alone = as_text(plan(own, 10_000, hardware))
        assert f"head.fp32_precision = ieee in place of {fp32_precision}: {device} has no {units} units." in alone
    again = replace(config, precision="auto", head=replace(config.head, fp32_precision="ieee"))
    assert "precision" not in plan(again, 10_000, hardware).advice.why
    faster = with_speeds(hardware.device, 500.0, None).products
    assert set(faster) == set(hardware.device.products)
    assert max(faster.values()) == 500e12


def test_tables_take_what_each_of_them_takes_alone():
    table = [
        {"name": "people", "classes": 2_000_000, "batch_share": 3.0},
        {"name": "scenes", "classes": 400_000, "head": {"weight_dtype": "float32", "momentum_dtype": "float32"}},
        {"name": "letters", "classes": 300_000, "head": {"placement": "host", "sample_rate": 0.1}},
    ]
    config = settings(table=table, batch=80)
    described = plan(config, [2_000_000, 400_000, 300_000], CARD, gpus=8)
    together, alone = described.configured, []
    for batch, each in zip((48, 16, 16), configuration.class_tables(config), strict=True):
        of_table = replace(each.config, data=replace(each.config.data, batch_size=batch))
        alone.append(plan(of_table, each.classes or 0, CARD, gpus=8).configured)
    for name in ("class weights", "momentum", "1/norms"):
        assert together.memory.kept[name] == sum(each.memory.kept.get(name, 0) for each in alone)
    assert together.memory.host == alone[2].memory.host
    for name in ("head, products", "head, table traffic", "head, features gathered"):
        assert together.timing.parts[name] == pytest.approx(sum(each.timing.parts[name] for each in alone))
    assert [each["name"] for each in described.as_dict()["tables"]] == ["people", "scenes", "letters"]
    assert "table scenes: 400,000 classes x 512, stored as float32 + float32" in as_text(described)


def test_classes_of_tables_stand_in_the_tables(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('[[table]]\nname = "a"\ndata.train = "absent.rec"\n')
    assert main(["plan", str(tmp_path / "run.toml")]) == 2
    assert "absent.rec is not here to count its classes; give classes in table a" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "run.toml"), "--classes", "1000"]) == 2
    assert "--classes is of a single table; give each table its own classes" in capsys.readouterr().err
