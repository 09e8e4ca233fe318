"""A few training steps on all ranks: repeated bit by bit, and beside the same in float64 in one piece."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plsc.doctor.report import Line, Tick, checked, failed
from plsc.errors import first_line
from plsc.head.sharded_head import ShardedHead
from plsc.losses.margins import CosFace
from plsc.optim.head_optimizers import HeadSGD
from plsc.parallel.collectives import all_gather_rows
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.ddp import data_parallel

_INPUTS, _HIDDEN, _DIM, _CLASSES, _BATCH, _STEPS = 24, 48, 64, 403, 16, 4
_S, _M = 16.0, 0.2
_LR, _HEAD_LR, _MOMENTUM, _DECAY = 0.05, 0.5, 0.9, 5e-4
# Of the loss, relative to float64's, over all steps.
_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
_STORAGES = (("float32", "float32"), ("bfloat16", "int8"))


@dataclass(frozen=True)
class Run:
    """Losses of some steps, and the backbone's weights and this rank's class rows after them."""

    losses: list[float]
    weights: list[Tensor]

    def equals(self, other: "Run") -> bool:
        """True if every bit is the same."""
        same = all(torch.equal(mine, theirs) for mine, theirs in zip(self.weights, other.weights, strict=True))
        return same and self.losses == other.losses


def steps(mesh: Mesh, tick: Tick) -> list[Line]:
    """Two lines for each storage of the table: repeatable, and right."""
    lines = []
    for weight, momentum in _STORAGES:
        name = f"{weight} + {momentum}"
        try:
            runs = [train(mesh, weight, momentum, tick) for _ in range(2)]
            tick(f"training, {name}, the same in float64")
            want = _reference_losses(mesh, weight, momentum)
        except RuntimeError as error:
            lines.append(failed(f"steps, {name}", first_line(error), "send this report"))
            continue
        lines += [_repeated(name, *runs), _right(name, weight, runs[0].losses, want)]
    return lines


def _repeated(name: str, first: Run, second: Run) -> Line:
    same = first.equals(second)
    text = f"{_STEPS} steps, bit by bit the same" if same else f"differ: losses {first.losses} and {second.losses}"
    advice = "a kernel or a collective is not deterministic, or memory is faulty: repeat, and send this report"
    return checked(f"steps twice, {name}", text, same, advice)


def _right(name: str, weight: str, losses: list[float], want: list[float]) -> Line:
    error = max(abs(mine - other) / abs(other) for mine, other in zip(losses, want, strict=True))
    text = f"loss {losses[0]:.4f} to {losses[-1]:.4f}, off by {error:.1e} (bound {_BOUNDS[weight]:.0e})"
    advice = "look at the lines above; send this report"
    is_right = error <= _BOUNDS[weight]
    return checked(f"steps against float64, {name}", text, is_right, advice, losses=losses, float64=want)


def _network(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    net = nn.Sequential(nn.Linear(_INPUTS, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _DIM))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return net.to(dtype)


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(_BATCH, _INPUTS, generator=generator)
    return x, torch.randint(_CLASSES, (_BATCH,), generator=generator)


def _make_head(mesh: Mesh, weight: str, momentum: str) -> ShardedHead:
    head = ShardedHead(_DIM, _CLASSES, mesh, CosFace(s=_S, m=_M), weight_dtype=weight, momentum_dtype=momentum)
    with torch.no_grad():
        head.weight.mul_(10)  # norms near 1, so that the steps turn the rows visibly
    return head


def train(mesh: Mesh, weight: str, momentum: str, tick: Tick) -> Run:
    """Train a small network and head on all ranks, from the same start each time."""
    net = data_parallel(_network(torch.float32).to(mesh.device), mesh)
    head = _make_head(mesh, weight, momentum)
    of_net = torch.optim.SGD(net.parameters(), lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY)
    of_head = HeadSGD(head, lr=_HEAD_LR, momentum=_MOMENTUM, weight_decay=_DECAY)
    losses = []
    for step in range(_STEPS):
        x, labels = (part.to(mesh.device) for part in _batch(mesh.rank, step))
        tick(f"training, {weight}, step {step}, forward")
        loss = head(net(x), labels)
        tick(f"training, {weight}, step {step}, backward")
        loss.backward()
        tick(f"training, {weight}, step {step}, update")
        of_net.step()
        of_head.step()
        of_net.zero_grad()
        losses.append(float(loss.detach()))
    return Run(losses, [p.detach().clone() for p in net.parameters()] + [head.weight.detach().clone()])


def _reference_losses(mesh: Mesh, weight: str, momentum: str) -> list[float]:
    """The losses in float64: all ranks' samples in one batch, the whole table, and torch's optimizer."""
    table = all_gather_rows(_make_head(mesh, weight, momentum).weight.detach(), mesh).double().cpu()
    table.requires_grad_()
    net = _network(torch.float64)
    of_net = torch.optim.SGD(net.parameters(), lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY)
    of_table = torch.optim.SGD([table], lr=_HEAD_LR, momentum=_MOMENTUM, weight_decay=_DECAY)
    losses = []
    for step in range(_STEPS):
        batches = [_batch(rank, step) for rank in range(mesh.world_size)]
        x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        cos = nn.functional.normalize(net(x.double())) @ nn.functional.normalize(table).T
        logits = _S * (cos - _M * nn.functional.one_hot(labels, _CLASSES))
        loss = nn.functional.cross_entropy(logits, labels)
        for optimizer in (of_net, of_table):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (of_net, of_table):
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses
