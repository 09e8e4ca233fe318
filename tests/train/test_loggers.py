"""Loggers beside TensorBoard: functions, and objects with a method log() as those of tracking services."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import TINY, register_tiny

from plsc.errors import UsageError
from plsc.loggers import LoggedRun
from plsc.train.metrics import MetricsLog, read_metrics

Ranks = Any


class TrackedRun:
    """A stand-in for a run of W&B, whose method is ``log(data, step=None, commit=None)``."""

    def __init__(self) -> None:
        self.history: dict[int, dict[str, float]] = {}

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        assert step >= max(self.history, default=0), "W&B drops steps that go back"
        self.history.setdefault(step, {}).update(data)


def train_with_loggers(mesh: Any, out: Path) -> tuple[list[tuple[int, dict[str, float]]], dict[int, Any], int]:
    from plsc import config
    from plsc.train import train

    register_tiny()
    seen: list[tuple[int, dict[str, float]]] = []
    tracked, failures = TrackedRun(), []

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:  # as mlflow's
        assert step is not None
        seen.append((step, metrics))

    def failing(values: dict[str, float], step: int) -> None:
        failures.append(step)
        raise ConnectionError("the service is down")

    changes = {"epochs": None, "steps": 4, "log.every_steps": 2, "eval.sets": ["avatars:6x3@100"]}
    settings = config.load(None, {**TINY, **changes})
    train(settings, mesh, out=out, quiet=True, loggers=[failing, log_metrics, tracked])
    return seen, tracked.history, len(failures)


@pytest.mark.slow
def test_loggers_get_what_tensorboard_gets(tmp_path: Path, ranks: Ranks) -> None:
    (seen, history, failures), (on_second, *_) = ranks(2, train_with_loggers, tmp_path)
    assert [step for step, _ in seen] == [2, 4, 4]  # the last one is the evaluation
    assert on_second == []
    lines = read_metrics(tmp_path)
    for (step, values), line in zip(seen, lines, strict=True):
        assert step == line["step"]
        assert all(isinstance(value, float) for value in values.values())
        for name, value in values.items():
            want: Any = line
            parts = name.split("/")
            while parts:
                want = want[parts.pop(0)]
            assert value == want, name
    assert {"loss", "mfu", "images_per_second", "time/head", "time/step"} <= set(seen[0][1])
    assert "eval/avatars:6x3@100/accuracy" in seen[-1][1]
    assert history == {2: seen[0][1], 4: {**seen[1][1], **seen[2][1]}}
    assert failures == 3
    log = (tmp_path / "train.log").read_text()
    assert log.count("ConnectionError('the service is down')") == 1
    assert "failing failed at step 2" in log


def test_what_is_no_logger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a logger is a function of \(values, step=N\) or has a method log\(\)"):
        MetricsLog(LoggedRun(tmp_path, {}, 0), enabled=True, loggers=["wandb"])  # type: ignore[list-item]


def test_ranks_but_the_first_call_no_logger(tmp_path: Path) -> None:
    called: list[int] = []
    run, append = LoggedRun(tmp_path, {}, 0), lambda values, step: called.append(step)
    log = MetricsLog(run, enabled=False, loggers=[append])
    log.write(1, {"loss": 1.0})
    log.close()
    assert called == []


def test_numbers_alone_reach_a_logger(tmp_path: Path) -> None:
    got: list[dict[str, float]] = []
    run, append = LoggedRun(tmp_path, {}, 0), lambda values, step: got.append(values)
    log = MetricsLog(run, enabled=True, loggers=[append])
    log.write(3, {"loss": float("nan"), "mfu": None, "time": {"head": 1}, "done": True, "name": "x"})
    log.close()
    assert set(got[0]) == {"loss", "time/head"}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 3,
        "loss": None,
        "mfu": None,
        "time": {"head": 1},
        "done": True,
        "name": "x",
    }
