"""Runs that have ended, or are stopped where something is due: going on from there is what never stopping is."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import losses, run, run_until

from plsc.embedding.embedder import model_file
from plsc.files import read_json
from plsc.train.metrics import read_metrics

Ranks = Any
EVALUATED: dict[str, Any] = {"eval.sets": ["avatars:6x3@100"], "eval.every_steps": 4, "optim.schedule": "constant"}
STAGE = [{"from_epoch": 1.2, "head": {"m": 0.2}, "data": {"augment": "standard"}}]


def contents(out: Path) -> dict[str, tuple[str, int]]:
    """The hash of each file of weights and checkpoints, and when it was written."""
    files = [*out.glob("*.safetensors"), *(out / "checkpoints").rglob("*")]
    return {
        str(path.relative_to(out)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
        if path.is_file()
    }


def evaluated(out: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line["eval"] for line in read_metrics(out) if "eval" in line}


@pytest.mark.first_ring("keep.best")
@pytest.mark.parametrize(
    ("length", "longer", "changes"),
    [
        ({"epochs": 2}, {"epochs": 3}, {"checkpoint.every_steps": 5, "stage": STAGE}),
        ({"epochs": 2}, {"epochs": 3}, {"checkpoint.every_steps": 0, "checkpoint.keep.best": 1}),
        ({"epochs": None, "steps": 10}, {"epochs": None, "steps": 12}, {"checkpoint.every_steps": 5}),
        ({"epochs": 2}, {}, {"checkpoint.every_steps": 0}),  # stopped by a signal at the last step
    ],
    ids=["every_steps, a stage", "keep.best", "steps", "signal"],
)
def test_a_finished_run_stays_as_it_is_until_it_is_made_longer(
    length: dict[str, Any], longer: dict[str, Any], changes: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    changes = {**EVALUATED, **changes}
    out = tmp_path / "run"
    if longer:
        ranks(1, run, out, {**changes, **length})
    else:
        ranks(1, run_until, out, {**changes, **length}, None, 10)
    before, lines, log = contents(out), read_metrics(out), (out / "train.log").read_text()
    assert list(evaluated(out)) == [4, 8, 10]
    for _ in range(2):
        (result,) = ranks(1, run, out, {**changes, **length}, "auto")
        assert (contents(out), read_metrics(out)) == (before, lines)
        assert (result["steps"], result["epochs"], result["eval"]) == (10, 2, evaluated(out)[10])
    assert (out / "train.log").read_text().removeprefix(log).count("no step is left to train") == 2
    if longer:
        ranks(1, run, out, {**changes, **longer}, "auto")
        ranks(1, run, tmp_path / "whole", {**changes, **longer})
        assert losses(out) == losses(tmp_path / "whole")
        mine, whole = (load_file(each / "model.safetensors") for each in (out, tmp_path / "whole"))
        assert all(torch.equal(mine[name], whole[name]) for name in whole)


def test_a_signal_takes_nothing_that_is_due_after_its_step(tmp_path: Path, ranks: Ranks) -> None:
    changes = {**EVALUATED, "epochs": 3, "checkpoint.every_steps": 8, "checkpoint.keep.best": 1}
    (whole,) = ranks(1, run, tmp_path / "whole", changes)
    ranks(1, run_until, tmp_path / "run", changes, None, 4)
    ranks(1, run_until, tmp_path / "run", changes, "auto", 8)
    (result,) = ranks(1, run, tmp_path / "run", changes, "auto")
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")
    assert list(evaluated(tmp_path / "whole")) == [4, 8, 12, 15]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert (result["best"], result["eval"]) == (whole["best"], whole["eval"])
    kept, expected = (sorted(each.glob("*/step-*")) for each in (tmp_path / "run", tmp_path / "whole"))
    assert [path.name for path in kept] == [path.name for path in expected]


def test_the_schedule_ends_with_the_last_step_of_another_batch_size(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run_until, tmp_path, {"epochs": 2}, None, 3)  # 36 of 60 images: batches of 20 and 4 are left of the epoch
    (result,) = ranks(1, run, tmp_path, {"epochs": 2, "data.batch_size": 20}, "auto")
    assert result["steps"] == 3 + 2 + 3
    log = (tmp_path / "train.log").read_text()
    assert "length  8 steps = 2 epochs of 3 steps" in log
    rates = [line["lr"] for line in read_metrics(tmp_path)]
    assert rates[3:] == pytest.approx([0.05 * rate for rate in (1, 1, 3 / 4, 2 / 4, 1 / 4)])
    ranks(1, run, tmp_path, {"epochs": None, "steps": 9, "data.batch_size": 20}, "auto")
    assert "length  9 steps" in (tmp_path / "train.log").read_text()
    assert list(losses(tmp_path)) == list(range(1, 10))


def test_a_run_that_stopped_early_says_so_where_its_model_is_used(
    tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    out, changes = tmp_path / "run", {"epochs": 2, "data.train": "avatars:60x1"}
    ranks(1, run_until, out, changes, None, 7)
    assert "warning: no class has two images" in (out / "train.log").read_text()
    for _ in range(2):
        model_file(out)
    line = f"{out} stopped at step 7 of 10, or is training still; `plsc train CONFIG --out {out} --resume auto` goes on"
    assert caplog.messages == [line]
    ranks(1, run, out, changes, "auto")
    model_file(out)
    assert caplog.messages == [line]
    assert read_json(out / "progress.json") == {"step": 10, "steps": 10}
