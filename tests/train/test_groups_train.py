"""Training with head groups: the same run as with one table over all ranks, saved and resumed like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import losses, refusal, run

Ranks = Any
CHANGES = {
    "epochs": 2,
    "data.batch_size": 5,
    "optim.accumulate": 2,
    "optim.clip_norm": 0.5,
    "optim.clip_head": True,
    "checkpoint.every_steps": 2,
    "head.margin": "curricularface",
}


def on_rank(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None = None) -> list[torch.Tensor]:
    """Train; the backbone's weights, which all ranks must share."""
    from safetensors.torch import load_file

    run(mesh, out, changes, resume)
    return list(load_file(out / "model.safetensors").values())


@pytest.mark.first_ring("1")
@pytest.mark.slow
@pytest.mark.parametrize("head_ranks", [1, 2])
def test_groups_train_as_one_table_does(head_ranks: int, tmp_path: Path, ranks: Ranks) -> None:
    ranks(4, on_rank, tmp_path / "whole", CHANGES)
    ranks(4, on_rank, tmp_path / "groups", {**CHANGES, "head_ranks": head_ranks}, head_ranks=head_ranks)
    whole, groups = losses(tmp_path / "whole"), losses(tmp_path / "groups")
    assert groups == pytest.approx(whole, rel=1e-3)
    assert groups[1] == pytest.approx(whole[1], rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_of_groups_goes_on_without_them(tmp_path: Path, ranks: Ranks) -> None:
    changes = {**CHANGES, "head_ranks": 2}
    ranks(4, on_rank, tmp_path, {**changes, "epochs": None, "steps": 2, "optim.schedule": "constant"}, head_ranks=2)
    ranks(2, on_rank, tmp_path, {**CHANGES, "data.batch_size": 10, "optim.schedule": "constant"}, "auto")
    ranks(4, on_rank, tmp_path / "whole", {**CHANGES, "optim.schedule": "constant"})
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path)
    assert resumed.keys() == whole.keys()
    assert resumed[2] == pytest.approx(whole[2], rel=1e-4)


def test_a_mesh_of_other_groups_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    for message in ranks(2, refusal, tmp_path, {"head_ranks": 1}):
        assert "plsc.init(head_ranks=1)" in message
