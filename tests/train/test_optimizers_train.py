"""Runs with each optimizer: they learn, go on from a checkpoint bit for bit, and take their learning rates and head."""

import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.tiny_runs import assert_same_files, losses, open_trainer, refusal, run

from plsc.optim.backbone_optimizers import BACKBONE_OPTIMIZERS
from plsc.optim.schedules import scaled_lr
from plsc.train.metrics import read_metrics

Ranks = Any
RATES = {"sgd": 0.05, "lars": 2.0, "adamw": 0.01, "lamb": 0.02, "adafactor": 0.02, "lion": 0.001, "muon": 0.01}
SHORT = {"epochs": None, "steps": 8, "optim.schedule": "constant", "checkpoint.every_steps": 0}


def in_two_halves(mesh: Any, out: Path, changes: dict[str, Any], resumed: dict[str, Any]) -> list[Any]:
    """The head's optimizer, and the weights of a run that went through beside those of one that went on."""
    from plsc.train import opening

    heads: list[object] = []
    original = opening.build

    def building(*arguments: Any) -> Any:
        components = original(*arguments)
        heads.append(components.head_optimizers[0])
        return components

    with patch.object(opening, "build", building):
        run(mesh, out / "whole", changes)
        run(mesh, out / "halves", {**changes, "steps": 4})
        run(mesh, out / "halves", {**changes, **resumed}, "auto")
    return [type(heads[0]).__name__]


@pytest.mark.first_ring("adamw-float32", "lars-float32", "adamw-int8")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "state_dtype"), [*((name, "float32") for name in BACKBONE_OPTIMIZERS), ("adamw", "int8")]
)
def test_each_optimizer_learns_and_goes_on_bit_for_bit(
    name: str, state_dtype: str, tmp_path: Path, ranks: Ranks
) -> None:
    changes = {**SHORT, "optim.name": name, "optim.lr": RATES[name], "optim.head_lr": 0.05 if name == "lars" else None}
    changes |= {"optim.state_dtype": state_dtype, "steps": 10}  # two epochs: batches differ in how hard they are
    (head,) = ranks(1, in_two_halves, tmp_path, changes, {})[0]
    assert head == ("HeadSGD" if name in ("sgd", "lars") else "HeadAdamW")
    found = losses(tmp_path / "whole")
    assert losses(tmp_path / "halves") == found
    assert sum(found[step] for step in range(6, 11)) < 0.9 * sum(found[step] for step in range(1, 6))
    assert_same_files(tmp_path / "halves", tmp_path / "whole")


@pytest.mark.slow
def test_the_head_has_an_optimizer_of_its_own(tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "optim.name": "lamb", "optim.head": "sgd", "optim.lr": 0.02, "optim.head_lr": 0.05}
    changes |= {"head.momentum_dtype": "none"}
    assert ranks(1, in_two_halves, tmp_path, changes, {})[0] == ["HeadSGD"]
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    assert "lamb (head sgd), lr 0.02 (head 0.05)" in (tmp_path / "whole/train.log").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_state_is_kept_by_weight_where_the_groups_change(name: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "optim.name": name, "optim.lr": RATES[name], "optim.weight_decay": 0.0}
    ranks(1, in_two_halves, tmp_path, changes, {"optim.no_decay": "*.0.weight,*.bias"})
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optim.no_decay": "*.bias,*norms*"},
            r'UsageError: optim\.no_decay: "\*norms\*" fits no weight of the backbone; the nearest are layers\.',
        ),
        (
            {"optim.layer_decay": 0.75},
            "UsageError: optim.layer_decay needs a backbone with a sequence of transformer blocks",
        ),
    ],
)
def test_groups_that_cannot_be_made_are_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, ranks: Ranks
) -> None:
    for answer in ranks(2, refusal, tmp_path, {**SHORT, **changes}):
        assert re.match(message, answer)


def twice(mesh: Any, out: Path, changes: dict[str, Any]) -> None:
    run(mesh, out, changes)
    run(mesh, out, {**changes, "steps": 6, "data.batch_size": 3}, "auto")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("scaling", "power"), [("none", 0.0), ("linear", 1.0), ("sqrt", 0.5)])
def test_rates_grow_with_the_global_batch(world: int, scaling: str, power: float, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "steps": 3, "optim.lr_scaling": scaling, "optim.base_batch": 3, "optim.head_lr": 0.02}
    ranks(world, twice, tmp_path, {**changes, "optim.accumulate": 2, "data.batch_size": 6})
    lines = {line["step"]: line for line in read_metrics(tmp_path) if "lr" in line}
    first, second = (4 * world) ** power, (2 * world) ** power  # of 12 and, when it goes on, 6 images per rank
    assert [lines[step]["lr"] for step in (3, 6)] == pytest.approx([0.05 * first, 0.05 * second])
    assert [lines[step]["head_lr"] for step in (3, 6)] == pytest.approx([0.02 * first, 0.02 * second])
    log = (tmp_path / "train.log").read_text()
    assert f"lr {0.05 * first:g} (head {0.02 * first:g})" in log
    assert ("which is 0.05 at 3 images, scaled" in log) == (scaling != "none")


@pytest.mark.parametrize("batch", [1, 512, 4096])
def test_scaled_rates_by_hand(batch: int) -> None:
    assert scaled_lr(0.1, batch, "none", 512) == 0.1
    assert scaled_lr(0.1, batch, "linear", 512) == pytest.approx(0.1 * batch / 512)
    assert scaled_lr(0.1, batch, "sqrt", 512) == pytest.approx(0.1 * math.sqrt(batch / 512))


EIGHT_BITS: dict[str, Any] = {
    **SHORT,
    "backbone": "tiny_vit",
    "optim.name": "adamw",
    "optim.lr": 0.01,
    "optim.state_dtype": "int8",
    "optim.accumulate": 1,
}
PARTED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel.strategy": "zero1"},
    "fsdp": {"parallel.strategy": "fsdp"},
    "hsdp": {"parallel.strategy": "hsdp", "parallel.shard_ranks": 2},
    "pp": {"parallel.pp": 2, "parallel.pp_micro_batches": 2},
    "offloaded, fp16": {"parallel.strategy": "fsdp", "parallel.offload": True, "precision": "fp16"},
}


def stored_moments(mesh: Any, out: Path, changes: dict[str, Any]) -> list[tuple[str, tuple[int, ...], Any]]:
    """What this rank would write of the optimizer right after it has gone on: (name, offsets, numbers)."""
    from plsc.parallel.tensor_shard import TensorShard
    from plsc.train import state

    found = []
    with open_trainer(mesh, out, changes) as trainer:
        tensors, _ = state.capture(trainer.components, trainer.position)
        for name, tensor in tensors.items():
            blocks = tensor.blocks if isinstance(tensor, TensorShard) else [(tensor, (0,) * tensor.dim())]
            if name.startswith("optimizer."):
                found += [(name, tuple(offsets), local.numpy().copy()) for local, offsets in blocks if local.numel()]
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_moments_in_8_bits_go_on_under_any_strategy_and_world(ranks: Ranks, tmp_path: Path) -> None:
    """Codes and scales are the stored ones bit for bit, wherever their rows lie; then the run learns on."""
    ranks(2, run, tmp_path / "run", {**EIGHT_BITS, **PARTED["fsdp"], "data.batch_size": 6, "steps": 2})
    whole = {name: numbers for name, _, numbers in ranks(1, stored_moments, tmp_path / "run", EIGHT_BITS)[0]}
    assert sum(numbers.dtype == "uint8" for numbers in whole.values()) >= 6
    course = [("zero1", 2), ("fsdp", 3), ("hsdp", 4), ("pp", 2), ("offloaded, fp16", 2), ("ddp", 1)]
    for strategy, world in course:
        changes = {**EIGHT_BITS, **PARTED[strategy], "data.batch_size": 12 // (1 if strategy == "pp" else world)}
        seen = dict.fromkeys(whole, 0)
        by_rank = ranks(world, stored_moments, tmp_path / "run", changes)
        for name, offsets, numbers in (each for found in by_rank for each in found):
            part = tuple(slice(first, first + size) for first, size in zip(offsets, numbers.shape, strict=True))
            assert (whole[name][part] == numbers).all(), (strategy, name)
            seen[name] += numbers.size
        assert all(seen[name] % numbers.size == 0 and seen[name] for name, numbers in whole.items()), strategy
    ranks(1, run, tmp_path / "run", {**EIGHT_BITS, "steps": 8}, "auto")
    found = losses(tmp_path / "run")
    assert found[8] < 0.97 * found[1]
