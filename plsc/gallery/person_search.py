"""From nearest faces to nearest persons: every store searches by face and answers by person.

A person with a thousand similar faces must hide nobody, so both functions ask for more faces until ``k`` persons are
among them or no faces are left.
"""

from collections.abc import Callable, Sequence

import numpy as np

from plsc.gallery.values import Float32, Match
from plsc.index.rows import Int64

Neighbours = Sequence[tuple[int, int, float]]
Fetch = Callable[[int, list[int]], Neighbours]
Knn = Callable[[Float32, int], tuple[Float32, Int64, Int64]]
_GROWTH = 4  # of the number of candidates, if too few persons were among them


def num_candidates(persons: int, *, max_faces: int | None = None, limit: int | None = None) -> int:
    """Return how many faces to ask for, at most ``limit``, to find ``persons`` persons of up to ``max_faces`` faces."""
    count = 2 * persons + 16
    if max_faces is not None:
        count = min(count, (persons - 1) * max_faces + 1)  # pigeonhole: so many faces belong to enough persons
    return count if limit is None else min(count, limit)


def search_persons(knn: Knn, queries: Float32, k: int, threshold: float, max_faces: int) -> list[list[Match]]:
    """Find the ``k`` most similar persons for each of ``queries`` (Q, dim) through a batched face search.

    Args:
        knn: ``knn(queries, count)`` returns scores, faces and persons, (Q, count') each, best first, with
            count' < count only if there are no more faces.
        threshold: the lowest score to return.
        max_faces: upper bound on the faces of one person.
    """
    answers: list[list[Match]] = [[] for _ in queries]
    pending = np.arange(len(queries))
    count = num_candidates(k, max_faces=max_faces)
    while len(pending):
        scores, faces, persons = knn(queries[pending], count)
        exhausted = scores.shape[1] < count
        # Lists, for a loop over numpy scalars takes several times as long; a product in float32 may exceed 1.
        columns = zip(np.clip(scores, -1.0, 1.0).tolist(), faces.tolist(), persons.tolist(), strict=True)
        short = []
        for query, (query_scores, query_faces, query_persons) in zip(pending.tolist(), columns, strict=True):
            answers[query] = _best_faces(query_scores, query_faces, query_persons, k, threshold)
            if len(answers[query]) < k and not exhausted and query_scores[-1] >= threshold:
                short.append(query)
        pending = np.array(short, dtype=np.int64)
        count *= _GROWTH
    return answers


def group_by_person(fetch: Fetch, k: int, threshold: float, *, limit: int | None = None) -> list[Match]:
    """Find the ``k`` most similar persons through a server that can exclude persons from a face search.

    Args:
        fetch: ``fetch(count, excluded)`` returns (person, face, cosine) of the ``count`` best faces of all persons but
            ``excluded``, best first, and fewer only if there are no more.
        threshold: the lowest score to return.
        limit: the largest count that ``fetch`` accepts.
    """
    best: dict[int, Match] = {}
    while len(best) < k:
        count = num_candidates(k - len(best), limit=limit)
        rows = fetch(count, list(best))
        for person, face, score in rows:
            best.setdefault(person, Match(person, face, min(max(float(score), -1.0), 1.0)))
        if len(rows) < count or rows[-1][2] < threshold:
            break
    return [match for match in list(best.values())[:k] if match.score >= threshold]


def _best_faces(scores: list[float], faces: list[int], persons: list[int], k: int, threshold: float) -> list[Match]:
    """Return the first ``k`` persons with scores >= ``threshold`` among faces that are sorted best first."""
    best: dict[int, Match] = {}
    for score, face, person in zip(scores, faces, persons, strict=True):
        if score < threshold or len(best) == k:
            break
        if person not in best:
            best[person] = Match(person, face, score)
    return list(best.values())
