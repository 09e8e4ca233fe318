"""A run goes on with its class table and the state beside it in other types: the same values, or the nearest ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import assert_same_losses, losses, open_trainer, run, run_until
from torch import Tensor

Ranks = Any
TYPES = {
    "float32": {"head.weight_dtype": "float32", "head.momentum_dtype": "float32"},
    "bfloat16": {"head.weight_dtype": "bfloat16", "head.momentum_dtype": "bfloat16"},
    "int8": {"head.weight_dtype": "bfloat16", "head.momentum_dtype": "int8"},
    "none": {"head.weight_dtype": "float32", "head.momentum_dtype": "none"},
}
SHORT = {"epochs": None, "steps": 3, "checkpoint.every_steps": 0, "head.centers": 2}


def tables(mesh: Any, out: Path, changes: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """All rows of the class table and its state in float64, as the run in ``out`` is resumed, and its log's lines."""
    with open_trainer(mesh, out, changes) as trainer:
        head, state = trainer.components.tables[0].head, trainer.components.head_optimizers[0].tables
        found = {name: table.read(slice(None), torch.float64) for name, table in state.items()}
        found["weight"] = head.weight.detach().double()
    return found, (out / "train.log").read_text().splitlines()


def rows(ranks: Ranks, world: int, out: Path, changes: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    answers = ranks(world, tables, out, changes)
    whole = {name: torch.cat([found[name] for found, _ in answers]) for name in answers[0][0]}
    return whole, "\n".join(answers[0][1])


def nearest(values: Tensor, kind: str) -> Tensor:
    """``values`` as a table of this kind holds them, from the formulas."""
    if kind != "int8":
        return values.to(getattr(torch, kind)).double()
    step = values.abs().amax(1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(values / step) * step, values)


@pytest.mark.first_ring("int8-sgd")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("before", ["float32", "bfloat16", "int8"])
def test_tables_hold_the_nearest_values(before: str, optimizer: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {**SHORT, "optim.head": optimizer, "data.batch_size": 6}
    ranks(2, run, tmp_path, {**changes, **TYPES[before]})
    stored, _ = rows(ranks, 2, tmp_path, {**changes, **TYPES[before]})
    assert set(stored) == {"weight", *(["momentum"] if optimizer == "sgd" else ["first_moment", "second_moment"])}
    for after in ("float32", "bfloat16", "int8"):
        found, log = rows(ranks, 3, tmp_path, {**changes, **TYPES[after]})
        weight = TYPES[after]["head.weight_dtype"]
        assert torch.equal(found["weight"], nearest(stored["weight"], weight))
        for name in set(stored) - {"weight"}:
            kind = weight if name == "second_moment" else TYPES[after]["head.momentum_dtype"]
            expected = nearest(stored[name], kind)
            if kind != "int8":
                assert torch.equal(found[name], expected), name
            else:  # a value half-way between two steps may go to either, and scales are float32
                step = stored[name].abs().amax(1, keepdim=True) / 127
                assert (found[name] - stored[name]).abs().le(step * 0.5001).all()
                assert (found[name] - expected).abs().lt(1e-3 * step + 1e-30).double().mean() > 0.99
        if before == "float32" and after == "bfloat16":
            assert "head.weight: float32 in the checkpoint, bfloat16 here: rounded once, to the nearest" in log


def test_momentum_begins_at_zero_where_there_was_none_and_may_be_left_out(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run, tmp_path, {**SHORT, **TYPES["none"]})
    found, log = rows(ranks, 2, tmp_path, {**SHORT, **TYPES["int8"], "data.batch_size": 6})
    assert not found["momentum"].any()
    assert "head_optimizer.momentum begins at zero: the checkpoint holds none" in log
    ranks(1, run, tmp_path, {**SHORT, **TYPES["int8"], "steps": 4}, "auto")
    found, log = rows(ranks, 1, tmp_path, {**SHORT, **TYPES["none"], "steps": 4})
    assert set(found) == {"weight"}
    assert "left out: head_optimizer.momentum of the checkpoint" in log
    assert "momentum_scale" not in log


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_world_placement_and_type_at_once(tmp_path: Path, ranks: Ranks) -> None:
    """Each change of the course changes all of them; the losses stay near those of one process that changes none."""
    base = {"backbone": "tiny_vit", "sync_batchnorm": True, "epochs": None, "steps": 10, "optim.name": "adamw"}
    base |= {"optim.lr": 0.005, "optim.eps": 1e-4}  # biases before a batch normalisation have gradients of rounding
    mapped = f"mmap:{tmp_path}/table"
    course: list[tuple[int, int, dict[str, Any]]] = [
        (1, 3, {"parallel.strategy": "ddp", **TYPES["float32"]}),
        (4, 5, {"parallel.strategy": "fsdp", **TYPES["int8"], "head.placement": mapped}),
        (2, 7, {"parallel.strategy": "zero1", **TYPES["bfloat16"], "head.placement": "host"}),
        (4, 9, {"parallel.strategy": "ddp", "parallel.tp": 2, **TYPES["float32"]}),
        (3, 11, {"parallel.strategy": "fsdp", **TYPES["int8"], "head.placement": mapped}),
    ]
    for index, (world, stop, changes) in enumerate(course):
        images = 12 * changes.get("parallel.tp", 1) // world
        given = {**base, **changes, "data.batch_size": images}
        ranks(world, run_until, tmp_path / "run", given, "auto" if index else None, stop)
    ranks(1, run, tmp_path / "whole", base)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 11))
    assert_same_losses(tmp_path / "run", tmp_path / "whole", 0.02)
