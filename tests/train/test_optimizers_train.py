"""Runs with each optimizer: they learn, go on from a checkpoint bit for bit, and take their learning rates and head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import TINY, losses, run

from plsc import config
from plsc.errors import UsageError
from plsc.optim.backbone_optimizers import BACKBONE_OPTIMIZERS

Ranks = Any
RATES = {"sgd": 0.05, "lars": 2.0, "adamw": 0.01, "lamb": 0.02, "adafactor": 0.02, "lion": 0.001, "muon": 0.01}
SHORT = {"epochs": None, "steps": 8, "optim.schedule": "constant", "checkpoint.every_steps": 0}


def in_two_halves(mesh: Any, out: Path, changes: dict[str, Any], resumed: dict[str, Any]) -> list[Any]:
    """The head's optimizer, and the weights of a run that went through beside those of one that went on."""
    from plsc.optim import HeadOptimizer
    from plsc.train import trainer

    heads: list[HeadOptimizer] = []
    original = trainer.build

    def building(*arguments: Any) -> Any:
        components = original(*arguments)
        heads.append(components.head_optimizer)
        return components

    trainer.build = building  # type: ignore[attr-defined]
    try:
        run(mesh, out / "whole", changes)
        run(mesh, out / "halves", {**changes, "steps": 4})
        run(mesh, out / "halves", {**changes, **resumed}, "auto")
    finally:
        trainer.build = original  # type: ignore[attr-defined]
    return [type(heads[0]).__name__]


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONE_OPTIMIZERS)
def test_each_optimizer_learns_and_goes_on_bit_for_bit(name: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "optim.name": name, "optim.lr": RATES[name], "optim.head_lr": 0.05 if name == "lars" else None}
    (head,) = ranks(1, in_two_halves, tmp_path, changes, {})[0]
    assert head == ("HeadSGD" if name in ("sgd", "lars") else "HeadAdamW")
    found = losses(tmp_path / "whole")
    assert losses(tmp_path / "halves") == found
    assert found[8] < 0.97 * found[1]
    first, second = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "halves"))
    assert all(torch.equal(first[key], second[key]) for key in first | second)


@pytest.mark.slow
def test_the_head_has_an_optimizer_of_its_own(tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "optim.name": "lamb", "optim.head": "sgd", "optim.lr": 0.02, "optim.head_lr": 0.05}
    changes |= {"head.momentum_dtype": "none"}
    assert ranks(1, in_two_halves, tmp_path, changes, {})[0] == ["HeadSGD"]
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    assert "lamb (head sgd), lr 0.02 (head 0.05)" in (tmp_path / "whole/train.log").read_text()


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "muon", "adafactor"])
def test_a_head_without_moments_needs_sgd(name: str) -> None:
    changes = {**TINY, "backbone": "iresnet18", "optim.name": name, "head.momentum_dtype": "none"}
    with pytest.raises(UsageError, match=r'leaves adamw no moments; .*optim\.head = "sgd"'):
        config.load(None, changes)
    assert config.load(None, {**changes, "optim.head": "sgd"}).optim.head_name == "sgd"
