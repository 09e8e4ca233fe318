"""Searches on the device's thread: those alike go to the store as one, and matches get their persons' names."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from plsc.errors import PlscError
from plsc.gallery.contract import Match, Named, Store
from plsc.gallery.filters import Filter
from plsc.serve.inputs import Float32


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
    """Each query's matches; of a person who is not among ``persons`` nothing is shown."""

    matches: list[list[Match]]
    persons: Mapping[int, Named]


class Searcher:
    """The two halves of a search: ``run`` on the device, ``name`` off it."""

    def __init__(self, store: Store) -> None:
        self._store = store

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
        persons = {name: self._store.names_of(name, sorted(wanted)) for name, wanted in ids.items()}
        return [Answer(one.matches, persons[one.collection]) for one in found]

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
        return self._store.search(search.collection, queries, k=search.k, where=search.where, **threshold)
