"""Which queries the report shows: some drawn at random, and some of those that the search got wrong."""

from dataclasses import dataclass

import numpy as np

from plsc.index import Index


@dataclass(frozen=True)
class Match:
    """A neighbour: its row in the index, its cosine, and whether it shows the query's identity."""

    row: int
    score: float
    same: bool


@dataclass(frozen=True)
class Shown:
    """A query's row in the index, its identity's name, and its neighbours without itself, nearest first."""

    row: int
    name: str
    matches: list[Match]


def choose(index: Index, drawn: int = 6, wrong: int = 2, k: int = 8, seed: int = 0) -> list[Shown]:
    """``drawn`` queries at random, one per identity, then up to ``wrong`` whose nearest neighbour is someone else."""
    found = index.search(index.vectors, k + 1)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(index))
    firsts = order[np.unique(index.labels[order], return_index=True)[1]]
    shown = [_shown(index, int(row), found.rows[row], found.scores[row], k) for row in generator.permutation(firsts)]
    failures = [query for query in shown if not query.matches[0].same]
    return shown[:drawn] + [query for query in failures if query not in shown[:drawn]][:wrong]


def _shown(index: Index, row: int, rows: np.ndarray, scores: np.ndarray, k: int) -> Shown:
    label = index.labels[row]
    matches = [
        Match(int(other), float(score), bool(index.labels[other] == label))
        for other, score in zip(rows, scores, strict=True)
        if other != row
    ]
    return Shown(row, index.class_name(int(label)) or str(label), matches[:k])
