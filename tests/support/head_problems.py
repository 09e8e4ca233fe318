"""Problems for a class head: steps of it on any ranks, the same by the dense oracle, and all that a head stores."""

import copy
from typing import Any

import torch
from reference import relative_error
from torch import Tensor

import plsc
from plsc.head.low_precision import RoundingBits, RowState
from plsc.parallel import Mesh
from plsc.parallel.collectives import all_gather_rows

ONE = Mesh(0, 1, 0, torch.device("cpu"))
HIGH = {"weight_dtype": torch.float64, "momentum_dtype": torch.float64}
LOW = {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8}
LIMIT = {torch.float64: 1e-11, torch.float32: 2e-5}
LR, MOMENTUM, DECAY = 0.2, 0.9, 5e-4
Problem = tuple[Tensor, Tensor, Tensor]
Step = tuple[Tensor, Tensor, Tensor]


def make_problem(
    classes: int = 53, batch: int = 12, dim: int = 24, centers: int = 1, seed: int = 0, *, extreme: bool = False
) -> Problem:
    """Weights (C·K, D), embeddings (B, D) of different norms, labels (B,) with repeats.

    ``extreme``: norms differ by three orders of magnitude, and two cosines are near 1 and −1.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes * centers, dim, generator=generator, dtype=torch.float64)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    norms = torch.logspace(-1, 2, batch) / dim**0.5 if extreme else torch.linspace(1, 8, batch)
    x *= norms.double()[:, None]
    y = torch.randint(classes, (batch,), generator=generator)
    if batch > 3:
        y[1 if extreme else -1] = y[0]
    if batch > 3 and extreme:
        x[2] = 3 * weight[y[2] * centers] + 0.05 * x[2] / x[2].norm()
        x[3] = -3 * weight[y[3] * centers] + 0.05 * x[3] / x[3].norm()  # θ + m > π
    return weight, x, y


def uneven(batch: int, world: int) -> list[int]:
    """Every rank's samples: unequal, and one rank has none where there are enough ranks."""
    return {1: [batch], 2: [batch - 3, 3], 4: [batch - 6, 1, 0, 5]}[world]


def batch_of(problem: Problem, step: int, mesh: Mesh, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step."""
    _, x, y = problem
    return (x * (1 + 0.1 * step)).roll(step, 0).split(sizes)[mesh.rank], y.roll(step, 0).split(sizes)[mesh.rank]


def make_head(mesh: Mesh, problem: Problem, margin: Any = None, **options: Any) -> plsc.ShardedHead:
    """A head in float64 that starts from the problem's weights."""
    weight, centers = problem[0], options.get("centers", 1)
    head = plsc.ShardedHead(weight.shape[1], len(weight) // centers, mesh, margin, **{**HIGH, **options})
    first, stop = head.class_range
    with torch.no_grad():
        head.weight.copy_(weight[first * centers : stop * centers])
    return head


def sharded_steps(
    mesh: Mesh, margin: Any, problem: Problem, sizes: list[int], steps: int = 1, **options: Any
) -> list[Step]:
    """Some steps of HeadSGD: loss, the embeddings' gradient here, and the table of this rank's group, after each."""
    head = make_head(mesh, problem, margin, **options)
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    out = []
    for step in range(steps):
        x, y = batch_of(problem, step, mesh, sizes)
        x, before = x.to(head.weight.dtype).requires_grad_(), y.clone()
        loss = head(x, y)
        loss.backward()
        assert torch.equal(y, before)
        optimizer.step()
        table = all_gather_rows(head.weight.detach(), mesh.head).clone()
        out.append((loss.detach(), x.grad / mesh.world_size, table))
    return out


def dense_steps(oracle: Any, problem: Problem, steps: int = 1, centers: int = 1) -> list[Step]:
    """The same steps by the oracle, in one process."""
    oracle = copy.deepcopy(oracle)  # its state moves
    weight = problem[0].clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    out = []
    for step in range(steps):
        x, y = batch_of(problem, step, ONE, [len(problem[1])])
        x = x.clone().requires_grad_()
        loss = oracle.loss(x, y, weight, centers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append((loss.detach(), x.grad, weight.detach().clone()))
    return out


def assert_equal_steps(got: list[list[Step]], want: list[Step], start: Tensor, limit: float) -> None:
    """Compare with one process: losses and tables equal on all ranks; gradients, and the change of the table."""
    for step, (loss, gradient, table) in enumerate(want):
        assert all(torch.equal(rank[step][0], got[0][step][0]) for rank in got)
        assert all(torch.equal(rank[step][2], got[0][step][2]) for rank in got)
        assert relative_error(got[0][step][0], loss) <= limit
        assert relative_error(torch.cat([rank[step][1] for rank in got]), gradient) <= limit
        assert relative_error(got[0][step][2].double() - start, table.double() - start) <= max(limit, 1e-12)


def everything(head: plsc.ShardedHead, optimizer: Any) -> list[Tensor]:
    """Copies of the table, its 1/norms and the optimizer's tables."""
    state = [shard.blocks[0].local.clone() for shard in optimizer.sharded_state().values()]
    return [head.weight.detach().clone(), head.inverse_norms().clone(), *state]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def filled_state(
    rows: int, dim: int, dtypes: dict[str, torch.dtype], rounding: Any = "stochastic"
) -> dict[str, RowState]:
    """Tables of an optimizer's state that are not zero; second moments are positive."""
    generator, state = torch.Generator().manual_seed(dim + 1), {}
    for name, dtype in dtypes.items():
        state[name] = RowState(rows, dim, dtype, torch.device("cpu"), rounding)
        values = torch.randn(rows, dim, generator=generator) / 10
        values = values.square() * 3 if name == "second_moment" else values
        state[name].write(slice(0, rows), values, RoundingBits.draw(0, 0, torch.arange(rows), dim))
    return state
