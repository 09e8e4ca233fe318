"""Choosing what an index searches with: measured on its own rows, described for its manifest."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.index import approximate
from plsc.index.exact import Float32
from plsc.index.exact_search import ExactSearch
from plsc.index.memory import UncopiedSearch, Within
from plsc.index.planner import KINDS, TIMED_QUERIES, Tuned, first_within, milliseconds, tuned
from plsc.index.recall import Recall, Target, oracle, recall_of

ORACLE_QUERIES = 100  # queries that check the exact search against float64


@dataclass(frozen=True)
class Wish:
    """What was asked for: ``kind`` if nothing else may be chosen, a recall, the latency of a single query or None, and
    how much memory building may take (None: as it comes)."""

    kind: approximate.Kind
    may_choose: bool
    target: Target
    latency_ms: float | None
    seed: int
    quiet: bool
    within: Within | None = None


def choose(vectors: Float32, held: int, wish: Wish, file: Path) -> dict[str, Any]:
    """Build what is asked for over ``vectors`` (N, D), the last ``held`` rows apart, and write it to ``file``, if not
    exact.

    Returns the manifest's "kind", "held_out", "parameters", "recall"; "speed_over_exact" of an approximate kind; and,
    where a latency was asked for, "latency": {"asked_ms", "exact_ms", "ms"}. Raises :class:`UsageError` where the
    kind asked for does not reach the recall.
    """
    if wish.kind == "exact":
        return _exact(vectors, wish)
    base, queries = vectors[: len(vectors) - held], np.array(vectors[len(vectors) - held :])
    exact = _exact_search(base, wish.within)
    truth = exact.search(queries, 10)[0]
    slow = milliseconds(exact.search, queries)
    best = _best(base, queries, truth, wish, slow)
    if best is None:
        return _exact(vectors, wish)
    ratio = _speed_over_exact(best.structure, queries[:TIMED_QUERIES], exact)
    if wish.may_choose and ratio <= 1:
        return _exact(vectors, wish)
    approximate.save(best.structure, file)
    return {
        "kind": best.kind,
        "held_out": held,
        "parameters": approximate.parameters(best.structure, best.kind, best.effort),
        "recall": best.recall.as_json(),
        "speed_over_exact": ratio,
        **_latency(wish, slow, best.milliseconds),
    }


def exact_recall(vectors: Float32, seed: int = 0, within: Within | None = None) -> Recall:
    """The exact search's recall on 100 of its own rows (themselves not counted) against float64 numpy: 1, or
    it is broken."""
    count = min(ORACLE_QUERIES, len(vectors))
    chosen = np.sort(np.random.default_rng(seed).choice(len(vectors), count, replace=False))
    queries = vectors[chosen]
    found, truth = _exact_search(vectors, within).search(queries, 11)[0], oracle(queries, vectors, 11)
    return recall_of(found[:, 1:], truth[:, 1:].astype(np.float32))


def _best(base: Float32, queries: Float32, truth: Float32, wish: Wish, slow: float) -> Tuned | None:
    """The structure to use; None for none."""
    if wish.latency_ms is None or not wish.may_choose:
        return tuned(wish.kind, base, queries, truth, wish.target, wish.seed, quiet=wish.quiet, within=wish.within)
    if slow <= wish.latency_ms:
        return None
    return first_within(
        wish.latency_ms, KINDS, base, queries, truth, wish.target, wish.seed, quiet=wish.quiet, within=wish.within
    )


def _exact(vectors: Float32, wish: Wish) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if wish.latency_ms is not None:
        search = _exact_search(vectors, wish.within)
        search.search(vectors[: 2 * TIMED_QUERIES], 1)  # as a service has it: with the copy made
        slow = milliseconds(search.search, vectors[:TIMED_QUERIES])
        more = _latency(wish, slow, slow)
    recall = exact_recall(vectors, wish.seed, wish.within).as_json()
    return {"kind": "exact", "held_out": 0, "parameters": {}, "recall": recall, **more}


def _exact_search(vectors: Float32, within: Within | None) -> ExactSearch | UncopiedSearch:
    """The exact search, without its copy of the rows where that takes too much memory."""
    return ExactSearch(vectors) if within is None or 2 * vectors.size <= within.left else UncopiedSearch(vectors)


def _latency(wish: Wish, exact: float, chosen: float) -> dict[str, Any]:
    if wish.latency_ms is None:
        return {}
    return {"latency": {"asked_ms": wish.latency_ms, "exact_ms": round(exact, 4), "ms": round(chosen, 4)}}


def _speed_over_exact(structure: Any, queries: Float32, exact: ExactSearch | UncopiedSearch) -> float:
    """How many times as fast as brute force single queries are; in turns, so that a busy machine slows both."""
    seconds = np.zeros(2)
    for query in queries[:, None, :]:
        moments = [time.perf_counter()]
        approximate.found(structure, query, 10)
        moments.append(time.perf_counter())
        exact.search(query, 10)
        moments.append(time.perf_counter())
        seconds += np.diff(moments)
    return round(float(seconds[1] / seconds[0]), 2)
