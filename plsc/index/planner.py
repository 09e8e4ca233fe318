"""Which search meets a latency: exact if it does, else the first approximate structure that does, recall measured."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.errors import UsageError
from plsc.index import approximate
from plsc.index.approximate_search import ApproximateSearch
from plsc.index.exact import Exact, Float32, Int64
from plsc.index.memory import Within
from plsc.index.on_disk import built
from plsc.index.recall import Recall, Target, choose_held_out
from plsc.index.row_source import RowSource

HELD_OUT = 1000  # queries that tune and measure an approximate structure
TIMED_QUERIES = 50
TIMED_SECONDS = 2.0
KINDS: tuple[approximate.Kind, ...] = ("ivf", "hnsw")  # tried in this order: IVF is built many times as fast

Search = Callable[[Float32, int], tuple[Float32, Int64]]


@dataclass(frozen=True)
class Tuned:
    """An approximate structure with its effort set: what it finds, and how long a single query takes it."""

    structure: Any
    kind: approximate.Kind
    effort: int
    recall: Recall
    milliseconds: float


class SelectedRows:
    """``rows`` (n,) of a source as an array (n, D) that is read where it is sliced or indexed, and only then."""

    def __init__(self, source: RowSource, rows: Int64) -> None:
        self._source, self._rows = source, rows
        self.shape = (len(rows), source.vectors.shape[1])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: slice | Int64) -> Float32:
        return self._source.take(self._rows[key])


def milliseconds(search: Search, queries: Float32, k: int = 10) -> float:
    """The median time of single ``queries`` (Q, D), Q >= 1: up to 50 of them, for up to two seconds."""
    search(queries[:1], k)  # what a first search compiles or allocates is no part of the latency
    times: list[float] = []
    end = time.monotonic() + TIMED_SECONDS
    for query in queries[:TIMED_QUERIES, None, :]:
        began = time.perf_counter()
        search(query, k)
        times.append(1000 * (time.perf_counter() - began))
        if time.monotonic() > end:
            break
    return statistics.median(times)


def tuned(
    kind: approximate.Kind,
    base: approximate.Base,
    queries: Float32,
    truth: Float32,
    target: Target,
    seed: int,
    *,
    quiet: bool,
    within: Within | None = None,
) -> Tuned:
    """Build ``kind`` over ``base`` (N, D) and tune it on ``queries`` (Q, D) to ``target``.

    truth: (Q, <=10) exact scores of the same rows. ``within`` limits the memory. Raises
    :class:`UsageError` where no effort reaches the recall, or the kind needs more memory.
    """
    structure = built(kind, base, seed, within, quiet=quiet)
    effort, recall = approximate.tune(structure, kind, queries, truth, target)
    taken = milliseconds(lambda some, k: approximate.found(structure, some, k), queries)
    return Tuned(structure, kind, effort, recall, taken)


def first_within(
    latency_ms: float,
    kinds: Sequence[approximate.Kind],
    base: approximate.Base,
    queries: Float32,
    truth: Float32,
    target: Target,
    seed: int,
    *,
    quiet: bool,
    within: Within | None = None,
) -> Tuned | None:
    """The first of ``kinds`` whose single query takes at most ``latency_ms``, else the fastest of them.

    None where none is possible: too few rows, or none reaches the recall.
    """
    tried: list[Tuned] = []
    for kind in kinds:
        if len(base) < approximate.LEAST_ROWS[kind]:
            continue
        try:
            tried.append(tuned(kind, base, queries, truth, target, seed, quiet=quiet, within=within))
        except UsageError:  # its recall stays too low, or it does not fit
            continue
        if tried[-1].milliseconds <= latency_ms:
            break
    return min(tried, key=lambda one: one.milliseconds, default=None)


def plan_search(
    exact: Exact,
    vectors: Float32,
    labels: Int64,
    latency_ms: float,
    *,
    recall: float = 0.99,
    recall_at: int = 10,
    seed: int = 0,
    quiet: bool = True,
) -> ApproximateSearch | None:
    """An approximate search over ``vectors`` (N, D) where ``exact`` takes longer than asked; None where it does not.

    Args:
        exact: searches the same rows; it also answers what the structure cannot.
        labels: (N,) int64, whose face a row is; of many persons one row each is held out to tune with. -1: unknown.
        latency_ms: what a single query may take.
        recall, recall_at: least share of the true nearest (1) or of the ten nearest too (10) to be found.

    None also where no structure is faster than the exact search at that recall. The answer is the first structure
    that meets the latency, else the fastest.
    """
    held = choose_held_out(labels, HELD_OUT, seed)
    if not len(held):
        return None
    source = RowSource(vectors)
    queries = source.take(held)
    slow = milliseconds(exact.search, queries)
    if slow <= latency_ms:
        return None
    inside = np.ones(len(vectors), dtype=bool)
    inside[held] = False
    truth = exact.search(queries, 10, allowed=inside)[0]
    base = SelectedRows(source, np.flatnonzero(inside))
    best = first_within(latency_ms, KINDS, base, queries, truth, Target(recall, recall_at), seed, quiet=quiet)
    if best is None or best.milliseconds >= slow:
        return None
    return ApproximateSearch(best.structure, best.kind, vectors, held, exact, best.recall)
