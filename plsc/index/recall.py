"""How much an approximate search misses, measured on real rows that were never part of the structure
searched."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plsc.index.exact import Float32, Int64

_NUMBERS = 1 << 18  # of the rows compared at once
TIE = 1e-6  # scores this close are the same neighbour as good: duplicates of an image are interchangeable


@dataclass(frozen=True)
class Recall:
    """Shares of the true 1 and 10 nearest rows that a search found, over ``queries`` queries."""

    at_1: float
    at_10: float
    queries: int

    def as_json(self) -> dict[str, float | int]:
        """As manifests and ``--json`` hold it."""
        return {"recall@1": round(self.at_1, 6), "recall@10": round(self.at_10, 6), "queries": self.queries}


@dataclass(frozen=True)
class Target:
    """The recall asked for: of the nearest row alone (``at`` 1), or of it and of the ten nearest (``at`` 10)."""

    share: float
    at: int = 10

    def reached(self, recall: Recall) -> float:
        """The share that counts."""
        return recall.at_1 if self.at == 1 else min(recall.at_1, recall.at_10)

    def met_by(self, recall: Recall) -> bool:
        """Whether ``recall`` is enough."""
        return self.reached(recall) >= self.share


def choose_held_out(labels: Int64, count: int, seed: int) -> Int64:
    """Choose up to ``count`` rows to hold out as queries, in ascending order.

    One row of each of as many classes as possible, only from classes that keep another row: a query then has
    a true neighbour, as in use. Where too few classes are known, other rows fill up, at most a tenth of all.
    Random vectors would not do: an IVF that finds 41% of their neighbours finds 96% of those of real,
    clustered rows.
    """
    count = min(count, len(labels) // 10)
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    classes, first, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    chosen = order[first[(sizes > 1) & (classes >= 0)]]
    chosen = random.permutation(chosen)[:count]
    if len(chosen) < count:
        rest = order[~np.isin(order, chosen)]
        chosen = np.concatenate([chosen, rest[: count - len(chosen)]])
    return np.sort(chosen)


def recall_of(found: Float32, truth: Float32) -> Recall:
    """Compare the scores of a search (Q, >=10 or as many as there are) with those of the exact one, both best
    first."""
    depth = min(10, truth.shape[1])
    if not len(truth) or not depth:
        return Recall(1.0, 1.0, len(truth))
    found_1, found_10 = (_share(found[:, :n], truth[:, :n]) for n in (1, depth))
    return Recall(found_1, found_10, len(truth))


def _share(found: Float32, truth: Float32) -> float:
    good = (found >= truth[:, -1:] - TIE).sum(axis=1)
    return float(np.minimum(good, truth.shape[1]).mean() / truth.shape[1])


def oracle(queries: Float32, base: Float32, k: int) -> npt.NDArray[np.float64]:
    """The ``k`` best inner products (Q, min(k, N)), best first, in float64 numpy: slow, and independent of
    faiss."""
    best = np.full((len(queries), 0), -np.inf)
    together = max(1, _NUMBERS // max(1, base.shape[1]))
    for start in range(0, len(base), together):
        scores = queries.astype(np.float64) @ base[start : start + together].astype(np.float64).T
        best = np.concatenate([best, scores], axis=1)
        best = -np.partition(-best, min(k, best.shape[1]) - 1, axis=1)[:, :k]
    return -np.sort(-best, axis=1)
