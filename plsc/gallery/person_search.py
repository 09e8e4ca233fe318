"""From the faces that a view finds to the persons that were asked for."""

import numpy as np

from plsc.gallery.grouping import faces_asked
from plsc.gallery.store import Float32, Match
from plsc.gallery.view import Allowed, View

_WIDER = 4  # times as many faces where too few persons were among them


def nearest_persons(view: View, queries: Float32, k: int, threshold: float, allowed: Allowed) -> list[list[Match]]:
    """The ``k`` most alike persons for each of ``queries`` (Q, D), by the best face each, with scores >= threshold.

    A person with many faces hides nobody: more faces are asked for until ``k`` persons are found, or none are left.
    """
    answers: list[list[Match]] = [[] for _ in queries]
    pending = np.arange(len(queries))
    count = faces_asked(k, each=view.most_faces)
    while len(pending):
        scores, faces, persons = view.nearest(queries[pending], count, allowed)
        exhausted = scores.shape[1] < count
        found = zip(np.clip(scores, -1.0, 1.0).tolist(), faces.tolist(), persons.tolist(), strict=True)
        short = []
        for query, (own_scores, own_faces, own_persons) in zip(pending.tolist(), found, strict=True):
            answers[query] = _best_faces(own_scores, own_faces, own_persons, k, threshold)
            if len(answers[query]) < k and not exhausted and own_scores[-1] >= threshold:
                short.append(query)
        pending = np.array(short, dtype=np.int64)
        count *= _WIDER
    return answers


def _best_faces(scores: list[float], faces: list[int], persons: list[int], k: int, threshold: float) -> list[Match]:
    """The first ``k`` persons with scores >= ``threshold`` among faces that are sorted best first."""
    best: dict[int, Match] = {}
    for score, face, person in zip(scores, faces, persons, strict=True):
        if score < threshold or len(best) == k:
            break
        if person not in best:
            best[person] = Match(person, face, score)
    return list(best.values())
