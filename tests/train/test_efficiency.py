"""What a run says of its efficiency: FLOPs beside torch's counter, utilisation, the parts of a step, memory."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reference import Oracle
from support.tiny_runs import TINY, register_tiny, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from plsc.head.class_table import class_range
from plsc.models import create
from plsc.models.recompute_budget import recompute_activations
from plsc.parallel.step_timeline import PARTS
from plsc.train.efficiency import BackboneFlops, backbone_flops, centers_in_step, head_flops
from plsc.train.metrics import read_metrics

Ranks = Any
DIM, CLASSES, BATCH = 24, 60, 6


def whole_step(backbone: torch.nn.Module, classes: torch.Tensor, size: int, frozen: bool) -> int:
    """torch's count of a step with a dense softmax over ``classes``, in float64."""
    model = copy.deepcopy(backbone).double().train()
    weight = torch.randn(len(classes), DIM, dtype=torch.float64, requires_grad=True)
    x = torch.randn(BATCH, 3, size, size, dtype=torch.float64)
    labels = torch.arange(BATCH)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        with torch.set_grad_enabled(not frozen):
            embeddings = model(x)
        Oracle("arcface", parameters={"m": 0.5}).loss(embeddings, labels, weight).backward()
    return int(counter.get_total_flops())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["iresnet18", "vit_tiny"])
def test_model_flops_are_those_that_torch_counts_in_a_plain_step(name: str) -> None:
    size, shards = 32, 4
    backbone = create(name, embedding_dim=DIM, image_size=size)
    counted = backbone_flops(copy.deepcopy(backbone).to("meta"), size)
    centers = centers_in_step(CLASSES, 1, 1.0, shards, BATCH)
    ours = BATCH * (counted.forward + counted.backward + head_flops(DIM, centers))
    assert ours == whole_step(backbone, torch.arange(CLASSES), size, frozen=False)
    # sampled, beside a frozen backbone
    ranges = [class_range(CLASSES, shard, shards) for shard in range(shards)]
    sampled = torch.arange(sum(round(0.3 * (stop - first)) for first, stop in ranges))
    centers = centers_in_step(CLASSES, 1, 0.3, shards, BATCH)
    ours = BATCH * (counted.forward + head_flops(DIM, centers, trains_backbone=False))
    assert ours == whole_step(backbone, sampled, size, frozen=True)


def test_recomputed_activations_are_no_model_flops() -> None:
    backbone = create("resnet8", embedding_dim=DIM, image_size=32)
    plain = backbone_flops(copy.deepcopy(backbone).to("meta"), 32)
    assert recompute_activations(backbone, "every_k") > 0
    assert backbone_flops(copy.deepcopy(backbone).to("meta"), 32) == plain


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    backbone = create("resnet8", embedding_dim=DIM, image_size=32).to("meta")
    whole = backbone_flops(backbone, 32)
    *_, last = backbone.parameters()
    backbone.requires_grad_(False)
    assert backbone_flops(backbone, 32) == BackboneFlops(whole.forward, 0)
    last.requires_grad_(True)
    assert backbone_flops(backbone, 32).backward < whole.backward / 10


def test_centres_of_a_sampled_step() -> None:
    assert centers_in_step(10, 3, 1.0, 4, 8) == 30
    assert centers_in_step(1000, 2, 0.1, 8, 4) == 2 * 8 * round(0.1 * 125)
    # more distinct classes in the batch than the share of them: those are what is taken
    assert centers_in_step(1000, 1, 0.0, 1, 64) == pytest.approx(1000 * (1 - 0.999**64))
    assert centers_in_step(8, 1, 0.1, 2, 10_000) == pytest.approx(8)


def head_products(mesh: Any, changes: dict[str, Any]) -> tuple[float, float]:
    """FLOPs of the head for an image as a run tells them, and this rank's part of those of the passes that it makes."""
    meter = _meter(mesh, {"data.train": "avatars:40x1", **changes})
    head, config = meter._components.tables[0].head, meter._components.config
    counted, steps = 0, 50
    first_pass, dim = head.backend.first_pass, config.embedding_dim

    def counting(rows: Any, batch: Any, *args: Any, **options: Any) -> Any:
        nonlocal counted
        counted += 3 * 2 * dim * rows.num_classes * rows.centers * len(batch.features)
        return first_pass(rows, batch, *args, **options)

    torch.manual_seed(mesh.rank)
    with patch.object(head.backend, "first_pass", counting), torch.no_grad():
        for _ in range(steps):
            head(torch.randn(config.data.batch_size, dim), torch.randint(40, (config.data.batch_size,)))
    backbone = meter._backbone.forward + meter._backbone.backward if mesh.is_main else 0
    return meter.flops_per_image() - backbone, counted / (steps * config.data.batch_size * mesh.world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_ranks", "changes"),
    [
        (4, {"head.centers": 3}),
        (4, {"head.sample_rate": 0.5, "head.centers": 3}),
        (2, {"head.sample_rate": 0.5}),
        (2, {"head.sample_rate": 0.0}),
        (1, {"head.sample_rate": 0.1, "head.centers": 2}),
    ],
)
def test_flops_of_a_head_are_those_of_its_passes(head_ranks: int, changes: dict[str, Any], ranks: Ranks) -> None:
    changes = {**changes, "data.batch_size": 3, "head_ranks": head_ranks % 4}
    told, *counted = zip(*ranks(4, head_products, changes, head_ranks=head_ranks), strict=True)
    assert told[0] == pytest.approx(sum(*counted), rel=0.03)  # labels are drawn


def flops_per_image(mesh: Any, changes: dict[str, Any]) -> float:
    value: float = _meter(mesh, {"backbone": "vit_tiny", "head.sample_rate": 0.0, **changes}).flops_per_image()
    return value


@pytest.mark.slow
def test_each_micro_batch_of_a_pipeline_takes_its_own_classes(ranks: Ranks) -> None:
    whole = ranks(1, flops_per_image, {"data.batch_size": 2})
    staged = ranks(2, flops_per_image, {"data.batch_size": 8, "parallel.pp": 2, "parallel.pp_micro_batches": 4})
    assert staged[0] == whole[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_line_of_metrics(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"log.every_steps": 5, "data.batch_size": 6, "eval.sets": ["avatars:6x3@100"], "eval.every_steps": 8}
    ranks(2, run, tmp_path, changes)
    lines = [line for line in read_metrics(tmp_path) if "loss" in line]
    assert len(lines) == 4
    for line in lines:
        by_hand = line["flops_per_image"] * line["images_per_second"] / line["peak_flops_per_second"]
        assert line["mfu"] == pytest.approx(by_hand, rel=1e-12)
        parts = {name: line["time"][name] for name in PARTS}
        assert set(line["time"]) == {"step", *parts}
        assert sum(parts.values()) == pytest.approx(line["time"]["step"], rel=1e-9)
        assert all(parts[name] > 0 for name in ("data", "backbone", "head", "communication", "optimizer"))
        assert line["peak_memory_bytes"] > 1 << 20
        assert line["power_watts"] is None  # a CPU
    # conv 5x5 of 3 by 8 channels, 3x3 of 8 by 16, linear; gradients of all but the image; 10 classes
    forward = 2 * (8 * 8 * 8 * 75 + 4 * 4 * 16 * 72 + 256 * 16)
    assert lines[0]["flops_per_image"] == 3 * forward - 2 * 8 * 8 * 8 * 75 + 6 * 16 * 10
    assert lines[0]["time"]["evaluation"] == 0
    assert lines[1]["time"]["evaluation"] > 0
    assert lines[0]["time"]["checkpoint"] > 0
    # The parts of all steps together are the time that the images took.
    by_parts = sum(5 * line["time"]["step"] for line in lines)
    by_images = sum(5 * 12 / line["images_per_second"] for line in lines)
    assert by_parts == pytest.approx(by_images, rel=0.05, abs=0.1)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def with_slow_parts(mesh: Any, out: Path, changes: dict[str, Any]) -> None:
    """Train with a clock that stands still but in one function of each part."""
    import plsc.parallel.step_timeline as timeline
    from plsc.head import ShardedHead
    from plsc.optim.head_optimizers import HeadOptimizer
    from plsc.train import evaluate, step, trainer

    clock = Clock()

    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            clock.now += seconds
            return function(*args, **options)

        return call

    def slow_groups(*args: Any) -> Iterator[Any]:
        for group in groups(*args):
            clock.now += 1
            yield group

    groups = trainer.micro_batches
    with (
        patch.object(timeline, "time", clock),
        patch.object(trainer, "micro_batches", slow_groups),
        patch.object(step.Stepper, "_prepared", slow(step.Stepper._prepared, 2)),
        patch.object(ShardedHead, "forward", slow(ShardedHead.forward, 4)),
        patch.object(HeadOptimizer, "step_unless", slow(HeadOptimizer.step_unless, 8)),
        patch.object(step.RunningStatistics, "restore_where", slow(step.RunningStatistics.restore_where, 16)),
        patch.object(evaluate, "evaluate_sets", slow(evaluate.evaluate_sets, 32)),
        patch.object(trainer, "capture", slow(trainer.capture, 64)),
        patch.object(step.Stepper, "_seed", slow(step.Stepper._seed, 128)),
    ):
        run(mesh, out, changes)


@pytest.mark.slow
def test_each_part_of_a_step_is_counted_where_it_belongs(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"epochs": None, "steps": 6, "eval.sets": ["avatars:6x3@100"], "eval.every_steps": 2}
    ranks(1, with_slow_parts, tmp_path, {**changes, "optim.accumulate": 2, "data.batch_size": 15, "log.every_steps": 2})
    lines = [line for line in read_metrics(tmp_path) if "loss" in line]
    parts = {"data": 1, "backbone": 4, "head": 16, "communication": 0, "optimizer": 16, "other": 128}
    # Four steps after the first line there is an evaluation for every two steps, and a checkpoint for every four.
    expected = [{"evaluation": 0, "checkpoint": 0}, {"evaluation": 16, "checkpoint": 0}]
    expected += [{"evaluation": 16, "checkpoint": 32}]
    for line, more in zip(lines, expected, strict=True):
        assert line["time"] == {"step": sum(parts.values()) + sum(more.values()), **parts, **more}


def power(mesh: Any, outcomes: list[Any]) -> list[float | None]:
    """What lines say of power where NVML answers so, one after the other; and how often it was asked, at the end."""
    meter = _meter(mesh, {})
    meter._power_is_known = True
    with patch.object(torch.cuda, "power_draw", side_effect=outcomes) as asked:
        return [*(meter.line(1.0)["power_watts"] for _ in outcomes), asked.call_count]


def test_power_is_that_of_all_ranks_where_it_is_known(ranks: Ranks) -> None:
    missing = ModuleNotFoundError("pynvml is not installed")
    assert ranks(2, power, [350_500, 150_000]) == [[701.0, 300.0, 2]] * 2
    assert ranks(2, power, [350_500, missing, 1]) == [[701.0, None, None, 2]] * 2


def _meter(mesh: Any, changes: dict[str, Any]) -> Any:
    from plsc import config
    from plsc.parallel.step_timeline import StepTimeline
    from plsc.train.components import build
    from plsc.train.efficiency import EfficiencyMeter
    from plsc.train.tables import open_training_data

    register_tiny()
    configuration = config.load(None, {**TINY, **changes})
    components = build(configuration, open_training_data(configuration), mesh)
    return EfficiencyMeter(components, StepTimeline(mesh.device))


def notes(mesh: Any, changes: dict[str, Any]) -> list[list[str]]:
    meter = _meter(mesh, changes)
    meter._peak = meter.flops_per_image() * 1000
    found = [meter.notes(500), meter.notes(12.3)]
    meter._waiting_share = 0.25
    return [*found, meter.notes(500), [meter.describe()]]


def test_the_progress_line_names_utilisation_and_a_wait_for_data(ranks: Ranks) -> None:
    ((half, little, waiting, (description,)),) = ranks(1, notes, {})
    assert half == ["MFU 50%"]
    assert little == ["MFU 1.2%"]
    assert waiting == ["MFU 50%", "25% waiting for data"]
    assert description.startswith("0.00029 GFLOP per image, forward and backward; MFU is the share of ")
