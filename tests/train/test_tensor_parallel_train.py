"""Runs under tensor parallelism: the losses of one process, and runs that go on with and without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import assert_same_losses, run, run_until

from plsc.train.metrics import read_metrics

Ranks = Any
# 60 images: 5 steps an epoch, 20 in all. Statistics over all images of a step, as one process has them.
SETUP: dict[str, Any] = {
    "backbone": "tiny_vit",
    "sync_batchnorm": True,
    "epochs": None,
    "steps": 20,
    "checkpoint.every_steps": 1,
}
# The eps is for biases before a batch normalisation: their gradients are roundings, which adamw would make large.
VARIANTS: dict[str, dict[str, Any]] = {
    "average": {"optim.accumulate": 2, "ema_decay": 0.9, "optim.clip_norm": 0.5, "optim.clip_head": True},
    "adamw": {
        "optim.name": "adamw",
        "optim.lr": 0.005,
        "optim.eps": 1e-4,
        "optim.clip_norm": 1.0,
        "optim.weight_decay": 0.05,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel.strategy": "fsdp"},
    "tp": {"parallel.tp": 2},
    "tp and fsdp": {"parallel.tp": 2, "parallel.strategy": "fsdp"},
}


def changes_of(layout: str, variant: str, world: int) -> dict[str, Any]:
    chosen = LAYOUTS[layout]
    return {**SETUP, **VARIANTS[variant], **chosen, "data.batch_size": 12 * chosen.get("parallel.tp", 1) // world}


@pytest.mark.first_ring("tp-2-average")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world", "variant"), [("tp", 2, "average"), ("tp", 4, "adamw"), ("tp and fsdp", 4, "average")]
)
def test_losses_are_those_of_one_process(
    layout: str, world: int, variant: str, trained_once: Any, ranks: Ranks, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    results = ranks(world, run, out, changes_of(layout, variant, world))
    alone = trained_once(1, changes_of("ddp", variant, 1))
    assert_same_losses(out, alone)
    assert all(result["loss"] == results[0]["loss"] for result in results)
    norms, own = ([line["grad_norm"] for line in read_metrics(each) if "grad_norm" in line] for each in (alone, out))
    assert own == pytest.approx(norms, rel=1e-3)
    shipped, expected = (load_file(each / "model.safetensors") for each in (out, alone))
    assert shipped.keys() == expected.keys()
    # adamw divides by a gradient's size: one that is all rounding moves its weight as far as any other
    atol = 1e-3 if variant == "adamw" else 2e-4
    for name, tensor in expected.items():
        torch.testing.assert_close(shipped[name], tensor, rtol=1e-3, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_with_and_without_it(variant: str, trained_once: Any, ranks: Ranks, tmp_path: Path) -> None:
    for index, (layout, world) in enumerate([("tp", 2), ("ddp", 1), ("tp and fsdp", 4), ("fsdp", 2)]):
        changes, resume = changes_of(layout, variant, world), "auto" if index else None
        ranks(world, run_until, tmp_path / "run", changes, resume, 5 * (index + 1))
    assert_same_losses(tmp_path / "run", trained_once(1, changes_of("ddp", variant, 1)))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_learn_as_one_process_does(precision: str, ranks: Ranks, tmp_path: Path) -> None:
    changes = {"backbone": "tiny_vit", "precision": precision, "epochs": 2}
    ranks(1, run, tmp_path / "alone", changes)
    ranks(2, run, tmp_path / "shared", {**changes, "parallel.tp": 2})
    assert_same_losses(tmp_path / "shared", tmp_path / "alone", 0.02)
