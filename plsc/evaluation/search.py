"""Searches: identification of probes in a gallery, closed set and open set; retrieval of all images among all.

Recall@K is that of metric learning (the benchmarks of CUB, Cars and Stanford Online Products), by which products,
landmarks and the like are compared; mean average precision at R and R-precision are those of Musgrave, Belongie and
Lim, "A Metric Learning Reality Check", ECCV 2020.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.embedding.columns import Float32, Float64, Int64
from plsc.errors import DataError
from plsc.evaluation.pairs import check_finite, unit_rows_float32

FPIRS = {"1e-1": 1e-1, "1e-2": 1e-2, "1e-3": 1e-3}
RECALLS = (1, 5, 10)
MAX_SCORES = 10**10  # of a set's retrieval; beyond, queries are sampled
_SCORES = 8_000_000  # held at a time (32 MB)

Retrieval = dict[str, float | int | None]


def identification(
    embeddings: NDArray[np.floating],
    labels: Int64,
    *,
    unknown_share: float = 0.3,
    seed: int = 0,
    gallery: NDArray[np.floating] | None = None,
) -> dict[str, Any]:
    """Search for every image but the first of its identity in a gallery of the first images.

    An identity with a single image is a distractor.

    Args:
        embeddings: (N, D), L2-normalised here.
        labels: (N,).
        gallery: (N, D), another model's embeddings of the same images, of which those of the first images are searched;
            None: the same.
        unknown_share: share of the identities that :func:`open_set` leaves out of the gallery.
        seed: samples those.

    Returns:
        ``rank1`` and ``rank5``: the share of probes whose identity is among the 1 or 5 best, where an impostor of the
        same score ranks first, or None without probes; ``probes`` and ``gallery``: their numbers; ``open_set``.

    Raises:
        DataError: a value is not finite, or the numbers of rows and labels differ.
    """
    if embeddings.ndim != 2 or len(embeddings) != len(labels):
        raise DataError(f"embeddings of shape {tuple(embeddings.shape)} do not fit {len(labels)} labels")
    check_finite(embeddings)
    unit = unit_rows_float32(embeddings)
    enrolled = unit if gallery is None else unit_rows_float32(gallery)
    _, first, identity = np.unique(labels, return_index=True, return_inverse=True)
    probes = np.setdiff1d(np.arange(len(labels)), first)
    result: dict[str, Any] = {"rank1": None, "rank5": None, "probes": len(probes), "gallery": len(first)}
    if probes.size:
        better = _ranked(unit[probes], enrolled[first], identity[probes])[1]
        result |= {"rank1": float(np.mean(better < 1)), "rank5": float(np.mean(better < 5))}
    return result | {"open_set": open_set(unit, enrolled, identity, first, unknown_share, seed)}


def open_set(
    unit: Float32, enrolled: Float32, identity: Int64, first: Int64, unknown_share: float, seed: int
) -> dict[str, Any]:
    """Compute TPIR at FPIR 1e-1, 1e-2 and 1e-3, with a share of the identities, sampled by ``seed``, not enrolled.

    FPIR is the share of probes of unknown identities (all their images) whose best score reaches the threshold; TPIR
    the share of probes of known identities whose own gallery image is the best and reaches it (as in NIST's FRTE 1:N).

    Args:
        unit: (N, D), unit rows.
        enrolled: (N, D), likewise: those of the identities' first images are the gallery.
        identity: (N,) in 0 … C-1.
        first: (C,), the index of each identity's gallery image.
        unknown_share: share of the identities that are not enrolled.
        seed: samples those.

    Returns:
        ``tpir@fpir``, with None where FPIR < 1 / unknown probes or no known identity has a probe; ``unknown_probes``;
        ``known_probes``.
    """
    unknown = np.zeros(len(first), dtype=bool)
    unknown[np.random.default_rng(seed).permutation(len(first))[: round(unknown_share * len(first))]] = True
    known = np.flatnonzero(~unknown)
    column = np.full(len(first), -1)
    column[known] = np.arange(len(known))
    impostors = np.flatnonzero(unknown[identity])
    mated = np.setdiff1d(np.flatnonzero(~unknown[identity]), first)
    tpir: dict[str, float | None] = dict.fromkeys(FPIRS)
    if impostors.size and mated.size and known.size:
        gallery, parts = enrolled[first[known]], parts_of(len(impostors), len(known))
        best = np.concatenate([(unit[impostors[part]] @ gallery.T).max(axis=1) for part in parts])
        false_positives = np.sort(best)[::-1]
        own, better = _ranked(unit[mated], gallery, column[identity[mated]])
        for name, fpir in FPIRS.items():
            allowed = int(fpir * len(false_positives) * (1 + 1e-12))
            if allowed:  # the threshold lies just above the false positive that is one too many
                tpir[name] = float(np.sum(own[better < 1] > false_positives[allowed]) / len(mated))
    return {"tpir@fpir": tpir, "unknown_probes": len(impostors), "known_probes": len(mated)}


def _ranked(probes: Float32, gallery: Float32, own: Int64) -> tuple[Float32, Int64]:
    """Return per probe its ``own`` column's score, and how many others score at least as much."""
    own_score = np.empty(len(probes), dtype=np.float32)
    better = np.empty(len(probes), dtype=np.int64)
    for part in parts_of(len(probes), len(gallery)):
        scores = probes[part] @ gallery.T
        own_score[part] = np.take_along_axis(scores, own[part, None], axis=1)[:, 0]
        better[part] = np.sum(scores >= own_score[part, None], axis=1) - 1
    return own_score, better


def parts_of(queries: int, values: int) -> list[slice]:
    """Cut so many queries that ``values`` for each of a part, such as its scores, may be held."""
    step = max(_SCORES // values, 1)
    return [slice(start, start + step) for start in range(0, queries, step)]


def no_retrieval() -> Retrieval:
    """The figures of a set that cannot give them."""
    return {**{f"recall@{k}": None for k in RECALLS}, "map@r": None, "r_precision": None, "queries": 0}


def retrieval(unit: Float32, labels: Int64, *, seed: int = 0, max_scores: int = MAX_SCORES) -> Retrieval:
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
    parts = [queries[part] for part in parts_of(len(queries), len(labels))]
    means = np.concatenate([_figures(rows, part, begin[part], end[part]) for part in parts]).mean(axis=0)
    names = [*(f"recall@{k}" for k in RECALLS), "map@r", "r_precision"]
    return {**dict(zip(names, means.tolist(), strict=True)), "queries": len(queries)}


def _figures(rows: Float32, queries: Int64, begin: Int64, end: Int64) -> Float64:
    """Return (Q, 5): the figures of each query, whose class is ``rows[begin:end]``."""
    scores = rows[queries] @ rows.T
    own: list[Float32] = []
    for row, (query, first, last) in enumerate(zip(queries, begin, end, strict=True)):
        own.append(np.sort(np.delete(scores[row, first:last], query - first))[::-1])
        scores[row, first:last] = -np.inf
    nearest = min(max(int((end - begin).max()) - 1, *RECALLS), len(rows))
    others = np.sort(np.partition(scores, len(rows) - nearest, axis=1)[:, len(rows) - nearest :], axis=1)
    return np.array([_figures_of(*each) for each in zip(own, others, strict=True)])


def _figures_of(own: Float32, others: Float32) -> list[float]:
    """The figures of a query: ``own`` (R,) are the scores of its class, descending; ``others`` the best, ascending."""
    number = np.arange(len(own))
    rank = number + len(others) - np.searchsorted(others, own, side="left")  # exact as far as the figures look
    found = rank < len(own)
    precision = (number + 1) / (rank + 1)
    return [*(float(rank[0] < k) for k in RECALLS), float(precision[found].sum() / len(own)), float(found.mean())]
