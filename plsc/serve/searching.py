"""The two halves of a search, the device's and the names of who was found; and what is said where nobody was."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson

from plsc.errors import PlscError
from plsc.gallery.filters import Condition, Filter, PreparedFilter
from plsc.gallery.store import Store
from plsc.gallery.validation import Kind, kind_of
from plsc.gallery.values import Match
from plsc.serve.errors import ApiError
from plsc.serve.schemas import Float32

_NAMED_TOGETHER = 128  # persons read at once: with the longest metadata, 32 MiB
# Of any filter, for who may not list persons: the names of fields tell what is kept of them.
UNEXPLAINED = "no match has what the filter asks for; a token with the role read is told which fields nobody has"
_SAMPLED_PERSONS = 1000  # whose fields are named
_NAMED_FIELDS = 20
_CHECKED_FIELDS = 4  # of a filter: each costs the store a look at every person, and a search costs less than that
_KINDS = {Kind.BOOL: "true or false", Kind.NUMBER: "a number", Kind.TEXT: "text"}
# A condition that every value of a kind fulfils, and no other value.
_OF_KIND: dict[Kind, tuple[str, Any]] = {
    Kind.BOOL: ("in", (False, True)),
    Kind.NUMBER: ("gte", -sys.float_info.max),
    Kind.TEXT: ("gte", ""),
}


class Search(NamedTuple):
    """The search of one request: ``queries`` (Q, D) float32, of the model with ``contract_id``, and its options."""

    collection: str
    queries: Float32
    k: int
    threshold: float | None
    filter: Filter | None
    contract_id: str | None = None


class SearchMatches(NamedTuple):
    """Matches of each query of one request, their persons still unread."""

    collection: str
    matches: list[list[Match]]


class SearchAnswer(NamedTuple):
    """Matches of each query, and their persons as JSON by id; persons deleted meanwhile are not among them."""

    matches: list[list[Match]]
    persons: Mapping[int, bytes]


class Searcher:
    """The two halves of a search: :meth:`run` on the device's thread, :meth:`name` on another.

    Args:
        max_bytes: of the persons in one answer.
    """

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes

    def run(self, searches: Sequence[Search]) -> list[SearchMatches | Exception]:
        """Search, with one call of the store for all searches of one collection, k, threshold and filter."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, search in enumerate(searches):
            # By its text: filters on 1 and on true are equal to Python, and mean different things.
            matching = search.filter.key if isinstance(search.filter, PreparedFilter) else repr(search.filter)
            groups[search.collection, search.contract_id, search.k, search.threshold, matching].append(index)
        results: list[Any] = [None] * len(searches)
        for indices in groups.values():
            found = self._search_group([searches[index] for index in indices])
            for index, result in zip(indices, found, strict=True):
                results[index] = result
        return results

    def name(self, found: Sequence[SearchMatches]) -> list[SearchAnswer]:
        """Add the persons of all matches, read once per collection."""
        ids: dict[str, set[int]] = defaultdict(set)
        for item in found:
            for matches in item.matches:
                ids[item.collection].update([match.person for match in matches])
        persons = {name: self._persons(name, sorted(wanted)) for name, wanted in ids.items()}
        return [SearchAnswer(item.matches, persons[item.collection]) for item in found]

    def _persons(self, collection: str, ids: list[int]) -> dict[int, bytes]:
        """Persons as JSON; :class:`ApiError` if they are larger than one answer may be.

        The worker then names the searches of a batch one by one, so that it fails the large one alone.
        """
        persons: dict[int, bytes] = {}
        size = 0
        for start in range(0, len(ids), _NAMED_TOGETHER):
            for person, named in self._store.person_summaries(collection, ids[start : start + _NAMED_TOGETHER]).items():
                shown = {"id": named.id, "name": named.name, "metadata": named.metadata}
                external = {} if named.external_id is None else {"external_id": named.external_id}
                persons[person] = orjson.dumps(shown | external)
                size += len(persons[person])
            if size > self._max_bytes:
                raise answer_too_large(self._max_bytes)
        return persons

    def _search_group(self, searches: list[Search]) -> list[SearchMatches | Exception]:
        try:
            first, queries = searches[0], np.concatenate([search.queries for search in searches])
            options: dict[str, Any] = {"k": first.k, "filter": first.filter, "contract_id": first.contract_id}
            if first.threshold is not None:
                options["threshold"] = first.threshold
            matches = self._store.search(first.collection, queries, **options)
        except PlscError as error:
            if len(searches) == 1:
                return [error]
            return [found for search in searches for found in self._search_group([search])]
        rest = iter(matches)
        return [SearchMatches(search.collection, list(islice(rest, len(search.queries)))) for search in searches]


def answer_too_large(limit: int) -> ApiError:
    """The error for an answer of more than ``limit`` bytes."""
    return ApiError(400, f"the answer would be larger than {limit:,} bytes; ask for fewer matches, or fewer queries")


def filter_warnings(store: Store, collection: str, filter: Filter) -> list[str]:
    """Explain a filter that finds nobody: fields that no person of ``collection`` has, or never with such a value.

    The store is asked by filters on the field alone, so the warnings are exact, and only about the first four fields of
    the filter. The fields that there are, which a warning names, are those of the first 1,000 persons.
    """
    fields = list(dict.fromkeys(condition.key for condition in filter.conditions))[:_CHECKED_FIELDS]
    unknown = [key for key in fields if not _somebody_has(store, collection, key, "exists", True)]
    if unknown:
        return [f"nothing here has a field {' or '.join(map(_quoted, unknown))}; {_known_fields(store, collection)}"]
    checked = [condition for condition in filter.conditions if condition.key in fields][:_CHECKED_FIELDS]
    return [warning for condition in checked for warning in _kind_warnings(store, collection, condition)]


def _kind_warnings(store: Store, collection: str, condition: Condition) -> list[str]:
    """Warn where a field never has a value of the kind that it is compared with: the two are never equal or ordered."""
    if condition.operator in ("exists", "in", "ne"):
        return []
    kind = kind_of(condition.value)
    if _somebody_has(store, collection, condition.key, *_OF_KIND[kind]):
        return []
    return [
        f"the field {_quoted(condition.key)} is never {_KINDS[kind]}, and is compared with {_quoted(condition.value)}"
    ]


def _known_fields(store: Store, collection: str) -> str:
    persons = store.persons(collection, limit=_SAMPLED_PERSONS)
    fields = sorted({key for person in persons for key in person.metadata})
    more = ", …" if len(fields) > _NAMED_FIELDS else ""
    return f"fields: {', '.join(fields[:_NAMED_FIELDS])}{more}" if fields else "nothing here has metadata"


def _somebody_has(store: Store, collection: str, key: str, operator: str, value: Any) -> bool:
    return bool(store.persons(collection, limit=1, filter=Filter((Condition(key, operator, value),))))


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]
