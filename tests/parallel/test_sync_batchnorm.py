"""Synchronised batch normalisation against ordinary batch normalisation of the concatenated batch."""

import copy

import pytest
import torch
from torch import nn

from plsc.parallel import Mesh, convert_sync_batchnorm


def make_net() -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(36)).double()
    nn.init.uniform_(net[1].weight)
    return net


def step(mesh: Mesh, images: torch.Tensor, sizes: list[int]) -> tuple:
    net = convert_sync_batchnorm(make_net(), mesh)
    x = images.split(sizes)[mesh.rank].clone().requires_grad_()
    out = net(x)
    (out * torch.linspace(0, 1, 36)).square().sum().backward()
    return out.detach(), x.grad, net[1].weight.grad, net.state_dict()


@pytest.mark.parametrize("sizes", [[5, 3], [1, 6, 1]])
def test_equals_one_process_on_the_concatenated_batch(ranks, sizes):
    images = torch.randn(8, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net, x = make_net(), images.clone().requires_grad_()
    out = net(x)
    (out * torch.linspace(0, 1, 36)).square().sum().backward()
    results = ranks(len(sizes), step, images, sizes)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), out.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), x.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(sum(r[2] for r in results), net[1].weight.grad, rtol=1e-10, atol=1e-11)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(results[0][3][key], value, rtol=1e-11, atol=1e-12)


def test_conversion_keeps_keys_and_evaluates_alike():
    net = make_net().eval()
    synced = convert_sync_batchnorm(copy.deepcopy(net), Mesh(0, 1, 0, torch.device("cpu"))).eval()
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    assert synced.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(synced(x), net(x))
