"""The threshold of a search that holds an FPIR in a gallery of any size, out of what a calibration's file keeps.

Evidence ends where less than one of the compared scores would reach the threshold: at FPIR times scores persons. Beyond
it the tail is extrapolated. The scores are of persons with as many faces as the calibration's gallery had; where
persons have more faces, so many of them count as a person each, and the threshold is no lower than it must be.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plsc.errors import UsageError
from plsc.evaluation.larger_galleries import BODY, ImpostorScores, fit_impostors, is_enough, sample_impostors
from plsc.evaluation.probe import LabelledRows

MOST_SCORES = 10_000_000  # that are fitted for a file: ten times those that a table predicts from
MOST_PROBES = 1_000
_DIGITS = 3  # of numbers of persons for which thresholds are told apart: computing one takes milliseconds
_LEAST, _MOST = 1e-9, 1e9  # of a deviation or scale, and its reciprocal


@dataclass(frozen=True)
class SearchCalibration:
    """What the file keeps: an :class:`ImpostorScores` of ``scores`` scores, and the ``faces_each`` of its gallery."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    body: tuple[float, ...]
    share: float
    scale: float
    shape: float
    scores: int
    faces_each: float

    def flaw(self) -> str:
        """What is wrong with the numbers, as a file may hold any; "" where nothing is."""
        if not 1 <= len(self.mean) == len(self.deviation) <= MOST_PROBES or len(self.body) != BODY:
            return "its probes or quantiles are not as many as they should be"
        numbers = (*self.mean, *self.deviation, *self.body, self.share, self.scale, self.shape, self.faces_each)
        is_sound = (
            np.isfinite(numbers).all()
            and max(map(abs, self.mean)) <= 1.001  # rounded cosines
            and all(_LEAST <= value <= _MOST for value in (*self.deviation, self.scale))
            and (np.diff(self.body) >= 0).all()
            and max(map(abs, self.body)) <= _MOST
            and 0 < self.share <= 0.5
            and 0 < abs(self.shape) <= 10
            and 1 <= self.scores <= MOST_SCORES
            and 1 <= self.faces_each <= _MOST
        )
        return "" if is_sound else "its numbers of searches lie outside of what scores can be"

    def persons_at(self, fpir: float) -> int:
        """Up to so many persons there is evidence of ``fpir``."""
        return int(fpir * self.scores * (1 + 1e-12))

    @property
    def impostors(self) -> ImpostorScores:
        """The distribution that predicts thresholds."""
        mean, deviation, body = (np.array(each) for each in (self.mean, self.deviation, self.body))
        return ImpostorScores(mean, deviation, body, self.share, self.scale, self.shape)


def calibrate_searches(gallery: LabelledRows, non_mated: LabelledRows, *, seed: int = 0) -> SearchCalibration | None:
    """Fit to the scores of non-mated probes, sampled by ``seed``; None: they are too few, or too much alike."""
    scores, _ = sample_impostors(gallery, non_mated, seed=seed, most=MOST_SCORES)
    if not is_enough(scores):
        return None
    found = fit_impostors(scores)
    mean, deviation, body = (tuple(each.tolist()) for each in (found.mean, found.deviation, found.body))
    faces_each = len(gallery) / len(np.unique(gallery.labels))
    kept = SearchCalibration(mean, deviation, body, found.share, found.scale, found.shape, scores.size, faces_each)
    return None if kept.flaw() else kept


class SearchThresholds:
    """Thresholds that hold ``fpir``, by the size of a collection; each is computed once.

    Raises:
        UsageError: ``fpir`` is outside (0, 1), or not even supported for one person.
    """

    def __init__(self, calibration: SearchCalibration, fpir: float) -> None:
        if not 0 < fpir < 1:
            raise UsageError(f"an FPIR lies between 0 and 1, not at {fpir:g}")
        self.fpir, self._faces_each = fpir, calibration.faces_each
        self.persons = calibration.persons_at(fpir)
        if not self.persons:
            raise UsageError(
                f"an FPIR of {fpir:g} is beyond the evidence: {calibration.scores:,} compared scores support "
                f"{1 / calibration.scores:.1g} among one person; use more, or calibrate on more people"
            )
        impostors = calibration.impostors
        self._threshold = lru_cache(maxsize=4096)(lambda size: impostors.threshold(size, fpir))

    def size(self, persons: int, faces: int) -> int:
        """As how many persons a collection counts."""
        return max(persons, math.ceil(faces / self._faces_each), 1)

    def threshold(self, persons: int, faces: int) -> float:
        """The cosine for a collection at present; its size is rounded up to three digits."""
        size = self.size(persons, faces)
        step = 10 ** max(len(str(size)) - _DIGITS, 0)
        return self._threshold(-(-size // step) * step)
