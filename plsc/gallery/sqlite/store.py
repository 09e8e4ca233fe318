"""The gallery in one folder, as a :class:`plsc.gallery.store.Store`; plsc/gallery/sqlite/__init__.py shows its layout.

How a change becomes durable and visible: validate the arguments, take the write lock, allocate memory for the new view,
commit in SQLite, publish the view. What raises an error does so before the commit and leaves no trace; what is
acknowledged is durable and found. How a deleted vector leaves the files: plsc/gallery/sqlite/compaction.py.

Locks, in the order in which they are taken:

- ``_maintenance.lock``: one compaction, snapshot or check at a time.
- ``_write_lock``: one writer at a time, from BEGIN until the view shows what was committed; reentrant.
- the person caches' own locks.

Searches take none of them: they read a collection's current view and work on that.
"""

import math
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, StorageError, UsageError
from plsc.gallery.change_numbers import note_change
from plsc.gallery.filters import Filter, PreparedFilter
from plsc.gallery.person_search import search_persons
from plsc.gallery.sqlite import COLLECTIONS, changes, reads, records
from plsc.gallery.sqlite.answers import delete_answers, find_answer, insert_answer
from plsc.gallery.sqlite.backup import write_snapshot
from plsc.gallery.sqlite.collection_state import AnnPlanner, CollectionState
from plsc.gallery.sqlite.compaction import Compactor
from plsc.gallery.sqlite.folder import open_folder
from plsc.gallery.sqlite.integrity import check_store
from plsc.gallery.sqlite.maintenance import Maintenance
from plsc.gallery.sqlite.segments import SealedSegment
from plsc.gallery.sqlite.unfinished import note_deletion_time
from plsc.gallery.store import (
    COMPACT_WITHIN,
    KEEP,
    Collection,
    Float32,
    IdempotentRequest,
    Match,
    Metadata,
    NewPerson,
    Person,
    PersonSummary,
    Precondition,
    StoredAnswer,
    Unchanged,
)
from plsc.gallery.validation import (
    ValidPerson,
    check_collection,
    check_contract,
    check_external_id,
    check_fields,
    check_page,
    check_persons,
    check_search,
    now,
)
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64, unit_vectors

_T = TypeVar("_T")


class SqliteStore:
    """A :class:`plsc.gallery.store.Store` in the folder ``folder``, which is created if there is none.

    Args:
        precision: "bf16" keeps a copy of the vectors in memory, of 2 bytes a number, for searching; "fp32" scans the
            mapped files.
        latency_ms: if an exact search of a single query takes longer, an approximate one is looked for that finds 99%
            of the ten nearest faces; :meth:`statistics` reports its recall. None: always exact.
        compact_within: seconds after which no file of the store holds a deleted face's vector, or texts of a person who
            was deleted, or which were changed.
        key_file: with the master key of an encrypted store (plsc.gallery.sqlite.keys); None: it is not encrypted.

    Raises:
        ConflictError: another process has the store.
        UsageError, DataError: the folder holds something else, or ``key_file`` is not this store's.
        IntegrityError: SQLite's file is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        precision: str = "bf16",
        latency_ms: float | None = None,
        compact_within: float = COMPACT_WITHIN,
        key_file: str | Path | None = None,
    ) -> None:
        if not 0 < compact_within < math.inf:
            raise UsageError(f"deleted faces cannot leave the files within {compact_within} s; give a time above 0")
        self.folder = Path(folder)
        self._planner = AnnPlanner(latency_ms, self._publish_ann)
        self._lock, self._reserve, self._database = open_folder(
            self.folder, None if key_file is None else Path(key_file)
        )
        self._write_lock = threading.RLock()
        try:
            compactor = Compactor(self._database, self.folder / COLLECTIONS, self._write_lock, precision)
            # Replaced, never modified: readers take it without a lock.
            self._states: dict[str, CollectionState] = compactor.open_collections()
            with self._database.reading() as db:
                self._database.codec.recover(db)
                for state in self._states.values():
                    state.next_expiry = reads.next_expiry(db, state.number)
            self._maintenance = Maintenance(
                compactor, self._planner, lambda: self._states.values(), self._write_lock, compact_within
            )
        except BaseException:
            self._database.close()
            self._lock.release()
            raise
        self._reserve.hold()
        for state in self._states.values():
            self._planner.consider(state)
        self._maintenance.wake()

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        with self._database.reading() as db:
            return [stored.info for stored in records.all_collections(db)]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        number = self._state(name).number
        with self._database.reading() as db:
            stored = records.find_collection(db, number)
        if stored is None:
            raise _no_collection(name)
        return stored.info

    def create_collection(
        self, name: str, dim: int, contract_id: str, *, idempotent: IdempotentRequest | None = None
    ) -> Collection:
        """Create a collection."""
        check_collection(name, dim, contract_id)
        with self._write_lock:
            self._reserve.require()
            if name in self._states:
                raise ConflictError(f"a collection {name} exists already; choose another name")
            with self._numbered() as db:
                number = records.insert_collection(db, name, dim, contract_id, now())
                stored = records.find_collection(db, number)
                assert stored is not None
                insert_answer(db, idempotent, stored.info, now())
            self._states = {**self._states, name: CollectionState(stored, None, [], [])}
        return stored.info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._write_lock:
            state = self._state(name)
            self._commit_deletion(lambda db: records.delete_collection(db, state.number))
            state.deleted = True
            self._states = {other: kept for other, kept in self._states.items() if other != name}
            self._database.codec.require_erased()
        self._database.codec.sync_erased()
        self._maintenance.wake()

    # --- persons and faces ---

    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        state = self._state(collection)
        check_contract(state.info, contract_id)
        checked = check_persons(persons, state.info.dim)
        if not checked:
            return []
        with self._changing(state):
            _prepare(state, checked)
            with self._numbered() as db:
                created, added = changes.enrol(db, state, checked)
                insert_answer(db, idempotent, created, now())
            state.publish_added(added)
        return created

    def put_person(
        self, collection: str, person: NewPerson, contract_id: str, *, precondition: Precondition | None = None
    ) -> tuple[Person, bool]:
        """Enrol ``person``, or replace all of the one with its external id."""
        state = self._state(collection)
        check_contract(state.info, contract_id)
        check_external_id(person.external_id)
        checked = check_persons([person], state.info.dim)
        with self._changing(state):
            _prepare(state, checked)
            with self._numbered() as db:
                change, is_new = changes.put(db, state, checked[0], precondition)
                if change.gone:
                    note_deletion_time(db)
            with state.persons.invalidating(change.person.id):
                state.publish_replaced(change.added, change.gone)
        return change.person, is_new

    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        state = self._state(collection)
        check_contract(state.info, contract_id)
        checked = unit_vectors(vectors, state.info.dim)
        with self._changing(state):
            state.reserve(len(checked))
            with self._numbered() as db:
                faces = changes.add_faces(db, state, person, checked)
                ids: list[int] = faces.ids.tolist()
                insert_answer(db, idempotent, ids, now())
            state.publish_added(faces)
        return ids

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
        """Change the name or the expiry, or replace the metadata of a person."""
        state = self._state(collection)
        fields = check_fields(name=name, metadata=metadata, expires=expires)
        with self._changing(state):
            state.note_expiry(fields.get("expires"))
            with state.persons.invalidating(person), self._numbered() as db:
                changed = changes.update(db, state, person, fields, precondition)
            state.publish_changed()
        return changed

    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        """Delete a person and all faces."""
        state = self._state(collection)
        with self._changing(state, deleting=True), state.persons.invalidating(person):
            gone = self._commit_deletion(lambda db: changes.delete_person(db, state, person, precondition))
            state.publish_deleted(gone)

    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
        """Delete one face of a person."""
        state = self._state(collection)
        with self._changing(state, deleting=True):
            gone = self._commit_deletion(lambda db: changes.delete_face(db, state, person, face, precondition))
            state.publish_deleted(gone)

    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        """Delete those of ``persons`` whose time has come; returns their ids."""
        state = self._state(collection)
        with self._changing(state, deleting=True):
            gone = self._commit_deletion(lambda db: changes.delete_expired(db, state, persons))
            for person in gone:
                with state.persons.invalidating(person.id):
                    state.publish_deleted(person.faces)
            with self._database.reading() as db:
                state.next_expiry = reads.next_expiry(db, state.number)
        return [person.id for person in gone]

    @contextmanager
    def _changing(self, state: CollectionState, *, deleting: bool = False) -> Iterator[None]:
        """Hold the write lock for a change of one collection; afterwards wake the maintenance if it is due."""
        with self._write_lock:
            if state.deleted:
                raise _no_collection(state.info.name)
            if not deleting:
                self._reserve.require()
            yield
            self._database.codec.require_erased()
        self._database.codec.sync_erased()
        if state.needs_compaction:
            self._maintenance.wake()

    @contextmanager
    def _numbered(self) -> Iterator[sqlite3.Connection]:
        """Run the transaction of a change, which gets the next number if it changes anything."""
        number = None
        with self._database.writing() as db:
            before = db.total_changes
            yield db
            if db.total_changes != before:
                number = records.count_change(db)
        if number is not None:
            note_change(number)

    def _commit_deletion(self, delete: Callable[[sqlite3.Connection], _T]) -> _T:
        """Commit a deletion; on a full disk in the space kept back, and in what the log has used."""

        def commit() -> _T:
            with self._numbered() as db:
                note_deletion_time(db)
                return delete(db)

        try:
            return commit()
        except StorageError:
            self._reserve.release()
            with suppress(StorageError):
                self._database.truncate_log()
            return commit()

    # --- reading ---

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        state = self._state(collection)
        with self._database.snapshot() as db:
            return reads.find_person(db, state, person)

    def find_person(self, collection: str, external_id: str) -> Person:
        """Return the person with an external id."""
        state = self._state(collection)
        check_external_id(external_id)
        with self._database.snapshot() as db:
            return reads.find_by_external_id(db, state, external_id)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        state = self._state(collection)
        check_page(after, limit, filter)
        with self._database.snapshot() as db:
            return reads.select_page(db, state, after, limit, filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id."""
        return reads.find_summaries(self._database, self._state(collection), ids)

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, unit length, in the order of ``Person.faces``."""
        state = self._state(collection)
        with self._database.snapshot() as db:
            found = reads.find_person(db, state, person)
            vectors = records.read_vectors(db, found.faces, state.info.dim)
        if not vectors.any(axis=1).all():  # some were deleted, with their key, while they were read
            return self.vectors(collection, person)
        return vectors

    def expired(self, limit: int) -> dict[str, list[Person]]:
        """Return up to ``limit`` persons whose time has come, by collection."""
        found: dict[str, list[Person]] = {}
        for name, state in self._states.items():
            if state.has_expired and limit > 0:
                with self._database.snapshot() as db:
                    found[name] = reads.select_expired(db, state.number, limit)
                limit -= len(found[name])
        return found

    def last_change(self) -> int:
        """Return the number of the last change of a collection, person or face; 0: there was none."""
        with self._database.reading() as db:
            return records.last_id(db, records.CHANGES)

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""
        with self._database.reading() as db:
            return find_answer(db, token, key)

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""
        with self._write_lock:
            self._reserve.require()
            with self._database.writing() as db:
                insert_answer(db, idempotent, result, now())

    def forget_answers(self, before: str, most: int) -> int:
        """Forget answers stored before a time, and all but the ``most`` newest of each token; returns how many."""
        with self._write_lock, self._database.writing() as db:
            return delete_answers(db, before, most)

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim), the ``k`` most similar persons with a score >= ``threshold``."""
        state = self._state(collection)
        check_search(k, threshold, filter)
        units = unit_vectors(queries, state.info.dim)
        view, masks = (
            filter.found if isinstance(filter, PreparedFilter) else reads.matching_rows(self._database, state, filter)
        )

        def knn(some: Float32, count: int) -> tuple[Float32, Int64, Int64]:
            return view.knn(some, count, masks)

        return search_persons(knn, units, int(k), float(threshold), view.max_faces)

    def prepare_filter(self, collection: str, filter: Filter) -> PreparedFilter:
        """Look up who matches, so that a search with the result, on another thread, needs SQLite no more."""
        state = self._state(collection)
        check_search(1, -1.0, filter)
        found = reads.matching_rows(self._database, state, filter)
        return PreparedFilter(filter.conditions, found, (id(found[0]), repr(filter.conditions)))

    def stopping_when(self, stop: Callable[[], bool]) -> AbstractContextManager[None]:
        """End what this thread reads in the block as soon as ``stop`` says so, by :class:`DeadlineError`."""
        return self._database.stopping_when(stop)

    # --- maintenance ---

    def compact(self, collection: str | None = None) -> None:
        """Rebuild the segments, and erase deleted vectors and texts: no file of the store holds one afterwards."""
        states = [self._state(collection)] if collection is not None else list(self._states.values())
        try:
            self._maintenance.compact(states)
        finally:
            self._reserve.hold()

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything to the new folder ``target``."""
        with self._maintenance.lock:
            write_snapshot(self._database, Path(target))

    def check(self, snapshots: Path | None = None) -> dict[str, Any]:
        """Verify every row and every file, and the ``snapshots`` of a folder beside the store's own.

        See :func:`plsc.gallery.sqlite.integrity.check_store`.
        """
        with self._maintenance.lock:
            with self._write_lock, self._database.reading() as db:
                self._database.codec.check(db)
            return check_store(self._database, self.folder, snapshots)

    def statistics(self) -> dict[str, dict[str, float]]:
        """``{collection: {"rows", "base", "delta", "tombstones", "memory_bytes", "approximate", "recall",
        "failed_compactions"}}``; base and delta are the rows of the sealed and of the growing segment."""
        return {
            name: {**state.statistics(), "failed_compactions": self._maintenance.failures}
            for name, state in self._states.items()
        }

    def close(self) -> None:
        """Finish running work and release the store."""
        self._maintenance.close()
        self._planner.close()
        with self._maintenance.lock, self._write_lock:
            self._database.close()
            self._reserve.hold()
            self._lock.release()

    def _publish_ann(self, state: CollectionState, sealed: SealedSegment, ann: ApproximateSearch) -> None:
        with self._write_lock:
            state.publish_ann(sealed, ann)

    def _state(self, name: str) -> CollectionState:
        state = self._states.get(name) if isinstance(name, str) else None
        if state is None:
            raise _no_collection(name)
        return state


def _prepare(state: CollectionState, persons: Sequence[ValidPerson]) -> None:
    """Make ready for ``persons`` before their commit, so that publishing them cannot fail."""
    state.reserve(sum(len(person.vectors) for person in persons))
    for person in persons:
        state.note_expiry(person.expires)


def _no_collection(name: Any) -> NotFoundError:
    return NotFoundError(f"there is no collection {ascii(name)[:80]}")
