"""True and false accept rates when persons are drawn again: intervals that know that a person's pairs are alike.

A draw takes as many persons as there are, some several times. A pair of a person's own faces counts as often as the
person came, a pair of two persons' as often as both did, multiplied (Bolle et al., "Error analysis of pattern
recognition systems: the subsets bootstrap", CVIU 2004). Of pairs of different persons the highest scores alone are
kept, since no threshold in question lies below them; of too many of these, a random part.
"""

from dataclasses import dataclass

import numpy as np

from plsc.embedding.columns import Float32, Float64, Int64
from plsc.evaluation.roc import Roc, pair_blocks

_TAIL = 4  # times as many pairs as match: draws differ, and thresholds with them
_TAIL_MORE = 200  # and so many more
_MOST_KEPT = 100_000


@dataclass(frozen=True)
class PairScores:
    """A space's scores, each kind in descending order.

    Attributes:
        genuine: of pairs of a person's faces, float32 (G,).
        owners: whose, (G,).
        impostors: the highest of pairs of different persons, float32 (T,).
        first, second: whose, (T,).
        share: of the highest ones, how many were kept.
    """

    genuine: Float32
    owners: Int64
    impostors: Float32
    first: Int64
    second: Int64
    share: float

    def matched(self, times: Float64, threshold: float) -> float:
        """How many pairs of different persons match at ``threshold`` where person p came ``times[p]`` times."""
        count = int(np.searchsorted(-self.impostors, -threshold, side="right"))
        return float((times[self.first[:count]] * times[self.second[:count]]).sum() / self.share)

    def threshold(self, times: Float64, allowed: float) -> float:
        """The score above which at most ``allowed`` pairs of different persons match."""
        reached = np.cumsum(times[self.first] * times[self.second]) / self.share
        count = int(np.searchsorted(reached, allowed * (1 + 1e-12), side="right"))
        return float(self.impostors[min(count, len(self.impostors) - 1)])

    def accepted(self, times: Float64, above: float) -> float:
        """Share of the pairs of a person's faces that score more than ``above``."""
        weights = times[self.owners]
        count = int(np.searchsorted(-self.genuine, -above, side="left"))
        return float(weights[:count].sum() / max(weights.sum(), 1.0))


def pair_scores(
    embeddings: Float32, gallery: Float32, persons: Int64, roc: Roc, allowed: int, random: np.random.Generator
) -> PairScores:
    """Collect the scores of a space.

    Args:
        embeddings: unit rows (n, d).
        gallery: those that the later one of each pair is compared by.
        persons: numbers (n,).
        roc: of all the pairs.
        allowed: how many pairs of different persons match at the thresholds in question.
        random: chooses, where there are too many.
    """
    wanted = min(_TAIL * allowed + _TAIL_MORE, roc.impostor_pairs)
    lowest = roc.thresholds[min(int(np.searchsorted(roc.impostors, wanted)), len(roc.impostors) - 1)]
    share = min(_MOST_KEPT / wanted, 1.0)
    genuine: list[tuple[Float32, Int64, Int64]] = []
    impostors: list[tuple[Float32, Int64, Int64]] = []
    for rows, columns, scores in pair_blocks(embeddings, gallery):
        same = persons[rows, None] == persons[None, columns]
        if rows == columns:
            scores[np.tril_indices(len(scores))] = -np.inf
        for found, kept, part in ((genuine, same, 1.0), (impostors, ~same & (scores >= lowest - 1e-6), share)):
            left, right = np.nonzero(kept & (scores > -np.inf))
            if part < 1:
                drawn = random.random(left.size) < part
                left, right = left[drawn], right[drawn]
            found.append((scores[left, right], persons[rows][left], persons[columns][right]))
    own, owners, _ = _descending(genuine)
    return PairScores(own, owners, *_descending(impostors), share)


def _descending(parts: list[tuple[Float32, Int64, Int64]]) -> tuple[Float32, Int64, Int64]:
    scores, first, second = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(-scores, kind="stable")
    return scores[order], first[order], second[order]


def impostor_pairs(times: Float64, faces: Int64) -> float:
    """How many pairs of different persons' faces there are where person p came ``times[p]`` times."""
    weights = times * faces
    return float((weights.sum() ** 2 - (weights**2).sum()) / 2)
