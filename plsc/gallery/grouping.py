"""From the most alike faces to the most alike persons, for stores that search by face."""

from collections.abc import Callable, Sequence

from plsc.gallery.store import Match

Rows = Sequence[tuple[int, int, float]]
Fetch = Callable[[int, list[int]], Rows]


def faces_asked(persons: int, *, each: int | None = None, most: int | None = None) -> int:
    """How many faces to ask for, at most ``most``, in search of ``persons`` persons with at most ``each`` faces."""
    count = 2 * persons + 16
    if each is not None:
        count = min(count, (persons - 1) * each + 1)  # so many faces are of as many persons at least
    return count if most is None else min(count, most)


def best_persons(fetch: Fetch, k: int, threshold: float, *, most: int | None = None) -> list[Match]:
    """The ``k`` most alike persons with a score >= ``threshold``, each by the best face.

    ``fetch(count, without)`` gives (person, face, cosine) of the ``count`` best faces of all persons but ``without``,
    best first, and fewer only where there are no more. It is asked for up to ``most`` faces, again and again until
    ``k`` persons are found: a person with a thousand faces hides nobody.
    """
    found: dict[int, Match] = {}
    while len(found) < k:
        count = faces_asked(k - len(found), most=most)
        rows = fetch(count, list(found))
        for person, face, score in rows:
            found.setdefault(person, Match(person, face, min(max(float(score), -1.0), 1.0)))
        if len(rows) < count or rows[-1][2] < threshold:
            break
    return [match for match in list(found.values())[:k] if match.score >= threshold]
