"""Runs whose class table lies outside the device: the same losses, killed and resumed too, wherever it lies."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.tiny_runs import Killable, losses, register_tiny, run

from plsc.data.avatars import AvatarDataset
from plsc.data.loader import TrainLoader
from plsc.head.host_table import HostTable
from plsc.parallel import Mesh

SAMPLED = {"head.sample_rate": 0.3, "head.weight_dtype": "bfloat16", "head.momentum_dtype": "int8"}
ONE = Mesh(0, 1, 0, torch.device("cpu"))


def on_rank(mesh: Mesh, out: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """The run's result, and how many of how many fetched steps had been announced."""
    taken = []
    original = HostTable.take_prefetched

    def counting(table: HostTable, key: int, labels: torch.Tensor) -> Any:
        taken.append(original(table, key, labels))
        return taken[-1]

    with mock.patch.object(HostTable, "take_prefetched", counting):
        result = run(mesh, out, changes)
    return result, sum(rows is not None for rows in taken), len(taken)


@pytest.mark.first_ring("2")
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mapped_table_trains_as_one_on_the_device(tmp_path, ranks, accumulate):
    changes = {**SAMPLED, "optim.accumulate": accumulate, "checkpoint.every_steps": 0}
    ranks(2, on_rank, tmp_path / "device", changes)
    mapped = {**changes, "head.placement": f"mmap:{tmp_path}/table"}
    (_, announced, batches), *_ = ranks(2, on_rank, tmp_path / "mapped", mapped)
    assert losses(tmp_path / "mapped") == losses(tmp_path / "device")
    assert batches == 12  # 60 pictures in 3 global batches an epoch
    assert announced == 8  # all but the first batch of each epoch


@pytest.mark.live
@pytest.mark.slow
def test_killed_and_resumed_and_moved(tmp_path):
    """kill -9 while the table lies in a file; the rest of the run with the table on the device, and again in a file."""
    register_tiny()
    changes = {**SAMPLED, "head.placement": f"mmap:{tmp_path}/table"}
    run(ONE, tmp_path / "whole", changes)
    for last_step, given in ((9, changes), (14, SAMPLED)):
        killable = Killable(1, tmp_path / "killed", given, resume="auto")
        killable.wait_for_step(last_step)
        killable.kill([0])
        killable.wait()
    run(ONE, tmp_path / "killed", changes, resume="auto")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_labels_are_known_ahead_and_the_position_is_not_moved_by_that():
    loader = TrainLoader(AvatarDataset(10, 6, image_size=32), batch_size=7, rank=1, world_size=2, seed=3)
    assert loader.next_labels is None
    expected = None
    for _, labels in loader:
        assert expected is None or torch.equal(labels, expected)
        before = loader.state_dict()
        expected = loader.next_labels
        assert loader.state_dict() == before
    assert expected is None
