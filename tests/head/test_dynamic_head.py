"""Classes that come and go: a dict of rows and dense float64 tell the same losses, on any ranks and storage."""

import itertools
import math

import numpy as np
import pytest
import torch
from reference import Oracle, relative_error
from support.head_problems import HIGH, LOW

import plsc
from plsc.errors import UsageError
from plsc.head.key_map import KeyMap
from plsc.parallel.collectives import all_gather_rows

DIM, LR, MOMENTUM, DECAY = 12, 0.3, 0.9, 1e-3
ARC = plsc.ArcFace(s=16.0, m=0.3)
ORACLE = Oracle("arcface", s=16.0, parameters={"m": 0.3})


def batch(step: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (B, D) and keys (B,) of a step; the later the step, the more keys."""
    generator = torch.Generator().manual_seed(step)
    keys = torch.randint(3 * step + 4, (size,), generator=generator) * 7919 % 1000
    return torch.randn(size, DIM, generator=generator, dtype=torch.float64) * 3, keys


class Rows:
    """The oracle: rows and momentum (K, D) by class, and the class of each key."""

    def __init__(self, centers: int = 1) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.momentum: dict[int, torch.Tensor] = {}
        self.classes: dict[int, int] = {}
        self.centers, self.numbers = centers, itertools.count()

    def insert(self, key: int, row: torch.Tensor) -> None:
        self.classes[key] = own = next(self.numbers)
        self.rows[own], self.momentum[own] = row.clone(), torch.zeros_like(row)

    def step(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        for key in set(keys.tolist()) - self.classes.keys():
            units = x[keys == key].float()
            mean = (units / units.norm(dim=1, keepdim=True)).double().mean(0)
            self.insert(key, (mean / mean.norm() * 0.01 * math.sqrt(DIM))[None])
        order = sorted(self.rows)
        weight = torch.cat([self.rows[each] for each in order]).requires_grad_()
        labels = torch.tensor([order.index(self.classes[key]) for key in keys.tolist()])
        loss = ORACLE.loss(x, labels, weight, centers=self.centers)
        loss.backward()
        for each, gradient in zip(order, weight.grad.split(self.centers), strict=True):
            self.momentum[each] = MOMENTUM * self.momentum[each] + gradient + DECAY * self.rows[each]
            self.rows[each] = self.rows[each] - LR * self.momentum[each]
        return loss.detach()

    def remove(self, keys: list[int]) -> None:
        for key in keys:
            own = self.classes.pop(key)
            if own not in self.classes.values():
                del self.rows[own], self.momentum[own]

    def merge(self, sources: list[int], into: int) -> None:
        rows = [self.rows[self.classes[key]] for key in (into, *sources)]
        own, length = self.classes[into], rows[0].norm(dim=1, keepdim=True)
        mean = sum(row / row.norm(dim=1, keepdim=True) for row in rows)
        self.rows[own] = mean / mean.norm(dim=1, keepdim=True) * length
        self.remove(sources)
        self.classes |= dict.fromkeys(sources, own)

    def split(self, key: int, into: list[int]) -> None:
        for new in into:
            self.insert(new, self.rows[self.classes[key]])

    def rename(self, old: int, new: int) -> None:
        own = self.classes.pop(old)
        self.classes[new] = own


# After the steps of these numbers.
CHANGES = {
    3: [("remove", [7919 % 1000, 7919 * 3 % 1000])],
    5: [("merge", [7919 * 2 % 1000, 7919 * 5 % 1000], 7919 * 4 % 1000), ("insert", [5000, 5001])],
    7: [("split", 7919 * 6 % 1000, [2000, 2001]), ("rename", 7919 * 7 % 1000, 3000)],
    9: [("remove", [2000, 7919 * 5 % 1000])],
}


def changes_after(step: int, known: set[int]) -> list[tuple]:
    """CHANGES, where the keys are there."""
    found = []
    for name, *arguments in CHANGES.get(step, []):
        named = [key for argument in arguments for key in (argument if isinstance(argument, list) else [argument])]
        old = {"remove": named, "merge": named, "split": named[:1], "rename": named[:1], "insert": []}[name]
        if set(old) <= known:
            found.append((name, *arguments))
    return found


def expected(steps: int) -> tuple[list[torch.Tensor], Rows]:
    oracle, losses = Rows(), []
    for step in range(steps):
        losses.append(oracle.step(*batch(step)))
        for name, *arguments in changes_after(step, set(oracle.classes)):
            if name == "insert":
                for key in arguments[0]:
                    oracle.insert(key, given_row(key))
            else:
                getattr(oracle, name)(*arguments)
    return losses, oracle


def given_row(key: int) -> torch.Tensor:
    return torch.randn(1, DIM, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def change(head: plsc.DynamicHead, name: str, arguments: list) -> None:
    if name == "insert":
        head.insert(arguments[0], torch.cat([given_row(key) for key in arguments[0]]))
    else:
        getattr(head, name)(*arguments)


def train(mesh, sizes, steps, options, order=None, optimizer_kind="sgd"):
    """Losses of some steps, all keys and their rows; ``order``: which rank has which part of the batch."""
    head = plsc.DynamicHead(DIM, 120, mesh, ARC, **{**HIGH, **options})
    optimizer = plsc.HeadSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    losses = []
    for step in range(steps):
        x, keys = batch(step)
        place = mesh.rank if order is None else order[mesh.rank]
        x, keys = (part.split(sizes)[place] for part in (x, keys))
        loss = head(x.to(head.weight.dtype).requires_grad_(), keys)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        for name, *arguments in changes_after(step, set(head.key_map.keys.tolist())):
            change(head, name, arguments)
    keys = head.key_map.keys
    counts = [int(n) for n in np.bincount(head.key_map.shards, minlength=mesh.head.world_size)]
    return losses, keys, head.rows_of(torch.from_numpy(keys)), counts, head.live_classes


@pytest.mark.parametrize(
    ("world", "options", "head_ranks"),
    [
        (1, {}, None),
        (2, {"placement": "host"}, None),
        (3, {"placement": "mmap"}, None),
        (4, {"chunk_classes": 5}, 2),
    ],
    ids=["one", "host", "mapped", "groups"],
)
def test_losses_and_rows_are_those_of_a_dict(ranks, tmp_path, world, options, head_ranks):
    if options.get("placement") == "mmap":
        options = {"placement": f"mmap:{tmp_path / 'table'}"}
    sizes = {1: [12], 2: [9, 3], 3: [7, 0, 5], 4: [5, 1, 0, 6]}[world]
    losses, oracle = expected(12)
    known = {"head_ranks": head_ranks} if head_ranks else {}
    assert len(CHANGES) > 2
    for found, keys, rows, counts, live in ranks(world, train, sizes, 12, options, **known):
        assert relative_error(torch.stack(found), torch.stack(losses)) < 1e-7  # first rows are of float32 units
        assert keys.tolist() == sorted(oracle.classes)
        want = torch.stack([oracle.rows[oracle.classes[key]] for key in keys.tolist()])
        assert relative_error(rows, want) < 1e-6
        assert live == len(oracle.rows)
        assert sum(counts) == len(oracle.classes)
