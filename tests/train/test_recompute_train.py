"""Runs that recompute activations have the losses of runs that keep them."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import losses, run

from plsc import config
from plsc.plan import Hardware, Links, named_device, plan
from plsc.plan.planner import as_text

pytestmark = pytest.mark.exhaustive

Ranks = Any
SHORT = {"backbone": "resnet8", "epochs": None, "steps": 4, "checkpoint.every_steps": 2, "optim.schedule": "constant"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.accumulate": 2, "ema_decay": 0.9, "channels_last": True},
        {"sync_batchnorm": True},
        {"backbone": "timm:test_vit", "precision": "bf16"},
        {"parallel.strategy": "fsdp"},
    ],
    ids=["ddp", "accumulation", "synchronised", "vit in bf16", "fsdp"],
)
def test_two_ranks_that_recompute_have_the_losses_of_two_that_do_not(
    changes: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    ranks(2, run, tmp_path / "plain", {**SHORT, **changes})
    ranks(2, run, tmp_path / "again", {**SHORT, **changes, "recompute": "every_k"})
    assert len(losses(tmp_path / "plain")) == 4
    assert losses(tmp_path / "again") == losses(tmp_path / "plain")
    assert re.search(r"memory +activations of \d+ blocks are recomputed", (tmp_path / "again/train.log").read_text())


@pytest.mark.slow
def test_a_run_goes_on_with_another_recomputation(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run, tmp_path / "whole", SHORT)
    ranks(1, run, tmp_path / "halves", {**SHORT, "steps": 2})
    ranks(1, run, tmp_path / "halves", {**SHORT, "recompute": "budget", "recompute_budget": 0.7}, "auto")
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_the_plan_counts_what_is_kept() -> None:
    card = Hardware(named_device("h100"), 80 * 10**9, Links(360e9, 40e9))
    plans = {
        method: plan(config.from_dict({"backbone": "iresnet18", "recompute": method}), 1000, card)
        for method in ("none", "every_k", "budget")
    }
    phase = {method: made.configured.memory.phases["backbone, backward pass"] for method, made in plans.items()}
    assert phase["every_k"] < 0.65 * phase["none"]
    assert phase["budget"] <= 0.61 * phase["none"]
    seconds = {method: made.configured.timing.parts["backbone, forward and backward"] for method, made in plans.items()}
    assert seconds["none"] < seconds["budget"] < seconds["every_k"] < 1.5 * seconds["none"]
    assert "iresnet18, bf16, recompute budget 0.6, 128 images" in as_text(plans["budget"])
