"""The gallery in one folder, as a :class:`plsc.gallery.store.Store`; plsc/gallery/sqlite/__init__.py shows its layout.

How a change becomes durable and visible: validate the arguments, take the write lock, allocate memory for the new view,
commit in SQLite, publish the view. What raises an error does so before the commit and leaves no trace; what is
acknowledged is durable and found. How a deleted vector leaves the files: plsc/gallery/sqlite/compaction.py.

Locks, in the order in which they are taken:

- ``_maintenance_lock``: one compaction, snapshot or check at a time.
- ``_write_lock``: one writer at a time, from BEGIN until the view shows what was committed; reentrant.
- the person caches' own locks.

Searches take none of them: they read a collection's current view and work on that.
"""

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, StorageError
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.person_search import search_persons
from plsc.gallery.sqlite import COLLECTIONS, records
from plsc.gallery.sqlite.backup import write_snapshot
from plsc.gallery.sqlite.collection_state import AnnPlanner, CollectionState
from plsc.gallery.sqlite.compaction import Compactor, MaintenanceThread
from plsc.gallery.sqlite.folder import open_folder
from plsc.gallery.sqlite.integrity import check_store
from plsc.gallery.sqlite.segments import RowMasks, SealedSegment, SegmentView
from plsc.gallery.store import Collection, Float32, Match, Metadata, NewPerson, Person, PersonSummary
from plsc.gallery.validation import (
    check_collection,
    check_contract,
    check_name,
    check_page,
    check_persons,
    check_search,
    is_id,
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

    Raises:
        ConflictError: another process has the store.
        UsageError, DataError: the folder holds something else.
        IntegrityError: SQLite's file is damaged.
    """

    def __init__(self, folder: str | Path, *, precision: str = "bf16", latency_ms: float | None = None) -> None:
        self.folder = Path(folder)
        self._planner = AnnPlanner(latency_ms, self._publish_ann)
        self._lock, self._reserve, self._database = open_folder(self.folder)
        self._write_lock = threading.RLock()
        self._maintenance_lock = threading.Lock()
        try:
            self._compactor = Compactor(self._database, self.folder / COLLECTIONS, self._write_lock, precision)
            # Replaced, never modified: readers take it without a lock.
            self._states: dict[str, CollectionState] = self._compactor.open_collections()
            self._failed_compactions = 0
            self._maintenance = MaintenanceThread(self._maintain, self._note_failure)
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

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Create a collection."""
        check_collection(name, dim, contract_id)
        with self._write_lock:
            self._reserve.require()
            if name in self._states:
                raise ConflictError(f"a collection {name} exists already; choose another name")
            with self._database.writing() as db:
                number = records.insert_collection(db, name, dim, contract_id, now())
                stored = records.find_collection(db, number)
                assert stored is not None
            self._states = {**self._states, name: CollectionState(stored, None, [], [])}
        return stored.info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._write_lock:
            state = self._state(name)
            self._commit_deletion(lambda db: records.delete_collection(db, state.number))
            state.deleted = True
            self._states = {other: kept for other, kept in self._states.items() if other != name}
        self._maintenance.wake()

    # --- persons and faces ---

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        state = self._state(collection)
        check_contract(state.info, contract_id)
        checked = check_persons(persons, state.info.dim)
        if not checked:
            return []
        with self._changing(state):
            state.reserve(sum(len(person.vectors) for person in checked))
            with self._database.writing() as db:
                created, faces = records.insert_persons(db, state.number, checked, now())
            state.publish_added(faces)
        return created

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        state = self._state(collection)
        check_contract(state.info, contract_id)
        checked = unit_vectors(vectors, state.info.dim)
        with self._changing(state):
            state.reserve(len(checked))
            with self._database.writing() as db:
                owner = _find_person(db, state, person)
                faces = records.insert_faces(db, state.number, owner.id, checked)
            state.publish_added(faces)
        ids: list[int] = faces.ids.tolist()
        return ids

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata of a person; None keeps the current value."""
        state = self._state(collection)
        check_name(name)
        new_metadata = None if metadata is None else check_metadata(metadata)
        with self._changing(state):
            with state.persons.invalidating(person), self._database.writing() as db:
                former = _find_person(db, state, person)
                changed = replace(
                    former,
                    name=former.name if name is None else name,
                    metadata=former.metadata if new_metadata is None else new_metadata,
                )
                records.update_person(db, state.number, former, changed)
            state.publish_changed()
        return changed

    def delete_person(self, collection: str, person: int) -> None:
        """Delete a person and all faces."""
        state = self._state(collection)

        def delete(db: sqlite3.Connection) -> Sequence[int]:
            former = _find_person(db, state, person)
            records.delete_person(db, state.number, former)
            return former.faces

        with self._changing(state, deleting=True), state.persons.invalidating(person):
            state.publish_deleted(self._commit_deletion(delete))

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Delete one face of a person."""
        state = self._state(collection)

        def delete(db: sqlite3.Connection) -> Sequence[int]:
            if not is_id(face) or face not in _find_person(db, state, person).faces:
                raise NotFoundError(f"person {person} of {collection} has no face {ascii(face)[:80]}")
            records.delete_face(db, state.number, int(face))
            return [face]

        with self._changing(state, deleting=True):
            state.publish_deleted(self._commit_deletion(delete))

    @contextmanager
    def _changing(self, state: CollectionState, *, deleting: bool = False) -> Iterator[None]:
        """Hold the write lock for a change of one collection; afterwards wake the maintenance if it is due."""
        with self._write_lock:
            if state.deleted:
                raise _no_collection(state.info.name)
            if not deleting:
                self._reserve.require()
            yield
        if state.needs_compaction:
            self._maintenance.wake()

    def _commit_deletion(self, delete: Callable[[sqlite3.Connection], _T]) -> _T:
        """Commit a deletion; on a full disk in the space kept back, and in what the log has used."""
        try:
            with self._database.writing() as db:
                return delete(db)
        except StorageError:
            self._reserve.release()
            with suppress(StorageError):
                self._database.truncate_log()
            with self._database.writing() as db:
                return delete(db)

    # --- reading ---

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        state = self._state(collection)
        with self._database.snapshot() as db:
            return _find_person(db, state, person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        state = self._state(collection)
        check_page(after, limit, filter)
        if not -(2**63) <= after < 2**63:
            return []
        with self._database.snapshot() as db:
            text, values = records.filter_clause(db, state.number, filter)
            parameters = [state.number, int(after), *values]
            condition = f"p.collection = ? AND p.id > ?{text}"
            return records.select_persons(db, condition, parameters, min(int(limit), 2**62))

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id."""
        state = self._state(collection)

        def read(missing: list[int]) -> dict[int, PersonSummary]:
            with self._database.reading() as db:
                return records.find_summaries(db, state.number, [person for person in missing if is_id(person)])

        # A plain int needs no check here, which costs more than the lookup: only ids are ever in the cache.
        plain = [id if type(id) is int else int(id) for id in ids if type(id) is int or is_id(id)]
        return state.persons.get(plain, read)

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, unit length, in the order of ``Person.faces``."""
        state = self._state(collection)
        with self._database.snapshot() as db:
            return records.read_vectors(db, _find_person(db, state, person).faces, state.info.dim)

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
        view = state.view
        masks = self._masks(state, view, filter)

        def knn(some: Float32, count: int) -> tuple[Float32, Int64, Int64]:
            return view.knn(some, count, masks)

        return search_persons(knn, units, int(k), float(threshold), view.max_faces)

    def _masks(self, state: CollectionState, view: SegmentView, filter: Filter | None) -> RowMasks:
        """Return the rows of ``view`` that match. SQLite answers as of now, which is as of ``view``, or later."""
        key = "" if filter is None else repr(filter.conditions)  # not the filter itself: to Python, 1 equals True
        masks = view.masks.get(key)
        if masks is None:
            masks = view.masks_of(None if filter is None else self._matching_persons(state, filter))
            view.cache_masks(key, masks)
        return masks

    def _matching_persons(self, state: CollectionState, filter: Filter) -> Int64:
        with self._database.reading() as db:
            text, values = records.filter_clause(db, state.number, filter)
            rows = db.execute(f"SELECT p.id FROM persons p WHERE p.collection = ?{text}", (state.number, *values))
            return np.fromiter((row[0] for row in rows), np.int64)

    # --- maintenance ---

    def compact(self, collection: str | None = None) -> None:
        """Rebuild the segments and erase deleted vectors: no file of the store holds one afterwards."""
        states = [self._state(collection)] if collection is not None else list(self._states.values())
        with self._maintenance_lock:
            for state in states:
                self._compact(state)
            self._compactor.erase_orphans()
            self._compactor.reclaim_space()
        self._reserve.hold()

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything to the new folder ``target``."""
        with self._maintenance_lock:
            write_snapshot(self._database, Path(target))

    def check(self) -> dict[str, Any]:
        """Verify every row and every file; see :func:`plsc.gallery.sqlite.integrity.check_store`."""
        with self._maintenance_lock:
            return check_store(self._database, self.folder)

    def statistics(self) -> dict[str, dict[str, float]]:
        """``{collection: {"rows", "base", "delta", "tombstones", "memory_bytes", "approximate", "recall",
        "failed_compactions"}}``; base and delta are the rows of the sealed and of the growing segment."""
        return {
            name: {**state.statistics(), "failed_compactions": self._failed_compactions}
            for name, state in self._states.items()
        }

    def close(self) -> None:
        """Finish running work and release the store."""
        self._maintenance.close()
        self._planner.close()
        with self._maintenance_lock, self._write_lock:
            self._database.close()
            self._reserve.hold()
            self._lock.release()

    def _maintain(self) -> None:
        """Compact what needs it; run by the maintenance thread."""
        with self._maintenance_lock:
            due = [state for state in self._states.values() if state.needs_compaction]
            for state in due:
                self._compact(state)
            if self._compactor.erase_orphans() or due:
                self._compactor.reclaim_space()

    def _compact(self, state: CollectionState) -> None:
        self._compactor.compact(state)
        if not state.deleted:
            self._planner.consider(state)

    def _publish_ann(self, state: CollectionState, sealed: SealedSegment, ann: ApproximateSearch) -> None:
        with self._write_lock:
            state.publish_ann(sealed, ann)

    def _note_failure(self, error: Exception) -> None:
        self._failed_compactions += 1
        print(f"plsc gallery: compaction put off: {error or type(error).__name__}", file=sys.stderr, flush=True)

    def _state(self, name: str) -> CollectionState:
        state = self._states.get(name) if isinstance(name, str) else None
        if state is None:
            raise _no_collection(name)
        return state


def _find_person(db: sqlite3.Connection, state: CollectionState, person: int) -> Person:
    found = records.find_person(db, state.number, int(person)) if is_id(person) else None
    if found is None:
        raise NotFoundError(f"{state.info.name} has no person {ascii(person)[:80]}")
    return found


def _no_collection(name: Any) -> NotFoundError:
    return NotFoundError(f"there is no collection {ascii(name)[:80]}")
