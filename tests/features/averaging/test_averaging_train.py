"""Training runs whose ranks average weights: losses, resumption, and what is shipped."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import assert_same_files, losses, run

from plsc.optim import GradScaler
from plsc.parallel import Mesh
from plsc.train.checkpoint_reader import open_checkpoint

Ranks = Any
CHANGES: dict[str, Any] = {
    "backbone": "plain",
    "channels_last": True,
    "epochs": None,
    "steps": 8,
    "ema_decay": 0.9,
    "optim.schedule": "constant",
    "optim.lr": 0.01,
    "optim.clip_norm": 5.0,
    "optim.accumulate": 2,
    "checkpoint.every_steps": 5,
    "averaging.period": 3,
    "averaging.start_step": 2,
    "parallel.bucket_mb": 0.01,
}
LOCAL = {"averaging.name": "local_sgd"}
WAYS = [
    LOCAL,
    {"averaging.name": "post_local_sgd"},
    {"averaging.name": "diloco", "optim.name": "adamw", "optim.lr": 0.001},
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=[way["averaging.name"] for way in WAYS])
def test_runs_follow_the_plain_one_and_resume_bit_for_bit_between_two_averages(
    way: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    ranks(2, run, tmp_path / "plain", {**CHANGES, **way, "averaging.name": "none"})
    ranks(2, run, tmp_path / "whole", {**CHANGES, **way})
    plain, whole = losses(tmp_path / "plain"), losses(tmp_path / "whole")
    assert whole[8] < whole[1] / 2
    assert whole[1] == pytest.approx(plain[1], rel=1e-6)
    assert whole != plain
    assert f"average {way['averaging.name']}: " in (tmp_path / "whole" / "train.log").read_text()
    ranks(2, run, tmp_path / "resumed", {**CHANGES, **way, "steps": 5})
    ranks(2, run, tmp_path / "resumed", {**CHANGES, **way}, "auto")
    assert losses(tmp_path / "resumed") == whole
    assert_same_files(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_groups_go_on_from_the_average_on_other_ranks_and_without_averaging(tmp_path: Path, ranks: Ranks) -> None:
    groups = {
        "averaging.name": "hierarchical",
        "averaging.group_ranks": 2,
        "averaging.period": 4,
        "averaging.group_period": 2,
        "data.batch_size": 6,
        "backbone": "smooth",  # whose steps do not depend on how samples lie on ranks
    }
    ranks(4, run, tmp_path, {**CHANGES, **groups, "steps": 5})
    fsdp = {"parallel.strategy": "fsdp", "parallel.bucket_mb": None}
    for world, way in ((2, LOCAL), (4, fsdp), (1, {})):
        ranks(
            world,
            run,
            tmp_path / str(world),
            {**CHANGES, **way, "backbone": "smooth", "data.batch_size": 24 // world},
            str(tmp_path),
        )
        assert list(losses(tmp_path / str(world))) == [6, 7, 8]
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)  # the ranks' mean momenta too


def shipped(mesh: Mesh, out: Path) -> list[dict[str, torch.Tensor]]:
    """Train; the mean of the ranks' own weights in the checkpoint, and what it and the run's last file hold."""
    run(mesh, out, {**CHANGES, **LOCAL, "ema_decay": 0.0, "steps": 5})
    stored = open_checkpoint(out / "checkpoints" / "step-00000005", mesh)
    model = load_file(out / "model.safetensors")
    from plsc.models import create

    names = [name for name, _ in create("plain", embedding_dim=16, image_size=32).named_parameters()]
    own = [stored.read(f"exchange.{rank}.") for rank in range(2)]
    mean = {name: (own[0][f"{i}.weight"] + own[1][f"{i}.weight"]) / 2 for i, name in enumerate(names)}
    assert not torch.equal(own[0]["0.weight"], own[1]["0.weight"])
    return [mean, stored.read("backbone."), {name: model[name] for name in model if name in names}]


@pytest.mark.slow
def test_the_average_is_what_is_stored_and_shipped(tmp_path: Path, ranks: Ranks) -> None:
    mean, stored, model = ranks(2, shipped, tmp_path)[0]
    for name, tensor in mean.items():
        torch.testing.assert_close(stored[name], tensor)
        assert torch.equal(model[name], stored[name])


def with_one_bad_gradient(mesh: Mesh, out: Path) -> list[bool]:
    """Train; of each step, whether this rank's weights stayed. At the fourth, the first rank's gradient is NaN."""
    stayed: list[bool] = []
    unscale, step = GradScaler.unscale_all, GradScaler.step_both

    def poisoned(scaler: GradScaler, backbone: Any, head: Any) -> None:
        unscale(scaler, backbone, head)
        if mesh.rank == 0 and len(stayed) == 3:
            backbone.param_groups[0]["params"][0].grad[0] = torch.nan

    def watched(scaler: GradScaler, backbone: Any, *others: Any) -> Any:
        weights = [weight for group in backbone.param_groups for weight in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        verdict = step(scaler, backbone, *others)
        stayed.append(all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)))
        return verdict

    with mock.patch.object(GradScaler, "unscale_all", poisoned), mock.patch.object(GradScaler, "step_both", watched):
        result = run(mesh, out, {**CHANGES, **LOCAL, "precision": "bf16"})
    assert result["skipped_steps"] == 1
    return stayed


@pytest.mark.slow
def test_a_gradient_that_is_bad_on_one_rank_stops_all_of_them(tmp_path: Path, ranks: Ranks) -> None:
    expected = [False, False, False, True, False, False, False, False]
    assert ranks(2, with_one_bad_gradient, tmp_path) == [expected, expected]


TABLES = {
    "head_ranks": 1,
    "head.placement": "host",
    "head.sample_rate": 0.5,
    "head.weight_dtype": "bfloat16",
    "head.momentum_dtype": "int8",
    "replicas.averaging_period": 3,
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {**LOCAL, "replicas.staleness": 2}], ids=["waiting", "late, beside local_sgd"])
def test_runs_whose_tables_are_averaged_resume_bit_for_bit(way: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    changes = {**CHANGES, **TABLES, **way}
    ranks(2, run, tmp_path / "whole", changes, head_ranks=1)
    whole = losses(tmp_path / "whole")
    assert whole[8] < whole[1]
    assert "tables  of 2 head groups averaged every 3 steps" in (tmp_path / "whole" / "train.log").read_text()
    ranks(2, run, tmp_path / "resumed", {**changes, "steps": 5}, head_ranks=1)
    ranks(2, run, tmp_path / "resumed", changes, "auto", head_ranks=1)
    assert losses(tmp_path / "resumed") == whole
    ranks(1, run, tmp_path / "alone", {**changes, "data.batch_size": 24}, str(tmp_path / "resumed"))
