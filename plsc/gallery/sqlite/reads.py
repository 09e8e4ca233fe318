"""What reads ask of a collection. Persons whose time has come are found by those functions alone that look for them.

A function that is given a connection runs in its caller's transaction.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from plsc.errors import NotFoundError
from plsc.gallery.filters import Filter
from plsc.gallery.sqlite import records
from plsc.gallery.sqlite.collection_state import CollectionState
from plsc.gallery.sqlite.database import Database, corrupt_row
from plsc.gallery.sqlite.segments import RowMasks, SegmentView
from plsc.gallery.store import Person, PersonSummary
from plsc.gallery.validation import is_expired, is_id, now
from plsc.index.rows import Int64


def find_person(db: sqlite3.Connection, state: CollectionState, person: Any) -> Person:
    """Return a person; :class:`NotFoundError` if there is none, or the time of it has come."""
    found = records.find_person(db, state.number, int(person)) if is_id(person) else None
    if found is None or is_expired(found.expires):
        raise NotFoundError(f"{state.info.name} has no person {ascii(person)[:80]}")
    return found


def find_by_external_id(db: sqlite3.Connection, state: CollectionState, external_id: str) -> Person:
    """Return the person with an external id; :class:`NotFoundError` if there is none, or the time of it has come."""
    found = records.find_by_external_id(db, state.number, external_id)
    if found is None or is_expired(found.expires):
        raise NotFoundError(f"{state.info.name} has no person with the external id {external_id!a}")
    return found


def select_page(
    db: sqlite3.Connection, state: CollectionState, after: int, limit: int, filter: Filter | None
) -> list[Person]:
    """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
    if not -(2**63) <= after < 2**63:
        return []
    text, values = records.filter_clause(db, state.number, filter)
    parameters = [state.number, int(after), *values]
    condition = f"p.collection = ? AND p.id > ?{text}"
    if state.next_expiry is not None:
        condition, parameters = f"{condition} AND (p.expires IS NULL OR p.expires > ?)", [*parameters, now()]
    return records.select_persons(db, condition, parameters, min(int(limit), 2**62))


def find_summaries(database: Database, state: CollectionState, ids: Sequence[int]) -> dict[int, PersonSummary]:
    """Return the persons among ``ids`` that exist, by id, as far as possible from the collection's cache."""

    def read(missing: list[int]) -> dict[int, PersonSummary]:
        with database.reading() as db:
            return records.find_summaries(db, state.number, [person for person in missing if is_id(person)])

    # A plain int needs no check here, which costs more than the lookup: only ids are ever in the cache.
    plain = [id if type(id) is int else int(id) for id in ids if type(id) is int or is_id(id)]
    if state.has_expired:
        with database.reading() as db:
            expired = set(find_expired(db, state.number, now()))
        plain = [id for id in plain if id not in expired]
    return state.persons.get(plain, read)


def matching_rows(database: Database, state: CollectionState, filter: Filter | None) -> tuple[SegmentView, RowMasks]:
    """Return the present view and its rows that match. SQLite answers as of now, which is as of the view, or later."""
    view = state.view
    if state.has_expired:
        with database.reading() as db:
            view = view.without(find_expired_faces(db, state.number, now()))
    key = "" if filter is None else repr(filter.conditions)  # not the filter itself: to Python, 1 equals True
    masks = view.masks.get(key)
    if masks is None:
        persons = None
        if filter is not None:
            with database.reading() as db:
                persons = _matching_persons(db, state.number, filter)
        masks = view.masks_of(persons)
        view.cache_masks(key, masks)
    return view, masks


def _matching_persons(db: sqlite3.Connection, number: int, filter: Filter) -> Int64:
    text, values = records.filter_clause(db, number, filter)
    # Thousands of ids in a row: sqlite3 releases the interpreter lock for each row that it fetches.
    select = f"SELECT group_concat(p.id) FROM persons p WHERE p.collection = ?{text} GROUP BY p.id >> 14"
    parts = [np.fromstring(row[0], np.int64, sep=",") for row in db.execute(select, (number, *values))]
    return np.concatenate([np.empty(0, np.int64), *parts])


# --- persons whose time has come ---


def next_expiry(db: sqlite3.Connection, number: int) -> str | None:
    """Return the earliest time at which a person of collection ``number`` expires."""
    row = db.execute("SELECT min(expires) FROM persons WHERE collection = ? AND expires IS NOT NULL", (number,))
    found = row.fetchone()[0]
    if not isinstance(found, str | None):
        raise corrupt_row(db, "the time at which a person expires is not what was written")
    return found


def find_expired(db: sqlite3.Connection, number: int, moment: str) -> list[int]:
    """Return the persons of collection ``number`` that have expired by ``moment``."""
    rows = db.execute("SELECT id FROM persons WHERE collection = ? AND expires <= ?", (number, moment))
    return [row[0] for row in rows]


def find_expired_faces(db: sqlite3.Connection, number: int, moment: str) -> list[int]:
    """Return the faces of the persons of collection ``number`` that have expired by ``moment``."""
    rows = db.execute(
        "SELECT f.id FROM persons p JOIN faces f ON f.person = p.id WHERE p.collection = ? AND p.expires <= ?",
        (number, moment),
    )
    return [row[0] for row in rows]


def select_expired(db: sqlite3.Connection, number: int, limit: int) -> list[Person]:
    """Return up to ``limit`` persons of collection ``number`` that have expired, by ascending id."""
    return records.select_persons(db, "p.collection = ? AND p.expires <= ?", (number, now()), limit)
