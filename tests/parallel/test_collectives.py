"""Collectives against what one process computes."""

import pytest
import torch

from plsc.parallel import Mesh, collectives


def gather_uneven(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.full((mesh.rank, 3), float(mesh.rank)).to(dtype)  # rank 0 has none
    return collectives.all_gather_rows(rows, mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_of_unequal_number_are_concatenated_in_rank_order(ranks, world, dtype):
    expected = torch.cat([torch.full((rank, 3), float(rank)) for rank in range(world)]).to(dtype)
    for gathered in ranks(world, gather_uneven, dtype):
        assert torch.equal(gathered, expected)


def scatter(mesh: Mesh, sizes: list[int]) -> torch.Tensor:
    rows = torch.arange(sum(sizes) * 2.0).view(-1, 2) * (mesh.rank + 1)
    return collectives.reduce_scatter_rows(rows, sizes, mesh)


@pytest.mark.parametrize("sizes", [[5], [2, 1], [3, 0, 1]])
def test_each_rank_keeps_its_rows_of_the_sum(ranks, sizes):
    world = len(sizes)
    expected = torch.arange(sum(sizes) * 2.0).view(-1, 2) * sum(range(1, world + 1))
    for got, want in zip(ranks(world, scatter, sizes), expected.split(sizes), strict=True):
        assert torch.equal(got, want)


def scatter_padded(mesh: Mesh, sizes: list[int]) -> torch.Tensor:
    """What NCCL's reduce-scatter does with padded parts: part r of the sum is rank r's."""
    rows = torch.arange(sum(sizes) * 2.0).view(-1, 2) * (mesh.rank + 1)
    summed = collectives.all_reduce_sum(collectives.pad_parts(rows, sizes), mesh)
    return summed[mesh.rank]


@pytest.mark.parametrize("sizes", [[4], [2, 2], [2, 1], [3, 0, 1], [0, 2, 5, 1]])
def test_parts_that_are_padded_to_one_size_are_each_ranks_own(ranks, sizes):
    world = len(sizes)
    expected = torch.arange(sum(sizes) * 2.0).view(-1, 2) * sum(range(1, world + 1))
    for got, want in zip(ranks(world, scatter_padded, sizes), expected.split(sizes), strict=True):
        assert torch.equal(got[: len(want)], want)
        assert got.shape == (max(sizes), 2)
        assert not got[len(want) :].any()


def largest(mesh: Mesh) -> torch.Tensor:
    return collectives.all_reduce_max(torch.tensor([float(mesh.rank), -float(mesh.rank)]), mesh)


def test_every_rank_has_the_largest_of_each_element(ranks):
    assert [each.tolist() for each in ranks(3, largest)] == [[2.0, 0.0]] * 3


def objects(mesh: Mesh) -> tuple[list[int], int]:
    return collectives.all_gather_object(mesh.rank, mesh), collectives.broadcast_object(mesh.rank + 7, mesh)


def test_objects_travel(ranks):
    assert ranks(3, objects) == [([0, 1, 2], 7)] * 3
