"""Warnings in answers: what is allowed, and yet probably not what the caller meant."""

import json
import sys
from typing import Any

from plsc.gallery.filters import Condition, Filter
from plsc.gallery.store import Store
from plsc.gallery.validation import Kind, kind_of

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
