"""Exact receiver operating characteristic: one point per distinct score, so that ties are never split."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.embedding.columns import Float32, Float64, Int64, Mask

MINIMUM_IMPOSTORS = 10  # different pairs that have to match for a rate to be reported: fewer are chance
RATE_ROUNDING = 1e-12  # differences of rates are compared with decimals: 0.9 less 0.8 is no more than 0.1
FARS: Mapping[str, float] = {f"1e-{power}": 10.0**-power for power in range(1, 7)}
# Of all pairs of a set, cosines are counted in so many bins from -1 to 1: finer than what a float32 product of 512-d
# vectors resolves. Cosines such as 0 and 1 lie in the middle of one, and rounding parts no equal ones.
_BINS = 2**22
_ABOVE = 2.0 / _BINS  # from the highest threshold of a ROC to one that no score reaches
_BLOCK = 2048
_IMAGES_EACH = 100  # of an identity in a sample, where it is of few identities
_POINTS_PER_DECADE, _DRAWN_BINS = 12, 200  # of what is drawn: a curve, and a histogram


@dataclass(frozen=True)
class Roc:
    """Numbers of pairs accepted at each distinct score, from the highest score down.

    ``thresholds`` float64 (K,) descending; ``genuine`` and ``impostors`` int64 (K,): the same and the
    different pairs whose score is at least the threshold. The last point accepts every pair.
    """

    thresholds: Float64
    genuine: Int64
    impostors: Int64

    @property
    def genuine_pairs(self) -> int:
        """The number of same pairs."""
        return int(self.genuine[-1]) if self.genuine.size else 0

    @property
    def impostor_pairs(self) -> int:
        """The number of different pairs."""
        return int(self.impostors[-1]) if self.impostors.size else 0


def roc_from_scores(scores: NDArray[np.floating], is_same: Mask) -> Roc:
    """Compute the ROC of ``scores`` (N,), higher for more similar pairs, against the truth ``is_same`` (N,)."""
    order = np.argsort(scores)[::-1]
    ordered = scores[order]
    last_of_tie = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if ordered.size else order
    genuine = np.cumsum(is_same[order], dtype=np.int64)[last_of_tie]
    return Roc(ordered[last_of_tie].astype(np.float64), genuine, last_of_tie + 1 - genuine)


def roc_from_counts(scores: Float64, same: Int64, different: Int64) -> Roc:
    """Compute the ROC of a histogram: ``same[k]`` and ``different[k]`` pairs have ``scores[k]`` (K,), ascending."""
    filled = np.flatnonzero((same > 0) | (different > 0))[::-1]
    return Roc(scores[filled], np.cumsum(same[filled]), np.cumsum(different[filled]))


def merge_rocs(rocs: Sequence[Roc]) -> Roc:
    """Compute the ROC of the pairs of all ``rocs`` together; equal scores of different sets become one point."""
    if not rocs:
        return Roc(np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    scores, index = np.unique(np.concatenate([roc.thresholds for roc in rocs]), return_inverse=True)
    same, different = np.zeros(len(scores), dtype=np.int64), np.zeros(len(scores), dtype=np.int64)
    np.add.at(same, index, np.concatenate([np.diff(roc.genuine, prepend=0) for roc in rocs]))
    np.add.at(different, index, np.concatenate([np.diff(roc.impostors, prepend=0) for roc in rocs]))
    return roc_from_counts(scores, same, different)


def area_under_curve(roc: Roc) -> float | None:
    """Return the probability that a same pair outscores a different one, ties half; None without both kinds."""
    if not roc.genuine_pairs or not roc.impostor_pairs:
        return None
    genuine = np.append(0.0, roc.genuine / roc.genuine_pairs)
    impostors = np.append(0.0, roc.impostors / roc.impostor_pairs)
    return float(np.sum(np.diff(impostors) * (genuine[1:] + genuine[:-1])) / 2)


def allowed_impostors(roc: Roc, far: float) -> int:
    """Return the number of different pairs that may match at a false accept rate of ``far``."""
    # Rates are decimal: 1e-3 of 30,000 pairs must allow 30 of them, although 1e-3 is not exact in binary.
    return int(far * roc.impostor_pairs * (1 + 1e-12))


def threshold_that_holds(roc: Roc, allowed: int) -> tuple[float, int]:
    """The lowest threshold at which at most ``allowed`` different pairs match, and the number of its point, from 1 on.

    Where more of them tie at the highest score, it lies above every score, and its number is 0.
    """
    points = int(np.searchsorted(roc.impostors, allowed, side="right"))
    return (float(roc.thresholds[points - 1]) if points else threshold_above(roc)), points


def threshold_above(roc: Roc) -> float:
    """A threshold that no score of ``roc`` reaches, which has a pair."""
    return float(roc.thresholds[0]) + _ABOVE


def tar_at_far(roc: Roc, far: float) -> float | None:
    """Return the largest share of same pairs accepted while at most ``far`` of the different pairs are.

    None with fewer than ``10 / far`` different pairs, since fewer than ten accepted ones are chance, or no same pair.
    """
    allowed = allowed_impostors(roc, far)
    if allowed < MINIMUM_IMPOSTORS or not roc.genuine_pairs:
        return None
    points = threshold_that_holds(roc, allowed)[1]
    return float(roc.genuine[points - 1] / roc.genuine_pairs) if points else 0.0


def equal_error_rate(roc: Roc) -> float | None:
    """Return the rate at which false accepts equal false rejects, linear between points; None without both kinds."""
    if not roc.genuine_pairs or not roc.impostor_pairs:
        return None
    accepts = np.append(0.0, roc.impostors / roc.impostor_pairs)
    rejects = np.append(1.0, 1.0 - roc.genuine / roc.genuine_pairs)
    after = int(np.argmax(accepts >= rejects))  # the first point accepts nothing, the last one everything
    gap_before = rejects[after - 1] - accepts[after - 1]
    gap_after = accepts[after] - rejects[after]
    weight = gap_before / (gap_before + gap_after)
    return float(accepts[after - 1] + weight * (accepts[after] - accepts[after - 1]))


def sampled_curve(roc: Roc) -> dict[str, list[float]] | None:
    """Sample ``{"far": […], "tar": […]}`` for a logarithmic axis: FAR from ``10 / impostor pairs`` to 1.

    None without a same pair or with fewer than ten different ones.
    """
    if not roc.genuine_pairs or roc.impostor_pairs < MINIMUM_IMPOSTORS:
        return None
    lowest = max(np.log10(MINIMUM_IMPOSTORS / roc.impostor_pairs), -6.0)
    far = np.logspace(lowest, 0.0, max(int(-lowest * _POINTS_PER_DECADE), 1) + 1).tolist()
    points = [(value, tar) for value in far if (tar := tar_at_far(roc, value)) is not None]
    return {"far": [value for value, _ in points], "tar": [tar for _, tar in points]}


def roc_summary(roc: Roc) -> dict[str, Any]:
    """Return ``auc``, ``eer``, ``tar@far`` and the number of pairs of each kind."""
    return {
        "auc": area_under_curve(roc),
        "eer": equal_error_rate(roc),
        "tar@far": {name: tar_at_far(roc, far) for name, far in FARS.items()},
        "impostor_pairs": roc.impostor_pairs,
        "genuine_pairs": roc.genuine_pairs,
    }


def plot_data(roc: Roc) -> dict[str, Any]:
    """Return ``roc`` sampled for a logarithmic axis, and ``scores``: counts of same and different pairs by cosine."""
    edges = np.linspace(-1.0, 1.0, _DRAWN_BINS + 1)
    scores = np.clip(roc.thresholds, -1.0, 1.0)
    histogram = {"edges": edges.tolist()}
    for kind, accepted in (("same", roc.genuine), ("different", roc.impostors)):
        counts = np.histogram(scores, edges, weights=np.diff(accepted, prepend=0))[0]
        histogram[kind] = counts.astype(int).tolist()
    return {"roc": sampled_curve(roc), "scores": histogram}


def all_pairs_roc(embeddings: Float32, labels: Int64, gallery: Float32 | None = None) -> Roc:
    """Compute the ROC of every pair of N images: ``embeddings`` (N, D) of unit rows, ``labels`` (N,).

    Cosines are counted in bins of width 2^-21, so that memory does not grow with the number of pairs. Thresholds are
    the bins' lower edges, which float32 holds: as many pairs as are counted have a cosine of at least that.

    Args:
        embeddings: of the images.
        labels: of the same images.
        gallery: other unit rows (N, D) of the same images, by which the later one of each pair is compared.
    """
    counts, half = np.zeros(2 * (_BINS + 1), dtype=np.int64), _BINS // 2
    for rows, columns, cosines in pair_blocks(embeddings, embeddings if gallery is None else gallery):
        halves = np.floor(cosines * np.float32(_BINS)).astype(np.int64)  # exact, for _BINS is a power of two
        codes = (halves + 1 >> 1) + half
        np.clip(codes, 0, _BINS, out=codes)
        codes += (labels[rows, None] != labels[None, columns]) * (_BINS + 1)
        once = codes[np.triu_indices(len(codes), k=1)] if rows == columns else codes.reshape(-1)
        counts += np.bincount(once, minlength=counts.size)
    edges = (np.arange(_BINS + 1) - half - 0.5) / half
    return roc_from_counts(edges, counts[: _BINS + 1], counts[_BINS + 1 :])


def pair_blocks(embeddings: Float32, gallery: Float32) -> Iterator[tuple[slice, slice, Float32]]:
    """Yield rows of ``embeddings``, rows of ``gallery`` and their cosines, until each pair of N rows has come once.

    Where the two slices are the same, pairs of this block are above its diagonal alone.
    """
    for top in range(0, len(embeddings), _BLOCK):
        rows = slice(top, min(top + _BLOCK, len(embeddings)))
        for left in range(top, len(gallery), _BLOCK):
            columns = slice(left, min(left + _BLOCK, len(gallery)))
            yield rows, columns, embeddings[rows] @ gallery[columns].T


def sample_identities(labels: Int64, seed: int, pairs: int = 10**8) -> Int64:
    """Return indices of images, sampled by ``seed``, that form at most ``pairs`` pairs in all.

    These are all images if they form no more, else those of whole identities. Where few identities would be left, or no
    same pair, they are whole ones of few images; and where that leaves as few, identities are cut to an equal number.
    """
    max_images = int((1 + np.sqrt(1 + 8 * pairs)) / 2)
    if len(labels) <= max_images:
        return np.arange(len(labels), dtype=np.int64)
    names, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    random = np.random.default_rng(seed)
    order = random.permutation(len(names))
    enough = min(max(max_images // _IMAGES_EACH, 2), len(names))
    most = max_images // enough
    for candidates in (order, order[sizes[order] <= most]):
        whole = candidates[np.cumsum(sizes[candidates]) <= max_images]
        if most < 2 or (len(whole) >= enough and (sizes[whole] > 1).any()):
            return np.flatnonzero(np.isin(inverse, whole)).astype(np.int64)
    order = np.roll(order, -int(np.argmax(sizes[order] > 1)))  # one with a same pair comes first
    kept = order[np.cumsum(np.minimum(sizes[order], most)) <= max_images]
    images = random.permutation(len(labels))
    images = images[places_in_identities(inverse[images]) < most]
    return np.sort(images[np.isin(inverse[images], kept)]).astype(np.int64)


def places_in_identities(labels: Int64) -> Int64:
    """Return how many images of the same identity come before each image (N,)."""
    order = np.argsort(labels, kind="stable")
    first = np.flatnonzero(np.append(True, np.diff(labels[order]) != 0)[: len(order)])
    places = np.empty(len(labels), dtype=np.int64)
    places[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    return places
