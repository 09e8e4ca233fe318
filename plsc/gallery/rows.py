"""A collection in one transaction of its store: the primitives that a backend gives, and what is made of them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from plsc.embedding.contracts import joined
from plsc.errors import ConflictError, NotFoundError
from plsc.gallery import validation
from plsc.gallery.filters import Filter
from plsc.gallery.validation import ValidPerson, is_expired, is_id
from plsc.gallery.values import (
    Clock,
    Collection,
    Float32,
    IdempotentRequest,
    Migration,
    Person,
    Precondition,
    SecondVector,
)

SAME_PICTURE = 0.99  # cosine of two embeddings of one picture, decoded and aligned twice
_PAGE_PERSONS = 500  # of a walk over everybody
_T = TypeVar("_T")


class Rows(ABC):
    """A collection in one transaction of its store.

    Attributes:
        info: the collection.
        clock: the store's.
    """

    info: Collection
    clock: Clock = time

    @property
    def current(self) -> Collection:
        """The collection as this transaction sees it; in a read ``info`` may be of a moment before."""
        return self.info

    # --- the primitives of a backend ---

    @abstractmethod
    def find_all(self, ids: Sequence[int]) -> list[Person]:
        """Return those of ``ids`` that exist, by ascending id, also those whose time has come."""

    @abstractmethod
    def find_external(self, external_id: str) -> Person | None:
        """Return the person with an external id, even if its time has come."""

    @abstractmethod
    def page(self, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match and did not expire, by ascending id."""

    @abstractmethod
    def expired(self, limit: int) -> list[Person]:
        """Return up to ``limit`` persons whose time has come."""

    @abstractmethod
    def vectors_of(self, persons: Sequence[Person]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of ``Person.faces``}."""

    @abstractmethod
    def insert(self, persons: Sequence[ValidPerson]) -> list[Person]:
        """Insert persons with their faces under new ids."""

    @abstractmethod
    def insert_faces(self, owner: Person, vectors: Float32, second: Float32 | None) -> list[int]:
        """Insert faces of a person, with their vectors in the second space if there are any; returns their ids."""

    @abstractmethod
    def update(self, former: Person, changed: Person) -> None:
        """Store the name, metadata, external id, expiry and revision of ``changed`` in place of those of ``former``."""

    @abstractmethod
    def delete(self, person: Person) -> None:
        """Delete a person with all faces."""

    @abstractmethod
    def delete_faces(self, owner: Person, faces: Sequence[int]) -> None:
        """Delete faces of a person."""

    @abstractmethod
    def put_keys(self, owner: Person, keys: Mapping[int, str]) -> None:
        """Store keys of faces of a person, which have none; :meth:`delete_faces` deletes them with the faces."""

    @abstractmethod
    def set_contract(self, contract_id: str) -> None:
        """Store ``contract_id`` as the collection's, and have ``info`` say so."""

    @property
    def migration(self) -> Migration | None:
        """The collection's migration; None: it has no second space (:class:`MovableRows`)."""
        return None

    # --- reads made of them ---

    def require(self, person: Any) -> Person:
        """Return a person; :class:`NotFoundError` if there is none, or the time of it has come."""
        found = self.find_all([int(person)]) if is_id(person) else []
        if not found or is_expired(found[0].expires, self.clock):
            raise NotFoundError(f"{self.info.name} has no person {ascii(person)[:80]}")
        return found[0]

    def expected(self, person: Any, precondition: Precondition | None) -> Person:
        """Return a person who meets ``precondition``."""
        found = self.require(person)
        if precondition is not None:
            precondition.check(found)
        return found

    def living(self, external_id: str) -> Person | None:
        """Return the person with an external id whose time has not come."""
        found = self.find_external(external_id)
        return None if found is None or is_expired(found.expires, self.clock) else found

    def everyone(self) -> Iterator[tuple[Person, Float32]]:
        """Yield every person with the vectors, by id."""
        after = 0
        while persons := self.page(after, _PAGE_PERSONS, None):
            vectors = self.vectors_of(persons)
            for person in persons:
                yield person, vectors[person.id]
            after = persons[-1].id

    # --- changes made of them ---

    def admit(self, contract_id: str, compatible_with: Sequence[str]) -> None:
        """Have the collection's contract id name a model; see :meth:`plsc.gallery.store.Store.admit_model`."""
        validation.check_contract(self.info, contract_id, compatible_with)
        space = joined(self.info.contract_id, contract_id)
        if space != self.info.contract_id:
            if self.migration is not None:
                raise ConflictError(f"{self.info.name} is being moved to another model: finish that, or cancel it")
            validation.check_collection(self.info.name, self.info.dim, space)
            self.set_contract(space)

    def enrol(self, persons: Sequence[ValidPerson]) -> list[Person]:
        """Insert ``persons``; :class:`ConflictError` if a living person has the external id of one.

        One who expired gives the external id up and stays, to be deleted by who deletes all the others who expired.
        """
        for external_id in (person.external_id for person in persons if person.external_id is not None):
            former = self.find_external(external_id)
            if former is None:
                continue
            if not is_expired(former.expires, self.clock):
                raise ConflictError(
                    f"{self.info.name} has a person with the external id {external_id!a} already; "
                    "put a person to replace it"
                )
            self.update(former, replace(former, external_id=None))
        added = self.insert(persons)
        return [self._with_keys(one, one.faces, new.keys) for one, new in zip(added, persons, strict=True)]

    def put(self, person: ValidPerson, precondition: Precondition | None) -> tuple[Person, bool]:
        """Insert ``person``, or replace the one with its external id; returns True beside one that is new."""
        assert person.external_id is not None, "it was checked"
        former = self.living(person.external_id)
        if precondition is not None:
            precondition.check(former)
        if former is None:
            return self.enrol([person])[0], True
        self.delete_faces(former, former.faces)
        faces = tuple(self.insert_faces(former, person.vectors, person.second))
        changed = replace(former, name=person.name, metadata=person.metadata, expires=person.expires, faces=faces)
        saved = self._save(former, replace(changed, keys={}))
        return self._with_keys(saved, faces, person.keys), False

    def add_faces(
        self, person: Any, vectors: Float32, second: Float32 | None, keys: Sequence[str | None] = ()
    ) -> list[int]:
        """Add faces to a person; returns the id of each, that of the person's own face where there is one of its key.

        A face with a key is not added either where the person has it without one (:func:`same_faces`): it gets the key.
        """
        owner = self.require(person)
        found = dict[int, int]() if not keys else self._known_faces(owner, vectors, keys)
        new = [row for row in range(len(vectors)) if row not in found]
        if new:
            added = self.insert_faces(owner, vectors[new], None if second is None else second[new])
            found |= dict(zip(new, added, strict=True))
        faces = [found[row] for row in range(len(vectors))]
        keyed = self._with_keys(owner, faces, keys)
        if new or keyed is not owner:
            self._save(owner, owner)
        return faces

    def _known_faces(self, owner: Person, vectors: Float32, keys: Sequence[str | None]) -> dict[int, int]:
        """Return {row: face of ``owner``} of the rows that the person has already."""
        faces_by_key = {key: face for face, key in owner.keys.items()}
        found = {row: faces_by_key[key] for row, key in enumerate(keys) if key in faces_by_key}
        rows = [row for row, key in enumerate(keys) if key is not None and row not in found]
        bare = [place for place, face in enumerate(owner.faces) if face not in owner.keys]
        if rows and bare:
            same = same_faces(vectors[rows], self.vectors_of([owner])[owner.id][bare])
            found |= {rows[row]: owner.faces[bare[place]] for row, place in same}
        return found

    def _with_keys(self, owner: Person, faces: Sequence[int], keys: Sequence[str | None]) -> Person:
        """Store the keys of faces, where they have none, and return their person with them."""
        given = {face: key for face, key in zip(faces, keys, strict=bool(keys)) if key and face not in owner.keys}
        if not given:
            return owner
        self.put_keys(owner, given)
        return replace(owner, keys={**owner.keys, **given})

    def set_fields(self, person: Any, fields: dict[str, Any], precondition: Precondition | None) -> Person:
        """Set ``fields`` of a person, which gets another revision if that changes anything."""
        former = self.expected(person, precondition)
        changed = replace(former, **fields)
        return former if validation.same_content(changed, former) else self._save(former, changed)

    def delete_face(self, person: Any, face: Any, precondition: Precondition | None) -> None:
        """Delete a face of a person."""
        owner = self.require(person)
        if not is_id(face) or face not in owner.faces:
            raise NotFoundError(f"person {person} of {self.info.name} has no face {ascii(face)[:80]}")
        if precondition is not None:
            precondition.check(owner)
        self.delete_faces(owner, [int(face)])
        self._save(owner, owner)

    def delete_expired(self, persons: Sequence[int]) -> list[int]:
        """Delete those of ``persons`` whose time has come; returns their ids."""
        found = self.find_all([int(person) for person in persons if is_id(person)])
        gone = [person for person in found if is_expired(person.expires, self.clock)]
        for person in gone:
            self.delete(person)
        return [person.id for person in gone]

    def _save(self, former: Person, changed: Person) -> Person:
        """Store a changed person under the next revision."""
        changed = replace(changed, revision=former.revision + 1)
        self.update(former, changed)
        return changed


class MovableRows(Rows):
    """Rows of a backend that supports migrations: the primitives of the second space.

    But for :meth:`begin_migration` they are called while there is a migration.
    """

    @abstractmethod
    def begin_migration(self, migration: Migration) -> None:
        """Give the faces room for vectors of another model."""

    @abstractmethod
    def update_migration(self, migration: Migration) -> None:
        """Store ``migration`` in place of the former one."""

    @abstractmethod
    def end_migration(self) -> None:
        """Delete the second space with its vectors."""

    def exchange_spaces(self) -> None:
        """Make the second space, in which every face has a vector, the searched one, and the reverse.

        Not called by a store with a method of its own for it.
        """
        raise NotImplementedError

    @abstractmethod
    def put_second(self, person: int, faces: Sequence[int], vectors: Float32, *, is_estimated: bool) -> None:
        """Store vectors (n, dim) of faces of a person in the second space, in place of those that they have there."""

    @abstractmethod
    def second_vectors(self, persons: Sequence[Person]) -> dict[int, SecondVector]:
        """Return {face: its vector in the second space}, of the faces of ``persons`` that have one."""

    @abstractmethod
    def estimated_faces(self, persons: Sequence[Person]) -> set[int]:
        """Return the faces of ``persons`` whose searched vectors are estimates."""

    @abstractmethod
    def count_second(self) -> tuple[int, int]:
        """Return how many faces have no vector in the second space, and how many an estimate."""

    @abstractmethod
    def lacking(self, after: int, limit: int, *, estimated: bool) -> list[int]:
        """Return up to ``limit`` persons above ``after``, by id, of whom a face has no vector in the second space.

        Args:
            after: an id.
            limit: how many at most.
            estimated: return those with an estimate, too.
        """


def same_faces(new: Float32, own: Float32) -> list[tuple[int, int]]:
    """Return (row of ``new``, row of ``own``) of embeddings (n, dim) of one picture, each row in one pair at the most.

    The most alike come first, so that of two pictures that are nearly the same each is taken for itself.
    """
    cosines = new @ own.T
    pairs = list[tuple[int, int]]()
    for place in np.argsort(-cosines, axis=None, kind="stable"):
        row, other = divmod(int(place), len(own))
        if cosines[row, other] < SAME_PICTURE:
            break
        if all(row != one and other != two for one, two in pairs):
            pairs.append((row, other))
    return pairs


@dataclass(frozen=True)
class Change(Generic[_T]):
    """What is to be done in a transaction of a collection.

    Attributes:
        work: ``work(rows, checked)`` does it.
        check: ``check(info, migration)`` checks first, if it can without a lock, what is to be written; returns
            ``checked``. It is called again if the collection's model is another by the time of the transaction.
        idempotent: its answer is stored with the change.
        deleting: it may use the space that is kept back on a full disk.
        fills: it puts vectors into the second space of faces that are there, and never while that is exchanged.
    """

    work: Callable[[Rows, Any], _T]
    check: Callable[[Collection, Migration | None], Any] = lambda info, migration: None
    idempotent: IdempotentRequest | None = None
    deleting: bool = False
    fills: bool = False
