"""The gallery in one folder: SQLite holds the truth, scanned files the speed, and one process the folder.

STORE/
  reserve           room on the disk for opening and deleting where it is full
  lock              held by the process that owns the store; its id inside
  gallery.sqlite    everything (plsc.gallery.database), with its write-ahead log beside it
  collections/      a base per collection (plsc.gallery.base): derived from SQLite, made anew where it is damaged
  snapshots/        copies that the service was asked for (plsc.gallery.snapshot)
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
from plsc.gallery import records
from plsc.gallery.base import Base
from plsc.gallery.compaction import Compactor, Maintenance
from plsc.gallery.filter_sql import fitting
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.integrity import check_store
from plsc.gallery.opening import open_collections, open_files
from plsc.gallery.person_search import nearest_persons
from plsc.gallery.planning import Planning
from plsc.gallery.searched import SearchedCollection
from plsc.gallery.snapshot import write_snapshot
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
from plsc.gallery.view import Allowed, View
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64, unit_vectors

_T = TypeVar("_T")


class SqliteStore:
    """A :class:`plsc.gallery.store.Store` in the folder ``folder``, made where there is none.

    Args:
        precision: "bf16" keeps a copy of the vectors in 2 bytes a number for searching; "fp32" scans the files.
        latency_ms: where an exact search of a single query takes longer, an approximate one is looked for that finds
            99% of the ten nearest faces; :meth:`statistics` tell its recall. None: always exact.

    Raises :class:`ConflictError` while another process has the store, :class:`UsageError` and :class:`DataError` for a
    folder that holds something else, :class:`IntegrityError` where SQLite's file is damaged.
    """

    def __init__(self, folder: str | Path, *, precision: str = "bf16", latency_ms: float | None = None) -> None:
        self.folder = Path(folder)
        self._planning = Planning(latency_ms, self._show_quick)
        self._lock, self._reserve, self._database = open_files(self.folder)
        self._writing = threading.RLock()  # one writer at a time: from BEGIN until the view shows what was committed
        self._maintaining = threading.Lock()  # one compaction, snapshot or check at a time
        try:
            self._compactor = Compactor(self._database, self.folder / "collections", self._writing, precision)
            self._searched = open_collections(self._database, self.folder / "collections", self._compactor)
            self._failures = 0
            self._maintenance = Maintenance(self._maintain, self._note_failure)
        except BaseException:
            self._database.close()
            self._lock.release()
            raise
        self._reserve.hold()
        for searched in self._searched.values():
            self._planning.consider(searched)
        self._maintenance.wake()

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        with self._database.reading() as db:
            return [stored.about for stored in records.all_collections(db)]

    def collection(self, name: str) -> Collection:
        """One collection."""
        number = self._of(name).number
        with self._database.reading() as db:
            stored = records.find_collection(db, number)
        if stored is None:
            raise _no_collection(name)
        return stored.about

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Make a collection."""
        check_collection(name, dim, contract_id)
        with self._writing:
            self._reserve.require()
            if name in self._searched:
                raise ConflictError(f"a collection {name} exists already; choose another name")
            with self._database.writing() as db:
                number = records.insert_collection(db, name, dim, contract_id, now())
                stored = records.find_collection(db, number)
                assert stored is not None
            self._searched = {**self._searched, name: SearchedCollection(stored, None, [], [])}
        return stored.about

    def delete_collection(self, name: str) -> None:
        """Remove a collection with everything in it."""
        with self._writing:
            searched = self._of(name)
            self._forget(lambda db: records.delete_collection(db, searched.number))
            searched.deleted = True
            self._searched = {other: kept for other, kept in self._searched.items() if other != name}
        self._maintenance.wake()

    # --- persons ---

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        searched = self._of(collection)
        check_contract(searched.about, contract_id)
        checked = check_persons(persons, searched.about.dim)
        if not checked:
            return []
        with self._changing(searched):
            searched.reserve(sum(len(one.vectors) for one in checked))
            with self._database.writing() as db:
                made, faces = records.insert_persons(db, searched.number, checked, now())
            searched.show_added(faces)
        return made

    def person(self, collection: str, person: int) -> Person:
        """One person."""
        searched = self._of(collection)
        with self._database.snapshot() as db:
            return self._person(db, searched, person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Up to ``limit`` persons with ids above ``after``, ascending."""
        searched = self._of(collection)
        check_page(after, limit, filter)
        if not -(2**63) <= after < 2**63:
            return []
        with self._database.snapshot() as db:
            text, values = fitting(db, searched.number, filter)
            wanted = [searched.number, int(after), *values]
            return records.select_persons(db, f"p.collection = ? AND p.id > ?{text}", wanted, min(int(limit), 2**62))

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """The persons of ``ids`` that exist."""
        searched = self._of(collection)

        def read(persons: list[int]) -> dict[int, PersonSummary]:
            with self._database.reading() as db:
                return records.find_names(db, searched.number, [one for one in persons if is_id(one)])

        # A plain int is looked up as it is, which is quicker than checking it: only ids are ever remembered.
        whole = [one if type(one) is int else int(one) for one in ids if type(one) is int or is_id(one)]
        return searched.names.of(whole, read)

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata; None leaves it."""
        searched = self._of(collection)
        check_name(name)
        replaced = None if metadata is None else check_metadata(metadata)
        with self._changing(searched):
            with searched.names.changing(person), self._database.writing() as db:
                former = self._person(db, searched, person)
                changed = replace(
                    former,
                    name=former.name if name is None else name,
                    metadata=former.metadata if replaced is None else replaced,
                )
                records.update_person(db, searched.number, former, changed)
            searched.show_changed()
        return changed

    def delete_person(self, collection: str, person: int) -> None:
        """Forget a person and the faces."""
        searched = self._of(collection)

        def forget(db: sqlite3.Connection) -> Sequence[int]:
            former = self._person(db, searched, person)
            records.delete_person(db, searched.number, former)
            return former.faces

        with self._changing(searched, deleting=True), searched.names.changing(person):
            searched.show_deleted(self._forget(forget))

    # --- faces ---

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        searched = self._of(collection)
        check_contract(searched.about, contract_id)
        checked = unit_vectors(vectors, searched.about.dim)
        with self._changing(searched):
            searched.reserve(len(checked))
            with self._database.writing() as db:
                owner = self._person(db, searched, person)
                faces = records.insert_faces(db, searched.number, owner.id, checked)
            searched.show_added(faces)
        added: list[int] = faces.ids.tolist()
        return added

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Forget one face."""
        searched = self._of(collection)

        def forget(db: sqlite3.Connection) -> Sequence[int]:
            if not is_id(face) or face not in self._person(db, searched, person).faces:
                raise NotFoundError(f"person {person} of {collection} has no face {ascii(face)[:80]}")
            records.delete_face(db, searched.number, int(face))
            return [face]

        with self._changing(searched, deleting=True):
            searched.show_deleted(self._forget(forget))

    def vectors(self, collection: str, person: int) -> Float32:
        """The stored vectors (n, dim) of a person, unit length, in the order of ``Person.faces``."""
        searched = self._of(collection)
        with self._database.snapshot() as db:
            return records.read_vectors(db, self._person(db, searched, person).faces, searched.about.dim)

    # --- search ---

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """The ``k`` most alike persons for each of ``queries`` (Q, dim), by the best face each."""
        searched = self._of(collection)
        check_search(k, threshold, filter)
        checked = unit_vectors(queries, searched.about.dim)
        view = searched.view
        allowed = self._allowed(searched, view, filter)
        return nearest_persons(view, checked, int(k), float(threshold), allowed)

    def _allowed(self, searched: SearchedCollection, view: View, filter: Filter | None) -> Allowed:
        """What may be found. The filter is asked of SQLite as it is now, which is as ``view`` is, or newer."""
        key = "" if filter is None else repr(filter.conditions)  # its equality would take 1 for true
        allowed = view.masks.get(key)
        if allowed is None:
            allowed = view.allowed(None if filter is None else self._fitting(searched, filter))
            view.remember(key, allowed)
        return allowed

    def _fitting(self, searched: SearchedCollection, filter: Filter) -> Int64:
        """The ids of the persons that ``filter`` fits."""
        with self._database.reading() as db:
            text, values = fitting(db, searched.number, filter)
            rows = db.execute(f"SELECT p.id FROM persons p WHERE p.collection = ?{text}", (searched.number, *values))
            return np.fromiter((row[0] for row in rows), np.int64)

    # --- upkeep ---

    def compact(self, collection: str | None = None) -> None:
        """Make bases of what was added and deleted; deleted embeddings are then in no file of the store."""
        chosen = [self._of(collection)] if collection is not None else list(self._searched.values())
        with self._maintaining:
            for searched in chosen:
                self._compact(searched)
            self._erase_orphans()
            self._compactor.clean()
        self._reserve.hold()

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything into the new folder ``target``."""
        with self._maintaining:
            write_snapshot(self._database, Path(target))

    def check(self) -> dict[str, Any]:
        """Verify every row and every file (:func:`plsc.gallery.integrity.check_store`)."""
        with self._maintaining:
            return check_store(self._database, self.folder)

    def statistics(self) -> dict[str, dict[str, float]]:
        """``{collection: {"rows", "base", "delta", "tombstones", "memory_bytes", "approximate", "recall",
        "failed_compactions"}}``."""
        return {
            name: {**searched.figures(), "failed_compactions": self._failures}
            for name, searched in self._searched.items()
        }

    def close(self) -> None:
        """Finish running work and let go of the store."""
        self._maintenance.close()
        self._planning.close()
        with self._maintaining, self._writing:
            self._database.close()
            self._reserve.hold()
            self._lock.release()

    # --- within ---

    def _of(self, name: str) -> SearchedCollection:
        searched = self._searched.get(name) if isinstance(name, str) else None
        if searched is None:
            raise _no_collection(name)
        return searched

    def _person(self, db: sqlite3.Connection, searched: SearchedCollection, person: int) -> Person:
        found = records.find_person(db, searched.number, int(person)) if is_id(person) else None
        if found is None:
            raise NotFoundError(f"{searched.about.name} has no person {ascii(person)[:80]}")
        return found

    @contextmanager
    def _changing(self, searched: SearchedCollection, *, deleting: bool = False) -> Iterator[None]:
        """Nobody else writes; afterwards a compaction begins where it is due."""
        with self._writing:
            if searched.deleted:
                raise _no_collection(searched.about.name)
            if not deleting:
                self._reserve.require()
            yield
        if searched.is_due:
            self._maintenance.wake()

    def _forget(self, forget: Callable[[sqlite3.Connection], _T]) -> _T:
        """Commit a deletion: where the disk is full, in the room kept back and what the log has used."""
        try:
            with self._database.writing() as db:
                return forget(db)
        except StorageError:
            self._reserve.release()
            with suppress(StorageError):
                self._database.empty_log()
            with self._database.writing() as db:
                return forget(db)

    def _compact(self, searched: SearchedCollection) -> None:
        if searched.deleted:
            return
        if not searched.is_clean:
            self._compactor.rebuild(searched)
            self._planning.consider(searched)
        self._compactor.erase(searched.number, searched.kept)

    def _erase_orphans(self) -> None:
        """What is left of collections that were deleted."""
        with self._database.reading() as db:
            numbers = records.orphaned(db)
        for number in numbers:
            self._compactor.drop_other_bases(number, 0)
            self._compactor.erase(number, list)

    def _maintain(self) -> None:
        """What the thread does when it is woken: what is due, and nothing for little."""
        with self._maintaining:
            due: list[Callable[[], None]] = []
            for searched in self._searched.values():
                if searched.is_due:
                    self._compact(searched)
                    due = [self._compactor.clean]
            with self._database.reading() as db:
                if records.orphaned(db):
                    due = [self._erase_orphans, self._compactor.clean]
            for work in due:
                work()

    def _show_quick(self, searched: SearchedCollection, base: Base, quick: ApproximateSearch) -> None:
        with self._writing:
            searched.show_quick(base, quick)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        print(f"plsc gallery: compaction put off: {error or type(error).__name__}", file=sys.stderr, flush=True)


def _no_collection(name: Any) -> NotFoundError:
    return NotFoundError(f"there is no collection {ascii(name)[:80]}")
