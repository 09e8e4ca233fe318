"""Compaction: new sealed segments out of SQLite, and the erasure of deleted vectors, while searches and writes go on.

A deleted vector's way out of the files, each step durable before the next begins:

1. ``delete_person`` deletes the rows and writes a tombstone per face (table ``forgotten``), in one transaction; the
   published view masks the faces, so no search finds them. Their vectors are still in two files.
2. A rebuild publishes a segment without them, lets SQLite point to it, and removes the former segment. In an encrypted
   store, whose segments are in memory, the person's key is erased in place of this, before the deletion is answered.
3. ``erase`` overwrites the vectors in SQLite's file with zeros, in place, and deletes their tombstones.
4. ``reclaim_space`` truncates the write-ahead log, the last place with former pages.
5. The names and metadata of who was deleted or changed may be left in gaps of SQLite's pages. So the file is written
   anew, without those (plsc.gallery.sqlite.rewriting). Once half of the vectors are erased that comes at once, and
   their rows are deleted first.

All of this happens by itself within the time that the store promises (``compact_within``), sooner after many changes.
A process that is killed in between leaves tombstones and notes, which the next compaction continues from. Snapshots
taken before the deletion still hold the vectors and texts; ``plsc gallery check`` counts the vectors.
"""

import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from plsc.errors import ConflictError, IntegrityError, NotFoundError
from plsc.files import storage_errors
from plsc.gallery.second_space import exchanged
from plsc.gallery.sqlite import SQLITE, records, unfinished
from plsc.gallery.sqlite.collection_state import CollectionState, compaction_threshold
from plsc.gallery.sqlite.database import ERASED, Database
from plsc.gallery.sqlite.records import StoredCollection, StoredMigration
from plsc.gallery.sqlite.rewriting import rewrite
from plsc.gallery.sqlite.schema import SPACE
from plsc.gallery.sqlite.segments import (
    SealedSegment,
    open_segment,
    segment_folder,
    segment_in_memory,
    write_segment,
)
from plsc.progress import note

_ERASE_BATCH = 512  # vectors per transaction: the longest that a write waits for an erasure
_MIN_ERASED = 4096  # erased vectors that are worth rewriting the file


class Rebuilt(NamedTuple):
    """A published segment that SQLite does not point to yet; ``tombstones`` are the faces it was built without."""

    stored: StoredCollection
    sealed: SealedSegment | None
    tombstones: set[int]


class Compactor:
    """Compacts the collections of one store.

    Its methods are called by one thread at a time (the store's maintenance lock). ``write_lock`` is the store's lock of
    all writes; it is taken inside, for short moments, so the order is always maintenance lock, then write lock.
    """

    def __init__(self, database: Database, collections: Path, write_lock: threading.RLock, precision: str) -> None:
        self._database, self._collections, self._write_lock = database, collections, write_lock
        self._precision = precision
        self._first_left: tuple[datetime, float] | None = None  # since when texts are left, and when that was here

    @property
    def _in_memory(self) -> bool:
        """True where no file may hold a plain vector."""
        return self._database.codec.has_keys

    # --- opening ---

    def open_collections(self) -> dict[str, CollectionState]:
        """Open all collections by name. A damaged segment is rebuilt, with a line on stderr; leftovers are removed."""
        with self._database.reading() as db:
            all_stored = records.all_collections(db)
        with storage_errors(self._collections):
            self._remove_unreferenced(all_stored)
            return {stored.info.name: self._open_collection(stored) for stored in all_stored}

    def _remove_unreferenced(self, all_stored: list[StoredCollection]) -> None:
        """Remove segments that SQLite does not point to: unfinished, replaced, or of deleted collections."""
        current = {segment_folder(self._collections, one.number, one.segment) for one in all_stored if one.segment}
        kept = current | {folder.parent for folder in current}
        for path in [*self._collections.glob("*/*"), *self._collections.glob("*")]:
            if path not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _open_collection(self, stored: StoredCollection) -> CollectionState:
        stored, sealed = self._open_or_rebuild(stored)
        with self._database.snapshot() as db:
            newer = list(records.read_faces(db, stored, stored.watermark))
            deleted, since = deleted_faces(db, stored.number, stored.space), unfinished.deletions_since(db)
            migration = records.find_migration(db, stored.number)
            is_left = bool(tombstones(db, stored.number, most=1))
        clock, second = self._database.clock, None if migration is None else migration.info
        state = CollectionState(stored, sealed, newer, deleted, second, clock)
        if is_left and state.deleted_at is None:  # in a second space
            state.deleted_at = clock.monotonic()
        if state.deleted_at is not None and since is not None:
            state.deleted_at -= unfinished.seconds_since(since, clock)
        return state

    def _open_or_rebuild(self, stored: StoredCollection) -> tuple[StoredCollection, SealedSegment | None]:
        """Open the segment; rebuild it if it is damaged, or if so many newer faces would make opening slow."""
        if not self._in_memory:
            with self._database.reading() as db:
                newer = records.count_faces(db, stored.number, stored.watermark)
            try:
                sealed = open_segment(self._collections, stored, self._precision) if stored.segment else None
                if newer <= compaction_threshold(sealed):
                    return stored, sealed
            except IntegrityError as error:
                note(f"plsc gallery: {error}; rebuilding it from {SQLITE}")
        rebuilt = self.build_segment(stored.number)
        assert rebuilt is not None, "nobody else has the store"
        if not self._in_memory:
            with self._write_lock, self._database.writing() as db:
                records.set_segment(db, rebuilt.stored)
            self.remove_other_segments(stored.number, rebuilt.stored.segment)
        return rebuilt.stored, rebuilt.sealed

    # --- rebuilding ---

    def compact(self, state: CollectionState) -> None:
        """Rebuild the collection's segment if anything changed, then erase what was deleted."""
        if state.deleted:
            return
        if not state.is_compacted:
            with storage_errors(self._collections):
                rebuilt = self._rebuild_in_memory(state) if self._in_memory else self.build_segment(state.number)
                if rebuilt is not None and self._swap_segment(state, rebuilt):
                    self.remove_other_segments(state.number, rebuilt.stored.segment)
        self._erase(state.number, lambda: [face + state.space for face in state.deleted_in_segment()])

    def build_segment(self, number: int, *, second: bool = False) -> Rebuilt | None:
        """Publish a segment of collection ``number`` as of this moment; None if the collection was deleted.

        Args:
            number: of the collection.
            second: of its second space, as it will be once that is the searched one.
        """
        with self._database.snapshot() as db:
            former = records.find_collection(db, number)
            if former is None:
                return None
            if second:
                former = in_second_space(former, records.find_migration(db, number))
            deleted = set(deleted_faces(db, number, former.space))
            # Ids only grow, so every face that this snapshot does not see will have an id above the watermark.
            count, watermark = records.count_faces(db, number), records.last_id(db, "faces")
            stored, sealed = replace(former, segment=0, digest="", watermark=watermark), None
            # Closed also where the disk is full: the error's traceback would keep the reading, and its moment, alive.
            with closing(records.read_faces(db, former, 0)) as batches:
                if count and self._in_memory:
                    sealed = segment_in_memory(count, former.info.dim, batches, self._precision)
                elif count:
                    stored = write_segment(self._collections, former, watermark, count, batches, self._precision)
        if stored.segment:
            sealed = open_segment(self._collections, stored, self._precision, verify=False)
        return Rebuilt(stored, sealed, deleted)

    def _rebuild_in_memory(self, state: CollectionState) -> Rebuilt:
        """Make a segment of what searches see at this moment: nothing has to be read or decrypted again."""
        with self._write_lock:
            view = state.view
            with self._database.reading() as db:
                deleted = set(deleted_faces(db, state.number, state.space))
                watermark = records.last_id(db, "faces")
        count, dim = view.remaining_count, state.info.dim
        sealed = segment_in_memory(count, dim, view.remaining(), self._precision) if count else None
        return Rebuilt(StoredCollection(state.number, state.info, 0, "", watermark, state.space), sealed, deleted)

    def _swap_segment(self, state: CollectionState, rebuilt: Rebuilt) -> bool:
        """Make the segment the current one, in SQLite and then in memory; False if the collection was deleted."""
        with self._write_lock:
            if state.deleted:
                return False
            with self._database.writing() as db:
                records.set_segment(db, rebuilt.stored)
                now = deleted_faces(db, state.number, state.space)
                deleted = [face for face in now if face not in rebuilt.tombstones]
            state.swap_segment(rebuilt.stored, rebuilt.sealed, deleted)
        return True

    def exchange_spaces(self, state: CollectionState, rebuilt: Rebuilt, db: sqlite3.Connection) -> CollectionState:
        """Store that searches read what ``rebuilt`` is of, in the transaction of ``db``; returns the state of that.

        Called under the write lock.
        """
        former, migration = records.find_collection(db, state.number), records.find_migration(db, state.number)
        assert former is not None, "it was checked under the write lock"
        assert migration is not None, "it was checked under the write lock"
        if migration.space != rebuilt.stored.space:
            raise ConflictError(f"{former.info.name} was moved anew meanwhile; look at its migration")
        info, second = exchanged(former.info, migration.info)
        stored = replace(rebuilt.stored, info=info)
        records.exchange_spaces(db, stored, replace(migration, info=second, space=former.space))
        newer = list(records.read_faces(db, stored, stored.watermark))
        deleted = deleted_faces(db, stored.number, stored.space)
        return CollectionState(stored, rebuilt.sealed, newer, deleted, second, self._database.clock)

    def remove_other_segments(self, number: int, current: int) -> None:
        """Remove every segment of a collection but ``current`` (0: all, and their folder).

        A search that still reads a removed segment keeps its memory map, and so the file's contents, until it ends.
        """
        folder = self._collections / str(number)
        with storage_errors(folder):
            for path in list(folder.glob("*")):
                if path != segment_folder(self._collections, number, current):
                    shutil.rmtree(path)
            if not current and folder.is_dir():
                folder.rmdir()

    # --- erasing ---

    def erase_orphans(self) -> bool:
        """Remove segments and vectors of collections that were deleted; returns True if there were any."""
        with self._database.reading() as db:
            numbers = orphaned_collections(db)
        for number in numbers:
            self.remove_other_segments(number, 0)
            self._erase(number, list)
        return bool(numbers)

    def _erase(self, number: int, in_segment: Callable[[], Sequence[int]]) -> None:
        """Erase the vectors of a collection's tombstones from SQLite's file, in batches.

        Those that the sealed segment still holds (``in_segment``, called under the write lock) keep their tombstones:
        without them, a rebuilt or reopened view would not know that the faces are deleted.
        """
        keys = [-1]
        while keys:
            with self._write_lock, self._database.writing() as db:
                self._database.codec.sync_erased()  # before the tombstones go that tell which keys to erase
                keys = tombstones(db, number, after=keys[-1], most=_ERASE_BATCH)
                kept = set(in_segment())
                erase(db, [key for key in keys if key not in kept])
                unfinished.clear_deletion_time(db)

    def reclaim_space(self, age: float, stop: Callable[[], bool]) -> None:
        """Truncate the write-ahead log, and write SQLite's file anew where that is due.

        It is if half of its vectors are erased, or a person was deleted or changed ``age`` seconds ago. That needs disk
        space. Until there is some the store works all the same.

        Raises:
            StorageError: see :func:`plsc.gallery.sqlite.rewriting.rewrite`.
            DeadlineError: ``stop`` said so while the file was written anew.
        """
        with self._write_lock:
            with self._database.reading() as db:
                erased = count_erased(db)
                faces = db.execute("SELECT coalesce(sum(faces), 0) FROM collections").fetchone()[0]
            if erased >= max(_MIN_ERASED, (faces + erased) // 2):
                with self._database.writing() as db:
                    unfinished.purge_erased(db)
            self._database.truncate_log()
        if self.is_rewriting_due(age):
            with self._database.stopping_when(stop):
                rewrite(self._database, self._write_lock)

    def is_rewriting_due(self, age: float) -> bool:
        """True if the file has to be written anew since ``age`` seconds: a clock that is set back delays nothing."""
        with self._database.reading() as db:
            since = unfinished.rewrite_since(db)
        if since is None:
            self._first_left = None
            return False
        clock = self._database.clock
        if self._first_left is None or self._first_left[0] != since:
            self._first_left = since, clock.monotonic() - unfinished.seconds_since(since, clock)
        return clock.monotonic() - self._first_left[1] >= age


# --- tombstones in SQLite ---


def tombstones(db: sqlite3.Connection, number: int, *, after: int = -1, most: int = -1) -> list[int]:
    """Return the keys of a collection's deleted vectors that may still be in a file, ascending: ``most`` above one."""
    text = "SELECT face FROM forgotten WHERE collection = ? AND face > ? ORDER BY face LIMIT ?"
    return [row[0] for row in db.execute(text, (number, after, most))]


def deleted_faces(db: sqlite3.Connection, number: int, space: int) -> list[int]:
    """Return the faces whose vectors in a space are deleted and may still be in a file, ascending."""
    return [key - space for key in tombstones(db, number) if space <= key < space + SPACE]


def in_second_space(stored: StoredCollection, migration: StoredMigration | None) -> StoredCollection:
    """Return a collection as it will be once its second space is the searched one."""
    if migration is None:
        raise NotFoundError(f"{stored.info.name} is not being moved to another model; begin a migration")
    return replace(stored, info=exchanged(stored.info, migration.info)[0], space=migration.space)


def orphaned_collections(db: sqlite3.Connection) -> list[int]:
    """Return the numbers of deleted collections whose vectors may still be in SQLite's file."""
    rows = db.execute(
        "SELECT DISTINCT collection FROM forgotten WHERE collection NOT IN (SELECT number FROM collections)"
    )
    return [row[0] for row in rows]


def erase(db: sqlite3.Connection, keys: Sequence[int]) -> None:
    """Overwrite deleted vectors with zeros and delete their tombstones.

    The new record is as long as the old one, so SQLite writes it over the same bytes of the page.
    """
    rows = [(key,) for key in keys]
    db.executemany(
        f"UPDATE vectors SET checksum = x'{ERASED.hex()}', vector = zeroblob(length(vector)) WHERE face = ?", rows
    )
    db.executemany("DELETE FROM forgotten WHERE face = ?", rows)


def count_erased(db: sqlite3.Connection) -> int:
    """Count the rows with erased vectors."""
    return int(db.execute(f"SELECT count(*) FROM vectors WHERE checksum = x'{ERASED.hex()}'").fetchone()[0])
