"""What a run does: it learns, reports, accumulates, averages, skips what is not finite, and leaves its files."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.tiny_runs import TINY, losses, poisoned, refusal, register_tiny, run

from plsc.optim.verdict import Verdict
from plsc.train.components import MovingAverage
from plsc.train.metrics import read_metrics

Ranks = Any


@pytest.mark.slow
def test_the_run_directory(tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        "eval.sets": ["avatars:6x3@100", "avatars:5x3@200"],
        "eval.every_steps": 8,
        "log.every_steps": 5,
        "log.to": ("tensorboard",),
        "checkpoint.keep": 2,
        "data.batch_size": 6,
    }
    first, second = ranks(2, run, tmp_path, changes)
    assert first["steps"] == 20
    assert first["epochs"] == 4
    assert first["classes"] == 10
    assert first["images"] == 240
    assert first["eval"] == second["eval"]
    assert set(first["eval"]) == {"avatars:6x3@100", "avatars:5x3@200"}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "config.toml",
        "train.log",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "classes.json",
        "model.safetensors",
        "best.safetensors",
        "progress.json",
    }
    assert len(json.loads((tmp_path / "classes.json").read_text())["classes"]) == 10
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["latest", "step-00000016", "step-00000020"]
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if "eval" in line] == [8, 16, 20]
    evaluations = {line["step"]: line["eval"].values() for line in lines if "eval" in line}
    accuracies = {step: sum(r["accuracy"] for r in results) / 2 for step, results in evaluations.items()}
    assert first["best"]["accuracy"] == pytest.approx(max(accuracies.values()))
    assert accuracies[first["best"]["step"]] == max(accuracies.values())
    assert next((tmp_path / "tensorboard").iterdir()).stat().st_size > 0
    expected = {
        "step",
        "epoch",
        "loss",
        "loss_mean",
        "lr",
        "head_lr",
        "grad_norm",
        "head_mean_norm",
        "loss_scale",
        "skipped_steps",
        "images_per_second",
        "flops_per_image",
        "peak_flops_per_second",
        "mfu",
        "time",
        "peak_memory_bytes",
        "power_watts",
    }
    assert set(lines[0]) == expected


def reloaded(mesh: Any, out: Path, changes: dict[str, Any]) -> tuple[Any, Any]:
    from plsc import config

    register_tiny()
    written = config.load(out / "config.toml")
    given = config.load(None, {**TINY, **changes})
    return written, dataclasses.replace(given, data=given.data.with_contract(given.data.preprocessing))


def test_the_resolved_configuration_loads_back_equal(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"epochs": 1, "head.margin": "magface", "head.m": None, "head.m_low": 0.2}
    changes |= {"optim.name": "adamw", "optim.betas": "0.8,0.99"}
    ranks(1, run, tmp_path, changes)
    ((written, given),) = ranks(1, reloaded, tmp_path, changes)
    assert written == given


# (changes, images of all ranks together, steps): in float32 sums, losses of the last one part by 0.3.
SYNCHRONISED: dict[str, tuple[dict[str, Any], int, int]] = {
    "augmented": ({"backbone": "plain", "data.train": "avatars:12x6", "data.augment": "standard", "epochs": 5}, 24, 15),
    "clipped, averaged": (
        {
            "backbone": "plain",
            "data.train": "avatars:12x6",
            "data.augment": "standard",
            "epochs": 5,
            "optim.clip_norm": 1.0,
            "optim.clip_head": True,
            "ema_decay": 0.5,
        },
        24,
        15,
    ),
    # 9 images make three steps of 2 and one of 3 an epoch, of which the second of two ranks has one image
    "one image on a rank": ({"backbone": "plain", "data.train": "avatars:3x3", "epochs": 2}, 2, 8),
    "adamw": (
        {
            "backbone": "resnet8",
            "data.train": "avatars:20x6",
            "channels_last": True,
            "optim.name": "adamw",
            "optim.lr": 0.003,
            "optim.weight_decay": 0.05,
            "optim.clip_norm": 5.0,
        },
        24,
        20,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "worlds"),
    [
        pytest.param("augmented", [3], marks=pytest.mark.exhaustive),
        ("clipped, averaged", [2]),
        ("one image on a rank", [2]),
        pytest.param("adamw", [2, 3], marks=pytest.mark.exhaustive),
    ],
)
def test_sync_batchnorm_makes_the_number_of_ranks_not_matter(
    name: str, worlds: list[int], tmp_path: Path, ranks: Ranks
) -> None:
    changes, images, steps = SYNCHRONISED[name]
    for world in (1, *worlds):
        each = {**changes, "sync_batchnorm": True, "checkpoint.every_steps": 0, "data.batch_size": images // world}
        ranks(world, run, tmp_path / str(world), each)
    one = losses(tmp_path / "1")
    assert len(one) == steps
    for world in worlds:
        assert losses(tmp_path / str(world)) == pytest.approx(one, abs=1e-6)


@pytest.mark.first_ring("2")
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_step_as_one_large_batch(world: int, tmp_path: Path, ranks: Ranks) -> None:
    """Batch normalisation sees micro-batches; but for that (it is taken out here) k of them are one batch."""
    changes = {
        "backbone": "smooth",
        "data.train": "avatars:10x7",
        "optim.lr": 0.01,
        "epochs": 2,
        "seed": 3,
        "optim.clip_norm": 0.5,
        "data.batch_size": 24 // world,
        "checkpoint.every_steps": 0,
    }
    small = {**changes, "data.batch_size": 8 // world, "optim.accumulate": 3}
    ranks(world, run, tmp_path / "large", changes)
    ranks(world, run, tmp_path / "small", small)
    large, small_losses = losses(tmp_path / "large"), losses(tmp_path / "small")
    assert large.keys() == small_losses.keys()
    for step, loss in large.items():
        assert small_losses[step] == pytest.approx(loss, rel=2e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_like_full(precision: str, tmp_path: Path, ranks: Ranks) -> None:
    """Beside a run that leaves out the same steps: so every step of both has the same batch."""
    changes = {"backbone": "plain", "data.batch_size": 6, "sync_batchnorm": True}
    _, same = ranks(2, poisoned, tmp_path / "low", {**changes, "precision": precision}, [], 0)[0]
    left_out = [number for number, unchanged in enumerate(same) if unchanged]
    ranks(1, poisoned, tmp_path / "full", {**changes, "data.batch_size": 12}, left_out, 0)
    full, low = losses(tmp_path / "full"), losses(tmp_path / "low")
    skipped = len(left_out)  # the scale of fp16 begins too high, and finds its place
    assert skipped <= (5 if precision == "fp16" else 0)
    for step in range(16, 21):
        assert low[step] == pytest.approx(full[step], rel=0.2)
    scales = [line["loss_scale"] for line in read_metrics(tmp_path / "low")]
    assert scales[-1] == (2.0 ** (16 - skipped) if precision == "fp16" else 1.0)


@pytest.mark.first_ring("fp16")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_not_finite_changes_nothing(precision: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 6, "precision": precision, "head.margin": "adaface", "head.m": 0.1}
    for result, same in ranks(2, poisoned, tmp_path, changes, [0, 7, 8], 1):
        bad = [number for number, unchanged in enumerate(same) if unchanged]
        assert result["skipped_steps"] == len(bad)
        assert bad == [0, 7, 8] or (precision == "fp16" and {0, 7, 8} < set(bad) and len(bad) < 8)
    lines = {line["step"]: line for line in read_metrics(tmp_path)}
    assert lines[8]["loss"] is None
    assert lines[20]["loss"] < lines[2]["loss"]
    assert lines[20]["loss_scale"] == (2.0 ** (16 - len(bad)) if precision == "fp16" else 1.0)


def test_too_many_in_a_row_end_the_run(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 6, "max_skipped_steps": 4}
    for message, _ in ranks(2, poisoned, tmp_path, changes, list(range(6, 20)), 0):
        assert "not finite for 4 steps in a row, up to step 10" in message
        assert "optim.lr" in message
        assert "--resume auto" in message
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step*")) == ["step-00000004", "step-00000008"]


def test_the_moving_average_rises_to_its_decay_and_leaves_skipped_steps_out() -> None:
    average, expected, number = MovingAverage({"weight": torch.zeros(2)}, 0.3), 0.0, 0
    for step, skips in enumerate([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]):
        average.update({"weight": torch.full((2,), step + 1.0)}, Verdict(torch.tensor([skips])))
        if not skips:
            decay = min(0.3, (1 + number) / (10 + number))
            expected, number = decay * expected + (1 - decay) * (step + 1), number + 1
        torch.testing.assert_close(average.values["weight"], torch.full((2,), expected))


def seeds_of_steps(mesh: Any, out: Path) -> list[int]:
    """The seed of torch's generator at each step's first pass."""
    from plsc.train import step

    seeds: list[int] = []
    take = step.Stepper._backward

    def noting(self: Any, group: Any) -> torch.Tensor:
        seeds.append(torch.initial_seed())
        return take(self, group)

    with patch.object(step.Stepper, "_backward", noting):
        run(mesh, out, {"data.batch_size": 6, "epochs": 1})
    return seeds


def test_every_rank_draws_other_numbers_at_every_step(tmp_path: Path, ranks: Ranks) -> None:
    seeds = [seed for of_rank in ranks(2, seeds_of_steps, tmp_path) for seed in of_rank]
    assert len(set(seeds)) == len(seeds) == 2 * 5


def test_steps_schedules_and_rates(tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        "epochs": None,
        "steps": 8,
        "optim.schedule": "step",
        "optim.milestones": "1",
        "optim.head_lr": 0.5,
        "optim.warmup_steps": 2,
        "checkpoint.every_steps": 0,
    }
    result = ranks(1, run, tmp_path, changes)[0]
    assert result["steps"] == 8
    lines = read_metrics(tmp_path)
    assert [line["lr"] for line in lines] == pytest.approx([0.025, 0.05, 0.05, 0.05, 0.05, 0.005, 0.005, 0.005])
    assert [line["head_lr"] / line["lr"] for line in lines] == pytest.approx([10] * 8)
    assert [line["epoch"] for line in lines] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6])


def fine_tuned(mesh: Any, first: Path, second: Path) -> list[tuple[str, float]]:
    """How far each weight is from those that the second run was given, after a step too small to matter."""
    from safetensors.torch import load_file

    run(mesh, first, {"epochs": 1, "checkpoint.every_steps": 0})
    given = first / "model.safetensors"
    run(
        mesh,
        second,
        {
            "epochs": None,
            "steps": 1,
            "optim.lr": 1e-12,
            "data.train": "avatars:8x6",
            "init_weights": str(given),
            "channels_last": True,
            "ema_decay": 0.5,
        },
    )
    before, after = load_file(given), load_file(second / "model.safetensors")
    return [
        (name, float((after[name] - before[name]).abs().max()))
        for name in before
        if "running" not in name and "tracked" not in name
    ]


def test_fine_tuning_with_another_number_of_classes(tmp_path: Path, ranks: Ranks) -> None:
    distances = ranks(1, fine_tuned, tmp_path / "first", tmp_path / "second")[0]
    assert distances
    assert all(distance < 1e-6 for _, distance in distances)
    assert len(json.loads((tmp_path / "second/classes.json").read_text())["classes"]) == 8


def rotation_tta(mesh: Any, out: Path) -> tuple[str, dict[str, Any], dict[str, Any], float]:
    """A run with rotation TTA; what it says of itself, what its model is found to do, and a run from its weights."""
    from safetensors.torch import load_file

    from plsc.embedding.embedder import open_embedder
    from plsc.evaluation import evaluate
    from plsc.models import load_model

    first, second, tested = out / "first", out / "second", "avatars:9x4@5000"
    changes = {"data.rotation_classes": True, "epochs": 1, "checkpoint.every_steps": 0}
    run(mesh, first, {**changes, "rotation_tta": True, "eval.sets": [tested]})
    said = [line for line in read_metrics(first) if "eval" in line][-1]["eval"][tested]
    embedder = open_embedder(first, device=mesh.device)
    found = evaluate(embedder, [tested], image_size=32, mesh=mesh, quiet=True)[tested]
    given = first / "model.safetensors"
    run(mesh, second, {**changes, "epochs": None, "steps": 1, "optim.lr": 1e-12, "init_weights": str(given)})
    before, after = load_file(given), load_file(second / "model.safetensors")
    moved = max(
        float((before[f"upright.{key}"] - after[key]).abs().max())
        for key in after
        if "running" not in key and "tracked" not in key
    )
    return load_model(given).name, said, found, moved


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rotation_tta_is_judged_shipped_and_can_be_trained_on(tmp_path: Path, ranks: Ranks) -> None:
    name, said, found, moved = ranks(1, rotation_tta, tmp_path)[0]
    assert name == "turned:tiny"
    for figure in ("accuracy", "auc", "rank1"):
        assert said[figure] == pytest.approx(found[figure], abs=1e-6)
    assert moved < 1e-6


def test_unreadable_pictures_cost_themselves_alone(tmp_path: Path, ranks: Ranks) -> None:
    from PIL import Image

    for person in range(3):
        (tmp_path / "data" / f"p{person}").mkdir(parents=True)
        for number in range(4):
            path = tmp_path / "data" / f"p{person}" / f"{number}.png"
            Image.new("RGB", (40, 40), (person * 90, number * 60, 7)).save(path)
            if (person, number) in ((0, 1), (2, 2), (2, 3)):
                path.write_bytes(b"\x89PNG no more")
    changes = {"data.train": str(tmp_path / "data"), "data.batch_size": 2, "epochs": 3}
    result = ranks(2, run, tmp_path / "run", changes)
    assert result[0]["epochs"] == 3
    (message,) = ranks(1, refusal, tmp_path / "strict", {**changes, "data.max_bad_records": 0})
    assert "could not be read" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.train": "/nowhere/at/all"}, "UsageError: there is no /nowhere/at/all"),
        ({"data.image_size": 33}, "UsageError: image_size is 33"),
        ({"init_weights": "/nowhere.pt"}, "/nowhere.pt"),
        ({"head.margin": "sphereface", "head.m": 0.5}, "UsageError: [head] margin sphereface: "),
        ({"data.train": "avatars:1x2"}, "UsageError: "),
        ({"eval.sets": "/no/set.bin"}, "/no/set.bin"),
    ],
)
def test_what_is_wrong_is_one_line_on_every_rank(
    changes: dict[str, Any], message: str, tmp_path: Path, ranks: Ranks
) -> None:
    for text in ranks(2, refusal, tmp_path, changes):
        assert message in text
        assert "\n" not in text
    assert not losses(tmp_path)
