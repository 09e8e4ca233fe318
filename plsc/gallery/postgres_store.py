"""The gallery in Postgres with pgvector: several services may share one, and Postgres' backups and replicas serve it.

Three tables: ``plsc_collections`` (with the next id and the counts), ``plsc_persons`` (metadata as jsonb),
``plsc_faces`` (vectors). Every change is one transaction that holds its collection's row, so writers of a collection
take turns, in whatever process they are; acknowledged is committed, and the next statement of anyone sees it.
The search is exact, a scan in the database: recall 1, dims up to pgvector's 16,000, and time in proportion to the
faces of the collection. :meth:`PostgresStore.compact` rewrites the tables without what was deleted; Postgres' own log
and backups keep it until they are recycled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, StorageError, UsageError
from plsc.gallery import postgres_rows as rows
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.person_search import group_by_person
from plsc.gallery.postgres_filters import metadata_text
from plsc.gallery.store import Collection, Float32, Match, Metadata, NewPerson, Person, PersonSummary
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import (
    MAX_ID,
    check_collection,
    check_contract,
    check_name,
    check_page,
    check_persons,
    check_search,
    is_id,
    now,
)
from plsc.index.rows import unit_vectors

LARGEST_DIM = 16_000
_LOCK = 7089713  # held while the tables are made: IF NOT EXISTS alone fails where two services start at once


def open_postgres(dsn: str) -> "PostgresStore":
    """Open the gallery in the database that ``dsn`` names (``host=… dbname=…`` or ``postgresql://…``).

    Makes the tables where they are not there. Raises :class:`UsageError` if psycopg or pgvector's Python package is
    not installed or the database is not in UTF-8, and :class:`StorageError` if it cannot be reached or has no pgvector.
    """
    try:
        import pgvector.psycopg  # noqa: F401
        import psycopg
    except ImportError:
        raise UsageError("a store in Postgres needs more packages: pip install 'plsc-torch[postgres]'") from None
    try:
        with psycopg.connect(dsn) as connection:
            _prepare(connection)
    except psycopg.Error as error:
        raise StorageError(f"the Postgres store cannot be opened: {_line(error)}") from None
    return PostgresStore(dsn)


def _prepare(connection: Any) -> None:
    encoding = connection.execute("SHOW server_encoding").fetchone()[0]
    if encoding != "UTF8":
        raise UsageError(f"the Postgres database is in {encoding}; a gallery needs one in UTF8")
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    if not connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone():
        connection.execute("CREATE EXTENSION vector")
    connection.execute(rows.SCHEMA)


class PostgresStore:
    """A :class:`plsc.gallery.store.Store` in Postgres; make one by :func:`open_postgres`."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._idle: LifoQueue[Any] = LifoQueue()

    def collections(self) -> list[Collection]:
        """All collections by name."""
        with self._transaction() as connection:
            return [about for _, about in rows.all_collections(connection)]

    def collection(self, name: str) -> Collection:
        """One collection."""
        with self._transaction() as connection:
            return rows.find_collection(connection, name)[1]

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Make a collection."""
        check_collection(name, dim, contract_id)
        if dim > LARGEST_DIM:
            raise UsageError(f"pgvector takes vectors of up to {LARGEST_DIM} numbers, not {dim}")
        with self._transaction() as connection:
            made = connection.execute(
                "INSERT INTO plsc_collections (name, dim, contract_id, created) VALUES (%s, %s, %s, %s) "
                "ON CONFLICT DO NOTHING RETURNING key",
                [name, int(dim), contract_id, now()],
            ).fetchone()
            if made is None:
                raise ConflictError(f"collection {name} exists already; name another one, or delete it")
            return rows.find_collection(connection, name)[1]

    def delete_collection(self, name: str) -> None:
        """Remove a collection with everything in it."""
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, name, lock=True)
            connection.execute("DELETE FROM plsc_collections WHERE key = %s", [key])

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        with self._transaction() as connection:
            key, about = rows.find_collection(connection, collection, lock=True)
            check_contract(about, contract_id)
            return rows.enrol(connection, key, check_persons(persons, about.dim))

    def person(self, collection: str, person: int) -> Person:
        """One person."""
        with self._transaction() as connection:
            return rows.find_person(connection, *rows.find_collection(connection, collection), person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Up to ``limit`` persons with ids above ``after``, ascending."""
        check_page(after, limit, filter)
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, collection)
            return rows.page(connection, key, min(max(after, 0), MAX_ID), min(limit, MAX_ID), filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """The persons of ``ids`` that exist."""
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, collection)
            found = rows.some(connection, key, [int(one) for one in ids if is_id(one)])
        return {one.id: PersonSummary(one.id, one.name, one.metadata) for one in found.values()}

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata; None leaves it."""
        text = None if metadata is None else metadata_text(check_metadata(metadata))
        with self._transaction() as connection:
            key, about = rows.find_collection(connection, collection, lock=True)
            rows.find_person(connection, key, about, person)
            connection.execute(
                "UPDATE plsc_persons SET name = coalesce(%s, name), metadata = coalesce(%s::jsonb, metadata) "
                "WHERE collection = %s AND id = %s",
                [check_name(name), text, key, person],
            )
            return rows.find_person(connection, key, about, person)

    def delete_person(self, collection: str, person: int) -> None:
        """Forget a person and the faces."""
        with self._transaction() as connection:
            key, about = rows.find_collection(connection, collection, lock=True)
            rows.find_person(connection, key, about, person)
            rows.delete(connection, key, person=person)

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        with self._transaction() as connection:
            key, about = rows.find_collection(connection, collection, lock=True)
            check_contract(about, contract_id)
            rows.find_person(connection, key, about, person)
            return rows.insert_faces(connection, key, person, unit_vectors(vectors, about.dim))

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Forget one face."""
        with self._transaction() as connection:
            key, about = rows.find_collection(connection, collection, lock=True)
            if face not in rows.find_person(connection, key, about, person).faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            rows.delete(connection, key, face=face)

    def vectors(self, collection: str, person: int) -> Float32:
        """The stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        with self._transaction() as connection:
            key, about = rows.find_collection(connection, collection)
            rows.find_person(connection, key, about, person)
            return rows.vectors_of(connection, key, [person], about.dim)[person]

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """For each of ``queries`` (Q, dim): the ``k`` most alike persons with a score >= ``threshold``."""
        check_search(k, threshold, filter)
        with self._transaction(read_only=True) as connection:
            key, about = rows.find_collection(connection, collection)
            return [
                group_by_person(rows.nearest(connection, key, query, filter), k, threshold)
                for query in unit_vectors(queries, about.dim)
            ]

    def compact(self, collection: str | None = None) -> None:
        """Rewrite the tables without what was deleted; nobody can use them meanwhile."""
        if collection is not None:
            self.collection(collection)
        with self._connection() as connection:
            connection.autocommit = True
            try:
                connection.execute("VACUUM (FULL, ANALYZE) plsc_collections, plsc_persons, plsc_faces")
            finally:
                connection.autocommit = False

    def snapshot(self, target: Path) -> None:
        """Write everything, as of one moment, into the new folder ``target`` (see :mod:`plsc.gallery.transfer`)."""
        with self._transaction(read_only=True) as connection:
            found = rows.all_collections(connection)
            write_copy(target, [(about, rows.everyone(connection, key, about.dim)) for key, about in found])

    def check(self) -> dict[str, Any]:
        """Verify counts, ids and vectors; "checksums" tells whether Postgres guards its own pages."""
        with self._transaction(read_only=True) as connection:
            found = rows.all_collections(connection)
            for key, about in found:
                rows.check_rows(connection, key, about)
            checksums = connection.execute("SHOW data_checksums").fetchone()[0] == "on"
        persons, faces = (sum(getattr(about, name) for _, about in found) for name in ("persons", "faces"))
        return {"collections": len(found), "persons": persons, "faces": faces, "checksums": checksums}

    def statistics(self) -> dict[str, dict[str, float]]:
        """Rows and persons of each collection; the search is exact, so there is no delta and the recall is 1."""
        return {
            about.name: {"rows": about.faces, "persons": about.persons, "delta": 0, "tombstones": 0, "recall": 1.0}
            for about in self.collections()
        }

    def close(self) -> None:
        """Let go of the connections."""
        while (connection := self._waiting()) is not None:
            connection.close()

    @contextmanager
    def _transaction(self, *, read_only: bool = False) -> Iterator[Any]:
        """A transaction; ``read_only`` sees all its statements' rows as of one moment."""
        with self._connection() as connection, connection.transaction():
            if read_only:
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield connection

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection for one call, kept for the next unless it broke; its errors become :class:`StorageError`."""
        import psycopg

        connection = None
        try:
            connection = self._living() or self._connect()
            yield connection
        except psycopg.Error as error:
            raise StorageError(f"the Postgres store failed: {_line(error)}") from None
        finally:
            if connection is not None and not connection.closed:
                self._idle.put(connection)

    def _waiting(self) -> Any:
        try:
            return self._idle.get_nowait()
        except Empty:
            return None

    def _living(self) -> Any:
        """A waiting connection that still answers: those to a server that was started again do not."""
        import psycopg

        while (connection := self._waiting()) is not None:
            try:
                connection.execute("")
                connection.rollback()
                return connection
            except psycopg.Error:
                connection.close()
        return None

    def _connect(self) -> Any:
        import psycopg
        from pgvector.psycopg import register_vector

        connection = psycopg.connect(self._dsn)
        register_vector(connection)
        # A server may be set to acknowledge what is not on its disk yet.
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            connection.execute("SET synchronous_commit TO on")
        connection.commit()
        return connection


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
