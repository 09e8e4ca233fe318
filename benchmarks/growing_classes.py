"""What a class table that grows is asked in a benchmark, and what it should answer: in NumPy and dense float64.

Shares no code with plsc: keys and their classes are a dict, rows an array to which new ones are appended, and those of
classes that are gone stay in it with a logit of minus infinity.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Keys = NDArray[np.int64]
Change = tuple[Any, ...]  # the name of a method of plsc.DynamicHead, and its arguments

LR, MOMENTUM, DECAY = 0.3, 0.9, 1e-4
SCALE, MARGIN = 16.0, 0.2  # of CosFace: arccos is ill-conditioned where a new row is its only sample's direction
FIRST_LENGTH = 0.01  # of new rows, times √D
_OLD, _BACK, _TWICE = 64, 4, 16  # samples of a batch: of present keys, of removed ones, and second ones of new keys
_CHANGES_EVERY, _REMOVED, _SOURCES = 5, 20, 3  # steps, and keys each time
_SAMPLES_AT_ONCE = 128  # whose logits the oracle holds


@dataclass
class Stream:
    """Batches and changes by step, from a seed alone: the same in every process that asks for them in order.

    Args:
        dim: D of the embeddings.
        first: keys at the beginning.
        new: keys that come in each step.
        seed: of everything.
    """

    dim: int
    first: int
    new: int
    seed: int

    def __post_init__(self) -> None:
        generator = np.random.default_rng([self.seed])
        self.keys = self._fresh(generator, self.first)
        self._gone: list[int] = []
        self._step = 0

    def first_rows(self) -> Tensor:
        """The rows (first, D) that the keys begin with."""
        return self._normal(2**32, self.first)

    def steps_to(self, classes: int) -> int:
        """A number of steps after which there are as many keys."""
        lost = (_REMOVED - 2) / _CHANGES_EVERY - _BACK / 2
        return int(np.ceil((classes - self.first) / (self.new - lost)))

    def next(self) -> tuple[Keys, list[Change]]:
        """The keys (B,) of the next step's batch, and the changes after it."""
        generator = np.random.default_rng([self.seed, 1, self._step])
        fresh = self._fresh(generator, self.new)
        back = np.array(self._gone[: _BACK // 2] * 2, np.int64)
        del self._gone[: _BACK // 2]
        batch = np.concatenate([fresh, fresh[:_TWICE], back, generator.choice(self.keys, _OLD)])
        generator.shuffle(batch)
        self.keys = np.concatenate([self.keys, fresh, np.unique(back)])
        self._step += 1
        return batch, self._changes(generator) if self._step % _CHANGES_EVERY == 0 else []

    def embeddings(self, step: int, batch: int) -> Tensor:
        """Embeddings (batch, D) of a step, float64, of any direction and length 3·√D or so."""
        return 3 * self._normal(step, batch)

    def _changes(self, generator: np.random.Generator) -> list[Change]:
        chosen = generator.choice(self.keys, _REMOVED + _SOURCES + 3, replace=False).tolist()
        removed, sources, (into, split, old) = chosen[:_REMOVED], chosen[_REMOVED:-3], chosen[-3:]
        *parts, renamed = self._fresh(generator, 3).tolist()
        self._gone += removed
        self.keys = np.concatenate([self.keys[~np.isin(self.keys, [*removed, old])], [*parts, renamed]])
        return [("remove", removed), ("merge", sources, into), ("split", split, parts), ("rename", old, renamed)]

    def _normal(self, number: int, rows: int) -> Tensor:
        generator = np.random.default_rng([self.seed, 2, number])
        return torch.from_numpy(generator.standard_normal((rows, self.dim)))

    @staticmethod
    def _fresh(generator: np.random.Generator, count: int) -> Keys:
        return generator.integers(0, 2**63, count, np.int64)  # 10⁵ of 2⁶³: two are the same once in 10⁹ runs


class Rows:
    """The oracle: rows and momentum, and the row of each key.

    Args:
        dim: D.
        capacity: the most rows that are ever made.
    """

    def __init__(self, dim: int, capacity: int) -> None:
        self.rows, self.momentum = torch.zeros(2, capacity, dim, dtype=torch.float64)
        self.place: dict[int, int] = {}
        self._keys_at: Counter[int] = Counter()
        self._gone: list[int] = []
        self._made = 0

    def insert(self, keys: list[int], rows: Tensor) -> None:
        """Append ``rows`` (m, D), with a momentum of zero."""
        places = range(self._made, self._made + len(keys))
        self.rows[self._made : self._made + len(keys)] = rows
        self.place |= dict(zip(keys, places, strict=True))
        self._keys_at.update(places)
        self._made += len(keys)

    def step(self, x: Tensor, keys: Keys) -> float:
        """Insert what is new of ``keys`` (B,), and take a step on embeddings (B, D); the loss before it."""
        new = np.array([key for key in np.unique(keys).tolist() if key not in self.place], np.int64)
        self.insert(new.tolist(), self._first_rows(x, keys, new))
        weight = self.rows[: self._made].clone().requires_grad_()
        unit = weight / weight.norm(dim=1, keepdim=True)
        leaf = unit.detach().requires_grad_()
        labels = torch.tensor([self.place[key] for key in keys.tolist()])
        parts = zip(x.split(_SAMPLES_AT_ONCE), labels.split(_SAMPLES_AT_ONCE), strict=True)
        loss = sum(self._add_loss(leaf, part, label, len(x)) for part, label in parts)
        unit.backward(leaf.grad)
        assert weight.grad is not None
        own = self.momentum[: self._made]
        own.mul_(MOMENTUM).add_(weight.grad + DECAY * self.rows[: self._made])
        self.rows[: self._made] -= LR * own
        return loss

    def remove(self, keys: list[int]) -> None:
        """Forget keys, and the rows that are no other key's."""
        for key in keys:
            place = self.place.pop(key)
            self._keys_at[place] -= 1
            if not self._keys_at[place]:
                self._gone.append(place)

    def merge(self, sources: list[int], into: int) -> None:
        """Let ``sources`` be of the row of ``into``, in the direction of all."""
        rows = self.rows[[self.place[key] for key in (into, *sources)]]
        length, mean = rows[0].norm(), torch.nn.functional.normalize(rows).sum(0)
        place = self.place[into]
        self.rows[place] = mean / mean.norm() * length
        self.remove(sources)
        self.place |= dict.fromkeys(sources, place)
        self._keys_at[place] += len(sources)

    def split(self, key: int, into: list[int]) -> None:
        """Copy the row of ``key`` for each of ``into``."""
        self.insert(into, self.rows[self.place[key]].expand(len(into), -1))

    def rename(self, old: int, new: int) -> None:
        """Give the row of ``old`` to ``new``."""
        self.place[new] = self.place.pop(old)

    def _first_rows(self, x: Tensor, keys: Keys, new: Keys) -> Tensor:
        """The directions of the means of the unit embeddings, which plsc takes in float32."""
        units = (x.float() / x.float().norm(dim=1, keepdim=True)).double()
        sums = torch.zeros(len(new), x.shape[1], dtype=torch.float64)
        is_new = torch.from_numpy(np.isin(keys, new))
        sums.index_add_(0, torch.from_numpy(np.searchsorted(new, keys[is_new.numpy()])), units[is_new])
        lengths: Tensor = sums.norm(dim=1, keepdim=True)
        return sums / lengths * (FIRST_LENGTH * math.sqrt(x.shape[1]))

    def _add_loss(self, unit: Tensor, x: Tensor, labels: Tensor, batch: int) -> float:
        """CosFace of some samples, as their part of the mean over ``batch``; its gradient is added to ``unit``'s."""
        cosines = (x / x.norm(dim=1, keepdim=True)) @ unit.T
        logits = SCALE * cosines
        logits[torch.arange(len(labels)), labels] -= SCALE * MARGIN
        logits.index_fill_(1, torch.tensor(self._gone, dtype=torch.int64), -torch.inf)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / batch
        loss.backward()
        return loss.item()
