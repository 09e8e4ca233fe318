"""Synchronised batch normalisation against ordinary batch normalisation of the concatenated batch."""

import copy
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from plsc.parallel import Mesh, convert_sync_batchnorm, sync_batchnorm


def make_net() -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(36)).double()
    nn.init.uniform_(net[1].weight)
    return net


def step(mesh: Mesh, images: torch.Tensor, sizes: list[int], memory_format=torch.contiguous_format) -> tuple:
    net = convert_sync_batchnorm(make_net(), mesh).to(memory_format=memory_format)
    x = images.split(sizes)[mesh.rank].clone(memory_format=memory_format).requires_grad_()
    out = net(x)
    (out * torch.linspace(0, 1, 36)).square().sum().backward()
    return out.detach(), x.grad, net[1].weight.grad, net.state_dict()


def assert_equal_to_one_process(images: torch.Tensor, results: list[tuple], tolerance: float) -> None:
    """Outputs, gradients and statistics of the ranks' parts are those of the whole batch."""
    net, x = make_net(), images.clone().requires_grad_()
    out = net(x)
    (out * torch.linspace(0, 1, 36)).square().sum().backward()
    pairs = [(torch.cat([r[0] for r in results]), out.detach()), (torch.cat([r[1] for r in results]), x.grad)]
    pairs += [(sum(r[2] for r in results), net[1].weight.grad)]
    pairs += [(results[0][3][key], value) for key, value in net.state_dict().items()]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("sizes", [[5, 3], [1, 6, 1]])
def test_equals_one_process_on_the_concatenated_batch(ranks, sizes):
    images = torch.randn(8, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_equal_to_one_process(images, ranks(len(sizes), step, images, sizes), 1e-10)


def channels_of(x: torch.Tensor) -> torch.Tensor:
    """(B, C, …) as (C, samples)."""
    return x.transpose(0, 1).flatten(1)


def like(per_channel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x, eps):
    rows = channels_of(x)
    return rows.mean(1), (rows.var(1, correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    """In the order of PyTorch's kernel, which counts samples as an integer and divides by its sums."""
    mean, m2, n = torch.zeros_like(means[0]), torch.zeros_like(means[0]), 0
    for rank_mean, rank_invstd, count in zip(means, invstds, counts, strict=True):
        factor = 1 / (n + count)
        m2 += (rank_invstd**-2 - eps) * count + (mean - rank_mean) ** 2 * n * count * factor
        mean = n * factor * mean + count * factor * rank_mean
        n += int(count)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(m2 / (n - 1), momentum)
    return mean, (m2 / n + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    return (x - like(mean, x)) * like(invstd * weight, x) + like(bias, x)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, by_input, by_weight, by_bias):
    assert grad.stride() == x.stride()
    rows, grads = channels_of(x) - mean[:, None], channels_of(grad)
    along = (rows * grads).sum(1)
    return grads.sum(1), along, along * invstd, grads.sum(1)


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_grad, sum_grad_x, counts):
    n = counts.sum()
    inner = grad - like(sum_grad / n, x) - (x - like(mean, x)) * like(invstd**2 * sum_grad_x / n, x)
    return inner * like(invstd * weight, x)


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


def step_on_gpu(mesh: Mesh, images: torch.Tensor, sizes: list[int], memory_format: torch.memory_format) -> tuple:
    """``step`` as on GPUs, with stand-ins for the kernels that PyTorch has there alone; and the collectives."""
    calls: Counter[str] = Counter()

    def counted(name):
        real = getattr(sync_batchnorm, name)
        return lambda tensor, mesh: calls.update([f"{name} {tensor.numel()}"]) or real(tensor, mesh)

    stand_ins = {kernel.__name__: kernel for kernel in KERNELS}
    collectives = {name: counted(name) for name in ("all_gather_equal", "all_reduce_sum")}
    with patch.multiple(torch, **stand_ins), patch.multiple(sync_batchnorm, **collectives):
        return (*step(replace(mesh, device=torch.device("cuda")), images, sizes, memory_format), calls)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("sizes", [[5, 3], [1, 6, 1], [0, 0, 8], [5, 0, 3]], ids=str)
def test_gpus_equal_one_process_on_the_concatenated_batch(ranks, sizes, memory_format):
    images = torch.randn(8, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = ranks(len(sizes), step_on_gpu, images, sizes, memory_format)
    assert_equal_to_one_process(images, results, 1e-9)
    for result in results:  # of 4 and of 36 channels: one collective in each direction
        assert result[4] == {
            "all_gather_equal 9": 1,
            "all_gather_equal 73": 1,
            "all_reduce_sum 8": 1,
            "all_reduce_sum 72": 1,
        }


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_without_samples_weigh_nothing(monkeypatch, device, memory_format):
    """On a GPU by PyTorch's kernels: the statistics of empty ranks stand before and after this one's."""
    if device == "cpu":
        for kernel in KERNELS:
            monkeypatch.setattr(torch, kernel.__name__, kernel)

    def between_empty_ranks(local: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        channels = len(local) // 2
        empty = torch.zeros_like(local)
        empty[channels:-1], empty[-1] = 1, sync_batchnorm.NO_SAMPLES
        return torch.stack([empty, local, empty])

    monkeypatch.setattr(sync_batchnorm, "all_gather_equal", between_empty_ranks)
    plain = make_net().float().to(device=device, memory_format=memory_format)
    synced = convert_sync_batchnorm(copy.deepcopy(plain), Mesh(0, 1, 0, torch.device("cuda")))
    images = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(0)).to(device, memory_format=memory_format)
    results = []
    for net in (synced, plain):
        x = images.clone().requires_grad_()
        out = net(x)
        (out * torch.linspace(0, 1, 36, device=device)).square().sum().backward()
        results.append([out, x.grad, net[1].weight.grad, net[1].bias.grad, *net.state_dict().values()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_conversion_keeps_keys_and_evaluates_alike():
    net = make_net().eval()
    synced = convert_sync_batchnorm(copy.deepcopy(net), Mesh(0, 1, 0, torch.device("cpu"))).eval()
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    assert synced.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(synced(x), net(x))
