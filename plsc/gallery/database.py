"""The SQLite file that is a gallery's truth: its schema, its connections, and what its errors mean.

Vectors lie in a table of their own that only grows: a row is never moved to another page, and forgetting one
overwrites it where it lies, so that no stale copy of it stays behind in a page (SQLite's secure_delete clears what it
frees, not what it copies from page to page). Checksums guard each row's content, which SQLite itself does not.
"""

import queue
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plsc.errors import DataError, IntegrityError, PlscError, StorageError, UsageError
from plsc.gallery.write_ahead_log import check_log

APPLICATION_ID = 0x706C7363  # "plsc"
VERSION = 1
PAGE_BYTES = 16384  # seven vectors of 512 numbers to a page; in SQLite's usual 4 KiB half of each page stays empty
ERASED = bytes(5)  # the checksum of a vector that was overwritten
_WAIT_SECONDS = 30.0
_IDLE_READERS = 16

SCHEMA = (
    """CREATE TABLE collections (
        number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, dim INTEGER NOT NULL,
        contract_id TEXT NOT NULL, created TEXT NOT NULL, checksum INTEGER NOT NULL,
        persons INTEGER NOT NULL DEFAULT 0, faces INTEGER NOT NULL DEFAULT 0,
        base INTEGER NOT NULL DEFAULT 0, seal TEXT NOT NULL DEFAULT '', covered INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE persons (
        id INTEGER PRIMARY KEY AUTOINCREMENT, collection INTEGER NOT NULL REFERENCES collections (number),
        name TEXT, metadata TEXT NOT NULL, created TEXT NOT NULL, checksum INTEGER NOT NULL)""",
    "CREATE INDEX persons_of_collection ON persons (collection)",
    """CREATE TABLE faces (
        id INTEGER PRIMARY KEY AUTOINCREMENT, collection INTEGER NOT NULL REFERENCES collections (number),
        person INTEGER NOT NULL REFERENCES persons (id), checksum INTEGER NOT NULL)""",
    "CREATE INDEX faces_of_collection ON faces (collection)",
    "CREATE INDEX faces_of_person ON faces (person)",
    # face: not a reference, for the row outlives the face until it is overwritten, and its place after that
    "CREATE TABLE vectors (face INTEGER PRIMARY KEY, checksum BLOB NOT NULL, vector BLOB NOT NULL)",
    "CREATE INDEX erased ON vectors (face) WHERE checksum = x'0000000000'",
    # faces whose vectors are still in the base or in this file
    "CREATE TABLE forgotten (face INTEGER PRIMARY KEY, collection INTEGER NOT NULL)",
    "CREATE INDEX forgotten_of_collection ON forgotten (collection)",
    # what filters look at: kind 0 truth, 1 number, 2 text (plsc.gallery.records)
    """CREATE TABLE attributes (
        collection INTEGER NOT NULL, key TEXT NOT NULL, kind INTEGER NOT NULL, value NOT NULL, person INTEGER NOT NULL,
        PRIMARY KEY (collection, key, kind, value, person)) WITHOUT ROWID""",
    "CREATE TABLE unfinished (work TEXT PRIMARY KEY) WITHOUT ROWID",
)


class Database:
    """The connections to ``path``: one that writes, and readers, each used by one thread at a time.

    Callers serialise their writes. Errors: :class:`StorageError` where nothing can be written, and
    :class:`IntegrityError` where what was read is damaged, both naming the file.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path``, or make it; :class:`DataError` if it is another program's, or a later version's."""
        self.path = path
        self._closed = False
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        check_log(path, PAGE_BYTES)  # first: SQLite would take what is lost for never written, and remove the log
        with errors_of(path):
            self._writer = _connected(path)
            try:
                _prepare(self._writer, path)
            except BaseException:
                self._writer.close()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading; every statement sees all that is committed."""
        with errors_of(self.path):
            if self._closed:
                raise UsageError(f"the store {self.path.parent} is closed")
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                connection = _connected(self.path)
            try:
                yield connection
            finally:
                self._give_back(connection)

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading whose statements all see the same moment."""
        with self.reading() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed and on disk after the block, or undone where anything in it fails."""
        with errors_of(self.path):
            if self._closed:
                raise UsageError(f"the store {self.path.parent} is closed")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def empty_log(self) -> None:
        """Bring the write-ahead log into the file and cut it to nothing: old pages are then in neither."""
        with errors_of(self.path):
            busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StorageError(f"{self.path}: a long read keeps the write-ahead log in use; try again later")

    def vacuum(self) -> None:
        """Write the file anew, without the room that was freed. Needs as much room again while it works."""
        with errors_of(self.path):
            self._writer.execute("VACUUM")

    def close(self) -> None:
        """Close all connections that are not in use."""
        self._closed = True
        while not self._idle.empty():
            self._idle.get_nowait().close()
        self._writer.close()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if self._closed or self._idle.qsize() >= _IDLE_READERS:
            connection.close()
        else:
            self._idle.put(connection)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Tell what SQLite's errors mean for the one who asked."""
    try:
        yield
    except sqlite3.Error as error:
        raise _meaning(error, path) from None
    except UnicodeDecodeError:  # in SQLite's own message
        raise _corrupt(path, "its schema is not what was written") from None


def damaged(connection: sqlite3.Connection, what: str) -> IntegrityError:
    """The error that names the file of ``connection`` and ``what`` is damaged in it."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return _corrupt(path, what)


def _corrupt(path: Path, what: object) -> IntegrityError:
    return IntegrityError(f"{path} is corrupt: {what}; restore a snapshot with plsc gallery restore")


def _meaning(error: sqlite3.Error, path: Path) -> PlscError | sqlite3.Error:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "UTF-8" in str(error):
        return _corrupt(path, error)
    if code in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_PERM,
    ):
        return StorageError(f"{path}: {error}; nothing was changed: make room on the disk, or check its permissions")
    if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
        return UsageError(f"the store {path.parent} is closed")
    return error


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    # a filter's values after "in": as many as they are, and exact (JSON's fractions would be rounded once more)
    connection.execute(
        "CREATE TEMP TABLE wanted (place INTEGER, kind INTEGER, value, PRIMARY KEY (place, kind, value)) WITHOUT ROWID"
    )
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    application, version = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if not application and not version and not tables:
        connection.execute("PRAGMA journal_mode = WAL")
        _create(connection)
    elif application != APPLICATION_ID:
        raise DataError(f"{path} is no gallery; name another folder")
    elif version != VERSION:
        raise DataError(f"{path} is a gallery of version {version}; this plsc reads version {VERSION}")
    elif sorted(_statements(connection)) != sorted(SCHEMA):
        raise damaged(connection, "its schema is not what was written")
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise StorageError(f"{path}: this file system does not take a write-ahead log; use a local disk")


def _statements(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
    return [row[0] for row in rows]


def _create(connection: sqlite3.Connection) -> None:
    """All in one transaction: a killed creation leaves an empty file, which is begun anew."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
