"""Retrieval, all images against all: the figures by which products, landmarks and the like are compared.

Recall@K is that of metric learning (the benchmarks of CUB, Cars and Stanford Online Products); mean average precision
at R and R-precision are those of Musgrave, Belongie and Lim, "A Metric Learning Reality Check", ECCV 2020.
"""

import numpy as np
from numpy.typing import NDArray

RECALLS = (1, 5, 10)
MAX_SCORES = 10**10  # computed for a set; beyond, queries are sampled
_SCORES = 8_000_000  # held at a time (32 MB)

Retrieval = dict[str, float | int | None]


def no_retrieval() -> Retrieval:
    """The figures of a set that cannot give them."""
    return {**{f"recall@{k}": None for k in RECALLS}, "map@r": None, "r_precision": None, "queries": 0}


def retrieval(
    unit: NDArray[np.float32], labels: NDArray[np.int64], *, seed: int = 0, max_scores: int = MAX_SCORES
) -> Retrieval:
    """Search for every image among all others.

    A query has R other images of its class; images without any are no queries, and distract. Among equal scores, images
    of other classes rank first.

    Args:
        unit: (N, D), unit rows.
        labels: (N,).
        seed: samples the queries where all would take more than ``max_scores`` scores.
        max_scores: queries times images.

    Returns:
        Means over the queries, or None where there are none: ``recall@1``, ``recall@5`` and ``recall@10``, whether an
        image of its class is among the K nearest; ``r_precision``, the share of its class among the R nearest;
        ``map@r``, the sum of precision at i over those i up to R where the i-th nearest is of its class, over R. And
        ``queries``, their number.
    """
    order = np.argsort(labels, kind="stable")
    ordered, rows = labels[order], unit[order]  # a class's images are neighbours
    begin = np.searchsorted(ordered, ordered, side="left")
    end = np.searchsorted(ordered, ordered, side="right")
    queries = np.flatnonzero(end - begin > 1)
    most = max(max_scores // max(len(labels), 1), 1)
    if len(queries) > most:
        queries = np.sort(np.random.default_rng(seed).choice(queries, most, replace=False))
    if not queries.size:
        return no_retrieval()
    at_a_time = max(_SCORES // len(labels), 1)
    parts = [queries[start : start + at_a_time] for start in range(0, len(queries), at_a_time)]
    means = np.concatenate([_figures(rows, part, begin[part], end[part]) for part in parts]).mean(axis=0)
    names = [*(f"recall@{k}" for k in RECALLS), "map@r", "r_precision"]
    return {**dict(zip(names, means.tolist(), strict=True)), "queries": len(queries)}


def _figures(
    rows: NDArray[np.float32], queries: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return (Q, 5): the figures of each query, whose class is ``rows[begin:end]``."""
    scores = rows[queries] @ rows.T
    own: list[NDArray[np.float32]] = []
    for row, (query, first, last) in enumerate(zip(queries, begin, end, strict=True)):
        own.append(np.sort(np.delete(scores[row, first:last], query - first))[::-1])
        scores[row, first:last] = -np.inf
    nearest = min(max(int((end - begin).max()) - 1, *RECALLS), len(rows))
    others = np.sort(np.partition(scores, len(rows) - nearest, axis=1)[:, len(rows) - nearest :], axis=1)
    return np.array([_figures_of(*each) for each in zip(own, others, strict=True)])


def _figures_of(own: NDArray[np.float32], others: NDArray[np.float32]) -> list[float]:
    """The figures of a query: ``own`` (R,) are the scores of its class, descending; ``others`` the best, ascending."""
    number = np.arange(len(own))
    rank = number + len(others) - np.searchsorted(others, own, side="left")  # exact as far as the figures look
    found = rank < len(own)
    precision = (number + 1) / (rank + 1)
    return [*(float(rank[0] < k) for k in RECALLS), float(precision[found].sum() / len(own)), float(found.mean())]
