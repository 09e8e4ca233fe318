"""Searches on the device's thread: those alike go to the store as one, and matches get their persons' names."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from plsc.errors import PlscError
from plsc.gallery.filters import Filter
from plsc.gallery.store import Match, Store
from plsc.serve.failures import Refusal
from plsc.serve.inputs import Float32

_TOGETHER = 128  # persons read at once: with the longest metadata, 32 MiB


def too_large(most: int) -> Refusal:
    """The refusal of an answer of more than ``most`` bytes."""
    return Refusal(400, f"the answer would be larger than {most:,} bytes; ask for fewer matches, or fewer queries")


class Search(NamedTuple):
    """``queries`` (Q, D) of one request, and what is asked of them."""

    collection: str
    queries: Float32
    k: int
    threshold: float | None
    where: Filter | None


class Found(NamedTuple):
    """Each query's matches."""

    collection: str
    matches: list[list[Match]]


class Answer(NamedTuple):
    """Each query's matches, and their persons as JSON; of one who is not among ``persons`` nothing is shown."""

    matches: list[list[Match]]
    persons: Mapping[int, bytes]


class Searcher:
    """The two halves of a search: ``run`` on the device, ``name`` off it."""

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store, self._most_bytes = store, most_bytes

    def run(self, searches: Sequence[Search]) -> list[Found | Exception]:
        """One call of the store for all searches of one collection, k, threshold and filter."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, search in enumerate(searches):
            # By its text: filters on 1 and on true are equal to Python, and mean different things.
            groups[search.collection, search.k, search.threshold, repr(search.where)].append(place)
        results: list[Any] = [None] * len(searches)
        for places in groups.values():
            for place, found in zip(places, self._group([searches[place] for place in places]), strict=True):
                results[place] = found
        return results

    def name(self, found: Sequence[Found]) -> list[Answer]:
        """The persons of all matches, asked for once per collection; those deleted meanwhile are left out."""
        ids: dict[str, set[int]] = defaultdict(set)
        for one in found:
            for matches in one.matches:
                ids[one.collection].update([match.person for match in matches])
        persons = {name: self._persons(name, sorted(wanted)) for name, wanted in ids.items()}
        return [Answer(one.matches, persons[one.collection]) for one in found]

    def _persons(self, collection: str, ids: list[int]) -> dict[int, bytes]:
        """Persons as JSON; :class:`Refusal` if all together are larger than one answer may be.

        Where the searches of several callers were, each is then named alone.
        """
        persons: dict[int, bytes] = {}
        size = 0
        for start in range(0, len(ids), _TOGETHER):
            for person, named in self._store.person_summaries(collection, ids[start : start + _TOGETHER]).items():
                persons[person] = orjson.dumps(named)
                size += len(persons[person])
            if size > self._most_bytes:
                raise too_large(self._most_bytes)
        return persons

    def _group(self, searches: list[Search]) -> list[Found | Exception]:
        try:
            matches = self._ask(searches[0], np.concatenate([search.queries for search in searches]))
        except PlscError as error:
            if len(searches) == 1:
                return [error]
            return [found for search in searches for found in self._group([search])]
        found, start = [], 0
        for search in searches:
            stop = start + len(search.queries)
            found.append(Found(search.collection, matches[start:stop]))
            start = stop
        return list(found)

    def _ask(self, search: Search, queries: Float32) -> list[list[Match]]:
        threshold = {} if search.threshold is None else {"threshold": search.threshold}
        return self._store.search(search.collection, queries, k=search.k, filter=search.where, **threshold)
