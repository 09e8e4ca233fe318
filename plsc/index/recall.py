"""Recall of an approximate search: measured on real rows held out of it, and monitored while it is in use."""

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64, Mask
from plsc.index.scan import ExactSearcher

TIE = 1e-6  # scores this close are equally good neighbours: duplicates of an image are interchangeable
SAMPLE_EVERY = 64  # queries, of which the last is asked again
MIN_SAMPLES = 20  # compared queries; fewer say nothing
_WINDOW = 1000  # compared queries that count
_PENDING = 16  # sampled queries that wait; further ones replace the oldest
_ORACLE_NUMBERS = 1 << 21  # of the rows compared at once


@dataclass(frozen=True)
class Recall:
    """Shares of the true 1 and 10 nearest rows that a search found, over ``queries`` queries."""

    at_1: float
    at_10: float
    queries: int

    def as_json(self) -> dict[str, float | int]:
        """The form of manifests and of ``--json``."""
        return {"recall@1": round(self.at_1, 6), "recall@10": round(self.at_10, 6), "queries": self.queries}


def choose_held_out(labels: Int64, count: int, seed: int) -> Int64:
    """Choose rows to hold out as queries.

    One row of each of as many classes as possible, only from classes that keep another row, so that a query has a
    true neighbour as it has in use. Where too few classes are known, other rows fill up. Random vectors would not do:
    an IVF that finds 41% of their neighbours finds 96% of those of real, clustered rows.

    Args:
        labels: (N,) class of each row, -1 for none.
        count: how many are wanted; never more than a tenth of all rows.
        seed: of the choice.

    Returns:
        Row numbers, ascending.
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


def recall_of(scores: Float32, truth: Float32) -> Recall:
    """Compare a search's scores with those of the exact search, both (Q, >= 10 or all there are), best first."""
    depth = min(10, truth.shape[1])
    if not len(truth) or not depth:
        return Recall(1.0, 1.0, len(truth))
    at_1, at_10 = (_share(scores[:, :n], truth[:, :n]) for n in (1, depth))
    return Recall(at_1, at_10, len(truth))


def _share(scores: Float32, truth: Float32) -> float:
    good = (scores >= truth[:, -1:] - TIE).sum(axis=1)
    return float(np.minimum(good, truth.shape[1]).sum() / truth.size)  # divided once: 0.7 is no less than 0.7


def oracle(queries: Float32, base: Float32, k: int) -> Float64:
    """The ``k`` best inner products (Q, min(k, N)), best first, by float64 numpy: slow, and independent of faiss."""
    best = np.full((len(queries), 0), -np.inf)
    step = max(1, _ORACLE_NUMBERS // max(1, base.shape[1]))
    for start in range(0, len(base), step):
        scores = queries.astype(np.float64) @ base[start : start + step].astype(np.float64).T
        if best.shape[1] == k:  # few columns have one of the best: the others need no partition
            scores = scores[:, (scores > best.min(axis=1, keepdims=True)).any(axis=0)]
        best = np.concatenate([best, scores], axis=1)
        best = -np.partition(-best, min(k, best.shape[1]) - 1, axis=1)[:, :k]
    return -np.sort(-best, axis=1)


class RecallMonitor:
    """Samples queries that were answered approximately, and compares them with exact answers while nobody waits.

    :meth:`record` is called by searches, on any thread; :meth:`compare` by one thread that has time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of _since_sample and _pending; _compared belongs to the comparing thread
        self._since_sample = 0
        self._pending: deque[tuple[Float32, Float32, Mask | None]] = deque(maxlen=_PENDING)
        self._compared: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def record(self, queries: Float32, scores: Float32, allowed: Mask | None) -> None:
        """Note that queries (Q, D) among the rows ``allowed`` were answered with ``scores`` (Q, k), best first."""
        with self._lock:
            self._since_sample += len(queries)
            if self._since_sample >= SAMPLE_EVERY:
                self._since_sample = 0
                self._pending.append((queries[-1].copy(), scores[-1].copy(), allowed))

    def compare(self, exact: ExactSearcher) -> None:
        """Ask ``exact`` the queries sampled since the last call."""
        with self._lock:
            pending = list(self._pending)
            self._pending.clear()
        for query, scores, allowed in pending:
            recall = recall_of(scores[None], exact.search(query[None], len(scores), allowed=allowed)[0])
            self._compared.append((recall.at_1, recall.at_10))

    @property
    def recall(self) -> Recall | None:
        """Over the newest 1,000 queries compared; None while there are fewer than 20."""
        compared = list(self._compared)
        if len(compared) < MIN_SAMPLES:
            return None
        at_1, at_10 = np.mean(compared, axis=0).tolist()
        return Recall(at_1, at_10, len(compared))
