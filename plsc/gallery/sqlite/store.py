"""The gallery in one folder, as a :class:`plsc.gallery.store.Store`; plsc/gallery/sqlite/__init__.py shows its layout.

How a change becomes durable and visible: validate the arguments, take the write lock, write the rows in a transaction,
allocate memory for the new view, commit, publish the view. What raises an error does so before the commit and leaves no
trace; what is acknowledged is durable and found. compaction.py says how a deleted vector leaves the files.

Locks, in the order in which they are taken:

- ``_maintenance.lock``: one compaction, snapshot or check at a time.
- ``_write_lock``: one writer at a time, from BEGIN until the view shows what was committed; reentrant.
- the person caches' own locks.

Searches take none of them: they read a collection's current view and work on that.
"""

import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from plsc.errors import ConflictError, IntegrityError, StorageError, UsageError
from plsc.files import storage_errors
from plsc.gallery.filters import Filter, PreparedFilter, UnfinishedFilter
from plsc.gallery.rows import Change
from plsc.gallery.second_space import is_same_move, must_exchange
from plsc.gallery.sqlite import COLLECTIONS, COMPACT_WITHIN, RESERVE, records
from plsc.gallery.sqlite.backup import write_snapshot
from plsc.gallery.sqlite.collection_state import CollectionState, RowMasks, SegmentView
from plsc.gallery.sqlite.compaction import Compactor, Rebuilt
from plsc.gallery.sqlite.folder import open_folder
from plsc.gallery.sqlite.integrity import check_store
from plsc.gallery.sqlite.maintenance import AnnPlanner, Maintenance
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.store import Query, Store, note_change
from plsc.gallery.validation import is_id, no_collection
from plsc.gallery.values import Clock, Collection, Float32, IdempotentRequest, Match, PersonSummary, StoredAnswer
from plsc.index.rows import Int64
from plsc.index.scan import AUTO

_T = TypeVar("_T")

_RESERVE_BYTES = 4 << 20  # the log of some deletions, and SQLite's own files
_MIN_RESERVE_BYTES = 64 << 10  # SQLite's own files alone
_LOOKED_UP_AT_ONCE = 50_000  # people times conditions of a filter: about 20 ms


class SqliteStore(Store):
    """A :class:`plsc.gallery.store.Store` in the folder ``folder``, which is created if there is none.

    Args:
        precision: "int8" searches by codes of the vectors, of a byte a number, in mapped files of their own; "bf16"
            keeps a copy of 2 bytes a number in memory; "fp32" scans the mapped vectors. "auto" is int8 where a compiled
            scan multiplies bytes, else bf16. Answers are the same.
        latency_ms: if an exact search of a single query takes longer, an approximate one is looked for that finds 99%
            of the ten nearest faces; :meth:`statistics` reports its recall. None: always exact.
        compact_within: seconds after which no file of the store holds a deleted face's vector, or texts of a person who
            was deleted, or which were changed.
        key_file: with the master key of an encrypted store (plsc.gallery.sqlite.keys); None: it is not encrypted.
        clock: what tells who has expired, and what is due.

    Raises:
        ConflictError: another process has the store.
        UsageError, DataError: the folder holds something else, or ``key_file`` is not this store's.
        IntegrityError: SQLite's file is damaged.
    """

    folder: Path

    def __init__(
        self,
        folder: str | Path,
        *,
        precision: str = AUTO,
        latency_ms: float | None = None,
        compact_within: float = COMPACT_WITHIN,
        key_file: str | Path | None = None,
        clock: Clock = time,
    ) -> None:
        if not 0 < compact_within < math.inf:
            raise UsageError(f"deleted faces cannot leave the files within {compact_within} s; give a time above 0")
        self.folder = Path(folder)
        self._write_lock = threading.RLock()
        self._planner = AnnPlanner(latency_ms, self._write_lock)
        self._reserve = Reserve(self.folder)
        self._lock, self._database = open_folder(
            self.folder, None if key_file is None else Path(key_file), lambda: self._reserve.release(0)
        )
        self.clock = clock
        self._database.use(clock=clock)
        try:
            self._compactor = compactor = Compactor(
                self._database, self.folder / COLLECTIONS, self._write_lock, precision
            )
            # Replaced, never modified: readers take it without a lock.
            self._states: dict[str, CollectionState] = compactor.open_collections()
            with self._database.reading() as db:
                self._database.codec.recover(db)
                for state in self._states.values():
                    state.next_expiry = SqliteRows(db, state.number, state.info).next_expiry()
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
            raise no_collection(name)
        return stored.info

    def _create(self, name: str, dim: int, contract_id: str, idempotent: IdempotentRequest | None) -> Collection | None:
        with self._write_lock:
            self._reserve.require()
            if name in self._states:
                return None
            with self._numbered() as db:
                stored = records.insert_collection(db, name, dim, contract_id)
                records.insert_answer(db, idempotent, stored.info)
            self._states = {**self._states, name: CollectionState(stored, None, [], [], None, self.clock)}
        return stored.info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._write_lock:
            state = self._state(name)
            self._commit(state, SqliteRows.delete_everything, deleting=True)
            state.deleted = True
            self._states = {other: kept for other, kept in self._states.items() if other != name}
            self._database.codec.require_erased()
        self._database.codec.sync_erased()
        self._maintenance.wake()

    # --- files beside the store ---

    @property
    def seals(self) -> bool:  # type: ignore[override]
        """True if the store is encrypted."""
        return self._database.codec.has_keys

    def sealed(self, person: int, contents: Mapping[int, bytes]) -> dict[int, bytes]:
        """See :class:`plsc.gallery.store.Store`, as for what follows."""
        with self._database.reading() as db:
            return self._database.codec.seal(db, person, contents)

    def unsealed(self, person: int, face: int, content: bytes) -> bytes | None:
        """Return what was sealed for a face; None: it was not, or the person's key is erased."""
        return self._database.codec.unseal(person, face, content)

    # --- changes of one collection ---

    def _change(self, collection: str, change: Change[_T]) -> _T:
        state = self._state(collection)
        migration = state.migration  # read once: it may be another when the check ends
        checked = change.check(state.info, migration)

        def work(rows: SqliteRows) -> _T:
            result = change.work(rows, checked)
            records.insert_answer(rows.db, change.idempotent, result)
            return result

        with self._write_lock:
            is_as_checked = state.migration is migration or is_same_move(state.migration, migration)
            if self._state(collection) is not state or not is_as_checked:
                return self._change(collection, change)  # its models are others since
            if change.fills and state.is_exchanging:  # the segment is being written of the vectors that are there
                raise ConflictError(f"{collection} is being cut over, or rolled back; send it again when that is done")
            if not change.deleting:
                self._reserve.require()
            result = self._commit(state, work, deleting=change.deleting)
            self._database.codec.require_erased()
        self._database.codec.sync_erased()
        if state.needs_compaction:
            self._maintenance.wake()
        return result

    def _commit(self, state: CollectionState, work: Callable[[SqliteRows], _T], *, deleting: bool) -> _T:
        """Commit and publish a change; a deletion on a full disk in the space kept back, and in what the log has used.

        Called under the write lock.
        """
        try:
            return self._commit_once(state, work)
        except StorageError:
            if not deleting:
                raise
            self._reserve.release()
            with suppress(StorageError):
                self._database.truncate_log()
            return self._commit_once(state, work)

    def _commit_once(self, state: CollectionState, work: Callable[[SqliteRows], _T]) -> _T:
        touched: set[int] = set()
        try:
            with self._numbered() as db:
                rows = SqliteRows(db, state.number, state.info)
                touched = rows.touched
                result = work(rows)
                state.prepare(rows.added, rows.expiries)
                migration = rows.migration
            state.publish(rows.added, rows.gone)
            state.info, state.migration = rows.info, migration
            return result
        finally:
            state.persons.forget(touched)

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

    # --- the second space ---

    def exchange_spaces(self, collection: str, contract_id: str) -> Collection:
        """Let searches read the second space, which is of ``contract_id``; the searched one becomes the second."""
        with self._maintenance.lock:
            former = self._state(collection)
            with self._write_lock:  # not in the midst of a change that fills the second space
                former.is_exchanging = True
            try:
                state = self._exchange_spaces(former, collection, contract_id)
            finally:
                former.is_exchanging = False
        self._planner.consider(state)
        return self.collection(collection)

    def _exchange_spaces(self, former: CollectionState, collection: str, contract_id: str) -> CollectionState:
        with self._reading(collection) as rows:
            if not must_exchange(rows, contract_id):
                return former
        try:
            with storage_errors(self.folder / COLLECTIONS):
                rebuilt = self._compactor.build_segment(former.number, second=True)
                if rebuilt is None:
                    raise no_collection(collection)
                state = self._exchange_with(rebuilt, collection, contract_id)
        except BaseException:  # a segment that nothing points to would be in the next one's place
            with suppress(StorageError):
                self._compactor.remove_other_segments(former.number, former.segment)
            raise
        self._compactor.remove_other_segments(state.number, rebuilt.stored.segment)
        return state

    def _exchange_with(self, rebuilt: Rebuilt, collection: str, contract_id: str) -> CollectionState:
        """Exchange the spaces in one transaction, ``rebuilt`` being a segment of the second one."""
        with self._write_lock:
            self._reserve.require()
            former = self._state(collection)
            with self._numbered() as db:
                must_exchange(SqliteRows(db, former.number, former.info), contract_id)
                state = self._compactor.exchange_spaces(former, rebuilt, db)
            state.next_expiry, state.deleted_at = former.next_expiry, former.deleted_at
            former.deleted = True
            self._states = {**self._states, collection: state}
        return state

    def end_migration(self, collection: str, contract_id: str) -> None:
        """Delete the second space of a collection, which is of ``contract_id``, with all vectors in it."""
        super().end_migration(collection, contract_id)
        state = self._state(collection)
        with self._write_lock:
            state.deleted_at = state.deleted_at or self.clock.monotonic()
        self._maintenance.wake()

    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        """Delete those of ``persons`` whose time has come; returns their ids."""
        gone = super().delete_expired(collection, persons)
        with self._write_lock:
            state = self._states.get(collection)  # another one after a cut-over meanwhile
            if state is not None:
                with self._rows_now(state) as rows:
                    state.next_expiry = rows.next_expiry()
        return gone

    # --- reads of one collection ---

    @contextmanager
    def _reading(self, collection: str) -> Iterator[SqliteRows]:
        state = self._state(collection)
        with self._database.snapshot() as db:
            yield SqliteRows(db, state.number, state.info)

    @contextmanager
    def _rows_now(self, state: CollectionState) -> Iterator[SqliteRows]:
        """Yield rows of which each statement sees everything committed before it."""
        with self._database.reading() as db:
            yield SqliteRows(db, state.number, state.info)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id, as far as possible from the collection's cache."""
        state = self._state(collection)

        def read(missing: list[int]) -> dict[int, PersonSummary]:
            with self._rows_now(state) as rows:
                return rows.summaries([id for id in missing if is_id(id)])

        # A plain int needs no check here, which costs more than the lookup: only ids are ever in the cache.
        plain = [id if type(id) is int else int(id) for id in ids if type(id) is int or is_id(id)]
        if state.has_expired:
            with self._rows_now(state) as rows:
                expired = set(rows.expired_ids())
            plain = [id for id in plain if id not in expired]
        return state.persons.get(plain, read)

    def vectors(self, collection: str, person: int, contract_id: str | None = None) -> Float32:
        """See :class:`plsc.gallery.store.Store`."""
        while True:
            vectors = super().vectors(collection, person, contract_id)
            if vectors.any(axis=1).all():  # else some were deleted, with their key, while they were read
                return vectors

    def _names_with_expired(self) -> list[str]:
        return [name for name, state in self._states.items() if state.has_expired]

    def _search(self, collection: str, query: Query) -> list[list[Match]]:
        view: SegmentView
        state, filter = self._state(collection), query.filter
        if isinstance(filter, PreparedFilter):
            view, masks, state = filter.found
        units = query.units(state)
        if not isinstance(filter, PreparedFilter):
            view, masks = self._matching_rows(state, filter, "" if filter is None else repr(filter.conditions))
        try:
            return view.search(units, query.k, query.threshold, masks)
        except IntegrityError as error:  # of a file that SQLite has all of
            state.note_damage(view)
            self._maintenance.wake()
            raise StorageError(f"the vectors of {collection} are written anew: {error}") from None

    def prepare_filter(self, collection: str, filter: Filter) -> PreparedFilter | UnfinishedFilter:
        """Look up who matches, so that a search with the result, on another thread, needs SQLite no more.

        Where that takes long, a few conditions are looked up at a time.
        """
        state = self._state(collection)
        key = repr(filter.conditions)  # not the filter itself: to Python, 1 equals True
        if key not in state.view.masks and (unfinished := self._look_further(state, filter)) is not None:
            return unfinished
        found = self._matching_rows(state, filter, key)
        return PreparedFilter(filter.conditions, (*found, state), (id(found[0]), key))

    def _look_further(self, state: CollectionState, filter: Filter) -> UnfinishedFilter | None:
        """Look up the next conditions of many; None when it is time to finish: few are left, or something changed."""
        begun = filter if isinstance(filter, UnfinishedFilter) else None
        first = 0 if begun is None else begun.looked_up
        last = first + max(_LOOKED_UP_AT_ONCE // max(state.view.remaining_count, 1), 1)
        if last >= len(filter.conditions):
            return None
        with self._rows_now(state) as rows:
            change = records.last_id(rows.db, records.CHANGES)
            if begun is not None and begun.change != change:
                return None
            found = None if begun is None else begun.found
            for condition in filter.conditions[first:last]:
                found = rows.narrow(found, condition)
        return UnfinishedFilter(filter.conditions, found, last, change)

    def _matching_rows(self, state: CollectionState, filter: Filter | None, key: str) -> tuple[SegmentView, RowMasks]:
        """Return the present view and its rows that match, of which SQLite answers as of the view, or later."""
        view = state.view
        if state.has_expired:
            with self._rows_now(state) as rows:
                view = view.without(rows.expired_faces())
        masks = view.masks.get(key)
        if masks is None:
            persons = None
            if filter is not None:
                with self._database.snapshot() as db:
                    persons = _matching(SqliteRows(db, state.number, state.info), filter)
            masks = view.masks_of(persons)
            view.cache_masks(key, masks)
        return view, masks

    def stopping_when(self, stop: Callable[[], bool]) -> AbstractContextManager[None]:
        """End what this thread reads in the block as soon as ``stop`` says so, by :class:`DeadlineError`."""
        return self._database.stopping_when(stop)

    # --- numbers of changes, and answers ---

    def last_change(self) -> int:
        """Return the number of the last change of a collection, person or face; 0: there was none."""
        with self._database.reading() as db:
            return records.last_id(db, records.CHANGES)

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""
        with self._database.reading() as db:
            return records.find_answer(db, token, key)

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""
        with self._write_lock:
            self._reserve.require()
            with self._database.writing() as db:
                records.insert_answer(db, idempotent, result)

    def forget_answers(self, before: str, most: int) -> int:
        """See :class:`plsc.gallery.store.Store`."""
        with self._write_lock, self._database.writing() as db:
            return records.delete_answers(db, before, most)

    # --- maintenance ---

    def compact(self, collection: str | None = None) -> None:
        """Rebuild the segments, and erase deleted vectors and texts: no file of the store holds one afterwards."""
        if collection is not None:
            self._state(collection)  # NotFoundError
        try:
            self._maintenance.compact(
                lambda: [state for name, state in self._states.items() if collection in (None, name)]
            )
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
        """``{collection: {"rows", "sealed", "growing", "tombstones", "memory_bytes", "approximate", "recall",
        "failed_compactions"}}``; sealed and growing are the rows of these segments."""
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

    def _state(self, name: str) -> CollectionState:
        state = self._states.get(name) if isinstance(name, str) else None
        if state is None:
            raise no_collection(name)
        return state


def _matching(rows: SqliteRows, filter: Filter) -> Int64 | None:
    """Return the persons that match, as of one moment: what was looked up before counts if nothing changed since."""
    found, first = None, 0
    if isinstance(filter, UnfinishedFilter) and records.last_id(rows.db, records.CHANGES) == filter.change:
        found, first = filter.found, filter.looked_up
    for condition in filter.conditions[first:]:
        found = rows.narrow(found, condition)
    return found


class Reserve:
    """Disk space kept back in ``folder/reserve``, so that a store on a full disk can still be opened and deleted from.

    While it is used up, everything that adds to the store is refused.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE
        self._held = False

    def release(self, kept: int = _MIN_RESERVE_BYTES) -> None:
        """Free the space for deletions, but for what the next opening needs; that opening frees all of it."""
        self._held = False
        with suppress(OSError):
            os.truncate(self._path, kept)

    def hold(self) -> bool:
        """Allocate the space again; returns True if all of it is held. With less, what opening needs is taken."""
        if not self._held:
            self._held = self._allocate(_RESERVE_BYTES)
            if not self._held:
                self._allocate(_MIN_RESERVE_BYTES)
        return self._held

    def require(self) -> None:
        """Raise :class:`StorageError` unless the space is held: the last of it is for deletions."""
        if not self.hold():
            raise StorageError(
                f"the disk of {self._path.parent} is full; nothing was changed: deletions are still taken, "
                "and everything else when there is room again"
            )

    def _allocate(self, count: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, count)  # real blocks, where a truncated file would be a hole
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True
