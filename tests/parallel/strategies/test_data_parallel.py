"""plsc.data_parallel wraps a module by any strategy: gradients are those of one process, weights the first rank's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import plsc
from plsc.errors import UsageError
from plsc.optim import HeadSGD

Ranks = Any
SIZES = (3, 1, 2, 2)  # images of each rank


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(6, 10), nn.Sequential(nn.Sequential(nn.Linear(10, 7)), nn.Sequential(nn.Linear(7, 8)))
    )
    net.register_buffer("offset", torch.randn(6))
    return net.double()


def train(mesh: Any, sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[list[float], Any, int]:
    """Losses, the rank's buffer, and how many numbers of weights the rank holds; each rank begins with its own."""
    module = make_net(mesh.rank)
    net = plsc.data_parallel(module, mesh, **options)
    head = plsc.ShardedHead(8, 11, mesh, margin=plsc.CosFace(s=8.0, m=0.1), weight_dtype="float64")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), HeadSGD(head, lr=0.1)]
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(3):
        x = torch.randn((sum(sizes), 6), generator=generator, dtype=torch.float64).split(sizes)[mesh.rank]
        y = torch.randint(11, (sum(sizes),), generator=generator).split(sizes)[mesh.rank]
        loss = head(net(x + module.offset), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    held = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in net.parameters()]
    return losses, module.offset, sum(weight.numel() for weight in held)


@pytest.mark.parametrize(
    ("options", "copies"),
    [({}, 4), ({"strategy": "fsdp"}, 1), ({"strategy": "zero2"}, 1), ({"strategy": "hsdp", "shard_ranks": 2}, 2)],
    ids=["ddp", "fsdp", "zero2", "hsdp"],
)
def test_every_strategy_trains_as_one_process(options: dict[str, Any], copies: int, ranks: Ranks) -> None:
    ((expected, offset, whole),) = ranks(1, train, (sum(SIZES),), {})
    found = ranks(4, train, SIZES, options)
    for losses, own, _ in found:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert torch.equal(own, offset)
    assert sum(held for *_, held in found) == copies * whole


def refusal(mesh: Any, options: dict[str, Any]) -> str:
    try:
        plsc.data_parallel(nn.Linear(2, 2), mesh, **options)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fdsp"}, "data_parallel has no strategy 'fdsp'; it is one of ddp, zero2, fsdp, hsdp"),
        ({"strategy": "zero1"}, "ZeroRedundancyOptimizer"),
        ({"strategy": "fsdp", "bucket_mb": 1.0}, "exchange and bucket_mb are DDP's"),
        ({"strategy": "hsdp", "shard_ranks": 2}, "shard_ranks = 2 does not divide the number of ranks, 3; give 3"),
    ],
)
def test_what_cannot_be_is_named(options: dict[str, Any], message: str, ranks: Ranks) -> None:
    assert all(message in found for found in ranks(3, refusal, options))
