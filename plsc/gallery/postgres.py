"""The gallery in Postgres with pgvector: several services may share one, and Postgres' backups and replicas serve it.

The tables: ``plsc_collections`` (with the next id and the counts), ``plsc_persons`` (metadata as jsonb),
``plsc_faces`` (vectors), ``plsc_idempotency`` (answers to requests with an Idempotency-Key), and, for moves to another
model, ``plsc_migrations`` and ``plsc_second_vectors``. Every change is one transaction that locks its collection's row,
so writers of a collection take turns, in whatever process they are; what is acknowledged is committed, and every later
statement sees it.

The search is exact, a scan in the database: recall 1, dims up to pgvector's 16,000, and time in proportion to the faces
of the collection. :meth:`PostgresStore.compact` rewrites the tables without what was deleted; Postgres' own log and
backups keep it until they are recycled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from plsc.errors import StorageError, UsageError, masked
from plsc.gallery import postgres_rows as rows
from plsc.gallery.person_search import group_by_person
from plsc.gallery.postgres_rows import PostgresRows
from plsc.gallery.rows import Change
from plsc.gallery.store import Query, Store
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import now
from plsc.gallery.values import Collection, IdempotentRequest, Match, StoredAnswer, totals

_T = TypeVar("_T")

MAX_DIM = 16_000  # pgvector's
_SCHEMA_LOCK = 7089713  # of pg_advisory_xact_lock: IF NOT EXISTS alone fails when two services start at once
_MAX_CONNECTIONS = 16
_CONNECT_SECONDS = 10.0  # to get a connection from the pool


def open_postgres(dsn: str) -> "PostgresStore":
    """Open the gallery in the database that ``dsn`` names (``host=… dbname=…`` or ``postgresql://…``).

    What it leaves out is taken from PGHOST, PGPASSWORD and their like, and a password from ~/.pgpass or PGPASSFILE. No
    error shows a password. Creates the tables if they are missing.

    Raises:
        UsageError: the Python packages are not installed, or the database is not in UTF-8.
        StorageError: ``dsn`` is none, or the database cannot be reached, or has no pgvector.
    """
    try:
        import pgvector.psycopg  # noqa: F401
        import psycopg
        import psycopg_pool  # noqa: F401
    except ImportError:
        raise UsageError("a store in Postgres needs more packages: pip install 'plsc-torch[postgres]'") from None
    if dsn.startswith("//"):  # of postgres://…
        dsn = f"postgresql:{dsn}"
    password = _password_of(dsn)
    try:
        with psycopg.connect(dsn) as connection:
            _prepare(connection)
    except psycopg.Error as error:
        raise StorageError(f"the Postgres store cannot be opened: {_first_line(error, password)}") from None
    return PostgresStore(dsn)


def _password_of(dsn: str) -> str:
    """The password in ``dsn``, "" without; :class:`StorageError` where it is no DSN: libpq would quote a part of it."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(dsn)
    except ProgrammingError:
        raise StorageError(
            "the Postgres store cannot be opened: the text after postgres: is no DSN (not shown: it may hold a "
            "password); write host=H dbname=D user=U or postgresql://HOST/DATABASE, or nothing, and set PGHOST and the "
            "like, and PGPASSFILE"
        ) from None
    if "://" in dsn and "@" in f"{parts.get('host', '')}{parts.get('dbname', '')}":
        raise StorageError(
            "the Postgres store cannot be opened: the DSN has more than one @; write those of a password as %40, and "
            "/ as %2F"
        )
    return str(parts.get("password") or "")


class PostgresStore(Store):
    """A :class:`plsc.gallery.store.Store` in Postgres; made by :func:`open_postgres`."""

    def __init__(self, dsn: str) -> None:
        from psycopg_pool import ConnectionPool

        # check: a connection to a server that was restarted meanwhile is replaced before it is used.
        self._pool = ConnectionPool(
            dsn,
            min_size=0,
            max_size=_MAX_CONNECTIONS,
            timeout=_CONNECT_SECONDS,
            configure=_configure,
            check=ConnectionPool.check_connection,
            open=True,
        )

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        with self._transaction() as connection:
            return [one.info for one in rows.all_collections(connection, self.clock)]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        with self._reading(name) as found:
            return found.info

    def _create(self, name: str, dim: int, contract_id: str, idempotent: IdempotentRequest | None) -> Collection | None:
        if dim > MAX_DIM:
            raise UsageError(f"pgvector takes vectors of up to {MAX_DIM} numbers, not {dim}")
        with self._transaction() as connection:
            created = connection.execute(
                "INSERT INTO plsc_collections (name, dim, contract_id, created) VALUES (%s, %s, %s, %s) "
                "ON CONFLICT DO NOTHING RETURNING key",
                [name, dim, contract_id, now(self.clock)],
            ).fetchone()
            if created is None:
                return None
            info = rows.find_collection(connection, name, self.clock).info
            rows.insert_answer(connection, idempotent, info, self.clock)
            return info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._transaction() as connection:
            key = rows.find_collection(connection, name, self.clock, lock=True).key
            connection.execute("DELETE FROM plsc_collections WHERE key = %s", [key])

    # --- changes and reads of one collection ---

    def _change(self, collection: str, change: Change[_T]) -> _T:
        with self._transaction() as connection:
            found = rows.find_collection(connection, collection, self.clock, lock=True)
            result = change.work(found, change.check(found.info, found.migration))
            rows.insert_answer(connection, change.idempotent, result, self.clock)
            return result

    @contextmanager
    def _reading(self, collection: str) -> Iterator[PostgresRows]:
        with self._transaction(read_only=True) as connection:
            yield rows.find_collection(connection, collection, self.clock)

    def _search(self, collection: str, query: Query) -> list[list[Match]]:
        with self._reading(collection) as found:
            units, hidden = query.units(found), found.expired_ids()
            fetches = [found.face_search(unit, query.filter, hidden) for unit in units]
            return [group_by_person(fetch, query.k, query.threshold) for fetch in fetches]

    # --- maintenance ---

    def _names_with_expired(self) -> list[str]:
        with self._transaction() as connection:
            names = connection.execute(
                "SELECT c.name FROM plsc_collections c WHERE EXISTS "
                "(SELECT 1 FROM plsc_persons p WHERE p.collection = c.key AND p.expires <= %s)",
                [now(self.clock)],
            )
            return [row[0] for row in names]

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""
        with self._transaction() as connection:
            return rows.find_answer(connection, token, key)

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""
        with self._transaction() as connection:
            rows.insert_answer(connection, idempotent, result, self.clock)

    def forget_answers(self, before: str, most: int) -> int:
        """See :class:`plsc.gallery.store.Store`."""
        with self._transaction() as connection:
            return rows.delete_answers(connection, before, most)

    def compact(self, collection: str | None = None) -> None:
        """Rewrite the tables without what was deleted; they are locked meanwhile."""
        if collection is not None:
            self.collection(collection)
        with self._connection() as connection:
            connection.autocommit = True  # VACUUM does not run in a transaction
            try:
                connection.execute(f"VACUUM (FULL, ANALYZE) {rows.TABLES}")
            finally:
                connection.autocommit = False

    def snapshot(self, target: Path) -> None:
        """Write everything, as of one moment, to the new folder ``target`` (see :mod:`plsc.gallery.transfer`)."""
        with self._transaction(read_only=True) as connection:
            write_copy(target, [(one.info, one.everyone()) for one in rows.all_collections(connection, self.clock)])

    def check(self) -> dict[str, Any]:
        """Verify counts, ids and vectors; "checksums" says if Postgres guards its own pages."""
        with self._transaction(read_only=True) as connection:
            found = rows.all_collections(connection, self.clock)
            for one in found:
                one.check()
            expired = sum(len(one.expired_ids()) for one in found)
            checksums = connection.execute("SHOW data_checksums").fetchone()[0] == "on"
        return {**totals([one.info for one in found]), "expired": expired, "checksums": checksums}

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @contextmanager
    def _transaction(self, *, read_only: bool = False) -> Iterator[Any]:
        """Run a transaction; with ``read_only`` all its statements see the same moment."""
        with self._connection() as connection, connection.transaction():
            if read_only:
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield connection

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Borrow a connection from the pool; psycopg's errors become :class:`StorageError`."""
        import psycopg

        try:
            with self._pool.connection() as connection:
                yield connection
        except psycopg.Error as error:
            raise StorageError(f"the Postgres store failed: {_first_line(error)}") from None


def _prepare(connection: Any) -> None:
    encoding = connection.execute("SHOW server_encoding").fetchone()[0]
    if encoding != "UTF8":
        raise UsageError(f"the Postgres database is in {encoding}; a gallery needs one in UTF8")
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_SCHEMA_LOCK])
    if not connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone():
        connection.execute("CREATE EXTENSION vector")
    connection.execute(rows.SCHEMA)


def _configure(connection: Any) -> None:
    """Set up a new connection of the pool."""
    from pgvector.psycopg import register_vector

    register_vector(connection)
    # A server may be set to acknowledge commits that are not on its disk yet; ours are durable.
    if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
        connection.execute("SET synchronous_commit TO on")
    connection.commit()


def _first_line(error: Exception, password: str = "") -> str:
    line = masked(str(error).strip().partition("\n")[0])
    return (line.replace(password, "***") if password else line)[:300] or type(error).__name__
