"""The SQLite file that holds a gallery's rows: schema, connections, and the meaning of its errors.

Deleted vectors must leave no copy in the file. SQLite's ``secure_delete`` zeroes pages that it frees, but not the stale
copies that remain when it moves a row between pages. So vectors live in a table of their own that only grows: a row is
never moved, and erasing a vector overwrites it in place with zeros of the same length. SQLite does not checksum its
pages either, so every row carries a checksum of its content (plsc.gallery.sqlite.records).
"""

import queue
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plsc.errors import DataError, IntegrityError, PlscError, StorageError, UsageError

APPLICATION_ID = 0x706C7363  # "plsc"
VERSION = 1
PAGE_BYTES = 16384  # seven vectors of 512 numbers per page; SQLite's default of 4 KiB would waste half of each page
ERASED = bytes(5)  # the checksum column of an erased vector; vector_checksum never returns it
_BUSY_TIMEOUT_SECONDS = 30.0
_MAX_IDLE_READERS = 16

# The column names belong to the file format. `base` is the number of the current sealed segment (0: none), `seal` its
# manifest's digest, `covered` its watermark (the largest face id that it accounts for), `forgotten` the tombstones.
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
    # face is no foreign key: the row outlives the face until it is erased, and keeps its space after that
    "CREATE TABLE vectors (face INTEGER PRIMARY KEY, checksum BLOB NOT NULL, vector BLOB NOT NULL)",
    "CREATE INDEX erased ON vectors (face) WHERE checksum = x'0000000000'",
    # tombstones: deleted faces whose vectors are still in a sealed segment or in this file
    "CREATE TABLE forgotten (face INTEGER PRIMARY KEY, collection INTEGER NOT NULL)",
    "CREATE INDEX forgotten_of_collection ON forgotten (collection)",
    # metadata as filters compare it; kind is a plsc.gallery.filters.Kind
    """CREATE TABLE attributes (
        collection INTEGER NOT NULL, key TEXT NOT NULL, kind INTEGER NOT NULL, value NOT NULL, person INTEGER NOT NULL,
        PRIMARY KEY (collection, key, kind, value, person)) WITHOUT ROWID""",
    "CREATE TABLE unfinished (work TEXT PRIMARY KEY) WITHOUT ROWID",
)


class Database:
    """Connections to the SQLite file at ``path``: one writer, and a pool of readers used by one thread at a time each.

    Callers serialise their writes. Every method translates SQLite's errors with :func:`translate_errors`.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` or create it; :class:`DataError` if it is another program's file or a later version's."""
        self.path = path
        self._closed = False
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        with translate_errors(path):
            self._writer = _connect(path)
            try:
                _prepare(self._writer, path)
            except BaseException:
                self._writer.close()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for reading; each statement sees everything committed before it."""
        with translate_errors(self.path):
            self._require_open()
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                connection = _connect(self.path)
            try:
                yield connection
            finally:
                self._release(connection)

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for reading whose statements all see the same moment."""
        with self.reading() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: committed and synced to disk after the block, rolled back if anything in it fails."""
        with translate_errors(self.path):
            self._require_open()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def truncate_log(self) -> None:
        """Checkpoint the write-ahead log into the file and truncate it: neither then holds superseded pages."""
        with translate_errors(self.path):
            busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StorageError(f"{self.path}: a long read keeps the write-ahead log in use; try again later")

    def vacuum(self) -> None:
        """Rewrite the file without its free space. Needs as much disk space again while it runs."""
        with translate_errors(self.path):
            self._writer.execute("VACUUM")

    def close(self) -> None:
        """Close all idle connections; one in use is closed when it is returned."""
        self._closed = True
        while not self._idle.empty():
            self._idle.get_nowait().close()
        self._writer.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"the store {self.path.parent} is closed; open it again")

    def _release(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if self._closed or self._idle.qsize() >= _MAX_IDLE_READERS:
            connection.close()
        else:
            self._idle.put(connection)


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours: :class:`StorageError` if it cannot write, :class:`IntegrityError` for damage."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(error, path) from None
    except UnicodeDecodeError:  # raised by sqlite3 for a damaged schema, whose text is in SQLite's message
        raise _corrupt(path, "its schema is not what was written") from None


def corrupt_row(connection: sqlite3.Connection, what: str) -> IntegrityError:
    """Return the error for damaged content: it names the file of ``connection`` and ``what`` is wrong in it."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return _corrupt(path, what)


def _corrupt(path: Path, what: object) -> IntegrityError:
    return IntegrityError(f"{path} is corrupt: {what}; restore a snapshot with plsc gallery restore")


def _translated(error: sqlite3.Error, path: Path) -> PlscError | sqlite3.Error:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code; the upper bits say where it happened
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
        return UsageError(f"the store {path.parent} is closed; open it again")
    return error


def _connect(path: Path) -> sqlite3.Connection:
    # isolation_level None: we issue BEGIN and COMMIT ourselves. Readers move between threads, one at a time.
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA synchronous = FULL")  # COMMIT returns after the log is synced: that is what "durable" is
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    # The values after "in" of a filter: any number of them, and exact, which a JSON parameter would not be for floats.
    connection.execute(
        "CREATE TEMP TABLE wanted (condition INTEGER, kind INTEGER, value, "
        "PRIMARY KEY (condition, kind, value)) WITHOUT ROWID"
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
        raise corrupt_row(connection, "its schema is not what was written")
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise StorageError(f"{path}: this file system does not support a write-ahead log; use a local disk")


def _statements(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
    return [row[0] for row in rows]


def _create(connection: sqlite3.Connection) -> None:
    """Create the schema in one transaction: a process killed here leaves an empty file, which is created again."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
