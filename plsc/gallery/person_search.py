"""From nearest faces to nearest persons, for servers that search by face and can exclude persons."""

from collections.abc import Callable, Sequence

from plsc.gallery.values import Match

Neighbours = Sequence[tuple[int, int, float]]
Fetch = Callable[[int, list[int]], Neighbours]


def num_candidates(persons: int, limit: int | None = None) -> int:
    """Return how many faces to ask for, at most ``limit``, to find ``persons`` persons among them, as a rule."""
    count = 2 * persons + 16
    return count if limit is None else min(count, limit)


def group_by_person(fetch: Fetch, k: int, threshold: float, *, limit: int | None = None) -> list[Match]:
    """Find the ``k`` most similar persons.

    A person with a thousand similar faces must hide nobody, so more faces are asked for until ``k`` persons are among
    them or no faces are left.

    Args:
        fetch: ``fetch(count, excluded)`` returns (person, face, cosine) of the ``count`` best faces of all persons but
            ``excluded``, best first, and fewer only if there are no more.
        k: how many persons at most.
        threshold: the lowest score to return.
        limit: the largest count that ``fetch`` accepts.
    """
    best: dict[int, Match] = {}
    while len(best) < k:
        count = num_candidates(k - len(best), limit)
        rows = fetch(count, list(best))
        for person, face, score in rows:
            best.setdefault(person, Match(person, face, min(max(float(score), -1.0), 1.0)))
        if len(rows) < count or rows[-1][2] < threshold:
            break
    return [match for match in list(best.values())[:k] if match.score >= threshold]
