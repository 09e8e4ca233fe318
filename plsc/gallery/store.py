"""What every gallery backend is: a :class:`Store`, whose transactions see a collection as :class:`Rows`.

Every method that changes something returns only after the change is durable and visible to searches. Vectors are stored
normalised, float32.

Here stands what all backends do alike: they check what is given, and make each change of few primitives. To add a
backend, write a module with a subclass of each class and a function that opens the store by its address, and add a line
to :data:`plsc.gallery.backends.SERVERS`. The tests in tests/gallery run against every backend.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, UsageError
from plsc.gallery import validation
from plsc.gallery.filters import Filter
from plsc.gallery.rows import Change, Rows
from plsc.gallery.second_space import SecondSpaces
from plsc.gallery.validation import MAX_ID, ValidPerson, is_expired, is_id
from plsc.gallery.values import (
    KEEP,
    Clock,
    Collection,
    Float32,
    IdempotentRequest,
    Match,
    Metadata,
    Migration,
    NewPerson,
    Person,
    PersonSummary,
    Precondition,
    StoredAnswer,
    Unchanged,
)
from plsc.index.rows import unit_vectors

_NONE: Final[Mapping[str, npt.ArrayLike]] = MappingProxyType({})
_T = TypeVar("_T")


class Query(NamedTuple):
    """A search with valid options, whose ``vectors`` (Q, D) were not checked; for the rest see :meth:`Store.search`."""

    vectors: npt.ArrayLike
    k: int
    threshold: float
    filter: Filter | None
    contract_id: str | None

    def units(self, found: validation.Searched) -> Float32:
        """Return the vectors in float32, of length 1.

        Raises:
            ConflictError: they are of another model than the collection's.
            UsageError: they do not fit its dimension, or have no direction.
        """
        validation.check_query(found, self.contract_id)
        return unit_vectors(self.vectors, found.info.dim)


class Store(SecondSpaces):
    """A durable gallery. Its methods may be called from several threads at once.

    Raises, from every method: :class:`NotFoundError` for an unknown collection, person or face;
    :class:`UsageError` for vectors that are not finite numbers (n, dim) with a direction, and for an invalid name,
    metadata, filter or k; :class:`ConflictError` for a collection or external id that already exists or vectors of
    another contract id; :class:`PreconditionError` where a ``precondition`` does not hold; :class:`StorageError` if the
    store cannot write. After any of them nothing has changed.

    A person whose time has come (``expires``) is found by no method but :meth:`expired`, and is deleted by
    :meth:`delete_expired`. With ``idempotent`` a method stores the request's answer in the transaction of its change,
    and raises :class:`ConflictError` if there is one for the key already.

    Attributes:
        folder: where the store keeps its files; None: a server keeps them.
        clock: tells who has expired, and what is due.
        seals: it encrypts its vectors, and :meth:`sealed` the files beside it.
    """

    folder: Path | None = None
    clock: Clock = time
    seals: bool = False

    # --- what a backend gives besides the methods that are abstract below ---

    @abstractmethod
    def _reading(self, collection: str) -> AbstractContextManager[Rows]:
        """Yield the rows of a collection to a reader."""

    @abstractmethod
    def _change(self, collection: str, change: Change[_T]) -> _T:
        """Run a change in a transaction that no other change of the collection overlaps."""

    @abstractmethod
    def _create(self, name: str, dim: int, contract_id: str, idempotent: IdempotentRequest | None) -> Collection | None:
        """Create a collection whose name and dimension are valid; None: there is one of the name."""

    @abstractmethod
    def _search(self, collection: str, query: Query) -> list[list[Match]]:
        """Search as ``query`` asks."""

    # --- files beside the store, each of a face ---

    def sealed(self, person: int, contents: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return contents of files of a person's faces, encrypted where vectors are, without those of deleted faces."""
        return dict(contents)

    def unsealed(self, person: int, face: int, content: bytes) -> bytes | None:
        """Return what was :meth:`sealed` for this face; None: it was not, or the person's key is erased."""
        return content

    # --- collections ---

    @abstractmethod
    def collections(self) -> list[Collection]:
        """List all collections by name."""

    @abstractmethod
    def collection(self, name: str) -> Collection:
        """Return one collection."""

    def create_collection(
        self, name: str, dim: int, contract_id: str, *, idempotent: IdempotentRequest | None = None
    ) -> Collection:
        """Create a collection. A name is 1 to 64 letters, digits, ``_``, ``-`` or ``.``, beginning with a letter."""
        validation.check_collection(name, dim, contract_id)
        created = self._create(name, int(dim), contract_id, idempotent)
        if created is None:
            raise ConflictError(f"a collection {name} exists already; name another one, or delete it")
        return created

    def admit_model(self, collection: str, contract_id: str, compatible_with: Sequence[str]) -> None:
        """Let vectors of another model come beside those that a collection holds; its contract id names both then.

        Args:
            collection: its name.
            contract_id: of the model.
            compatible_with: the models whose vectors its own may be compared with (``Embedder.compatible_with``).

        Raises:
            ConflictError: the collection has vectors of a model that is not among them, or is being moved.
        """
        self._change(collection, Change(lambda rows, _: rows.admit(contract_id, compatible_with)))

    @abstractmethod
    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""

    # --- persons and faces ---

    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        *,
        compatible_with: Sequence[str] = (),
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        """Enrol all of ``persons`` or none; ``contract_id`` is the one their vectors were made under.

        With ``compatible_with``, and if there is a vector, the same change admits the model (:meth:`admit_model`).
        """

        def check(info: Collection, migration: Migration | None) -> list[ValidPerson]:
            return validation.check_persons(persons, contract_id, info, migration, compatible_with)

        work = _naming(Rows.enrol, contract_id, compatible_with, [person.vectors for person in persons])
        return self._change(collection, Change(work, check, idempotent))

    def put_person(
        self,
        collection: str,
        person: NewPerson,
        contract_id: str,
        *,
        compatible_with: Sequence[str] = (),
        precondition: Precondition | None = None,
    ) -> tuple[Person, bool]:
        """Enrol ``person``, or replace all of the one with its external id; returns True beside a new one.

        ``contract_id`` and ``compatible_with`` as in :meth:`add_persons`.
        """
        validation.check_external_id(person.external_id)

        def check(info: Collection, migration: Migration | None) -> ValidPerson:
            return validation.check_persons([person], contract_id, info, migration, compatible_with)[0]

        work = _naming(lambda rows, new: rows.put(new, precondition), contract_id, compatible_with, [person.vectors])
        return self._change(collection, Change(work, check))

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        with self._reading(collection) as rows:
            return rows.require(person)

    def find_person(self, collection: str, external_id: str) -> Person:
        """Return the person with an external id."""
        validation.check_external_id(external_id)
        with self._reading(collection) as rows:
            found = rows.living(external_id)
        if found is None:
            raise NotFoundError(f"{collection} has no person with the external id {external_id!a}")
        return found

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        validation.check_page(after, limit)
        _check_filter(filter)
        with self._reading(collection) as rows:
            return rows.page(min(max(int(after), 0), MAX_ID), min(int(limit), MAX_ID), filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id. The metadata may be shared: do not modify it."""
        with self._reading(collection) as rows:
            found = rows.find_all(sorted({int(id) for id in ids if is_id(id)}))
        living = (one for one in found if not is_expired(one.expires, self.clock))
        return {one.id: PersonSummary(one.id, one.name, one.metadata, one.external_id) for one in living}

    def update_person(
        self,
        collection: str,
        person: int,
        *,
        name: str | Unchanged | None = KEEP,
        metadata: Metadata | Unchanged = KEEP,
        expires: str | Unchanged | None = KEEP,
        precondition: Precondition | None = None,
    ) -> Person:
        """Change the name or the expiry, or replace the metadata of a person; None removes a name or an expiry."""
        fields = validation.check_fields(name=name, metadata=metadata, expires=expires)
        return self._change(collection, Change(lambda rows, _: rows.set_fields(person, fields, precondition)))

    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        """Delete a person and all faces: no later search finds them."""
        self._change(
            collection, Change(lambda rows, _: rows.delete(rows.expected(person, precondition)), deleting=True)
        )

    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        *,
        others: Mapping[str, npt.ArrayLike] = _NONE,
        keys: Sequence[str | None] = (),
        compatible_with: Sequence[str] = (),
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids. ``others`` and ``keys`` as in :class:`NewPerson`.

        A face whose key the person has is not added again: its place in the answer has the id of the one that is there.
        Likewise one with a key that the person has without any, by its embedding (of one model, cosine 0.99): that
        gets the key. ``contract_id`` and ``compatible_with`` as in :meth:`add_persons`.
        """

        def check(info: Collection, migration: Migration | None) -> tuple[Any, ...]:
            own, second = validation.check_vectors(vectors, contract_id, others, info, migration, compatible_with)
            return own, second, validation.check_keys(keys, len(own))

        work = _naming(lambda rows, new: rows.add_faces(person, *new), contract_id, compatible_with, [vectors])
        return self._change(collection, Change(work, check, idempotent))

    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
        """Delete one face of a person."""
        self._change(collection, Change(lambda rows, _: rows.delete_face(person, face, precondition), deleting=True))

    def vectors(self, collection: str, person: int, contract_id: str | None = None) -> Float32:
        """Return the stored vectors (n, dim) of a person, unit length, in the order of ``Person.faces``.

        With ``contract_id`` of the collection as it was: :class:`ConflictError` if it is another now, after a cut-over.
        """
        with self._reading(collection) as rows:
            if contract_id not in (None, rows.current.contract_id):
                raise ConflictError(
                    f"{collection} is of another model since: {rows.current.contract_id}; read it again"
                )
            found = rows.require(person)
            return rows.vectors_of([found])[found.id]

    # --- searches ---

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
        contract_id: str | None = None,
    ) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim), the ``k`` most similar persons with a score >= ``threshold``.

        Matches are sorted best first. A person appears once, with the best face. ``filter`` is applied before
        ranking, so k persons are returned whenever k match it. Fewer than k qualifying persons are all returned.
        With ``contract_id``, that of the model which made the queries, vectors of another one are not searched: a
        :class:`ConflictError` says that the collection was moved to it meanwhile.
        """
        validation.check_search(k, threshold)
        _check_filter(filter)
        return self._search(collection, Query(queries, int(k), float(threshold), filter, contract_id))

    def prepare_filter(self, collection: str, filter: Filter) -> Filter:
        """Look up who matches, where that takes long, for one search with the result soon after, on any thread.

        A :class:`plsc.gallery.filters.UnfinishedFilter` is no result yet, and goes in again: in between, others have
        their turns.
        """
        return filter

    def stopping_when(self, stop: Callable[[], bool]) -> AbstractContextManager[None]:
        """End what this thread reads in the block as soon as ``stop`` says so, by :class:`DeadlineError`."""
        return nullcontext()

    # --- persons whose time has come, and answers ---

    def expired(self, limit: int) -> dict[str, list[Person]]:
        """Return up to ``limit`` persons whose time has come, by collection."""
        found: dict[str, list[Person]] = {}
        for name in self._names_with_expired():
            with suppress(NotFoundError), self._reading(name) as rows:  # somebody deleted the collection meanwhile
                found[name] = rows.expired(limit)
                limit -= len(found[name])
        return found

    def _names_with_expired(self) -> list[str]:
        """Return the collections in which somebody's time may have come."""
        return []

    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        """Delete those of ``persons`` whose time has come; returns their ids."""
        return self._change(collection, Change(lambda rows, _: rows.delete_expired(persons), deleting=True))

    @abstractmethod
    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""

    @abstractmethod
    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""

    @abstractmethod
    def forget_answers(self, before: str, most: int) -> int:
        """Forget answers stored before a time, and all but the ``most`` newest of each token.

        Returns:
            How many were forgotten. More may be left where it is :data:`plsc.gallery.values.FORGOTTEN_AT_ONCE`: changes
            wait meanwhile, and a token may have had very many.
        """

    # --- maintenance ---

    def last_change(self) -> int | None:
        """Return the number of the last change of a collection, person or face; None: the store counts none."""
        return None

    @abstractmethod
    def compact(self, collection: str | None = None) -> None:
        """Merge additions and deletions into the searched files now; no file then holds what was deleted."""

    @abstractmethod
    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything to the new folder ``target``; :class:`ConflictError` if it exists."""

    @abstractmethod
    def check(self) -> dict[str, Any]:
        """Verify everything stored and return counts. Raises :class:`IntegrityError` naming what is damaged."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """Cheap figures for metrics and health: ``{collection: {"rows", "growing", "tombstones", "recall", …}}``.

        Those here are of a store that searches all rows, so no segment grows and the recall is 1.
        """
        return {
            info.name: {"rows": info.faces, "persons": info.persons, "growing": 0, "tombstones": 0, "recall": 1.0}
            for info in self.collections()
        }

    @abstractmethod
    def close(self) -> None:
        """Finish running work and release the store."""


def _naming(
    work: Callable[[Rows, Any], _T], contract_id: str, compatible_with: Sequence[str], added: Sequence[npt.ArrayLike]
) -> Callable[[Rows, Any], _T]:
    """Return ``work``, before which a model that is compatible with the collection's is admitted if it adds vectors."""

    def admit_and_work(rows: Rows, checked: Any) -> _T:
        if compatible_with and any(np.asarray(vectors).size for vectors in added):
            rows.admit(contract_id, compatible_with)
        return work(rows, checked)

    return admit_and_work


def _check_filter(filter: Filter | None) -> None:
    if filter is not None and not isinstance(filter, Filter):
        raise UsageError(f"a filter is made by Filter.parse, and not a {type(filter).__name__}")


# --- the numbers that a store gives its changes, handed from the thread that commits one to whoever logs it ---

_NUMBERS: ContextVar[list[int] | None] = ContextVar("numbers of changes", default=None)


def collect_changes() -> None:
    """Keep the numbers of changes made from here on in this context, and in copies of it.

    A store may count its changes, in their transactions. So a log that names the number of each shows later which
    changes have no line in it.
    """
    _NUMBERS.set([])


def note_change(number: int) -> None:
    """Say that a change got a number and is committed."""
    numbers = _NUMBERS.get()
    if numbers is not None:
        numbers.append(number)


def take_changes() -> list[int]:
    """Return the numbers kept in this context since they were last taken."""
    numbers = _NUMBERS.get()
    if not numbers:
        return []
    taken = numbers[:]
    numbers.clear()
    return taken
