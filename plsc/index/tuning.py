"""Choosing what to search with: each candidate structure is built, tuned to a recall on held-out rows, and timed.

:func:`choose_structure` decides for an index that is being built, :func:`plan_search` for a collection in memory.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.arguments import as_integer, as_number
from plsc.embedding.columns import Float32, Int64
from plsc.errors import PlscError, UsageError
from plsc.index import ann
from plsc.index.ann import ApproximateSearch
from plsc.index.on_disk import MemoryBudget, build_structure
from plsc.index.recall import Recall, choose_held_out, oracle, recall_of
from plsc.index.rows import RowSource
from plsc.index.scan import ExactSearch, ExactSearcher

HELD_OUT = 1000  # queries that tune and measure an approximate structure
TIMED_QUERIES = 50
TIMED_SECONDS = 2.0
TRIED: tuple[ann.Kind, ...] = ("ivf", "hnsw")  # in this order, for a latency: IVF is built many times as fast
ORACLE_QUERIES = 100  # queries that check the exact search against float64
_MAX_SEED = 2**31 - 1  # of faiss' k-means

Search = Callable[[Float32, int], tuple[Float32, Int64]]


class PlanningStopped(PlscError):
    """A plan was given up because its result is not wanted any more."""


class _StoppableRows:
    """``rows`` (n,) of a source as an array-like (n, D) that reads them only when it is sliced or indexed.

    A build does so part by part, and then raises :class:`PlanningStopped` once ``stopped`` is true.
    """

    def __init__(self, source: RowSource, rows: Int64, stopped: Callable[[], bool]) -> None:
        self._source, self._rows, self._stopped = source, rows, stopped
        self.shape = (len(rows), source.vectors.shape[1])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: slice | Int64) -> Float32:
        if self._stopped():
            raise PlanningStopped("nobody waits for the structure any more")
        return self._source.take(self._rows[key])


@dataclass
class BuildOptions:
    """The request of an index build; numpy's numbers become Python's own.

    Attributes:
        kind: "exact", "ivf", "hnsw", "pq" (least memory), or "auto": exact up to 200,000 rows; above that IVF, unless
            brute force answers a single query faster than IVF does at the wanted recall.
        recall: least recall of an approximate kind on held-out real rows.
        recall_at: 1 asks it of the nearest row alone, 10 of the ten nearest as well. Where an identity has fewer than
            11 rows, the last of ten neighbours are strangers, alike by chance, and finding them all takes many times
            the effort.
        latency_ms: with "auto" and any number of rows: exact if a single query then takes no longer, else the first of
            IVF and HNSW that takes no longer, else the fastest of all. The manifest's "latency" holds what was wanted
            and measured, medians in milliseconds.
        memory: bytes that the build may take, whatever the sets' size (see :mod:`plsc.index.on_disk`): an IVF
            structure that does not fit is trained on a smaller sample, added part by part and merged on disk, which
            takes three times the vectors' bytes there while it lasts; HNSW, which has to fit, is refused. None: as
            much as it takes.
        seed: of k-means and of the choice of held-out rows.
        quiet: print no progress.

    Raises:
        UsageError: one is of another type, or outside its range.
    """

    kind: str = "auto"
    recall: float = 0.99
    recall_at: int = 10
    latency_ms: float | None = None
    memory: int | None = None
    seed: int = 0
    quiet: bool = False

    def __post_init__(self) -> None:
        self.recall, self.recall_at = as_number(self.recall, "recall"), as_integer(self.recall_at, "recall_at")
        self.latency_ms = None if self.latency_ms is None else as_number(self.latency_ms, "latency_ms")
        self.memory = None if self.memory is None else as_integer(self.memory, "memory", 1)
        self.seed = as_integer(self.seed, "seed", 0, _MAX_SEED)
        if self.kind not in ("auto", *ann.KINDS):
            raise UsageError(f"no kind {self.kind!r}; it is one of auto, {', '.join(ann.KINDS)}")
        if not 0 < self.recall <= 1:
            raise UsageError(f"recall {self.recall}: it lies above 0 and up to 1")
        if self.recall_at not in (1, 10):
            raise UsageError(f"recall at {self.recall_at}: it is measured at 1 and at 10")
        if self.latency_ms is not None and not 0 < self.latency_ms < math.inf:
            raise UsageError(f"a latency of {self.latency_ms} ms: it lies above 0")

    def reached(self, recall: Recall) -> float:
        """The share that counts."""
        return recall.at_1 if self.recall_at == 1 else min(recall.at_1, recall.at_10)


@dataclass(frozen=True)
class Tuned:
    """A structure with its effort set, its recall, and the median milliseconds of a single query."""

    structure: Any
    kind: ann.Kind
    effort: int
    recall: Recall
    milliseconds: float


@dataclass(frozen=True)
class Candidates:
    """The structures over ``base`` (N, D), tuned on ``queries`` (Q, D), whose exact scores are ``truth`` (Q, <= 10)."""

    base: ann.RowArray
    queries: Float32
    truth: Float32
    options: BuildOptions
    budget: MemoryBudget | None = None

    def tuned(self, kind: ann.Kind) -> Tuned:
        """Build ``kind``, and tune it; :class:`UsageError`: no effort reaches the recall, or it needs more memory."""
        structure = build_structure(kind, self.base, self.options.seed, self.budget, quiet=self.options.quiet)
        effort, recall = tune(structure, kind, self.queries, self.truth, self.options)
        milliseconds = median_milliseconds(lambda some, k: ann.search(structure, some, k), self.queries)
        return Tuned(structure, kind, effort, recall, milliseconds)

    def first_fast_enough(self, latency_ms: float) -> Tuned | None:
        """The first whose single query takes at most ``latency_ms``, else the fastest; None: none is possible."""
        tuned: list[Tuned] = []
        for kind in TRIED:
            if len(self.base) < ann.MIN_ROWS[kind]:
                continue
            try:
                tuned.append(self.tuned(kind))
            except UsageError:  # its recall stays too low, or it does not fit
                continue
            if tuned[-1].milliseconds <= latency_ms:
                break
        return min(tuned, key=lambda item: item.milliseconds, default=None)


def choose_structure(
    vectors: Float32, held_out: int, kind: ann.Kind, options: BuildOptions, budget: MemoryBudget | None, file: Path
) -> dict[str, Any]:
    """Build ``kind``, or what is faster where ``options`` leave the choice, and write it to ``file`` unless exact.

    Args:
        vectors: (N, D), of which the last ``held_out`` rows stay outside the structure.
        held_out: how many.
        kind: what to build.
        options: the request.
        budget: the memory that building may take; None: as much as it needs.
        file: for the faiss index.

    Returns:
        The manifest's "kind", "held_out", "parameters", "recall"; "speed_over_exact" of an approximate kind; and, with
        a latency in the request, "latency": {"asked_ms", "exact_ms", "ms"}.

    Raises:
        UsageError: the requested kind does not reach the recall.
    """
    if kind == "exact":
        return _exact(vectors, options, budget)
    base, queries = vectors[: len(vectors) - held_out], np.array(vectors[len(vectors) - held_out :])
    exact = _exact_search(base, budget)
    candidates = Candidates(base, queries, exact.search(queries, 10)[0], options, budget)
    exact_ms, may_choose = median_milliseconds(exact.search, queries), options.kind == "auto"
    best: Tuned | None = None
    if options.latency_ms is None or not may_choose:
        best = candidates.tuned(kind)
    elif exact_ms > options.latency_ms:
        best = candidates.first_fast_enough(options.latency_ms)
    if best is None:
        return _exact(vectors, options, budget)
    ratio = _speed_over_exact(best.structure, queries[:TIMED_QUERIES], exact)
    if may_choose and ratio <= 1:
        return _exact(vectors, options, budget)
    ann.save(best.structure, file)
    return {
        "kind": best.kind,
        "held_out": held_out,
        "parameters": ann.parameters(best.structure, best.kind, best.effort),
        "recall": best.recall.as_json(),
        "speed_over_exact": ratio,
        **_latency(options, exact_ms, best.milliseconds),
    }


def tune(structure: Any, kind: ann.Kind, queries: Float32, truth: Float32, options: BuildOptions) -> tuple[int, Recall]:
    """Find the least effort, within a sixteenth, whose recall is that of ``options``, and set it.

    Doubles the effort until it suffices, then bisects, taking recall to grow with the effort.

    Args:
        structure: over the rows that ``truth`` was computed on.
        kind: of the structure.
        queries: (Q, D).
        truth: (Q, <= 10) exact scores, best first.
        options: with the recall to reach.

    Returns:
        The effort, and its recall.

    Raises:
        UsageError: no effort reaches it.
    """

    def measure(effort: int) -> Recall:
        ann.set_effort(structure, kind, effort)
        return recall_of(structure.search(queries, truth.shape[1])[0], truth)

    effort, most = (16, ann.HNSW_MAX_EFFORT) if kind == "hnsw" else (1, int(structure.nlist))
    low, recall = effort - 1, measure(effort)
    while options.reached(recall) < options.recall and effort < most:
        low, effort = effort, min(effort * 2, most)
        recall = measure(effort)
    while effort - low > max(1, low // 16):
        middle = (low + effort) // 2
        attempt = measure(middle)
        if options.reached(attempt) >= options.recall:
            effort, recall = middle, attempt
        else:
            low = middle
    if options.reached(recall) < options.recall:
        raise UsageError(
            f"{kind} finds {options.reached(recall):.4f} of the nearest rows at most, and --recall asks for "
            f"{options.recall}; ask for less, or for --kind exact"
        )
    ann.set_effort(structure, kind, effort)
    return effort, recall


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
    stopped: Callable[[], bool] = lambda: False,
) -> ApproximateSearch | None:
    """Build an approximate search over ``vectors`` (N, D) where the exact one is slower than wanted.

    Args:
        exact: searches the same rows; it also answers what the structure cannot.
        vectors: (N, D) float32 of length 1.
        labels: (N,) int64, the person of each row, -1 for unknown; of many persons one row each is held out.
        latency_ms: the longest time of a single query.
        recall: least share of the true ten nearest rows, and of the nearest, to be found.
        stopped: asked between the parts of the work, which end when it is true.

    Returns:
        The first structure that meets the latency, else the fastest; None where the exact search meets it, or no
        structure is faster than that at this recall.

    Raises:
        PlanningStopped: ``stopped`` became true.
    """
    options = BuildOptions(recall=recall, quiet=True)
    held_out = choose_held_out(labels, HELD_OUT, options.seed)
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
    best = Candidates(base, queries, truth, options).first_fast_enough(latency_ms)
    if best is None or best.milliseconds >= exact_ms:
        return None
    return ApproximateSearch(best.structure, best.kind, vectors, held_out, exact, best.recall)


def median_milliseconds(search: Search, queries: Float32) -> float:
    """Median time of searches for 10 rows by single ``queries`` (Q, D), Q >= 1: of up to 50, for up to two seconds."""
    search(queries[:1], 10)  # what a first search compiles or allocates is no part of the latency
    times: list[float] = []
    end = time.monotonic() + TIMED_SECONDS
    for query in queries[:TIMED_QUERIES, None, :]:
        began = time.perf_counter()
        search(query, 10)
        times.append(1000 * (time.perf_counter() - began))
        if time.monotonic() > end:
            break
    return statistics.median(times)


def _exact(vectors: Float32, options: BuildOptions, budget: MemoryBudget | None) -> dict[str, Any]:
    latency: dict[str, Any] = {}
    if options.latency_ms is not None:
        exact = _exact_search(vectors, budget)
        exact.search(vectors[: 2 * TIMED_QUERIES], 1)  # as a service has it: with the copy made
        exact_ms = median_milliseconds(exact.search, vectors[:TIMED_QUERIES])
        latency = _latency(options, exact_ms, exact_ms)
    recall = exact_recall(vectors, options.seed, budget).as_json()
    return {"kind": "exact", "held_out": 0, "parameters": {}, "recall": recall, **latency}


def _exact_search(vectors: Float32, budget: MemoryBudget | None) -> ExactSearch:
    """The exact search, without its copy of the rows where that takes too much memory."""
    return ExactSearch(vectors, may_copy=budget is None or 2 * vectors.size <= budget.left)


def _latency(options: BuildOptions, exact_ms: float, chosen_ms: float) -> dict[str, Any]:
    if options.latency_ms is None:
        return {}
    return {"latency": {"asked_ms": options.latency_ms, "exact_ms": round(exact_ms, 4), "ms": round(chosen_ms, 4)}}


def _speed_over_exact(structure: Any, queries: Float32, exact: ExactSearch) -> float:
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
