"""From the faces that a view finds to the persons that were asked for."""

import numpy as np

from plsc.gallery.contract import Float32, Match
from plsc.gallery.grouping import faces_asked
from plsc.gallery.view import Allowed, View
from plsc.index.exact import Int64

_WIDER = 4  # times as many faces where too few persons were among them


def nearest_persons(view: View, queries: Float32, k: int, threshold: float, allowed: Allowed) -> list[list[Match]]:
    """The ``k`` most alike persons for each of ``queries`` (Q, D), by the best face each, with scores >= threshold.

    A person with many faces hides nobody: more faces are asked for until ``k`` persons are found, or none are left.
    """
    answers: list[list[Match]] = [[] for _ in queries]
    pending = np.arange(len(queries))
    count = faces_asked(k)
    while len(pending):
        scores, faces, persons = view.nearest(queries[pending], count, allowed)
        scores = np.clip(scores, -1.0, 1.0)
        exhausted = scores.shape[1] < count
        short = []
        for place, query in enumerate(pending.tolist()):
            answers[query] = _best_faces(scores[place], faces[place], persons[place], k)
            if len(answers[query]) < k and not exhausted and scores[place, -1] >= threshold:
                short.append(query)
        pending = np.array(short, dtype=np.int64)
        count *= _WIDER
    return [[match for match in answer if match.score >= threshold] for answer in answers]


def _best_faces(scores: Float32, faces: Int64, persons: Int64, k: int) -> list[Match]:
    """The first ``k`` persons in faces (n,) that are sorted best first."""
    first = np.sort(np.unique(persons, return_index=True)[1])[:k]
    rows = zip(persons[first].tolist(), faces[first].tolist(), scores[first].tolist(), strict=True)
    return [Match(person, face, score) for person, face, score in rows]
