"""Writing SQLite's file anew, so that it holds nothing but its rows, while searches and writes go on.

SQLite zeroes what it frees, but not the copies that it leaves in the gaps of pages when it moves rows: names and
metadata of a person can so outlive their deletion. No statement finds such copies. VACUUM leaves them behind, and
stops all writes for as long as it takes. So:

1. The writing connection begins to note, in temporary tables in memory, the keys of the rows that it changes.
2. VACUUM INTO copies all rows of one moment into a new file beside the present one; writes go on.
3. The rows that were changed meanwhile are copied, twice: the second time there are few.
4. The new file takes the present one's name (:meth:`plsc.gallery.sqlite.database.Database.exchange`).

Writes wait during 3 and 4, readers during 4. Killed before the exchange the store is as before, and its next opening
removes the unfinished file; killed after it, the store is the new one. What changes between 1 and 4 is noted for the
next time (plsc.gallery.sqlite.unfinished).
"""

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plsc.errors import StorageError
from plsc.files import open_private, storage_errors, sync
from plsc.gallery.sqlite.database import Database, ReadersError, translate_errors
from plsc.gallery.sqlite.unfinished import begin_rewriting, end_rewriting

_SPARE_BYTES = 8 << 20  # that the disk has to have left beside the new file
_SYNC_SECONDS = 0.2
_ATTEMPTS, _PAUSE_SECONDS = 60, 0.5  # to find a moment without a long read


def rewrite(database: Database, write_lock: threading.RLock) -> None:
    """Write the file of ``database`` anew; called by one thread at a time.

    Raises:
        StorageError: there is no room, or a read goes on for long; the file is the former one.
        DeadlineError: the caller's thread was told to stop (:meth:`Database.stopping_when`).
    """
    path = new_path(database.file)
    try:
        with storage_errors(path), translate_errors(path), _following(database, write_lock) as changes:
            _require_room(database.file)
            with _synced_meanwhile(path), database.reading() as db:
                db.execute("VACUUM INTO ?", (str(path),))
            with write_lock:
                changes.copy(path)
            sync(path)
            _exchange(database, write_lock, changes, path)
    finally:
        remove_unfinished(database.file)


def new_path(database: Path) -> Path:
    """Return where the file of a store is written anew."""
    return database.with_name(f".{database.name}.new")


def remove_unfinished(database: Path) -> None:
    """Remove what a process that was killed while it wrote the file anew has left: it may hold what was deleted."""
    for leftover in database.parent.glob(f"{new_path(database).name}*"):
        leftover.unlink()


def _exchange(database: Database, write_lock: threading.RLock, changes: "_Changes", path: Path) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        with database.reading() as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # so that little is left to do while everybody waits
        former = None
        with write_lock:
            changes.copy(path)
            sync(path)
            with suppress(ReadersError) if attempt < _ATTEMPTS else storage_errors(path):
                former = database.exchange(path)
        if former is not None:
            os.close(former)  # gigabytes are freed while nobody waits
            return
        time.sleep(_PAUSE_SECONDS)


@contextmanager
def _synced_meanwhile(path: Path) -> Iterator[None]:
    """Make the new file, and sync it while the block writes it: commits would wait for all of it at its end."""
    file, ends = open_private(path), threading.Event()

    def sync_often() -> None:
        while not ends.wait(_SYNC_SECONDS):
            with suppress(OSError):  # which the last sync will say
                os.fsync(file)

    thread = threading.Thread(target=sync_often, name="gallery rewriting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        os.close(file)


def _require_room(database: Path) -> None:
    """Refuse before the disk is full of a file that would not fit: others write to it, too."""
    needed = database.stat().st_size + _SPARE_BYTES
    if shutil.disk_usage(database.parent).free < needed:
        raise StorageError(
            f"{database} cannot be written anew without what was deleted: that needs {needed:,} bytes of disk; "
            "make room on it"
        )


@contextmanager
def _following(database: Database, write_lock: threading.RLock) -> Iterator["_Changes"]:
    """Note the keys of the rows that are changed in the block."""
    with write_lock, database.writing() as db:
        begin_rewriting(db)
        changes = _Changes(db)
    try:
        yield changes
    finally:
        with write_lock:
            changes.end()


class _Changes:
    """The keys of rows that the connection ``db`` changes, and their copying into another file.

    All is called under the write lock, and but for the constructor between transactions.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db, self._keys = db, dict[str, list[str]]()
        tables = db.execute(
            "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
        )
        for (table,) in tables.fetchall():
            columns = db.execute("SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk", (table,)).fetchall()
            self._keys[table] = [column for (column,) in columns]
            self._follow(table, self._keys[table])

    def _follow(self, table: str, key: list[str]) -> None:
        columns = ", ".join(key)
        self._db.execute(f"CREATE TEMP TABLE changed_{table} ({columns}, PRIMARY KEY ({columns})) WITHOUT ROWID")
        for event, rows in (("INSERT", ["NEW"]), ("UPDATE", ["OLD", "NEW"]), ("DELETE", ["OLD"])):
            # Not by OR IGNORE: a statement's own ON CONFLICT, as of an upsert, would take its place in the trigger.
            noting = "".join(_noting(f"changed_{table}", key, row) for row in rows)
            self._db.execute(
                f"CREATE TEMP TRIGGER {event.lower()}_{table} AFTER {event} ON main.{table} BEGIN {noting}END"
            )

    def copy(self, path: Path) -> None:
        """Copy the rows as they are now into the file at ``path``, which could then take the present one's place."""
        self._db.execute("ATTACH ? AS new", (str(path),))
        try:
            self._db.execute("PRAGMA new.synchronous = OFF")  # of no use to anybody unless it is whole
            self._db.execute("PRAGMA new.journal_mode = OFF")
            with self._db:  # commits, or rolls back what a full disk has not ended
                self._db.execute("BEGIN")
                self._copy_rows()
                end_rewriting(self._db, "new")
            self._db.execute("PRAGMA new.journal_mode = WAL")  # as the present one has it: opening it writes nothing
        finally:
            self._db.execute("DETACH new")

    def _copy_rows(self) -> None:
        self._db.execute("PRAGMA defer_foreign_keys = ON")
        for table, key in self._keys.items():  # row by row: the keys of another database are looked up in no index
            same = " AND ".join(f"{column} = ?" for column in key)
            changed = self._db.execute(f"SELECT * FROM temp.changed_{table}").fetchall()
            self._db.executemany(f"DELETE FROM new.{table} WHERE {same}", changed)
        for table, key in self._keys.items():
            same = " AND ".join(f"rows.{column} = changed.{column}" for column in key)
            self._db.execute(
                f"INSERT INTO new.{table} SELECT rows.* FROM temp.changed_{table} changed "
                f"CROSS JOIN main.{table} rows ON {same}"
            )
            self._db.execute(f"DELETE FROM temp.changed_{table}")
        self._db.execute("DELETE FROM new.sqlite_sequence")
        self._db.execute("INSERT INTO new.sqlite_sequence SELECT * FROM main.sqlite_sequence")

    def end(self) -> None:
        """Note no more; after an exchange the connection is another, and has nothing to forget."""
        with suppress(sqlite3.ProgrammingError):  # closed
            for table in self._keys:
                self._db.execute(f"DROP TABLE temp.changed_{table}")
                for event in ("insert", "update", "delete"):
                    self._db.execute(f"DROP TRIGGER temp.{event}_{table}")


def _noting(table: str, key: list[str], row: str) -> str:
    """The statement by which a trigger puts the key of ``row`` into ``table``, unless it is there."""
    values = ", ".join(f"{row}.{column}" for column in key)
    same = " AND ".join(f"{column} = {row}.{column}" for column in key)
    return f"INSERT INTO {table} SELECT {values} WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE {same}); "
