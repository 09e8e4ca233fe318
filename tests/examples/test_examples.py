"""The examples run as they stand, on two ranks: with the losses of plsc train where the mathematics is the same."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import plsc

FOLDER = Path(__file__).parents[2] / "examples"
STEPS, SAVED = 6, 3  # an epoch of the data has four steps of two ranks: a checkpoint lies within it
DATA = ["--data", "avatars:20x10", "--steps", str(STEPS)]
TRAINED = {"data.train": "avatars:20x10", "data.workers": 0, "steps": STEPS, "log.every_steps": 1, "log.to": ()}
TRAINED |= {"eval.every_steps": 0, "checkpoint.every_steps": 0}
UNSEEN = "avatars:12x5@1000000"
CHECKPOINTS = {"lightning_module": f"step={SAVED}.ckpt"}  # of others step-N
LIBRARIES = [
    "pytorch-metric-learning",
    pytest.param(
        "oml", marks=pytest.mark.skipif(importlib.util.find_spec("oml") is None, reason="needs open-metric-learning")
    ),
]


def launched(folder: Path, *tasks: tuple[str, Any], ranks: int = 2) -> list[Any]:
    """What each of the tasks, in turn, returns on the first of so many ranks."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command += [str(Path(__file__).with_name("in_turn.py")), "tasks.json", "results.json"]
    path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def whole_and_resumed(name: str) -> list[tuple[str, list[str]]]:
    """A run that saves on the way, and one that goes on from there."""
    common = [*DATA, "--save-every", str(SAVED)]
    checkpoint = f"{name}/{CHECKPOINTS.get(name, f'step-{SAVED}')}"
    return [(name, [*common, "--out", name]), (name, [*common, "--out", f"{name}-resumed", "--resume", checkpoint])]


def assert_losses(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 3) for loss in found}) == len(found)


@pytest.mark.live
@pytest.mark.slow
def test_loops_have_the_losses_of_plsc_train_and_go_on_with_them(tmp_path: Path) -> None:
    sharded = {"sync_batchnorm": True, "parallel.strategy": "fsdp"}
    tasks: list[tuple[str, Any]] = [("plsc train", {**TRAINED, "out": "a"})]
    tasks += [("plsc train", {**TRAINED, **sharded, "out": "b"})]
    for name in ("plain_torch", "accelerate_loop", "fsdp2_dcp"):
        tasks += whole_and_resumed(name)
    expected, of_shards, *found = launched(tmp_path, *tasks)
    assert len(expected) == STEPS
    for whole, resumed, losses in zip(found[0::2], found[1::2], (expected, expected, of_shards), strict=True):
        assert_losses(whole, losses)
        assert_losses(resumed, losses[SAVED:])
    for name in ("plain_torch", "accelerate_loop", "fsdp2_dcp"):
        assert plsc.load_model(tmp_path / name / "model.safetensors").embedding_dim == 128


@pytest.mark.live
@pytest.mark.slow
def test_lightning_and_torchtitan_have_them_too(tmp_path: Path) -> None:
    tasks: list[tuple[str, Any]] = [("plsc train", {**TRAINED, "out": "a"}), *whole_and_resumed("lightning_module")]
    arguments = [*DATA, "--save-every", str(SAVED), "--out", "titan"]
    expected, *found, of_titan = launched(tmp_path, *tasks, ("torchtitan_checkpoint", arguments))
    for losses in (found[0], of_titan):
        assert_losses(losses, expected)
    assert_losses(found[1], expected[SAVED:])
    shutil.rmtree(tmp_path / "titan/checkpoint" / f"step-{STEPS}")
    (resumed,) = launched(tmp_path, ("torchtitan_checkpoint", arguments))
    assert_losses(resumed, expected[SAVED:])


@pytest.mark.live
@pytest.mark.slow
def test_micro_batches_of_accelerate_are_those_of_plsc_train(tmp_path: Path) -> None:
    accumulate = {"data.train": "avatars:32x10", "steps": 2, "optim.accumulate": 2}  # five batches an epoch
    arguments = ["--data", "avatars:32x10", "--steps", "2", "--accumulate", "2", "--out", "loop"]
    tasks = [("plsc train", {**TRAINED, **accumulate, "out": "a"}), ("accelerate_loop", arguments)]
    expected, found = launched(tmp_path, *tasks)
    assert_losses(found, expected)


@pytest.mark.live
@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_one(tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed("fsdp2_dcp")
    (expected,) = launched(tmp_path, whole)
    (found,) = launched(tmp_path, resumed, ranks=1)
    assert found == pytest.approx(expected[SAVED:], rel=1e-4)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_loss_beside_the_heads_changes_what_is_learnt(library: str, tmp_path: Path) -> None:
    common = [*DATA, "--library", library, "--out", "run"]
    tasks = [("metric_learning", [*common, "--weight", weight]) for weight in ("0", "1")]
    without, with_triplets = launched(tmp_path, *tasks)
    assert all(math.isfinite(loss) for step in with_triplets for loss in step)
    assert without[0] == with_triplets[0]  # of the same weights and pictures
    assert without[2] != with_triplets[2]
    assert all(triplets > 0 for _, triplets in with_triplets)


@pytest.mark.live
@pytest.mark.slow
def test_both_metrics_say_what_plsc_eval_says_of_the_model(tmp_path: Path) -> None:
    arguments = [*DATA, "--unseen", UNSEEN, "--out", "run"]
    ((of_torchmetrics, own),) = launched(tmp_path, ("torchmetrics_evaluator", arguments))
    (expected,) = plsc.evaluate(tmp_path / "run/model.safetensors", UNSEEN)["sets"].values()
    for name in ("accuracy", "auc", "rank1", "images"):
        assert own[name] == pytest.approx(expected[name], rel=1e-3), name
        assert of_torchmetrics[name] == own[name]


def test_every_example_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[`{path.name}`]({path.name})" in table for path in FOLDER.glob("*.py"))
