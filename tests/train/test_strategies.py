"""Every strategy trains as one process does, and a run goes on under any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import assert_same_losses, losses, open_trainer, refusal, run, run_until

from plsc.train.metrics import read_metrics

Ranks = Any
# 60 images: 5 steps an epoch, 20 in all. Statistics over all ranks, as one process has them.
SETUP: dict[str, Any] = {
    "backbone": "residual",
    "sync_batchnorm": True,
    "optim.accumulate": 1,
    "epochs": None,
    "steps": 20,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "fsdp": {"parallel.strategy": "fsdp"},
    "hsdp": {"parallel.strategy": "hsdp", "parallel.shard_ranks": 2},
    "offloaded": {"parallel.strategy": "fsdp", "parallel.offload": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw, clipped with the head": {
        "optim.name": "adamw",
        "optim.lr": 0.01,
        "optim.clip_norm": 1.0,
        "optim.clip_head": True,
    },
    "two micro-batches, average": {"optim.accumulate": 2, "ema_decay": 0.9, "optim.clip_norm": 0.5},
    "no decay of biases, channels_last": {"optim.no_decay": ["*.bias"], "channels_last": True},
}


def changes_of(strategy: str, variant: str, world: int) -> dict[str, Any]:
    changes = {**SETUP, **VARIANTS[variant], **STRATEGIES[strategy]}
    return {**changes, "data.batch_size": 12 // world}


@pytest.mark.first_ring("zero1-2-adamw, clipped with the head", "fsdp-2-two micro-batches, average")
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("strategy", "world"), [("zero1", 2), ("fsdp", 2), ("zero1", 4), ("zero2", 4), ("fsdp", 4), ("hsdp", 4)]
)
def test_losses_are_those_of_one_process(
    strategy: str, world: int, variant: str, trained_once: Any, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks(world, run, tmp_path / "run", changes_of(strategy, variant, world))
    run_alone = trained_once(1, changes_of("ddp", variant, 1))
    assert_same_losses(tmp_path / "run", run_alone)
    norms, own = (
        [line["grad_norm"] for line in read_metrics(out) if "grad_norm" in line]
        for out in (run_alone, tmp_path / "run")
    )
    assert own == pytest.approx(norms, rel=1e-3)
    assert all(result["loss"] == results[0]["loss"] for result in results)
    shipped, theirs = (load_file(out / "model.safetensors") for out in (tmp_path / "run", run_alone))
    assert shipped.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(shipped[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_spread_states_step_bit_by_bit_as_data_parallelism_does(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("lamb", "muon", "lars", "adafactor"):
        found = []
        for strategy in ("ddp", "zero1"):
            changes = {
                **SETUP,
                **STRATEGIES[strategy],
                "data.batch_size": 6,
                "optim.name": name,
                "optim.lr": 0.01,
                "epochs": 1,
                "steps": None,
            }
            ranks(2, run, tmp_path / name / strategy, changes)
            found.append(losses(tmp_path / name / strategy))
        assert found[0] == found[1], name


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["two micro-batches, average", "adamw, clipped with the head"])
@pytest.mark.parametrize(
    "course",
    [
        [("fsdp", 2), ("ddp", 1), ("zero2", 2), ("hsdp", 4)],
        [("zero1", 4), ("fsdp", 4), ("ddp", 2), ("offloaded", 2)],
    ],
    ids=["from fsdp", "from zero1"],
)
def test_a_run_goes_on_under_another_strategy_and_world(
    course: list[tuple[str, int]], variant: str, trained_once: Any, ranks: Ranks, tmp_path: Path
) -> None:
    for index, (strategy, world) in enumerate(course):
        changes = {**changes_of(strategy, variant, world), "checkpoint.every_steps": 1}
        resume = "auto" if index else None
        ranks(world, run_until, tmp_path / "run", changes, resume, 5 * (index + 1))
    assert_same_losses(tmp_path / "run", trained_once(1, changes_of("ddp", variant, 1)))


def kept_by_a_rank(mesh: Any, out: Path, changes: dict[str, Any]) -> tuple[int, int]:
    """How many numbers of weights, and of optimizer state, a rank keeps between steps."""
    with open_trainer(mesh, out, changes, None) as trainer:
        components = trainer.components
        trainer.stepper.step(next(trainer._groups()), 0).result()
        weights = sum(weight.parameter.numel() for weight in components.strategy.weights)
        states = components.strategy.local_optimizer(components.optimizer).state
        kept = sum(value.numel() for state in states.values() for value in state.values() if value is not None)
    return weights, kept


@pytest.mark.slow
def test_a_rank_keeps_its_share(ranks: Ranks, tmp_path: Path) -> None:
    kept = {
        name: ranks(4, kept_by_a_rank, tmp_path / name, {**SETUP, **STRATEGIES[name], "data.batch_size": 3})
        for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    }
    whole, states = kept["ddp"][0]
    for name in ("zero2", "fsdp"):
        assert sum(weights for weights, _ in kept[name]) == whole, name
    assert sum(weights for weights, _ in kept["hsdp"]) == 2 * whole
    assert [weights for weights, _ in kept["zero1"]] == [whole] * 4
    for name, copies in (("zero1", 1), ("zero2", 1), ("fsdp", 1), ("hsdp", 2)):
        assert sum(state for _, state in kept[name]) == copies * states, name
        assert max(state for _, state in kept[name]) < states, name


def test_ranks_that_do_not_divide_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    changes = {"parallel.strategy": "hsdp", "parallel.shard_ranks": 2}
    assert "does not divide the number of ranks, 3" in ranks(3, refusal, tmp_path / "run", changes)[0]
    assert not (tmp_path / "run").exists()
