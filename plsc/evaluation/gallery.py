"""Identification: probes are searched for in a gallery, closed set and open set."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.errors import DataError
from plsc.evaluation.pairs import check_finite, unit_rows_float32

FPIRS = {"1e-1": 1e-1, "1e-2": 1e-2, "1e-3": 1e-3}
_SCORES = 8_000_000  # scores held at a time (32 MB)


def identification(
    embeddings: NDArray[np.floating], labels: NDArray[np.int64], *, unknown_share: float = 0.3, seed: int = 0
) -> dict[str, Any]:
    """Search for every image but the first of its identity in a gallery of the first images.

    An identity with a single image is a distractor.

    Args:
        embeddings: (N, D), L2-normalised here.
        labels: (N,).
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
    _, first, identity = np.unique(labels, return_index=True, return_inverse=True)
    probes = np.setdiff1d(np.arange(len(labels)), first)
    result: dict[str, Any] = {"rank1": None, "rank5": None, "probes": len(probes), "gallery": len(first)}
    if probes.size:
        better = _search(unit[probes], unit[first], identity[probes])[2]
        result |= {"rank1": float(np.mean(better < 1)), "rank5": float(np.mean(better < 5))}
    return result | {"open_set": open_set(unit, identity, first, unknown_share, seed)}


def open_set(
    unit: NDArray[np.float32],
    identity: NDArray[np.int64],
    first: NDArray[np.int64],
    unknown_share: float,
    seed: int,
) -> dict[str, Any]:
    """Compute TPIR at FPIR 1e-1, 1e-2 and 1e-3, with a share of the identities, sampled by ``seed``, not enrolled.

    FPIR is the share of probes of unknown identities (all their images) whose best score reaches the threshold; TPIR
    the share of probes of known identities whose own gallery image is the best and reaches it (as in NIST's FRTE 1:N).

    Args:
        unit: (N, D), unit rows.
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
        false_positives = np.sort(_search(unit[impostors], unit[first[known]], None)[1])[::-1]
        own, _, better = _search(unit[mated], unit[first[known]], column[identity[mated]])
        for name, fpir in FPIRS.items():
            tpir[name] = _tpir(own[better < 1], false_positives, fpir, len(mated))
    return {"tpir@fpir": tpir, "unknown_probes": len(impostors), "known_probes": len(mated)}


def _tpir(hits: NDArray[np.float32], false_positives: NDArray[np.float32], fpir: float, mated: int) -> float | None:
    """Return TPIR at ``fpir`` from the scores of probes found at rank 1 and impostors' best scores, descending."""
    allowed = int(fpir * len(false_positives) * (1 + 1e-12))
    if allowed < 1:
        return None
    # At most ``allowed`` false positives: the threshold lies just above the next one.
    return float(np.sum(hits > false_positives[allowed]) / mated)


def _search(
    probes: NDArray[np.float32], gallery: NDArray[np.float32], own: NDArray[np.int64] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return per probe its ``own`` column's score, the best score, and how many others score at least its own."""
    own_score = np.full(len(probes), -np.inf, dtype=np.float32)
    best = np.empty(len(probes), dtype=np.float32)
    better = np.zeros(len(probes), dtype=np.int64)
    rows = max(_SCORES // len(gallery), 1)
    for start in range(0, len(probes), rows):
        part = slice(start, start + rows)
        scores = probes[part] @ gallery.T
        best[part] = scores.max(axis=1)
        if own is not None:
            own_score[part] = np.take_along_axis(scores, own[part, None], axis=1)[:, 0]
            better[part] = np.sum(scores >= own_score[part, None], axis=1) - 1
    return own_score, best, better
