"""Steps whose verdict the device obeys and the host reads later, as on a GPU: here the CPU obeys the same flag."""

import contextlib
import os
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.tiny_runs import TINY, losses, poisoned, register_tiny, run
from torch.utils._python_dispatch import TorchDispatchMode

from plsc.optim.verdict import Verdict

Ranks = Any
LATE = patch.object(Verdict, "host_decides", staticmethod(lambda device: False))
# Operations for which a host waits for its GPU: numbers asked for, sizes that depend on data, and numbers copied to it.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::lift_fresh",
}


class WaitingOperations(TorchDispatchMode):
    """Records the operations within that wait, a mask as an index among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        indices = args[1] if name in ("aten::index", "aten::index_put_") else []
        if name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices):
            frames = [frame for frame in traceback.extract_stack() if "/plsc/" in frame.filename]
            self.found.append(f"{name} in {frames[-1].filename}:{frames[-1].lineno}" if frames else name)
        return func(*args, **(kwargs or {}))


def operations(mesh: Any, changes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a third step waits for, and the order in which two steps vote and verdicts are read."""
    from plsc import config
    from plsc.train import step
    from plsc.train.components import build
    from plsc.train.micro_batches import micro_batches
    from plsc.train.tables import open_training_data

    register_tiny()
    configuration = config.load(None, {**TINY, **changes})
    events: list[str] = []
    vote, read = step.Stepper._vote, Verdict.numbers

    def voting(self: Any, *arguments: Any) -> Any:
        verdict = vote(self, *arguments)
        verdict.name = f"{sum('vote' in event for event in events)}"
        events.append(f"vote {verdict.name}")
        return verdict

    def reading(self: Any) -> Any:
        events.append(f"read {self.name}")
        return read(self)

    spying = patch.object(step.Stepper, "_vote", voting), patch.object(Verdict, "numbers", reading)
    with LATE, spying[0], spying[1], patch.dict(os.environ, PLSC_HEAD_BACKEND="torch"):
        components = build(configuration, open_training_data(configuration), mesh)
        stepper = step.Stepper(components)
        groups = micro_batches(components.loader, configuration.optim.accumulate, components.class_loss.split)
        for number in range(2):
            stepper.step(next(groups), number)
        group = next(groups)
        with WaitingOperations() as waiting:
            enqueued = stepper.step(group, 2)
        enqueued.result()
    return waiting.found, [event for index, event in enumerate(events) if event not in events[:index]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.name": "adamw", "optim.clip_norm": 1.0, "optim.clip_head": True, "ema_decay": 0.9},
        {"precision": "fp16", "optim.accumulate": 2, "data.batch_size": 6, "head.margin": "adaface", "head.m": 0.4},
        {"precision": "bf16", "head.margin": "elasticface", "head.m": 0.2, "head.centers": 2, "channels_last": True},
        {"head.margin": "curricularface", "head.weight_dtype": "bfloat16", "head.momentum_dtype": "int8"},
    ],
    ids=["sgd", "adamw", "fp16", "bf16", "int8"],
)
def test_a_step_waits_for_nothing_but_the_verdict_before_it(changes: dict[str, Any], ranks: Ranks) -> None:
    ((waiting, events),) = ranks(1, operations, changes)
    assert waiting == []
    assert events == ["vote 0", "vote 1", "read 0", "vote 2", "read 1", "read 2"]


def late_poisoned(
    mesh: Any, out: Path, changes: dict[str, Any], bad_steps: list[int], late: bool
) -> tuple[Any, list[bool]]:
    with LATE if late else contextlib.nullcontext():
        return poisoned(mesh, out, {"ema_decay": 0.9, **changes}, bad_steps, mesh.world_size - 1)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_device_skips_as_the_host_would(name: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        "optim.name": name,
        "optim.lr": 0.05 if name == "sgd" else 0.003,
        "data.batch_size": 6,
        "ema_decay": 0.9,
        "head.margin": "adaface",
        "head.m": 0.1,
        "checkpoint.every_steps": 7,
        "log.every_steps": 5,
    }
    runs = {late: ranks(2, late_poisoned, tmp_path / str(late), changes, [0, 7, 8, 13], late) for late in (True, False)}
    for found in runs.values():
        for result, same in found:
            assert [number for number, unchanged in enumerate(same) if unchanged] == [0, 7, 8, 13]
            assert result["skipped_steps"] == 4
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-3)


def late_run(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None) -> dict[str, Any]:
    with LATE:
        return run(mesh, out, changes, resume)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str, tmp_path: Path, ranks: Ranks) -> None:
    """Though losses are read late and fp16 skips its first steps."""
    changes = {
        "precision": "fp16",
        "optim.name": name,
        "optim.lr": 0.05 if name == "sgd" else 0.003,
        "data.batch_size": 6,
        "ema_decay": 0.9,
        "optim.schedule": "constant",
        "checkpoint.every_steps": 0,
    }
    ranks(2, late_run, tmp_path / "whole", {**changes, "log.every_steps": 9}, None)
    ranks(2, late_run, tmp_path / "halves", {**changes, "epochs": None, "steps": 7, "log.every_steps": 4}, None)
    ranks(2, late_run, tmp_path / "halves", {**changes, "log.every_steps": 9}, "auto")
    whole, halves = losses(tmp_path / "whole"), losses(tmp_path / "halves")
    assert sorted(whole) == [9, 18]
    assert {step: halves[step] for step in whole} == whole


def test_too_many_in_a_row_are_noticed_one_step_later(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 6, "max_skipped_steps": 4, "log.every_steps": 99, "checkpoint.every_steps": 0}
    for message, _ in ranks(2, late_poisoned, tmp_path, changes, list(range(6, 20)), True):
        assert "not finite for 4 steps in a row, up to step 10" in message
