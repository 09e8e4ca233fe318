"""The threshold that holds an FPIR among more persons than a gallery has.

The best of N impostors' scores reaches t for a share 1 - (1 - s_i(t))^N of the searches of probe i, and FPIR(N, t) is
its mean over the probes; one s for all of them would be wrong, for some faces resemble many others. Here s_i(t) =
s((t - m_i) / d_i), with the mean m_i and the deviation d_i of the probe's own scores in the gallery. The tail of s, of
the highest 0.3% of all probes' scores and 500 at least, is a generalised Pareto distribution by probability-weighted
moments (Hosking and Wallis, Technometrics 29, 1987); below it s is what was found, so the formula holds for any N. A
larger tail misses more (benchmarks/identification.py). Intervals of 95% come from a bootstrap over the probes' and the
enrolled persons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64
from plsc.evaluation.one_to_many import person_scores
from plsc.evaluation.probe import LabelledRows
from plsc.evaluation.search import FPIRS

SIZES = (1_000, 10_000, 100_000, 1_000_000)
_MOST_SCORES, _MOST_PROBES = 1_000_000, 1_000  # of which thresholds are predicted; more are sampled
_TAIL, _LARGEST_TAIL = 0.003, 0.01  # shares of all scores
_FEWEST = 500  # of a gallery's persons, and of scores in the tail
BODY = 100  # quantiles of the scores below the tail
_DRAWS = 100
_HALVINGS = 40  # of the cosines between -1 and 3


@dataclass(frozen=True)
class ImpostorScores:
    """The distribution of impostors' scores: of each probe ``mean`` and ``deviation`` (U,), and of all body and tail.

    ``body`` (100,) are scores in deviations above the mean, which shares from 1 down to ``share``, in equal ratios,
    reach. The tail begins at the last one; ``scale`` and ``shape`` are its own.
    """

    mean: Float64
    deviation: Float64
    body: Float64
    share: float
    scale: float
    shape: float

    def fpir(self, persons: int, threshold: float) -> float:
        """The predicted FPIR among ``persons`` persons."""
        standard = (threshold - self.mean) / self.deviation
        excess = np.maximum(standard - self.body[-1], 0) / self.scale
        with np.errstate(divide="ignore"):
            tail = self.share * np.maximum(1 - self.shape * excess, 0) ** (1 / self.shape)
            below = np.interp(standard, self.body, np.geomspace(1, self.share, BODY))
            survived = np.where(excess > 0, tail, below)
            return float(np.mean(-np.expm1(persons * np.log1p(-survived))))

    def threshold(self, persons: int, fpir: float) -> float:
        """The cosine at which the predicted FPIR among ``persons`` persons is ``fpir``."""
        low, high = -1.0, 3.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fpir(persons, middle) > fpir else (low, middle)
        return high


def is_enough(scores: Float32) -> bool:
    """Whether there are so many of ``scores`` (U, n) that :func:`fit_impostors` tells anything."""
    return scores.shape[1] >= _FEWEST and scores.size * _LARGEST_TAIL >= _FEWEST


def fit_impostors(scores: Float32, share: float = _TAIL) -> ImpostorScores:
    """Fit to ``scores`` (U, n): of each non-mated probe, those of n persons, 500 at least; ``share`` are the tail."""
    mean, deviation = scores.mean(axis=1, dtype=np.float64), scores.std(axis=1, dtype=np.float64) + 1e-9
    standard = (scores - mean[:, None].astype(np.float32)) / deviation[:, None].astype(np.float32)
    ordered = np.sort(standard, axis=None)
    tail = min(max(int(share * ordered.size), _FEWEST), ordered.size // 2)
    reached = np.geomspace(ordered.size, tail + 1, BODY).astype(np.int64)
    body = ordered[ordered.size - reached].astype(np.float64)
    excess = ordered[-tail:].astype(np.float64) - body[-1]
    first = excess.mean()
    second = np.mean(excess * (1 - (np.arange(1, tail + 1) - 0.35) / tail))
    with np.errstate(divide="ignore", invalid="ignore"):  # scores that are all alike have no tail
        shape = first / (first - 2 * second) - 2
        scale = 2 * first * second / (first - 2 * second)
    return ImpostorScores(mean, deviation, body, tail / ordered.size, float(scale), float(shape or 1e-9))


def sample_impostors(
    gallery: LabelledRows, non_mated: LabelledRows, *, seed: int = 0, most: int = _MOST_SCORES
) -> tuple[Float32, Int64]:
    """Scores of 1,000 non-mated probes at most with enrolled persons, sampled by ``seed``; and the probes' persons.

    There are ``most`` scores, or those of 500 persons where these are more.

    Returns:
        (U, n) and (U,), as :func:`predict_thresholds` takes them.
    """
    generator = np.random.default_rng(seed)
    probes = np.sort(generator.permutation(len(non_mated))[:_MOST_PROBES])
    people = np.unique(gallery.labels)
    people = generator.permutation(people)[: max(most // max(len(probes), 1), _FEWEST)]
    faces = np.flatnonzero(np.isin(gallery.labels, people))
    faces = faces[np.argsort(gallery.labels[faces], kind="stable")]
    first = np.unique(gallery.labels[faces], return_index=True)[1]
    scores = [found for _, found in person_scores(non_mated.unit[probes], gallery.unit[faces], first)]
    return np.concatenate(scores), non_mated.labels[probes]


def predict_thresholds(
    scores: Float32, persons: Int64, *, seed: int = 0, sizes: Sequence[int] = SIZES, draws: int = _DRAWS
) -> dict[str, Any]:
    """Predict the threshold of each FPIR in galleries of other sizes.

    Args:
        scores: (U, n), of each non-mated probe with each enrolled person.
        persons: (U,), whom the probes show.
        seed: draws the persons of the bootstrap.
        sizes: numbers of persons.
        draws: of the bootstrap.

    Returns:
        By the size and the rate {"threshold", "interval"}, or None where it is below 500 persons or beyond the
        evidence: fewer than one of the scores would reach the threshold.
    """
    generator = np.random.default_rng(seed)
    fitted = None
    if is_enough(scores):
        fitted = fit_impostors(scores)
        drawn = [fit_impostors(_redrawn(scores, persons, generator)) for _ in range(draws)]
    found: dict[str, Any] = {}
    for size in sizes:
        found[str(size)] = dict.fromkeys(FPIRS)
        for name, fpir in FPIRS.items():
            if fitted is not None and size >= _FEWEST and fpir / size * scores.size >= 1:
                interval = np.percentile([each.threshold(size, fpir) for each in drawn], (2.5, 97.5))
                found[str(size)][name] = {"threshold": fitted.threshold(size, fpir), "interval": interval.tolist()}
    return found


def _redrawn(scores: Float32, persons: Int64, generator: np.random.Generator) -> Float32:
    """The scores of as many probes' persons with as many enrolled ones, both drawn with replacement."""
    order = np.argsort(persons, kind="stable")
    ends = np.cumsum(np.unique(persons, return_counts=True)[1])
    probes = np.split(order, ends[:-1])
    rows = np.concatenate([probes[person] for person in generator.integers(len(probes), size=len(probes))])
    enrolled = generator.integers(scores.shape[1], size=scores.shape[1])
    drawn: Float32 = np.take(scores[rows], enrolled, axis=1)
    return drawn
