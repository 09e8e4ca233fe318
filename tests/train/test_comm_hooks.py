"""Training runs whose ranks compress their gradients: losses, resumption, and what checkpoints hold."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_runs import losses, run

Ranks = Any
CHANGES: dict[str, Any] = {
    "backbone": "plain",
    "epochs": None,
    "steps": 6,
    "optim.schedule": "constant",
    "checkpoint.every_steps": 3,
    "parallel.powersgd_start_step": 2,
    "parallel.dgc_warmup_epochs": 0.0,
    "parallel.dgc_sparsity": 0.9,
    "parallel.dgc_dense_below": 1000,
}
TOLERANCES = {"bf16": 2e-2, "fp16": 2e-3}  # of each step's loss
LOSSY = {"powersgd": 0.3, "dgc": 0.3}  # of the losses' mean: what is left out of a step comes with later ones


def trained(ranks: Ranks, out: Path, hook: str, **changes: Any) -> dict[int, float]:
    ranks(2, run, out, {**CHANGES, "parallel.comm_hook": hook, **changes})
    return losses(out)


@pytest.mark.slow
def test_runs_with_each_hook_follow_the_plain_one(tmp_path: Path, ranks: Ranks) -> None:
    whole = trained(ranks, tmp_path / "none", "none")
    for hook, tolerance in (TOLERANCES | LOSSY).items():
        found = trained(ranks, tmp_path / hook, hook)
        if hook in TOLERANCES:
            assert found == pytest.approx(whole, rel=tolerance)
        assert sum(found.values()) == pytest.approx(sum(whole.values()), rel=tolerance)
        assert found[1] == pytest.approx(whole[1], rel=1e-6)
        assert found != whole
        assert f"hook    {hook}: " in (tmp_path / hook / "train.log").read_text()


@pytest.mark.slow
def test_several_communicators_change_no_bit(tmp_path: Path, ranks: Ranks) -> None:
    for hook, strategy in (("none", "ddp"), ("bf16", "zero1")):
        changes = {"parallel.bucket_mb": 0.01, "parallel.strategy": strategy}  # more buckets than communicators
        one = trained(ranks, tmp_path / hook / "one", hook, **changes)
        assert trained(ranks, tmp_path / hook / "three", hook, **changes, **{"parallel.communicators": 3}) == one


@pytest.mark.slow
def test_dgc_that_sends_all_is_the_plain_run(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"optim.accumulate": 2, "parallel.bucket_mb": 0.01}
    whole = trained(ranks, tmp_path / "none", "none", **changes)
    found = trained(ranks, tmp_path / "dgc", "dgc", **{**changes, "parallel.dgc_sparsity": 0.0})
    assert found == pytest.approx(whole, rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_dgc_resumes_bit_for_bit_and_on_another_number_of_ranks(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"channels_last": True, "optim.clip_norm": 1.0}
    whole = trained(ranks, tmp_path / "whole", "dgc", **changes)
    first = {**CHANGES, "parallel.comm_hook": "dgc", **changes}
    for world in (2, 3, 1):
        out = tmp_path / str(world)
        ranks(2, run, out, {**first, "steps": 3})
        ranks(world, run, out, {**first, "data.batch_size": 24 // world}, "auto")
        if world == 2:
            assert losses(out) == whole
        else:
            assert losses(out) == pytest.approx(whole, rel=0.2)


@pytest.mark.feature("averaging")
def test_what_a_checkpoint_holds_and_nothing_takes_is_named(tmp_path: Path, ranks: Ranks) -> None:
    first = {**CHANGES, "parallel.comm_hook": "dgc", "ema_decay": 0.9}
    ranks(2, run, tmp_path / "dgc", {**first, "steps": 3})
    after = {**CHANGES, "steps": 4}
    diloco = {**CHANGES, "averaging.name": "diloco", "averaging.period": 2}
    ranks(2, run, tmp_path / "diloco", {**diloco, "steps": 3})
    for name, same, kinds in (
        ("dgc", first, {"gradients that were not sent yet (parallel.comm_hook)", "the moving average of the weights"}),
        ("diloco", diloco, {"the momentum of the outer steps (averaging)"}),
    ):
        for changes, expected in (({**same, "steps": 4}, set()), (after, kinds)):
            out = tmp_path / f"{name} {len(expected)}"
            ranks(2, run, out, changes, str(tmp_path / name))
            lines = [line for line in (out / "train.log").read_text().splitlines() if "left out: " in line]
            said = [line.partition("left out: ")[2].removesuffix(" of the checkpoint") for line in lines]
            assert {line.removesuffix(" (ema_decay)") for line in said} == expected


@pytest.mark.exhaustive
@pytest.mark.slow
def test_powersgd_says_that_it_forgets_its_error(tmp_path: Path, ranks: Ranks) -> None:
    first = {**CHANGES, "parallel.comm_hook": "powersgd", "data.batch_size": 8}
    ranks(3, run, tmp_path, {**first, "steps": 3})
    ranks(3, run, tmp_path, first, "auto")
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert "not stored in checkpoints: PowerSGD's error feedback" in (tmp_path / "train.log").read_text()


@pytest.mark.slow
def test_a_hook_switches_exact_sums_off(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"sync_batchnorm": True, "steps": 2}
    whole = trained(ranks, tmp_path / "none", "none", **changes)
    assert trained(ranks, tmp_path / "bf16", "bf16", **changes) == pytest.approx(whole, rel=1e-3)
