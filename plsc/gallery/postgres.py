"""The gallery in Postgres with pgvector: several services may share one, and Postgres' backups and replicas serve it.

Four tables: ``plsc_collections`` (with the next id and the counts), ``plsc_persons`` (metadata as jsonb),
``plsc_faces`` (vectors) and ``plsc_idempotency`` (answers to requests with an Idempotency-Key). Every change is one
transaction that locks its collection's row, so writers of a collection take turns, in whatever process they are; what
is acknowledged is committed, and every later statement sees it.

The search is exact, a scan in the database: recall 1, dims up to pgvector's 16,000, and time in proportion to the faces
of the collection. :meth:`PostgresStore.compact` rewrites the tables without what was deleted; Postgres' own log and
backups keep it until they are recycled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, StorageError, UsageError
from plsc.gallery import postgres_rows as rows
from plsc.gallery.filters import Filter
from plsc.gallery.person_search import group_by_person
from plsc.gallery.store import (
    KEEP,
    Collection,
    Float32,
    IdempotentRequest,
    Match,
    Metadata,
    NewPerson,
    Person,
    PersonSummary,
    Precondition,
    StoredAnswer,
    Unchanged,
)
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import (
    MAX_ID,
    ValidPerson,
    check_collection,
    check_contract,
    check_external_id,
    check_fields,
    check_page,
    check_persons,
    check_search,
    is_expired,
    is_id,
    now,
    same_content,
    taken_external_id,
)
from plsc.index.rows import unit_vectors

MAX_DIM = 16_000  # pgvector's
_SCHEMA_LOCK = 7089713  # of pg_advisory_xact_lock: IF NOT EXISTS alone fails when two services start at once
_MAX_CONNECTIONS = 16
_CONNECT_SECONDS = 10.0  # to get a connection from the pool


def open_postgres(dsn: str) -> "PostgresStore":
    """Open the gallery in the database that ``dsn`` names (``host=… dbname=…`` or ``postgresql://…``).

    Creates the tables if they are missing.

    Raises:
        UsageError: the Python packages are not installed, or the database is not in UTF-8.
        StorageError: the database cannot be reached, or has no pgvector.
    """
    try:
        import pgvector.psycopg  # noqa: F401
        import psycopg
        import psycopg_pool  # noqa: F401
    except ImportError:
        raise UsageError("a store in Postgres needs more packages: pip install 'plsc-torch[postgres]'") from None
    try:
        with psycopg.connect(dsn) as connection:
            _prepare(connection)
    except psycopg.Error as error:
        raise StorageError(f"the Postgres store cannot be opened: {_first_line(error)}") from None
    return PostgresStore(dsn)


class PostgresStore:
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
            return [info for _, info in rows.all_collections(connection)]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        with self._transaction() as connection:
            return rows.find_collection(connection, name)[1]

    def create_collection(
        self, name: str, dim: int, contract_id: str, *, idempotent: IdempotentRequest | None = None
    ) -> Collection:
        """Create a collection."""
        check_collection(name, dim, contract_id)
        if dim > MAX_DIM:
            raise UsageError(f"pgvector takes vectors of up to {MAX_DIM} numbers, not {dim}")
        with self._transaction() as connection:
            created = connection.execute(
                "INSERT INTO plsc_collections (name, dim, contract_id, created) VALUES (%s, %s, %s, %s) "
                "ON CONFLICT DO NOTHING RETURNING key",
                [name, int(dim), contract_id, now()],
            ).fetchone()
            if created is None:
                raise ConflictError(f"collection {name} exists already; name another one, or delete it")
            info = rows.find_collection(connection, name)[1]
            rows.insert_answer(connection, idempotent, info)
            return info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, name, lock=True)
            connection.execute("DELETE FROM plsc_collections WHERE key = %s", [key])

    # --- persons and faces ---

    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection, lock=True)
            check_contract(info, contract_id)
            created = _enrol(connection, key, info, check_persons(persons, info.dim))
            rows.insert_answer(connection, idempotent, created)
            return created

    def put_person(
        self, collection: str, person: NewPerson, contract_id: str, *, precondition: Precondition | None = None
    ) -> tuple[Person, bool]:
        """Enrol ``person``, or replace all of the one with its external id."""
        external_id = check_external_id(person.external_id)
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection, lock=True)
            check_contract(info, contract_id)
            (checked,) = check_persons([person], info.dim)
            former = rows.find_by_external_id(connection, key, external_id)
            alive = None if former is None or is_expired(former.expires) else former
            if precondition is not None:
                precondition.check(alive)
            if alive is None:
                return _enrol(connection, key, info, [checked])[0], True
            rows.delete_faces(connection, key, alive.faces)
            faces = tuple(rows.add_faces(connection, key, alive.id, checked.vectors))
            changed = replace(alive, name=checked.name, metadata=checked.metadata, expires=checked.expires, faces=faces)
            return _save(connection, key, changed), False

    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection, lock=True)
            check_contract(info, contract_id)
            owner = rows.find_person(connection, key, info, person)
            checked = unit_vectors(vectors, info.dim)
            faces = rows.add_faces(connection, key, owner.id, checked)
            if faces:
                _save(connection, key, owner)
            rows.insert_answer(connection, idempotent, faces)
            return faces

    def update_person(
        self,
        collection: str,
        person: int,
        *,
        name: str | Unchanged | None = KEEP,
        metadata: Metadata | Unchanged = KEEP,
        expires: str | Unchanged | None = KEEP,
        precondition: Precondition | None = None,
    ) -> Person:
        """Change the name or the expiry, or replace the metadata of a person."""
        fields = check_fields(name=name, metadata=metadata, expires=expires)
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection, lock=True)
            former = rows.find_person(connection, key, info, person)
            if precondition is not None:
                precondition.check(former)
            changed = replace(former, **fields)
            return former if same_content(changed, former) else _save(connection, key, changed)

    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        """Delete a person and all faces."""
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection, lock=True)
            former = rows.find_person(connection, key, info, person)
            if precondition is not None:
                precondition.check(former)
            rows.delete_person(connection, key, former)

    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
        """Delete one face of a person."""
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection, lock=True)
            owner = rows.find_person(connection, key, info, person)
            if face not in owner.faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            if precondition is not None:
                precondition.check(owner)
            rows.delete_faces(connection, key, [face])
            _save(connection, key, owner)

    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        """Delete those of ``persons`` whose time has come; returns their ids."""
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, collection, lock=True)
            gone = rows.find_expired(connection, key, persons)
            for person in gone:
                rows.delete_person(connection, key, person)
            return [person.id for person in gone]

    # --- reading ---

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        with self._transaction() as connection:
            return rows.find_person(connection, *rows.find_collection(connection, collection), person)

    def find_person(self, collection: str, external_id: str) -> Person:
        """Return the person with an external id."""
        check_external_id(external_id)
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection)
            found = rows.find_by_external_id(connection, key, external_id)
        if found is None or is_expired(found.expires):
            raise NotFoundError(f"collection {info.name} has no person with the external id {external_id!a}")
        return found

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        check_page(after, limit, filter)
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, collection)
            return rows.select_page(connection, key, min(max(after, 0), MAX_ID), min(limit, MAX_ID), filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id."""
        with self._transaction() as connection:
            key, _ = rows.find_collection(connection, collection)
            found = rows.select_summaries(connection, key, [int(id) for id in ids if is_id(id)])
        return {one.id: PersonSummary(one.id, one.name, one.metadata, one.external_id) for one in found}

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        with self._transaction() as connection:
            key, info = rows.find_collection(connection, collection)
            rows.find_person(connection, key, info, person)
            return rows.read_vectors(connection, key, [person], info.dim)[person]

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim), the ``k`` most similar persons with a score >= ``threshold``."""
        check_search(k, threshold, filter)
        with self._transaction(read_only=True) as connection:
            key, info = rows.find_collection(connection, collection)
            hidden = rows.expired_ids(connection, key)
            return [
                group_by_person(rows.face_search(connection, key, query, filter, hidden), k, threshold)
                for query in unit_vectors(queries, info.dim)
            ]

    # --- maintenance ---

    def expired(self, limit: int) -> dict[str, list[Person]]:
        """Return up to ``limit`` persons whose time has come, by collection."""
        found: dict[str, list[Person]] = {}
        with self._transaction() as connection:
            for key, name in rows.collections_with_expired(connection):
                found[name] = rows.select_expired(connection, key, limit)
                limit -= len(found[name])
        return found

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""
        with self._transaction() as connection:
            return rows.find_answer(connection, token, key)

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""
        with self._transaction() as connection:
            rows.insert_answer(connection, idempotent, result)

    def forget_answers(self, before: str, most: int) -> int:
        """Forget answers stored before a time, and all but the ``most`` newest of each token; returns how many."""
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
            found = rows.all_collections(connection)
            write_copy(target, [(info, rows.all_persons(connection, key, info.dim)) for key, info in found])

    def check(self) -> dict[str, Any]:
        """Verify counts, ids and vectors; "checksums" says if Postgres guards its own pages."""
        with self._transaction(read_only=True) as connection:
            found = rows.all_collections(connection)
            for key, info in found:
                rows.check_rows(connection, key, info)
            checksums = connection.execute("SHOW data_checksums").fetchone()[0] == "on"
            expired = sum(len(rows.expired_ids(connection, key)) for key, _ in found)
        persons, faces = (sum(getattr(info, name) for _, info in found) for name in ("persons", "faces"))
        figures = {"collections": len(found), "persons": persons, "faces": faces, "expired": expired}
        return {**figures, "checksums": checksums}

    def statistics(self) -> dict[str, dict[str, float]]:
        """Rows and persons of each collection; the search is exact, so there is no delta and the recall is 1."""
        return {
            info.name: {"rows": info.faces, "persons": info.persons, "delta": 0, "tombstones": 0, "recall": 1.0}
            for info in self.collections()
        }

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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


# --- changes: each function runs in its caller's transaction ---


def _enrol(connection: Any, key: int, info: Collection, persons: Sequence[ValidPerson]) -> list[Person]:
    """Insert ``persons``; :class:`ConflictError` if a living person has the external id of one.

    One who expired gives the external id up and stays, to be deleted by who deletes all the others who expired.
    """
    for external_id in (person.external_id for person in persons if person.external_id is not None):
        former = rows.find_by_external_id(connection, key, external_id)
        if former is not None and not is_expired(former.expires):
            raise taken_external_id(info.name, external_id)
        if former is not None:
            rows.remove_external_id(connection, key, former)
    return rows.insert_persons(connection, key, persons)


def _save(connection: Any, key: int, person: Person) -> Person:
    """Store a changed person under the next revision."""
    changed = replace(person, revision=person.revision + 1)
    rows.update_person(connection, key, changed)
    return changed
