"""The first centres: k-means++ on a sample, in two levels where there are many."""

import numpy as np

from plsc.cluster.assignment import Assigner, Points, nearest, unit_rows
from plsc.cluster.means import Sums
from plsc.cluster.scan import SearchDevice
from plsc.embedding.columns import Float32, Float64, Int64
from plsc.embedding.embedding_set import EmbeddingSet

PLUS_PLUS_UP_TO = 1000  # centres that are drawn one after the other, each by the distances of the whole sample
_SAMPLED, _SAMPLED_BY_CELL = 32, 8  # points per centre in the sample, of one level and of two
_COARSE_ITERATIONS = 5
_AT_ONCE = 1 << 22  # numbers of the sample that are multiplied at once


def first_centres(source: EmbeddingSet, usable: Int64, k: int, seed: tuple[int, ...], where: SearchDevice) -> Float32:
    """Draw ``k`` of the rows ``usable`` (n,) of a set as centres: (k, D) float32 of length 1.

    Up to 1,000 they are drawn by k-means++ (Arthur & Vassilvitskii, 2007) from 32 k rows; above, the sample of 8 k rows
    is cut into √k cells by k-means first, and each cell is drawn from by k-means++, in proportion to its rows.
    """
    random = np.random.default_rng(seed)
    per_centre = _SAMPLED if k <= PLUS_PLUS_UP_TO else _SAMPLED_BY_CELL
    count = min(len(usable), per_centre * k)
    sample = unit_rows(source, usable[np.sort(random.choice(len(usable), count, replace=False, shuffle=False))])
    if k <= PLUS_PLUS_UP_TO:
        return plus_plus(sample, k, random)
    cells = _cells(Points.of(sample, where), round(k**0.5), random)
    order = np.argsort(cells, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(cells))[:-1])
    shares = _shares(np.array([len(rows) for rows in members]), k)
    parts = [plus_plus(sample[rows], share, random) for rows, share in zip(members, shares.tolist(), strict=True)]
    return np.concatenate(parts)


def plus_plus(sample: Float32, k: int, random: np.random.Generator) -> Float32:
    """Draw ``k`` rows of ``sample`` (n >= k, D), each with the square of its distance to those drawn as its weight."""
    if not k:
        return sample[:0]
    chosen = np.empty(k, dtype=np.int64)
    chosen[0] = random.integers(len(sample))
    weights = np.full(len(sample), np.inf)
    for number in range(1, k):
        weights = np.minimum(weights, _squares(sample, sample[chosen[number - 1]]))
        weights[chosen[number - 1]] = 0.0
        total = np.cumsum(weights)
        if total[-1] > 0:
            drawn = int(np.searchsorted(total, random.random() * total[-1], side="right"))
            chosen[number] = min(drawn, len(sample) - 1)
        else:  # all others are copies of rows that were drawn
            chosen[number] = random.choice(np.setdiff1d(np.arange(len(sample)), chosen[:number]))
    return sample[chosen]


def _squares(sample: Float32, row: Float32) -> Float64:
    """Squared distances (n,) of ``sample`` to ``row``, without BLAS: its rounding would depend on the threads."""
    step = max(1, _AT_ONCE // len(row))
    parts = [np.einsum("nd,d->n", sample[at : at + step], row) for at in range(0, len(sample), step)]
    return np.maximum(2.0 - 2.0 * np.concatenate(parts).astype(np.float64), 0.0)


def _cells(points: Points, cells: int, random: np.random.Generator) -> Int64:
    """The cell (n,) of each of ``points``, none empty: by a few iterations of k-means with ``cells`` centres."""
    rows = np.sort(random.choice(len(points), min(len(points), _SAMPLED * cells), replace=False, shuffle=False))
    centres = plus_plus(points.take(rows), cells, random)
    assigner, sums = Assigner(points), Sums(cells, points.dim)
    for _ in range(_COARSE_ITERATIONS):
        changed, former = assigner.assign(centres)
        sums.move(points, changed, former, assigner.labels)
        centres = sums.centres(centres)
    labels = nearest(points, centres, 1)[1][:, 0]
    return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _shares(sizes: Int64, k: int) -> Int64:
    """Cut ``k`` into parts in proportion to ``sizes`` (sum >= k), none larger than its size."""
    exact = sizes * (k / sizes.sum())
    shares: Int64 = np.floor(exact).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")  # the largest fractions first
    shares[order[: k - int(shares.sum())]] += 1
    return shares
