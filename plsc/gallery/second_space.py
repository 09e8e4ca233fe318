"""The second space of a collection: vectors of another model beside the searched ones, while it moves to that model.

A collection moves in these steps, of which each is one transaction (plsc.gallery.migration takes them in turn):

1. ``begin_migration``: from here on whoever enrols gives vectors of both models (``NewPerson.others``), and a face that
   came without is listed by ``lacking``.
2. ``put_second_vectors`` fills the space. An adapter's estimate gives way to a face's own vector.
3. ``exchange_spaces``: searches read the other space, and the collection has the other model's contract id. Searches
   that began before end in the space that they began in. The same call goes back, with all that came since.
4. ``end_migration``: the space that no search reads goes, in the files as deleted vectors do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError
from plsc.gallery import validation
from plsc.gallery.rows import Change, MovableRows, Rows
from plsc.gallery.validation import MAX_ID
from plsc.gallery.values import Clock, Collection, FaceVectors, Migration, Person
from plsc.index.rows import unit_vectors

_T = TypeVar("_T")


class SecondSpaces(ABC):
    """What a :class:`plsc.gallery.store.Store` does with second spaces; it raises what that does."""

    clock: Clock

    @abstractmethod
    def _reading(self, collection: str) -> AbstractContextManager[Rows]: ...

    @abstractmethod
    def _change(self, collection: str, change: Change[_T]) -> _T: ...

    def migration(self, collection: str) -> Migration | None:
        """Return the migration of a collection; None: it has no second space."""
        with self._reading(collection) as rows:
            return rows.migration

    def spaces(self, collection: str) -> tuple[Collection, Migration | None]:
        """Return a collection and its migration, as of one moment."""
        with self._reading(collection) as rows:
            return rows.current, rows.migration

    def begin_migration(
        self, collection: str, dim: int, contract_id: str, details: Mapping[str, Any] | None = None
    ) -> Migration:
        """Give the faces of a collection a second space, of vectors with ``dim`` numbers by another model.

        Raises:
            ConflictError: it has one already, or ``contract_id`` is that of its own vectors.
        """
        validation.check_collection(collection, dim, contract_id)
        migration = Migration(int(dim), contract_id, validation.now(self.clock), details=dict(details or {}))

        def work(rows: Rows, _: object) -> Migration:
            if rows.migration is not None:
                raise ConflictError(f"{collection} is being moved to another model already; finish that, or cancel it")
            assert isinstance(rows, MovableRows), "the backend supports migrations"
            rows.begin_migration(migration)
            return migration

        def check(info: Collection, _: Migration | None) -> None:
            if info.contract_id == contract_id:
                raise ConflictError(f"the vectors of {collection} are of that model already; name another model")

        return self._change(collection, Change(work, check))

    def set_migration_details(
        self, collection: str, details: Mapping[str, Any], contract_ids: Sequence[str] | None = None
    ) -> Migration:
        """Store ``details`` (JSON) with a migration, in place of the former ones of the same names.

        With ``contract_ids`` of the searched space and the second one: :class:`ConflictError` if they are others now.
        """

        def work(rows: Rows, _: object) -> Migration:
            movable, migration = _migrating(rows)
            _check_contracts(rows, contract_ids)
            changed = replace(migration, details={**migration.details, **details})
            movable.update_migration(changed)
            return changed

        return self._change(collection, Change(work))

    def lacking(
        self, collection: str, *, after: int = 0, limit: int = 100, estimated: bool = False
    ) -> list[tuple[Person, tuple[int, ...]]]:
        """Return up to ``limit`` persons above ``after`` with those of their faces that lack a second vector.

        Args:
            collection: its name.
            after: an id; persons with larger ones are returned, by ascending id.
            limit: how many persons at most.
            estimated: count faces that have but an estimate, too.
        """
        validation.check_page(after, limit)
        with self._reading(collection) as rows:
            movable, _ = _migrating(rows)
            ids = movable.lacking(min(max(int(after), 0), MAX_ID), min(int(limit), MAX_ID), estimated=estimated)
            persons = rows.find_all(ids)
            found = movable.second_vectors(persons)
        lacks = {face for face, second in found.items() if second.is_estimated and estimated}
        return [
            (person, tuple(face for face in person.faces if face not in found or face in lacks)) for person in persons
        ]

    def face_vectors(
        self, collection: str, person: int, contract_ids: Sequence[str] | None = None
    ) -> dict[int, FaceVectors]:
        """Return {face: its vectors in both spaces} of a person, as of one moment.

        With ``contract_ids`` of the searched space and the second one: :class:`ConflictError` if they are others now.
        """
        with self._reading(collection) as rows:
            movable, _ = _migrating(rows)
            _check_contracts(rows, contract_ids)
            found = rows.require(person)
            searched, second = rows.vectors_of([found])[found.id], movable.second_vectors([found])
            estimated = movable.estimated_faces([found])
        both = {
            face: FaceVectors(vector, second.get(face), face in estimated)
            for face, vector in zip(found.faces, searched, strict=True)
        }
        # Zeros are of a face whose key was erased meanwhile: it is deleted.
        return {
            face: one
            for face, one in both.items()
            if one.searched.any() and (one.second is None or one.second.vector.any())
        }

    def count_second(self, collection: str) -> tuple[int, int]:
        """Return how many faces have no second vector, and how many an estimate."""
        with self._reading(collection) as rows:
            return _migrating(rows)[0].count_second()

    def put_second_vectors(
        self,
        collection: str,
        vectors: Mapping[int, Mapping[int, npt.ArrayLike]],
        contract_id: str,
        *,
        estimated: bool = False,
    ) -> int:
        """Store second vectors, {person: {face: (dim,)}}; returns how many.

        Persons and faces that are gone are passed over, and with ``estimated`` faces that have a vector of their own.

        Raises:
            ConflictError: the second space is not of ``contract_id``, as after a cut-over; or it is being exchanged.
        """

        def check(_: Collection, migration: Migration | None) -> dict[int, dict[int, Any]]:
            if migration is None or migration.contract_id != contract_id:
                raise ConflictError(
                    f"{collection} has no second space of the contract {ascii(contract_id)[:80]}; begin a migration"
                )
            return {
                person: dict(zip(own, unit_vectors(np.stack([*own.values()]), migration.dim), strict=True))
                for person, own in vectors.items()
                if own
            }

        def work(rows: Rows, checked: dict[int, dict[int, Any]]) -> int:
            count, (movable, _) = 0, _migrating(rows)
            for person in rows.find_all([id for id in checked if validation.is_id(id)]):
                known = movable.second_vectors([person]) if estimated else {}
                kept = {face for face, second in known.items() if not second.is_estimated}
                new = {face: row for face, row in checked[person.id].items() if face in {*person.faces} - kept}
                if new:
                    movable.put_second(person.id, list(new), np.stack([*new.values()]), is_estimated=estimated)
                count += len(new)
            return count

        return self._change(collection, Change(work, check, fills=True))

    def exchange_spaces(self, collection: str, contract_id: str) -> Collection:
        """Let searches read the second space, which is of ``contract_id``; the searched one becomes the second.

        If they read it already, nothing is done.

        Raises:
            ConflictError: there is no such space, or a face has no vector in it.
        """

        def work(rows: Rows, _: object) -> Collection:
            if must_exchange(rows, contract_id):
                _migrating(rows)[0].exchange_spaces()
            return rows.info

        return self._change(collection, Change(work))

    def end_migration(self, collection: str, contract_id: str) -> None:
        """Delete the second space of a collection, which is of ``contract_id``, with all vectors in it."""

        def work(rows: Rows, _: object) -> None:
            movable, migration = _migrating(rows)
            if migration.contract_id != contract_id:
                raise ConflictError(f"the second space of {collection} is of another contract; look at its migration")
            movable.end_migration()

        self._change(collection, Change(work, deleting=True))


def _migrating(rows: Rows) -> tuple[MovableRows, Migration]:
    migration = rows.migration
    if migration is None or not isinstance(rows, MovableRows):
        raise NotFoundError(f"{rows.info.name} is not being moved to another model; begin a migration")
    return rows, migration


def _check_contracts(rows: Rows, contract_ids: Sequence[str] | None) -> None:
    """:class:`ConflictError` unless the searched space and the second one are of these, as when somebody read them."""
    if contract_ids is None:
        return
    searched, second = contract_ids
    validation.check_contract(rows.current, searched)
    if _migrating(rows)[1].contract_id != second:
        raise ConflictError(f"{rows.info.name} is being moved to another model since; look at its migration")


def is_same_move(one: Migration | None, other: Migration | None) -> bool:
    """True if both are the migration of one second space, whatever its details are."""
    if one is None or other is None:
        return one is other
    return (one.contract_id, one.began) == (other.contract_id, other.began)


def must_exchange(rows: Rows, contract_id: str) -> bool:
    """Return False if searches read vectors of ``contract_id`` already; raises as ``exchange_spaces``."""
    movable, migration = _migrating(rows)
    if rows.info.contract_id == contract_id:
        return False
    if migration.contract_id != contract_id:
        raise ConflictError(
            f"{rows.info.name} has no space of the contract {ascii(contract_id)[:80]}; look at its migration"
        )
    lacking, _ = movable.count_second()
    if lacking:
        raise ConflictError(
            f"{lacking} faces of {rows.info.name} have no vector of that model; "
            "send their pictures again, estimate them by an adapter, or delete them"
        )
    return True


def exchanged(info: Collection, migration: Migration) -> tuple[Collection, Migration]:
    """Return a collection and its migration with the two spaces exchanged."""
    return (
        replace(info, dim=migration.dim, contract_id=migration.contract_id),
        replace(migration, dim=info.dim, contract_id=info.contract_id, is_cut_over=not migration.is_cut_over),
    )
