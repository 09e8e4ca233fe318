"""Verification of pairs by insightface's LFW protocol: ten folds, each judged by a threshold of the other nine."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.embedding.columns import Float32, Float64, Int64, Mask
from plsc.errors import DataError
from plsc.evaluation.roc import Roc, roc_from_scores, roc_summary

FOLDS = 10
ACCURACY_THRESHOLDS = np.arange(0, 4, 0.01)
TAR_THRESHOLDS = np.arange(0, 4, 0.001)
_ROWS = 65_536  # pairs per chunk, which bounds the float64 copies


def verification(embeddings: NDArray[np.floating], is_same: Mask) -> dict[str, Any]:
    """Verify pairs by the LFW protocol as insightface runs it, and by the exact ROC.

    Args:
        embeddings: (2N, D), L2-normalised here; rows 2i and 2i+1 are pair i.
        is_same: bool (N,), the truth of each pair.

    Returns:
        ``accuracy`` and ``accuracy_std``: mean and standard deviation over ten unshuffled, contiguous folds, each
        scored at the squared distance (0 to 4 in steps of 0.01) that is best for the other nine, the smallest among
        equals. ``threshold_cosine``: the mean of those ten, as a cosine. ``tar@far_folds``: insightface's TAR at FAR
        1e-3, whatever the number of pairs behind it. ``auc``, ``eer`` and ``tar@far``: from the exact ROC of all pairs.
        A value is None if the pairs cannot give it: fewer than ten pairs, one kind missing, or FAR < 10 / impostor
        pairs.

    Raises:
        DataError: the number of rows is not twice that of pairs, or a value is not finite.
    """
    return verified_pairs(embeddings, np.asarray(is_same, dtype=bool))[0]


def verified_pairs(embeddings: NDArray[np.floating], is_same: Mask) -> tuple[dict[str, Any], Roc]:
    """:func:`verification`, and the exact ROC of the pairs."""
    distances = squared_distances(embeddings, is_same.size)
    roc = roc_from_scores((1.0 - distances / 2.0).astype(np.float32), is_same)  # as searches tell scores
    return ten_folds(distances, is_same) | roc_summary(roc), roc


def alternating(first: Float32, second: Float32) -> Float32:
    """The rows (2N, D) of pairs, whose images are rows of ``first`` and of ``second`` (N, D)."""
    return np.stack([first, second], axis=1).reshape(2 * len(first), first.shape[1])


def squared_distances(embeddings: NDArray[np.floating], pairs: int) -> Float64:
    """Return squared L2 distances (N,) between the normalised rows 2i and 2i+1 of ``embeddings`` (2N, D)."""
    if embeddings.ndim != 2 or len(embeddings) != 2 * pairs:
        raise DataError(f"embeddings of shape {tuple(embeddings.shape)} do not fit {pairs} pairs: each needs two rows")
    check_finite(embeddings)
    distances = np.empty(pairs)
    for start in range(0, pairs, _ROWS):
        rows = unit_rows(embeddings[2 * start : 2 * (start + _ROWS)])
        distances[start : start + _ROWS] = np.sum(np.square(rows[0::2] - rows[1::2]), axis=1)
    return distances


def unit_rows(embeddings: NDArray[np.floating]) -> Float64:
    """Divide rows by their L2 norms, in float64; a row of zeros stays zero."""
    rows = embeddings.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, np.where(norms > 0, norms, 1.0), out=rows)


def unit_rows_float32(embeddings: NDArray[np.floating]) -> Float32:
    """:func:`unit_rows`, kept in float32 for large products; no float64 copy of the whole is made."""
    unit = np.empty(embeddings.shape, dtype=np.float32)
    for start in range(0, len(embeddings), _ROWS):
        unit[start : start + _ROWS] = unit_rows(embeddings[start : start + _ROWS])
    return unit


def check_finite(embeddings: NDArray[np.floating]) -> None:
    """Raise a :class:`DataError` that names the first row with a NaN or an infinity."""
    for start in range(0, len(embeddings), _ROWS):
        bad = np.flatnonzero(~np.isfinite(embeddings[start : start + _ROWS]).all(axis=1))
        if bad.size:
            row = start + int(bad[0])
            raise DataError(f"embeddings: row {row} is not finite; the model has diverged, or its precision overflows")


def ten_folds(distances: Float64, is_same: Mask) -> dict[str, Any]:
    """Return the ten folds' accuracy, its standard deviation, the threshold, and TAR at FAR 1e-3."""
    if is_same.size < FOLDS or is_same.all() or not is_same.any():
        return {"accuracy": None, "accuracy_std": None, "threshold_cosine": None, "tar@far_folds": None}
    accuracies, thresholds = _fold_accuracies(distances, is_same)
    return {
        "accuracy": float(accuracies.mean()),
        "accuracy_std": float(accuracies.std()),
        "threshold_cosine": float(1.0 - thresholds.mean() / 2.0),  # |x - y|^2 = 2 - 2 cos for unit vectors
        "tar@far_folds": _fold_tar(distances, is_same, 1e-3),
    }


def fold_bounds(pairs: int) -> Int64:
    """Return the edges (11,) of ten contiguous folds; the first ``pairs % 10`` hold one pair more."""
    sizes = np.full(FOLDS, pairs // FOLDS, dtype=np.int64)
    sizes[: pairs % FOLDS] += 1
    return np.append(0, np.cumsum(sizes))


def _accepted_by_fold(distances: Float64, mask: Mask, thresholds: Float64) -> Int64:
    """Count the pairs of ``mask`` in each fold below each threshold: (10, len(thresholds))."""
    bounds = fold_bounds(distances.size)
    # A pair is accepted (distance < threshold) from the first threshold that exceeds its distance.
    first = np.searchsorted(thresholds, distances, side="right")
    bins = len(thresholds) + 1
    counts = [np.bincount(first[start:end][mask[start:end]], minlength=bins)[:-1] for start, end in pairwise(bounds)]
    return np.cumsum(np.stack(counts), axis=1)


def _fold_accuracies(distances: Float64, is_same: Mask) -> tuple[Float64, Float64]:
    """Return the accuracy (10,) of each fold and the threshold (10,) that is best for the other nine."""
    sizes = np.diff(fold_bounds(distances.size))
    true_accepts = _accepted_by_fold(distances, is_same, ACCURACY_THRESHOLDS)
    false_accepts = _accepted_by_fold(distances, ~is_same, ACCURACY_THRESHOLDS)
    different = np.add.reduceat(~is_same, fold_bounds(distances.size)[:-1], dtype=np.int64)
    correct = true_accepts + different[:, None] - false_accepts
    best = np.argmax(correct.sum(axis=0) - correct, axis=1)
    return correct[np.arange(FOLDS), best] / sizes, ACCURACY_THRESHOLDS[best]


def _fold_tar(distances: Float64, is_same: Mask, far: float) -> dict[str, float] | None:
    """Compute insightface's ``val``: TAR of each fold at the distance that gives ``far`` on the nine others.

    The distance is interpolated between the last threshold below ``far`` and the first that reaches it. None if a fold,
    or the rest of the pairs, lacks one kind: the rates are then undefined.
    """
    bounds = fold_bounds(distances.size)
    same = np.add.reduceat(is_same, bounds[:-1], dtype=np.int64)
    different = np.diff(bounds) - same
    if not same.all() or not different.all():
        return None
    accepted = _accepted_by_fold(distances, ~is_same, TAR_THRESHOLDS)
    rates = (accepted.sum(axis=0) - accepted) / (different.sum() - different)[:, None]
    tars, fars = np.empty(FOLDS), np.empty(FOLDS)
    for fold in range(FOLDS):
        part = slice(bounds[fold], bounds[fold + 1])
        taken = distances[part] < _threshold_at(rates[fold], far)
        tars[fold] = taken[is_same[part]].mean()
        fars[fold] = taken[~is_same[part]].mean()
    return {"tar": float(tars.mean()), "tar_std": float(tars.std()), "far": float(fars.mean())}


def _threshold_at(rates: Float64, far: float) -> float:
    """Return the threshold at which the rising ``rates`` reach ``far``; 0 (accept nothing) if they never do."""
    if rates[-1] < far:
        return 0.0
    after = int(np.searchsorted(rates, far, side="left"))
    if after == 0:
        return float(TAR_THRESHOLDS[0])
    low, high = rates[after - 1], rates[after]
    step = TAR_THRESHOLDS[after] - TAR_THRESHOLDS[after - 1]
    return float(TAR_THRESHOLDS[after - 1] + step * (far - low) / (high - low))
