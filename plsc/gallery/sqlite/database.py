"""The SQLite file that holds a gallery's rows: connections, and the meaning of its errors.

Deleted vectors must leave no copy in the file. SQLite's ``secure_delete`` zeroes pages that it frees, but not the stale
copies that remain when it moves a row between pages. So vectors live in a table of their own that only grows: a row is
never moved, and erasing a vector overwrites it in place with zeros of the same length. The copies of names and metadata
go when the file is written anew (plsc.gallery.sqlite.rewriting). SQLite does not checksum its pages either, so every
row carries a checksum of its content (plsc.gallery.sqlite.records).
"""

import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from plsc.errors import (
    ConflictError,
    DataError,
    DeadlineError,
    IntegrityError,
    NotFoundError,
    PlscError,
    StorageError,
    UsageError,
)
from plsc.files import sync
from plsc.gallery.sqlite.schema import SCHEMAS, SETTINGS, VERSION, create, migrate, read_settings, statements
from plsc.gallery.values import Clock, Float32
from plsc.index.rows import Int64

APPLICATION_ID = 0x706C7363  # "plsc"
PAGE_BYTES = 16384  # seven vectors of 512 numbers per page; SQLite's default of 4 KiB would waste half of each page
ERASED = bytes(5)  # the checksum column of an erased vector; vector_checksum never returns it
_BUSY_TIMEOUT_SECONDS = 30.0
_MAX_IDLE_READERS = 16
_STEPS_BETWEEN_LOOKS = 50_000  # of SQLite's machine, about a millisecond
_READERS_SECONDS = 0.25  # that those who come wait while those who read are waited for


class ReadersError(StorageError):
    """A read goes on for long, and the file cannot be exchanged under it."""


class VectorCodec:
    """How vectors are stored: here as they are, in little-endian float32, or plsc.gallery.sqlite.encryption.

    The methods about transactions let keys follow what is committed.

    Attributes:
        overhead: bytes of a stored vector besides 4 for each number.
        has_keys: True where a vector is readable as long as a key is.
    """

    overhead = 0
    has_keys = False

    def encode(self, db: sqlite3.Connection, faces: Int64, persons: Int64, vectors: Float32) -> Sequence[bytes]:
        """Return the stored form of new vectors (n, dim), whose rows are not inserted yet."""
        return [vector.astype("<f4", copy=False).tobytes() for vector in vectors]

    def decode(self, db: sqlite3.Connection, faces: Sequence[int], stored: Sequence[bytes], dim: int) -> Float32:
        """Return the vectors (n, dim); a row of zeros is one whose key was erased while the caller was reading."""
        return np.frombuffer(b"".join(stored), dtype="<f4").astype(np.float32, copy=False).reshape(-1, dim)

    def seal(self, db: sqlite3.Connection, person: int, contents: Mapping[int, bytes]) -> dict[int, bytes]:
        """See :meth:`plsc.gallery.store.Store.sealed`; called without the write lock."""
        return dict(contents)

    def unseal(self, person: int, face: int, content: bytes) -> bytes | None:
        """See :meth:`plsc.gallery.store.Store.unsealed`; called without the write lock."""
        return content

    def recover(self, db: sqlite3.Connection) -> None:
        """Finish what a crash interrupted; called once, after the store was read."""

    def check(self, db: sqlite3.Connection) -> None:
        """Verify, under the write lock, that nothing keeps a key that has to be erased."""

    def leave(self, person: int, stored: bytes) -> None:
        """Note that the running transaction deletes a face of ``person``, whose vector is ``stored``."""

    def erase_waiting(self) -> None:
        """Erase the keys that wait for it, before a transaction; :class:`plsc.errors.StorageError` if that fails."""

    def prepare_commit(self, db: sqlite3.Connection) -> None:
        """Find out, at the end of a transaction, whose keys it erases."""

    def committed(self) -> None:
        """Let the keys follow what was committed."""

    def rolled_back(self) -> None:
        """Forget what the transaction noted."""

    def require_erased(self) -> None:
        """Raise :class:`plsc.errors.StorageError` if a key could not be erased that has to be."""

    def sync_erased(self) -> None:
        """Return when every key erased before is so on the disk, else raise :class:`plsc.errors.StorageError`."""

    def close(self) -> None:
        """Release what the codec holds."""


PLAIN = VectorCodec()


class StoreConnection(sqlite3.Connection):
    """A connection that knows how its store's vectors are stored, and the store's clock."""

    codec: VectorCodec = PLAIN
    clock: Clock = time


def codec_of(connection: sqlite3.Connection) -> VectorCodec:
    """Return how the vectors of the store of ``connection`` are stored."""
    return connection.codec if isinstance(connection, StoreConnection) else PLAIN


def clock_of(connection: sqlite3.Connection) -> Clock:
    """Return the clock of the store of ``connection``."""
    return connection.clock if isinstance(connection, StoreConnection) else time


class Database:
    """Connections to the SQLite file at ``path``: one writer, and a pool of readers used by one thread at a time each.

    Callers serialise their writes. Every method translates SQLite's errors with :func:`translate_errors`.

    Attributes:
        file: the path from the root, as everything after the opening names it.
        migrated_from: the version that the file was of until this opening; None: the present one.
        settings: what the table of this name says.
        codec: how vectors are stored; set by :meth:`use`.
        clock: the store's; set by :meth:`use`.
    """

    def __init__(self, path: Path, settings: Mapping[str, str] | None = None) -> None:
        """Open ``path``, create or migrate it.

        Args:
            path: the file.
            settings: of a new file. One that exists has to be encrypted where these are of an encrypted one.

        Raises:
            DataError: it is another program's or a later version's.
            UsageError: it is encrypted and should not be, or the reverse.
        """
        self.path, self.codec = path, PLAIN
        self.clock: Clock = time
        self.file = path.absolute()  # wherever the process goes
        self._closed = False
        self._idle: queue.LifoQueue[StoreConnection] = queue.LifoQueue()
        self._thread = threading.local()  # "stop": when this thread's reading ends; "reads": how many it has
        self._reads, self._exchanging = 0, False
        self._has_writer = True
        self._gate = threading.Condition()
        with translate_errors(path):
            _create_private(path)
            self._writer = _connect(path)
            try:
                self.migrated_from = _prepare(self._writer, path, settings or {})
                self.settings = read_settings(self._writer)
            except BaseException:
                self._writer.close()
                raise

    def use(self, *, codec: VectorCodec | None = None, clock: Clock | None = None) -> None:
        """Store vectors as ``codec`` does, and times as ``clock`` says; called before the first reading."""
        self.codec, self.clock = codec or self.codec, clock or self.clock
        self._equip(self._writer)

    def _equip(self, connection: StoreConnection) -> StoreConnection:
        connection.codec, connection.clock = self.codec, self.clock
        return connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for reading; each statement sees everything committed before it."""
        with translate_errors(self.path), self._counted_as_reader():
            self._require_open()
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                connection = self._equip(_connect(self.file))
            stop: Callable[[], bool] | None = getattr(self._thread, "stop", None)
            connection.set_progress_handler(stop, _STEPS_BETWEEN_LOOKS)
            try:
                yield connection
            except (NotFoundError, ConflictError):
                self._release(connection)
                raise
            except BaseException:
                # Somebody whom the error's traceback keeps may be reading yet: the next reader would see that moment.
                connection.close()
                raise
            self._release(connection)

    @contextmanager
    def stopping_when(self, stop: Callable[[], bool]) -> Iterator[None]:
        """End what this thread reads in the block as soon as ``stop`` says so, by :class:`DeadlineError`."""
        self._thread.stop = stop
        try:
            yield
        finally:
            self._thread.stop = None

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for reading whose statements all see the same moment."""
        with self.reading() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: committed and synced to disk after the block, rolled back if anything in it fails."""
        with translate_errors(self.path):
            self._require_open()
            self._require_writer()
            self.codec.erase_waiting()
            try:
                with self._writer:  # commits, or rolls back
                    self._writer.execute("BEGIN IMMEDIATE")
                    yield self._writer
                    self.codec.prepare_commit(self._writer)
            except BaseException:
                self.codec.rolled_back()
                raise
            self.codec.committed()

    def truncate_log(self) -> None:
        """Checkpoint the write-ahead log into the file and truncate it: neither then holds superseded pages."""
        with translate_errors(self.path):
            self._require_writer()
            busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StorageError(f"{self.path}: a long read keeps the write-ahead log in use; try again later")

    def exchange(self, new: Path) -> int:
        """Put the file ``new``, of the same rows, in the place of this one, which goes; called under the write lock.

        Nobody reads meanwhile: the write-ahead log is found by the file's name, so no connection may outlive its file.

        Returns:
            A descriptor of the former file, whose room is freed once it is closed.

        Raises:
            ReadersError: somebody reads for long; nothing was changed.
            StorageError: another program has the file open; nothing was changed, but the connection that writes.
        """
        with translate_errors(self.path), self._without_readers():
            self._require_open()
            self.truncate_log()
            self._close_connections()  # the last one removes the log
            try:
                if self.file.with_name(f"{self.file.name}-wal").exists():
                    raise StorageError(f"another program has {self.path} open; end it: one process owns a store")
                former = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    new.replace(self.file)
                    sync(self.file.parent)
                except BaseException:
                    os.close(former)  # before SQLite has locks on the file, which this would undo
                    raise
            finally:
                self._has_writer = False
                with suppress(sqlite3.Error):  # on a full disk: the next to write connects, or says so
                    self._require_writer()
        return former

    @contextmanager
    def _counted_as_reader(self) -> Iterator[None]:
        """Wait until no exchange is on; who reads already may read more, or the exchange would wait for them."""
        reads = getattr(self._thread, "reads", 0)
        with self._gate:
            self._gate.wait_for(lambda: reads or not self._exchanging)
            self._reads += 1
        self._thread.reads = reads + 1
        try:
            yield
        finally:
            self._thread.reads -= 1
            with self._gate:
                self._reads -= 1
                self._gate.notify_all()

    @contextmanager
    def _without_readers(self) -> Iterator[None]:
        with self._gate:
            self._exchanging = True
            is_free = self._gate.wait_for(lambda: not self._reads, _READERS_SECONDS)
        try:
            if not is_free:
                raise ReadersError(f"{self.path}: a long read keeps it from being written anew; try again later")
            yield
        finally:
            with self._gate:
                self._exchanging = False
                self._gate.notify_all()

    def close(self) -> None:
        """Close all idle connections; one in use is closed when it is returned."""
        self._closed = True
        self._close_connections()
        self.codec.close()

    def _close_connections(self) -> None:
        while not self._idle.empty():
            self._idle.get_nowait().close()
        self._writer.close()

    def _require_writer(self) -> None:
        """Connect again for writing where that failed after an exchange; called under the write lock."""
        if not self._has_writer:
            self._writer = self._equip(_connect(self.file))
            self._has_writer = True

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"the store {self.path.parent} is closed; open it again")

    def _release(self, connection: StoreConnection) -> None:
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
        raise corrupt(path, "its schema is not what was written") from None


def _create_private(path: Path) -> None:
    """Create the file, if there is none, readable by its owner alone; SQLite gives its log the same rights."""
    with suppress(OSError):  # SQLite says why it cannot be written
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def corrupt_row(connection: sqlite3.Connection, what: str) -> IntegrityError:
    """Return the error for damaged content: it names the file of ``connection`` and ``what`` is wrong in it."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return corrupt(path, what)


def corrupt(path: Path, what: object) -> IntegrityError:
    """Return the error for a damaged file of the store."""
    return IntegrityError(f"{path} is corrupt: {what}; restore a snapshot with plsc gallery restore")


def _translated(error: sqlite3.Error, path: Path) -> PlscError | sqlite3.Error:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code; the upper bits say where it happened
    if code == sqlite3.SQLITE_INTERRUPT:
        return DeadlineError("the deadline passed before the store had looked at all people; allow more time")
    lacks_its_own = code == sqlite3.SQLITE_ERROR and str(error).startswith("no such")  # a table, a column, an index
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "UTF-8" in str(error) or lacks_its_own:
        return corrupt(path, error)
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


def _connect(path: Path) -> StoreConnection:
    # isolation_level None: we issue BEGIN and COMMIT ourselves. Readers move between threads, one at a time.
    connection = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        factory=StoreConnection,
    )
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


def _prepare(connection: sqlite3.Connection, path: Path, settings: Mapping[str, str]) -> int | None:
    """Create, check or migrate the file; returns the version that it was migrated from."""
    application, version = _identity(connection)
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if not application and not version and not tables:
        connection.execute("PRAGMA journal_mode = WAL")
        create(connection, APPLICATION_ID, settings)
        version = VERSION
    else:
        check_schema(connection, path)
        _check_settings(read_settings(connection), settings, path)
    if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise StorageError(f"{path}: this file system does not support a write-ahead log; use a local disk")
    if version != VERSION:
        migrate(connection, version)
    return None if version == VERSION else version


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the numbers of the program and of the version that a file says it is of."""
    names = ("application_id", "user_version")
    application, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return application, version


def check_schema(connection: sqlite3.Connection, path: Path) -> int:
    """Verify that the file at ``path`` has the tables of a gallery, and nothing else; returns its version.

    Raises:
        DataError: it is another program's or a later version's.
        IntegrityError: its tables are others.
    """
    application, version = _identity(connection)
    if application != APPLICATION_ID:
        raise DataError(f"{path} is no gallery; name another folder")
    if version not in SCHEMAS:
        raise DataError(f"{path} is a gallery of version {version}; this plsc reads up to version {VERSION}: update it")
    if sorted(statements(connection)) != sorted(SCHEMAS[version]):
        raise corrupt(path, "its schema is not what was written")
    return version


def _check_settings(stored: Mapping[str, str], expected: Mapping[str, str], path: Path) -> None:
    """Refuse a file that is read otherwise than the caller would, before anything in it is changed."""
    unknown = sorted(stored.keys() - SETTINGS)
    if unknown:
        raise DataError(f"{path} has the setting {unknown[0]}, which this plsc does not know: update plsc")
    if "encryption" in stored and "encryption" not in expected:
        raise UsageError(f"{path} is encrypted; name its key file: --encrypt KEYFILE")
    if "encryption" in expected and "encryption" not in stored:
        raise UsageError(
            f"{path} is not encrypted; leave --encrypt out, or export its collections and import them into a new store"
        )
