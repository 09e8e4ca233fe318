"""Changes of persons as they are made within a transaction: what must hold first, and what they add and take out."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from plsc.errors import NotFoundError
from plsc.gallery.sqlite import records
from plsc.gallery.sqlite.collection_state import CollectionState
from plsc.gallery.sqlite.reads import find_person
from plsc.gallery.sqlite.records import Faces
from plsc.gallery.store import Float32, Person, Precondition
from plsc.gallery.validation import ValidPerson, is_expired, is_id, now, same_content, taken_external_id


class Change(NamedTuple):
    """What putting a person did: the person as it is, the faces that came, and those that went."""

    person: Person
    added: Faces
    gone: Sequence[int]


def enrol(db: sqlite3.Connection, state: CollectionState, persons: Sequence[ValidPerson]) -> tuple[list[Person], Faces]:
    """Insert ``persons``; :class:`ConflictError` if a living person has the external id of one.

    One who expired gives the external id up and stays, to be deleted by who deletes all the others who expired.
    """
    for external_id in (person.external_id for person in persons if person.external_id is not None):
        former = records.find_by_external_id(db, state.number, external_id)
        if former is not None and not is_expired(former.expires):
            raise taken_external_id(state.info.name, external_id)
        if former is not None:
            records.remove_external_id(db, state.number, former)
    return records.insert_persons(db, state.number, persons, now())


def put(
    db: sqlite3.Connection, state: CollectionState, person: ValidPerson, precondition: Precondition | None
) -> tuple[Change, bool]:
    """Insert ``person``, or replace the one with its external id; returns True beside one that is new."""
    assert person.external_id is not None
    former = records.find_by_external_id(db, state.number, person.external_id)
    alive = None if former is None or is_expired(former.expires) else former
    if precondition is not None:
        precondition.check(alive)
    if alive is None:
        (created,), added = enrol(db, state, [person])
        return Change(created, added, ()), True
    changed, added = records.replace_person(db, state.number, alive, person)
    return Change(changed, added, alive.faces), False


def update(
    db: sqlite3.Connection,
    state: CollectionState,
    person: int,
    fields: dict[str, Any],
    precondition: Precondition | None,
) -> Person:
    """Set ``fields`` of a person, which gets another revision if that changes anything."""
    former = _find_expected(db, state, person, precondition)
    changed = replace(former, **fields)
    if same_content(changed, former):
        return former
    changed = replace(changed, revision=former.revision + 1)
    records.update_person(db, state.number, former, changed)
    return changed


def add_faces(db: sqlite3.Connection, state: CollectionState, person: int, vectors: Float32) -> Faces:
    """Add faces to a person."""
    owner = find_person(db, state, person)
    if len(vectors):
        records.set_revision(db, state.number, replace(owner, revision=owner.revision + 1))
    return records.insert_faces(db, state.number, owner.id, vectors)


def delete_person(
    db: sqlite3.Connection, state: CollectionState, person: int, precondition: Precondition | None
) -> Sequence[int]:
    """Delete a person; returns the faces that went."""
    former = _find_expected(db, state, person, precondition)
    records.delete_person(db, state.number, former)
    return former.faces


def delete_face(
    db: sqlite3.Connection, state: CollectionState, person: int, face: int, precondition: Precondition | None
) -> Sequence[int]:
    """Delete a face of a person; returns the faces that went."""
    owner = find_person(db, state, person)
    if not is_id(face) or face not in owner.faces:
        raise NotFoundError(f"person {person} of {state.info.name} has no face {ascii(face)[:80]}")
    if precondition is not None:
        precondition.check(owner)
    records.delete_face(db, state.number, int(face))
    records.set_revision(db, state.number, replace(owner, revision=owner.revision + 1))
    return [int(face)]


def delete_expired(db: sqlite3.Connection, state: CollectionState, persons: Sequence[int]) -> list[Person]:
    """Delete those of ``persons`` whose time has come; returns them."""
    found = (records.find_person(db, state.number, int(person)) for person in persons if is_id(person))
    gone = [person for person in found if person is not None and is_expired(person.expires)]
    for person in gone:
        records.delete_person(db, state.number, person)
    return gone


def _find_expected(
    db: sqlite3.Connection, state: CollectionState, person: int, precondition: Precondition | None
) -> Person:
    found = find_person(db, state, person)
    if precondition is not None:
        precondition.check(found)
    return found
