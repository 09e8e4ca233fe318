"""Verification of pairs: insightface's LFW protocol, and pairs made of labelled images.

Labelled images give a seeded sample of pairs for the protocol's accuracy, and all pairs for the exact ROC.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.errors import DataError
from plsc.evaluation.roc import (
    FARS,
    Roc,
    area_under_curve,
    equal_error_rate,
    roc_from_counts,
    roc_from_scores,
    tar_at_far,
)

FOLDS = 10
ACCURACY_THRESHOLDS = np.arange(0, 4, 0.01)
TAR_THRESHOLDS = np.arange(0, 4, 0.001)
_ROWS = 65_536  # pairs per chunk, which bounds the float64 copies


def verification(embeddings: NDArray[np.floating], is_same: NDArray[np.bool_]) -> dict[str, Any]:
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
    truth = np.asarray(is_same, dtype=bool)
    distances = squared_distances(embeddings, truth.size)
    roc = roc_from_scores(1.0 - distances / 2.0, truth)
    return ten_folds(distances, truth) | roc_summary(roc)


def squared_distances(embeddings: NDArray[np.floating], pairs: int) -> NDArray[np.float64]:
    """Return squared L2 distances (N,) between the normalised rows 2i and 2i+1 of ``embeddings`` (2N, D)."""
    if embeddings.ndim != 2 or len(embeddings) != 2 * pairs:
        raise DataError(f"embeddings of shape {tuple(embeddings.shape)} do not fit {pairs} pairs: each needs two rows")
    check_finite(embeddings)
    distances = np.empty(pairs)
    for start in range(0, pairs, _ROWS):
        rows = unit_rows(embeddings[2 * start : 2 * (start + _ROWS)])
        distances[start : start + _ROWS] = np.sum(np.square(rows[0::2] - rows[1::2]), axis=1)
    return distances


def unit_rows(embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
    """Divide rows by their L2 norms, in float64; a row of zeros stays zero."""
    rows = embeddings.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, np.where(norms > 0, norms, 1.0), out=rows)


def unit_rows_float32(embeddings: NDArray[np.floating]) -> NDArray[np.float32]:
    """:func:`unit_rows`, kept in float32 for large products; no float64 copy of the whole is made."""
    unit = np.empty(embeddings.shape, dtype=np.float32)
    for start in range(0, len(embeddings), _ROWS):
        unit[start : start + _ROWS] = unit_rows(embeddings[start : start + _ROWS])
    return unit


def check_finite(embeddings: NDArray[np.floating], name: str = "embeddings") -> None:
    """Raise a :class:`DataError` that names the first row with a NaN or an infinity."""
    for start in range(0, len(embeddings), _ROWS):
        bad = np.flatnonzero(~np.isfinite(embeddings[start : start + _ROWS]).all(axis=1))
        if bad.size:
            raise DataError(
                f"{name}: row {start + int(bad[0])} is not finite; the model has diverged, or its precision overflows"
            )


def ten_folds(distances: NDArray[np.float64], is_same: NDArray[np.bool_]) -> dict[str, Any]:
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


def roc_summary(roc: Roc) -> dict[str, Any]:
    """Return ``auc``, ``eer``, ``tar@far`` and the number of pairs of each kind."""
    return {
        "auc": area_under_curve(roc),
        "eer": equal_error_rate(roc),
        "tar@far": {name: tar_at_far(roc, far) for name, far in FARS.items()},
        "impostor_pairs": roc.impostor_pairs,
        "genuine_pairs": roc.genuine_pairs,
    }


def fold_bounds(pairs: int) -> NDArray[np.int64]:
    """Return the edges (11,) of ten contiguous folds; the first ``pairs % 10`` hold one pair more."""
    sizes = np.full(FOLDS, pairs // FOLDS, dtype=np.int64)
    sizes[: pairs % FOLDS] += 1
    return np.append(0, np.cumsum(sizes))


def _accepted_by_fold(
    distances: NDArray[np.float64], mask: NDArray[np.bool_], thresholds: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Count the pairs of ``mask`` in each fold below each threshold: (10, len(thresholds))."""
    bounds = fold_bounds(distances.size)
    # A pair is accepted (distance < threshold) from the first threshold that exceeds its distance.
    first = np.searchsorted(thresholds, distances, side="right")
    bins = len(thresholds) + 1
    counts = [np.bincount(first[start:end][mask[start:end]], minlength=bins)[:-1] for start, end in pairwise(bounds)]
    return np.cumsum(np.stack(counts), axis=1)


def _fold_accuracies(
    distances: NDArray[np.float64], is_same: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the accuracy (10,) of each fold and the threshold (10,) that is best for the other nine."""
    sizes = np.diff(fold_bounds(distances.size))
    true_accepts = _accepted_by_fold(distances, is_same, ACCURACY_THRESHOLDS)
    false_accepts = _accepted_by_fold(distances, ~is_same, ACCURACY_THRESHOLDS)
    different = np.add.reduceat(~is_same, fold_bounds(distances.size)[:-1], dtype=np.int64)
    correct = true_accepts + different[:, None] - false_accepts
    best = np.argmax(correct.sum(axis=0) - correct, axis=1)
    return correct[np.arange(FOLDS), best] / sizes, ACCURACY_THRESHOLDS[best]


def _fold_tar(distances: NDArray[np.float64], is_same: NDArray[np.bool_], far: float) -> dict[str, float] | None:
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


def _threshold_at(rates: NDArray[np.float64], far: float) -> float:
    """Return the threshold at which the rising ``rates`` reach ``far``; 0 (accept nothing) if they never do."""
    if rates[-1] < far:
        return 0.0
    after = int(np.searchsorted(rates, far, side="left"))
    if after == 0:
        return float(TAR_THRESHOLDS[0])
    low, high = rates[after - 1], rates[after]
    step = TAR_THRESHOLDS[after] - TAR_THRESHOLDS[after - 1]
    return float(TAR_THRESHOLDS[after - 1] + step * (far - low) / (high - low))


# Cosines are counted in bins of this width: finer than what a float32 product of 512-d vectors resolves.
_BINS = 2**22
_BLOCK = 2048


def sample_pairs(
    labels: NDArray[np.int64], seed: int, limit: int = 6000
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Sample as many same as different pairs, at most ``limit`` of each kind, without repeats.

    Args:
        labels: (N,).
        seed: determines the sample.
        limit: pairs of each kind; all the same pairs are taken if there are no more.

    Returns:
        The images' indices ``first`` (P,) and ``second`` (P,), and ``is_same`` (P,), alternately same and different, so
        that every contiguous fold holds both kinds. P is 0 if one kind does not exist.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    position = np.arange(len(labels), dtype=np.int64)
    end = np.searchsorted(ordered, ordered, side="right").astype(np.int64)  # one past the image's own class
    # In the order of labels, an image forms same pairs with the rest of its class, and different pairs with everything
    # after its class. So each unordered pair occurs once and has a number, and numbers are sampled: no list of pairs.
    same_count, different_count = end - position - 1, len(labels) - end
    size = min(limit, int(same_count.sum()), int(different_count.sum()))
    generator = np.random.default_rng(seed)
    same = _numbered_pairs(_sample_numbers(generator, int(same_count.sum()), size), position + 1, same_count)
    different = _numbered_pairs(_sample_numbers(generator, int(different_count.sum()), size), end, different_count)
    first = np.stack([same[0], different[0]], axis=1).reshape(-1)
    second = np.stack([same[1], different[1]], axis=1).reshape(-1)
    return order[first], order[second], np.tile([True, False], size)


def _sample_numbers(generator: np.random.Generator, total: int, size: int) -> NDArray[np.int64]:
    if not size:
        return np.empty(0, dtype=np.int64)
    return np.asarray(generator.choice(total, size, replace=False), dtype=np.int64)


def _numbered_pairs(
    numbers: NDArray[np.int64], begin: NDArray[np.int64], count: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs by number, where image p is paired with images begin[p] … begin[p] + count[p] - 1."""
    ends = np.cumsum(count)
    first = np.searchsorted(ends, numbers, side="right").astype(np.int64)
    return first, begin[first] + numbers - (ends[first] - count[first])


def all_pairs_roc(embeddings: NDArray[np.float32], labels: NDArray[np.int64]) -> Roc:
    """Compute the ROC of every pair of N images: ``embeddings`` (N, D) of unit rows, ``labels`` (N,).

    Cosines are counted in bins of width 2^-21, so that memory does not grow with the number of pairs.
    """
    counts = np.zeros(2 * (_BINS + 1), dtype=np.int64)
    for top in range(0, len(labels), _BLOCK):
        rows, row_labels = embeddings[top : top + _BLOCK], labels[top : top + _BLOCK]
        for left in range(top, len(labels), _BLOCK):
            columns, column_labels = embeddings[left : left + _BLOCK], labels[left : left + _BLOCK]
            codes = _bin_numbers(rows @ columns.T)
            codes += (row_labels[:, None] != column_labels[None, :]) * (_BINS + 1)
            once = codes[np.triu_indices(len(rows), k=1)] if left == top else codes.reshape(-1)
            counts += np.bincount(once, minlength=counts.size)
    scores = np.linspace(-1.0, 1.0, _BINS + 1)
    return roc_from_counts(scores, counts[: _BINS + 1], counts[_BINS + 1 :])


def _bin_numbers(cosines: NDArray[np.float32]) -> NDArray[np.int64]:
    half = _BINS // 2
    numbers = np.rint(cosines * np.float32(half)).astype(np.int64) + half
    clipped: NDArray[np.int64] = np.clip(numbers, 0, _BINS, out=numbers)
    return clipped


def sample_identities(labels: NDArray[np.int64], seed: int, pairs: int = 10**8) -> NDArray[np.int64]:
    """Return indices of images, whole identities sampled by ``seed``, that form at most ``pairs`` pairs in all.

    These are all images if they form no more.
    """
    max_images = int((1 + np.sqrt(1 + 8 * pairs)) / 2)
    if len(labels) <= max_images:
        return np.arange(len(labels), dtype=np.int64)
    names, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(names))
    kept = np.zeros(len(names), dtype=bool)
    kept[order[np.cumsum(sizes[order]) <= max_images]] = True
    return np.flatnonzero(kept[inverse]).astype(np.int64)
