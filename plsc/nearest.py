"""The right names that a mistyped one may have meant, by edit distance, for error messages."""

from collections.abc import Iterable, Mapping

_LETTERS_PER_MISTAKE = 3  # of so many letters, one may be wrong
_SHORTEST_BEGINNING = 3  # letters of a name, from its first on, that stand for it


def edit_distance(one: str, other: str) -> int:
    """Count the letters to insert, leave out, replace or swap with their neighbour until ``one`` is ``other``."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        earlier, before, row = before, row, [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(word: str, names: Iterable[str] | Mapping[str, Iterable[str]], most: int = 1) -> list[str]:
    """Return the names that ``word`` most resembles, at most ``most`` of them, all as near as each other.

    Near is a name with at most a third of its letters wrong; where there is none, one that begins with ``word``.

    Args:
        word: as somebody wrote it; capitals do not count.
        names: the right ones, or each with the spellings that it is known by.
        most: of several that are as near, the first so many.
    """
    word = word.lower()
    spellings = names if isinstance(names, Mapping) else {name: (name,) for name in names}
    distances: dict[str, int] = {}
    for name, known in spellings.items():
        found = [distance for spelling in known if (distance := _distance_if_near(word, spelling.lower())) is not None]
        if found:
            distances[name] = min(found)
    if distances:
        least = min(distances.values())
        return [name for name, distance in distances.items() if distance == least][:most]
    if len(word) < _SHORTEST_BEGINNING:
        return []
    return [name for name, known in spellings.items() if any(each.lower().startswith(word) for each in known)][:most]


def did_you_mean(word: str, names: Iterable[str] | Mapping[str, Iterable[str]], most: int = 1) -> str:
    """Return ``"; did you mean X?"`` for what :func:`nearest` finds, or nothing."""
    found = nearest(word, names, most)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _distance_if_near(word: str, spelling: str) -> int | None:
    allowed = max(len(word), len(spelling)) // _LETTERS_PER_MISTAKE
    if abs(len(word) - len(spelling)) > allowed:
        return None
    distance = edit_distance(word, spelling)
    return distance if distance <= allowed else None
