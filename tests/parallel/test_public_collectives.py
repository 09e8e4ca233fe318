"""plsc.collectives as a public module, and the all-reduces that examples/all_reduce.py builds of it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import plsc
from plsc import collectives
from plsc.parallel import Mesh, with_head_groups

EXAMPLE = Path(__file__).parents[2] / "examples/all_reduce.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("all_reduce_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sums(mesh: Mesh, machine_ranks: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """What each way makes of tensors of whole numbers, whose sums are exact in any order."""
    grid = with_head_groups(mesh, machine_ranks)
    ways = (example().hierarchical_all_reduce, example().two_dimensional_all_reduce)
    return [way(numbers(mesh.rank, shape), grid) for way in ways]


def numbers(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(rank)).float()


@pytest.mark.parametrize("machine_ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5)])
def test_the_examples_sum_over_all_ranks(ranks: Any, machine_ranks: int, shape: tuple[int, ...]) -> None:
    expected = sum(numbers(rank, shape) for rank in range(4))
    for found in ranks(4, sums, machine_ranks, shape):
        assert all(torch.equal(each, expected) for each in found)


def test_one_rank_needs_no_group() -> None:
    mesh = plsc.init("cpu")
    assert torch.equal(sums(mesh, 0, (7,))[1], numbers(0, (7,)))
    assert plsc.collectives is collectives
    assert all(getattr(collectives, name).__doc__ for name in vars(collectives) if not name.startswith("_"))
