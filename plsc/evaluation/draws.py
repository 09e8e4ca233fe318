"""Pairs out of labelled images: a seeded draw for accuracy, and every pair for the ROC."""

import numpy as np
from numpy.typing import NDArray

from plsc.evaluation.roc import Roc, roc_from_counts

# Cosines are counted in bins of this width: finer than what a float32 product of 512-d vectors resolves.
_BINS = 2**22
_BLOCK = 2048


def draw_pairs(
    labels: NDArray[np.int64], seed: int, limit: int = 6000
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Draw as many same as different pairs, at most ``limit`` of each kind, without repeats.

    ``labels`` (N,). Returns the images' positions ``first`` (P,), ``second`` (P,) and ``is_same`` (P,), in
    turn same and different, so that every contiguous fold holds both kinds. All the same pairs are taken when
    there are no more than ``limit``. P is 0 when one kind does not exist.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    place = np.arange(len(labels), dtype=np.int64)
    end = np.searchsorted(ordered, ordered, side="right").astype(np.int64)  # one past the image's own class
    # In the order of labels, an image forms same pairs with the rest of its class, and different pairs with
    # everything behind its class: each unordered pair occurs once, and has a number.
    same_count, different_count = end - place - 1, len(labels) - end
    size = min(limit, int(same_count.sum()), int(different_count.sum()))
    generator = np.random.default_rng(seed)
    same = _numbered_pairs(_draw(generator, int(same_count.sum()), size), place + 1, same_count)
    different = _numbered_pairs(_draw(generator, int(different_count.sum()), size), end, different_count)
    first = np.stack([same[0], different[0]], axis=1).reshape(-1)
    second = np.stack([same[1], different[1]], axis=1).reshape(-1)
    return order[first], order[second], np.tile([True, False], size)


def _draw(generator: np.random.Generator, total: int, size: int) -> NDArray[np.int64]:
    if not size:
        return np.empty(0, dtype=np.int64)
    return np.asarray(generator.choice(total, size, replace=False), dtype=np.int64)


def _numbered_pairs(
    numbers: NDArray[np.int64], begin: NDArray[np.int64], count: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair number r of those where image p is joined with images begin[p] … begin[p] + count[p] - 1."""
    ends = np.cumsum(count)
    first = np.searchsorted(ends, numbers, side="right").astype(np.int64)
    return first, begin[first] + numbers - (ends[first] - count[first])


def all_pairs_roc(embeddings: NDArray[np.float32], labels: NDArray[np.int64]) -> Roc:
    """The ROC of every pair of N images: ``embeddings`` (N, D) of unit rows, ``labels`` (N,).

    Cosines are counted in bins of 2^-21, so memory does not grow with the number of pairs.
    """
    counts = np.zeros(2 * (_BINS + 1), dtype=np.int64)
    for top in range(0, len(labels), _BLOCK):
        rows, row_labels = embeddings[top : top + _BLOCK], labels[top : top + _BLOCK]
        for left in range(top, len(labels), _BLOCK):
            columns, column_labels = embeddings[left : left + _BLOCK], labels[left : left + _BLOCK]
            codes = _bin_numbers(rows @ columns.T)
            codes += (row_labels[:, None] != column_labels[None, :]) * (_BINS + 1)
            chosen = codes[np.triu_indices(len(rows), k=1)] if left == top else codes.reshape(-1)
            counts += np.bincount(chosen, minlength=counts.size)
    scores = np.linspace(-1.0, 1.0, _BINS + 1)
    return roc_from_counts(scores, counts[: _BINS + 1], counts[_BINS + 1 :])


def _bin_numbers(cosines: NDArray[np.float32]) -> NDArray[np.int64]:
    half = _BINS // 2
    numbers = np.rint(cosines * np.float32(half)).astype(np.int64) + half
    clipped: NDArray[np.int64] = np.clip(numbers, 0, _BINS, out=numbers)
    return clipped


def bounded_by_identities(labels: NDArray[np.int64], seed: int, pairs: int = 10**8) -> NDArray[np.int64]:
    """Positions of images, whole identities drawn by ``seed``, that form at most ``pairs`` pairs in all.

    All images when they already do.
    """
    most = int((1 + np.sqrt(1 + 8 * pairs)) / 2)
    if len(labels) <= most:
        return np.arange(len(labels), dtype=np.int64)
    names, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    drawn = np.random.default_rng(seed).permutation(len(names))
    kept = np.zeros(len(names), dtype=bool)
    kept[drawn[np.cumsum(sizes[drawn]) <= most]] = True
    return np.flatnonzero(kept[inverse]).astype(np.int64)
