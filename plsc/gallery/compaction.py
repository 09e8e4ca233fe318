"""Compaction: a new base out of SQLite, and the end of what was deleted, while searches and writes go on."""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from plsc.errors import PlscError
from plsc.gallery import records
from plsc.gallery.base import Base, base_folder, describe, open_base, write_base
from plsc.gallery.database import Database
from plsc.gallery.records import StoredCollection
from plsc.gallery.searched import SearchedCollection
from plsc.gallery.storage_errors import storage_errors

_ERASED_TOGETHER = 512  # vectors; writes wait for that many at most
_PAUSE_SECONDS = 30.0  # before another attempt
_LEAST_ERASED = 4096  # overwritten vectors that are worth a file written anew


class Compactor:
    """Compacts the collections of one store; its calls come one at a time, ``writing`` is the lock of all writes."""

    def __init__(self, database: Database, collections: Path, writing: threading.RLock, precision: str) -> None:
        self._database, self._collections, self._writing = database, collections, writing
        self.precision = precision

    def rebuild(self, searched: SearchedCollection) -> None:
        """Put a base of all faces that are there now in the place of the former one."""
        with storage_errors(self._collections):
            stored, base, left_out = self.write(searched.number)
            if stored is not None and self._switch(searched, stored, base, left_out):
                self.drop_other_bases(searched.number, stored.base)

    def write(self, number: int) -> tuple[StoredCollection | None, Base | None, set[int]]:
        """Publish a base of collection ``number`` as it is at this moment, next to the current one.

        Returns the collection as it is to be stored, the base (None: no faces), and the faces forgotten until then.
        The collection is None if it was deleted.
        """
        with self._database.snapshot() as db:
            former = records.find_collection(db, number)
            if former is None:
                return None, None, set()
            left_out = set(records.forgotten(db, number))
            count, covered = records.extent(db, number)
            if not count:
                return StoredCollection(number, former.about, 0, "", covered), None, left_out
            place = former.base + 1
            folder = base_folder(self._collections, number, place)
            parts = records.read_faces(db, number, 0, former.about.dim)
            seal = write_base(folder, describe(former, place, covered, count), count, parts)
        stored = StoredCollection(number, former.about, place, seal, covered)
        return stored, open_base(folder, stored, self.precision, verify=False), left_out

    def point_to(self, stored: StoredCollection) -> None:
        """Store which base is the current one."""
        with self._writing, self._database.writing() as db:
            records.point_to_base(db, stored)

    def drop_other_bases(self, number: int, current: int) -> None:
        """Remove every base of a collection but ``current`` (0: all), and the folder of one that has none."""
        folder = self._collections / str(number)
        with storage_errors(folder):
            for path in list(folder.glob("*")):
                if path != base_folder(self._collections, number, current):
                    shutil.rmtree(path)
            if not current and folder.is_dir():
                folder.rmdir()

    def erase(self, number: int, kept: Callable[[], Sequence[int]]) -> int:
        """Overwrite the vectors that collection ``number`` has forgotten; how many. ``kept`` gives, under the lock of
        writes, those that are still in a base: they have to wait for its successor."""
        erased = 0
        while True:
            with self._writing, self._database.writing() as db:
                excepted = set(kept())
                faces = [face for face in records.forgotten(db, number) if face not in excepted][:_ERASED_TOGETHER]
                records.erase(db, faces)
            erased += len(faces)
            if len(faces) < _ERASED_TOGETHER:
                return erased

    def clean(self) -> None:
        """Empty the write-ahead log, and write SQLite's file anew where half of its vectors were overwritten."""
        with self._writing:
            with self._database.reading() as db:
                erased, vectors = records.erased_count(db), records.vector_count(db)
            if erased > max(_LEAST_ERASED, vectors // 2):
                with self._database.writing() as db:
                    records.delete_erased(db)
            self.finish()
            self._database.empty_log()

    def finish(self) -> None:
        """Write SQLite's file anew if rows were taken out of it: stale copies of others may lie between its rows."""
        with self._writing:
            with self._database.reading() as db:
                if not records.is_unfinished(db):
                    return
            self._database.vacuum()
            with self._database.writing() as db:
                records.set_finished(db)

    def _switch(
        self, searched: SearchedCollection, stored: StoredCollection, base: Base | None, left_out: set[int]
    ) -> bool:
        """Make ``base`` the current one; False if the collection was deleted meanwhile."""
        with self._writing:
            if searched.deleted:
                return False
            with self._database.writing() as db:
                records.point_to_base(db, stored)
                gone = [face for face in records.forgotten(db, stored.number) if face not in left_out]
            searched.adopt(stored, base, gone)
        return True


class Maintenance:
    """A thread that does ``work`` when it is told to, and again later where a full disk, say, hindered it."""

    def __init__(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._work, self._failed = work, failed
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gallery maintenance", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        self._due.set()

    def close(self) -> None:
        """Wait for the work that is running."""
        self._closing.set()
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._due.wait()
            if self._closing.is_set():
                return
            self._due.clear()
            try:
                self._work()
            except (PlscError, MemoryError) as error:
                self._failed(error)
                self._closing.wait(_PAUSE_SECONDS)
                self._due.set()
