"""The report of a run: header, progress and closing lines, train.log."""

import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.tiny_runs import refusal, run

from plsc.train import report
from plsc.train.report import RunReport, StepProgress
from plsc.train.state import Position

Ranks = Any


def lines_of(path: Path) -> list[str]:
    """Lines of train.log without date and time."""
    return [line[20:] for line in path.read_text(encoding="utf-8").splitlines()]


def without_lines_between(mesh: Any, *args: Any) -> None:
    """Train, and log no step that the clock alone asks for."""
    with patch.object(report, "_LINE_SECONDS", math.inf):
        run(mesh, *args)


@pytest.mark.slow
def test_the_log_of_a_run_and_its_resumption_on_another_number_of_ranks(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"steps": 4, "epochs": None, "eval.sets": ["avatars:6x3@100"], "data.batch_size": 6}
    ranks(2, without_lines_between, tmp_path, changes)
    log = lines_of(tmp_path / "train.log")
    assert log[:2] == [
        "data    60 images of 10 classes from avatars:10x6, 32 px, augment flip",
        "model   tiny, 0.0 M parameters, embedding_dim 16, fp32",
    ]
    assert log[2].startswith("head    arcface (s 16, m 0.1), exact, float32 + float32 on device; ")
    assert " backend: " in log[2]
    assert log[3] == "ranks   2 ranks on CPU (gloo); global batch 12 = 6 x 2 ranks"
    assert log[4].startswith("work    0.00029 GFLOP per image, forward and backward; MFU is the share of ")
    assert re.search(r" TFLOP/s a rank \(products in (fp32|bf16|fp16), measured\)$", log.pop(4))
    assert log[4:7] == [
        "length  4 steps = 0.8 epochs of 5 steps; sgd, lr 0.05, polynomial after 2 steps of warm-up",
        "eval    avatars:6x3@100, at the end",
        "start   random weights of seed 0",
    ]
    assert log[7].startswith("step 4: avatars:6x3@100: accuracy ")
    assert log[8].startswith("step 4/4, epoch 0.80, lr ")
    assert log[9].startswith("trained 4 steps (0.80 epochs) in ")
    assert log[10].startswith(f"best: {tmp_path}/best.safetensors, of step 4, mean accuracy ")
    assert log[11].startswith(f"next: plsc eval {tmp_path} --data UNSEEN, ")
    assert log[11].endswith("(takes the last weights; --best takes the best)")
    ranks(1, without_lines_between, tmp_path, changes | {"steps": 6}, "auto")
    more = lines_of(tmp_path / "train.log")[len(log) + 2 :]
    assert more[6] == f"start   resumed from {tmp_path}/checkpoints/step-00000004 (step 4, saved by 2 ranks)"
    assert more[7] == "changed on resume: steps = 6 (was 4)"
    assert more[8] == "changed on resume: global batch = 6 (was 12), with peak learning rate = 0.05 (as before)"
    assert more[10].startswith("step 6/6, ")
    assert ", best 0." in more[10]


def test_the_log_says_what_ended_a_run(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, refusal, tmp_path, {"optim.lr": 1e30, "max_skipped_steps": 2, "epochs": None, "steps": 9})
    assert lines_of(tmp_path / "train.log")[-1].startswith("ended: loss or gradients were not finite for 2 steps")


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_progress_counts_steps_and_leaves_pauses_out_of_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    position = Position(step=10, skipped=1, best={"step": 8, "accuracy": 0.98765})
    lines = RunReport(tmp_path, enabled=True)
    progress = StepProgress(lines, position, 12)
    with progress.paused():
        clock.now += 100
    for _ in range(3):  # one more than was expected: a rank left the run, say
        clock.now += 4
        position.step += 1
        progress.advance(64, epoch=0.5, lr=0.0125, loss=12.3456)
    progress.finish()
    lines.close()
    state = "epoch 0.50, lr 0.0125, loss 12.346"
    rest = "best 0.9877 at step 8, 1 step skipped (not finite)"
    expected = [f"step 12/12, {state}, 16 images/s, {rest}", f"step 13/13, {state}, 16 images/s, {rest}"]
    assert lines_of(tmp_path / "train.log") == expected
    assert capsys.readouterr().err.splitlines() == [f"train: {line}" for line in expected]


def test_ranks_but_the_first_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = RunReport(tmp_path, enabled=False)
    silent.line("step 1")
    silent.close()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""
