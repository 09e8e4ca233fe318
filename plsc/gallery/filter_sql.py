"""Filters as SQL over the table of attributes: values are parameters, never part of the text."""

import sqlite3
from typing import Any

from plsc.gallery.filters import Condition, Filter
from plsc.gallery.records import kind_of
from plsc.gallery.store import Person

_SIGNS = {"eq": "=", "ne": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_ABSENT_FITS = "ne"


def fitting(db: sqlite3.Connection, number: int, where: Filter | None) -> tuple[str, list[Any]]:
    """SQL that begins with AND (empty without a filter) and its parameters: true for the persons ``p`` of collection
    ``number`` that ``where`` fits. The values after "in" are put into this connection's table ``wanted``."""
    db.execute("DELETE FROM temp.wanted")
    text, parameters = "", list[Any]()
    for place, condition in enumerate(where.conditions if where else ()):
        inner, values = _persons(db, number, place, condition)
        excluded = condition.operator == _ABSENT_FITS or (condition.operator == "exists" and not condition.value)
        text += f" AND p.id {'NOT ' if excluded else ''}IN ({inner})"
        parameters += values
    return text, parameters


def _persons(db: sqlite3.Connection, number: int, place: int, condition: Condition) -> tuple[str, list[Any]]:
    """A SELECT of the persons that have the key, with a value that compares as asked."""
    if condition.operator == "in":
        rows = ((place, kind_of(value), value) for value in condition.value)
        db.executemany("INSERT OR IGNORE INTO temp.wanted VALUES (?, ?, ?)", rows)
        return (
            "SELECT a.person FROM temp.wanted w CROSS JOIN attributes a ON a.kind = w.kind AND a.value = w.value "
            "WHERE w.place = ? AND a.collection = ? AND a.key = ?"
        ), [place, number, condition.key]
    start = "SELECT a.person FROM attributes a WHERE a.collection = ? AND a.key = ?"
    if condition.operator == "exists":
        return start, [number, condition.key]
    compared = f"{start} AND a.kind = ? AND a.value {_SIGNS[condition.operator]} ?"
    return compared, [number, condition.key, kind_of(condition.value), condition.value]


def attributes_of(db: sqlite3.Connection, number: int, person: Person) -> int:
    """How many entries of a person's metadata the table of attributes holds as they are."""
    text = "SELECT count(*) FROM attributes WHERE collection = ? AND key = ? AND kind = ? AND value IS ? AND person = ?"
    rows = ((number, key, kind_of(value), value, person.id) for key, value in person.metadata.items())
    return sum(int(db.execute(text, row).fetchone()[0]) for row in rows)
