"""Layers whose sums run in float64: their gradients are one process's on the whole batch, to float32's last bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from plsc.parallel import Mesh, convert_sync_batchnorm, data_parallel
from plsc.parallel.sync_batchnorm import sum_gradients_in_float64

Ranks = Any
ALONE = Mesh(0, 1, 0, torch.device("cpu"))


def make_net(*, normalised: bool = True) -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8) if normalised else nn.Identity(),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False),
        nn.PReLU(),
        nn.Conv2d(8, 16, 3, dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(16 * 16, 12),
        nn.Linear(12, 6, bias=False),
    )
    return net.to(memory_format=torch.channels_last)  # whose gradients are laid out otherwise in DDP's buckets


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def gradients(mesh: Mesh, sizes: list[int], normalised: bool) -> tuple[Any, ...]:
    """Two steps' gradients of Σ sin, the second of two micro-batches; multiplied by the world, as the head does."""
    net = convert_sync_batchnorm(make_net(normalised=normalised), mesh)
    wrapped: Any = data_parallel(net, mesh, sum_gradients_in_float64(net, mesh))
    mine = images(sum(sizes)).split(sizes)[mesh.rank]
    found = []
    for micro_batches in (1, 2):
        for number in range(micro_batches):
            last = number + 1 == micro_batches
            wrapped.require_backward_grad_sync = last
            output = wrapped(mine)
            assert output.dtype == torch.float64
            (output.sin().sum() * mesh.world_size).backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
        net.zero_grad()
    return *found, net.state_dict()


@pytest.mark.parametrize("sizes", [[24], [12, 12], [8, 8, 8], [5, 3, 16]])
def test_gradients_are_those_of_one_process_in_float64(sizes: list[int], ranks: Ranks) -> None:
    net = make_net(normalised=False).double()
    net(images(24).double()).sin().sum().backward()
    for once, twice, state in ranks(len(sizes), gradients, sizes, False):
        assert state.keys() == net.state_dict().keys()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(once[name].double(), parameter.grad, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(twice[name].double(), 2 * parameter.grad, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("sizes", [[12, 12], [8, 8, 8]])
def test_the_split_shows_in_no_bit_of_what_is_summed_in_float64(sizes: list[int], ranks: Ranks) -> None:
    ((alone, *_),) = ranks(1, gradients, [24], True)
    many = ranks(len(sizes), gradients, sizes, True)
    for once, *_ in many:
        for name, gradient in alone.items():
            if name != "3.weight":  # a convolution in groups keeps float32 sums
                spacing = torch.finfo(torch.float32).eps * gradient.abs()
                assert ((once[name] - gradient).abs() <= spacing).all(), name
                assert (once[name] != gradient).float().mean() < 0.01, name


def test_evaluation_is_untouched() -> None:
    net = make_net().eval()
    converted = copy.deepcopy(net)
    sum_gradients_in_float64(converted, ALONE)
    with torch.no_grad():
        assert torch.equal(converted(images(4)), net(images(4)))
