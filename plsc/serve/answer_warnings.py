"""Warnings in answers: what is allowed, and yet probably not what the caller meant."""

import json

from plsc.gallery.filters import Condition, Filter
from plsc.gallery.store import Store

_SAMPLED_PERSONS = 1000  # whose fields are named
_NAMED_FIELDS = 20


def unknown_fields(store: Store, collection: str, filter: Filter) -> list[str]:
    """Warn of each field of ``filter`` that no person of ``collection`` has; asked where a filter finds nobody.

    Whether somebody has a field is asked of the store as a filter of its own, so it is exact. The fields that there
    are, which the warnings name, are those of the first 1,000 persons.
    """
    keys = dict.fromkeys(condition.key for condition in filter.conditions)
    unknown = [key for key in keys if not _has_field(store, collection, key)]
    if not unknown:
        return []
    persons = store.persons(collection, limit=_SAMPLED_PERSONS)
    fields = sorted({key for person in persons for key in person.metadata})
    more = ", …" if len(fields) > _NAMED_FIELDS else ""
    known = f"fields: {', '.join(fields[:_NAMED_FIELDS])}{more}" if fields else "nobody here has metadata"
    return [f"no person has a field {json.dumps(key, ensure_ascii=False)[:80]}; {known}" for key in unknown]


def _has_field(store: Store, collection: str, key: str) -> bool:
    return bool(store.persons(collection, limit=1, filter=Filter((Condition(key, "exists", True),))))
