"""Choosing what to search with: each candidate structure is built, tuned to a recall on held-out rows, and timed.

:func:`choose_structure` decides for an index that is being built, :func:`plan_search` for a collection in memory.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import PlscError, UsageError
from plsc.index import ann
from plsc.index.ann import ApproximateSearch
from plsc.index.exact import ExactSearch, ExactSearcher, UncopiedSearch
from plsc.index.on_disk import MemoryBudget, build_structure
from plsc.index.recall import Recall, RecallTarget, choose_held_out, oracle, recall_of
from plsc.index.rows import Float32, Int64, RowSource, SelectedRows

HELD_OUT = 1000  # queries that tune and measure an approximate structure
TIMED_QUERIES = 50
TIMED_SECONDS = 2.0
KINDS: tuple[ann.Kind, ...] = ("ivf", "hnsw")  # tried in this order: IVF is built many times as fast
ORACLE_QUERIES = 100  # queries that check the exact search against float64

Search = Callable[[Float32, int], tuple[Float32, Int64]]


class PlanningStopped(PlscError):
    """A plan was given up because its result is not wanted any more."""


class _StoppableRows(SelectedRows):
    """Rows that raise :class:`PlanningStopped` once ``stopped`` is true: a build reads them part by part."""

    def __init__(self, source: RowSource, rows: Int64, stopped: Callable[[], bool]) -> None:
        super().__init__(source, rows)
        self._stopped = stopped

    def __getitem__(self, key: slice | Int64) -> Float32:
        if self._stopped():
            raise PlanningStopped("nobody waits for the structure any more")
        return super().__getitem__(key)


@dataclass(frozen=True)
class BuildOptions:
    """The request of an index build.

    Attributes:
        kind: what to build.
        may_choose: True if another kind may be taken where it is faster.
        target: the least recall.
        latency_ms: the longest time of a single query, or None.
        seed: of k-means and of the choice of held-out rows.
        quiet: print no progress.
        budget: the memory that building may take; None: as much as it needs.
    """

    kind: ann.Kind
    may_choose: bool
    target: RecallTarget
    latency_ms: float | None
    seed: int
    quiet: bool
    budget: MemoryBudget | None = None


@dataclass(frozen=True)
class Tuned:
    """A structure with its effort set, its recall, and the median milliseconds of a single query."""

    structure: Any
    kind: ann.Kind
    effort: int
    recall: Recall
    milliseconds: float


def choose_structure(vectors: Float32, held_out: int, options: BuildOptions, file: Path) -> dict[str, Any]:
    """Build what ``options`` ask for, and write it to ``file`` unless it is exact.

    Args:
        vectors: (N, D), of which the last ``held_out`` rows stay outside the structure.
        held_out: how many.
        options: the request.
        file: for the faiss index.

    Returns:
        The manifest's "kind", "held_out", "parameters", "recall"; "speed_over_exact" of an approximate kind; and, with
        a latency in the request, "latency": {"asked_ms", "exact_ms", "ms"}.

    Raises:
        UsageError: the requested kind does not reach the recall.
    """
    if options.kind == "exact":
        return _exact(vectors, options)
    base, queries = vectors[: len(vectors) - held_out], np.array(vectors[len(vectors) - held_out :])
    exact = _exact_search(base, options.budget)
    truth = exact.search(queries, 10)[0]
    exact_ms = median_milliseconds(exact.search, queries)
    best = _best(base, queries, truth, options, exact_ms)
    if best is None:
        return _exact(vectors, options)
    ratio = _speed_over_exact(best.structure, queries[:TIMED_QUERIES], exact)
    if options.may_choose and ratio <= 1:
        return _exact(vectors, options)
    ann.save(best.structure, file)
    return {
        "kind": best.kind,
        "held_out": held_out,
        "parameters": ann.parameters(best.structure, best.kind, best.effort),
        "recall": best.recall.as_json(),
        "speed_over_exact": ratio,
        **_latency(options, exact_ms, best.milliseconds),
    }


def exact_recall(vectors: Float32, seed: int = 0, budget: MemoryBudget | None = None) -> Recall:
    """Recall of the exact search on 100 of its own rows against float64 numpy, themselves not counted: 1, or a bug."""
    count = min(ORACLE_QUERIES, len(vectors))
    chosen = np.sort(np.random.default_rng(seed).choice(len(vectors), count, replace=False))
    queries = vectors[chosen]
    scores, truth = _exact_search(vectors, budget).search(queries, 11)[0], oracle(queries, vectors, 11)
    return recall_of(scores[:, 1:], truth[:, 1:].astype(np.float32))


def plan_search(
    exact: ExactSearcher,
    vectors: Float32,
    labels: Int64,
    latency_ms: float,
    *,
    recall: float = 0.99,
    recall_at: int = 10,
    seed: int = 0,
    quiet: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> ApproximateSearch | None:
    """Build an approximate search over ``vectors`` (N, D) where the exact one is slower than wanted.

    Args:
        exact: searches the same rows; it also answers what the structure cannot.
        vectors: (N, D) float32 of length 1.
        labels: (N,) int64, the person of each row, -1 for unknown; of many persons one row each is held out.
        latency_ms: the longest time of a single query.
        recall: least share of the true nearest rows to be found.
        recall_at: 1 to ask that of the nearest row alone, 10 of the ten nearest too.
        seed: of k-means and of the choice of held-out rows.
        quiet: print no progress.
        stopped: asked between the parts of the work, which end when it is true.

    Returns:
        The first structure that meets the latency, else the fastest; None where the exact search meets it, or no
        structure is faster than that at this recall.

    Raises:
        PlanningStopped: ``stopped`` became true.
    """
    held_out = choose_held_out(labels, HELD_OUT, seed)
    if not len(held_out):
        return None
    source = RowSource(vectors)
    queries = source.take(held_out)
    exact_ms = median_milliseconds(exact.search, queries)
    if exact_ms <= latency_ms:
        return None
    inside = np.ones(len(vectors), dtype=bool)
    inside[held_out] = False
    truth = exact.search(queries, 10, allowed=inside)[0]
    base = _StoppableRows(source, np.flatnonzero(inside), stopped)
    target = RecallTarget(recall, recall_at)
    best = _first_fast_enough(latency_ms, base, queries, truth, target, seed, quiet=quiet)
    if best is None or best.milliseconds >= exact_ms:
        return None
    return ApproximateSearch(best.structure, best.kind, vectors, held_out, exact, best.recall)


def median_milliseconds(search: Search, queries: Float32, k: int = 10) -> float:
    """Median time of single ``queries`` (Q, D), Q >= 1: up to 50 of them, for up to two seconds."""
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


def _best(base: Float32, queries: Float32, truth: Float32, options: BuildOptions, exact_ms: float) -> Tuned | None:
    """The structure to use; None for none."""
    target, seed, quiet, budget = options.target, options.seed, options.quiet, options.budget
    if options.latency_ms is None or not options.may_choose:
        return _tuned(options.kind, base, queries, truth, target, seed, quiet=quiet, budget=budget)
    if exact_ms <= options.latency_ms:
        return None
    return _first_fast_enough(options.latency_ms, base, queries, truth, target, seed, quiet=quiet, budget=budget)


def _tuned(
    kind: ann.Kind,
    base: ann.RowArray,
    queries: Float32,
    truth: Float32,
    target: RecallTarget,
    seed: int,
    *,
    quiet: bool,
    budget: MemoryBudget | None = None,
) -> Tuned:
    """Build ``kind`` over ``base`` (N, D) and tune it on ``queries`` (Q, D), ``truth`` (Q, <= 10) exact scores.

    Raises:
        UsageError: no effort reaches the recall, or the kind needs more memory.
    """
    structure = build_structure(kind, base, seed, budget, quiet=quiet)
    effort, recall = ann.tune(structure, kind, queries, truth, target)
    milliseconds = median_milliseconds(lambda some, k: ann.search(structure, some, k), queries)
    return Tuned(structure, kind, effort, recall, milliseconds)


def _first_fast_enough(
    latency_ms: float,
    base: ann.RowArray,
    queries: Float32,
    truth: Float32,
    target: RecallTarget,
    seed: int,
    *,
    quiet: bool,
    budget: MemoryBudget | None = None,
) -> Tuned | None:
    """The first of KINDS whose single query takes at most ``latency_ms``, else the fastest; None: none is possible."""
    tuned: list[Tuned] = []
    for kind in KINDS:
        if len(base) < ann.MIN_ROWS[kind]:
            continue
        try:
            tuned.append(_tuned(kind, base, queries, truth, target, seed, quiet=quiet, budget=budget))
        except UsageError:  # its recall stays too low, or it does not fit
            continue
        if tuned[-1].milliseconds <= latency_ms:
            break
    return min(tuned, key=lambda item: item.milliseconds, default=None)


def _exact(vectors: Float32, options: BuildOptions) -> dict[str, Any]:
    latency: dict[str, Any] = {}
    if options.latency_ms is not None:
        exact = _exact_search(vectors, options.budget)
        exact.search(vectors[: 2 * TIMED_QUERIES], 1)  # as a service has it: with the copy made
        exact_ms = median_milliseconds(exact.search, vectors[:TIMED_QUERIES])
        latency = _latency(options, exact_ms, exact_ms)
    recall = exact_recall(vectors, options.seed, options.budget).as_json()
    return {"kind": "exact", "held_out": 0, "parameters": {}, "recall": recall, **latency}


def _exact_search(vectors: Float32, budget: MemoryBudget | None) -> ExactSearch | UncopiedSearch:
    """The exact search, without its copy of the rows where that takes too much memory."""
    return ExactSearch(vectors) if budget is None or 2 * vectors.size <= budget.left else UncopiedSearch(vectors)


def _latency(options: BuildOptions, exact_ms: float, chosen_ms: float) -> dict[str, Any]:
    if options.latency_ms is None:
        return {}
    return {"latency": {"asked_ms": options.latency_ms, "exact_ms": round(exact_ms, 4), "ms": round(chosen_ms, 4)}}


def _speed_over_exact(structure: Any, queries: Float32, exact: ExactSearch | UncopiedSearch) -> float:
    """Ratio of the exact search's time to the structure's for single queries, in turns: a busy machine slows both."""
    seconds = np.zeros(2)
    for query in queries[:, None, :]:
        moments = [time.perf_counter()]
        ann.search(structure, query, 10)
        moments.append(time.perf_counter())
        exact.search(query, 10)
        moments.append(time.perf_counter())
        seconds += np.diff(moments)
    return round(float(seconds[1] / seconds[0]), 2)
