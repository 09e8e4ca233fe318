"""The gallery in Postgres with pgvector: several services may share one, and Postgres' backups and replicas serve it.

Three tables: ``plsc_collections`` (with the next id and the counts), ``plsc_persons`` (metadata as jsonb) and
``plsc_faces`` (vectors). Every change is one transaction that locks its collection's row, so writers of a collection
take turns, in whatever process they are; what is acknowledged is committed, and every later statement sees it.

The search is exact, a scan in the database: recall 1, dims up to pgvector's 16,000, and time in proportion to the faces
of the collection. :meth:`PostgresStore.compact` rewrites the tables without what was deleted; Postgres' own log and
backups keep it until they are recycled.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, IntegrityError, NotFoundError, StorageError, UsageError
from plsc.gallery.filters import COMPARISONS, Condition, Filter, Kind, check_metadata, kind_of
from plsc.gallery.person_search import Fetch, Rows, group_by_person
from plsc.gallery.store import Collection, Float32, Match, Metadata, NewPerson, Person, PersonSummary
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import (
    MAX_ID,
    ValidPerson,
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

MAX_DIM = 16_000  # pgvector's
SCHEMA = """
CREATE TABLE IF NOT EXISTS plsc_collections (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE, dim integer NOT NULL,
    contract_id text NOT NULL, created text NOT NULL, next_id bigint NOT NULL DEFAULT 1,
    persons bigint NOT NULL DEFAULT 0, faces bigint NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS plsc_persons (
    collection bigint NOT NULL REFERENCES plsc_collections ON DELETE CASCADE, id bigint NOT NULL, name text,
    metadata jsonb NOT NULL, created text NOT NULL, PRIMARY KEY (collection, id));
CREATE TABLE IF NOT EXISTS plsc_faces (
    collection bigint NOT NULL, id bigint NOT NULL, person bigint NOT NULL, embedding vector NOT NULL,
    PRIMARY KEY (collection, id),
    FOREIGN KEY (collection, person) REFERENCES plsc_persons (collection, id) ON DELETE CASCADE);
CREATE INDEX IF NOT EXISTS plsc_faces_of_person ON plsc_faces (collection, person);
"""
_COLLECTION = "SELECT key, name, dim, contract_id, created, persons, faces FROM plsc_collections"
_PERSON = """SELECT p.id, p.name, p.metadata, p.created,
    ARRAY(SELECT f.id FROM plsc_faces f WHERE f.collection = p.collection AND f.person = p.id ORDER BY f.id)
    FROM plsc_persons p WHERE p.collection = %s"""
_SCHEMA_LOCK = 7089713  # of pg_advisory_xact_lock: IF NOT EXISTS alone fails when two services start at once
_MAX_CONNECTIONS = 16
_CONNECT_SECONDS = 10.0  # to get a connection from the pool
_LENGTH_TOLERANCE = 1e-3  # of a stored vector
_PAGE_PERSONS = 1000


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
            return [info for _, info in all_collections(connection)]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        with self._transaction() as connection:
            return find_collection(connection, name)[1]

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
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
            return find_collection(connection, name)[1]

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._transaction() as connection:
            key, _ = find_collection(connection, name, lock=True)
            connection.execute("DELETE FROM plsc_collections WHERE key = %s", [key])

    # --- persons and faces ---

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        with self._transaction() as connection:
            key, info = find_collection(connection, collection, lock=True)
            check_contract(info, contract_id)
            return _insert_persons(connection, key, check_persons(persons, info.dim))

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        with self._transaction() as connection:
            key, info = find_collection(connection, collection, lock=True)
            check_contract(info, contract_id)
            _find_person(connection, key, info, person)
            checked = unit_vectors(vectors, info.dim)
            first = _take_ids(connection, key, 0, len(checked))
            faces = list(range(first, first + len(checked)))
            _insert_faces(connection, [(key, face, person, row) for face, row in zip(faces, checked, strict=True)])
            return faces

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata of a person; None keeps the current value."""
        text = None if metadata is None else metadata_json(check_metadata(metadata))
        with self._transaction() as connection:
            key, info = find_collection(connection, collection, lock=True)
            _find_person(connection, key, info, person)
            connection.execute(
                "UPDATE plsc_persons SET name = coalesce(%s, name), metadata = coalesce(%s::jsonb, metadata) "
                "WHERE collection = %s AND id = %s",
                [check_name(name), text, key, person],
            )
            return _find_person(connection, key, info, person)

    def delete_person(self, collection: str, person: int) -> None:
        """Delete a person and all faces."""
        with self._transaction() as connection:
            key, info = find_collection(connection, collection, lock=True)
            faces = len(_find_person(connection, key, info, person).faces)
            connection.execute("DELETE FROM plsc_persons WHERE collection = %s AND id = %s", [key, person])
            _subtract_counts(connection, key, 1, faces)  # the faces went by ON DELETE CASCADE

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Delete one face of a person."""
        with self._transaction() as connection:
            key, info = find_collection(connection, collection, lock=True)
            if face not in _find_person(connection, key, info, person).faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            connection.execute("DELETE FROM plsc_faces WHERE collection = %s AND id = %s", [key, face])
            _subtract_counts(connection, key, 0, 1)

    # --- reading ---

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        with self._transaction() as connection:
            return _find_person(connection, *find_collection(connection, collection), person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        check_page(after, limit, filter)
        with self._transaction() as connection:
            key, _ = find_collection(connection, collection)
            return _select_page(connection, key, min(max(after, 0), MAX_ID), min(limit, MAX_ID), filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id."""
        with self._transaction() as connection:
            key, _ = find_collection(connection, collection)
            found = _read_persons(
                connection.execute(
                    f"{_PERSON} AND p.id = ANY(%s::bigint[])", [key, [int(id) for id in ids if is_id(id)]]
                )
            )
        return {person.id: PersonSummary(person.id, person.name, person.metadata) for person in found}

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        with self._transaction() as connection:
            key, info = find_collection(connection, collection)
            _find_person(connection, key, info, person)
            return _read_vectors(connection, key, [person], info.dim)[person]

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
            key, info = find_collection(connection, collection)
            return [
                group_by_person(_face_search(connection, key, query, filter), k, threshold)
                for query in unit_vectors(queries, info.dim)
            ]

    # --- maintenance ---

    def compact(self, collection: str | None = None) -> None:
        """Rewrite the tables without what was deleted; they are locked meanwhile."""
        if collection is not None:
            self.collection(collection)
        with self._connection() as connection:
            connection.autocommit = True  # VACUUM does not run in a transaction
            try:
                connection.execute("VACUUM (FULL, ANALYZE) plsc_collections, plsc_persons, plsc_faces")
            finally:
                connection.autocommit = False

    def snapshot(self, target: Path) -> None:
        """Write everything, as of one moment, to the new folder ``target`` (see :mod:`plsc.gallery.transfer`)."""
        with self._transaction(read_only=True) as connection:
            found = all_collections(connection)
            write_copy(target, [(info, _all_persons(connection, key, info.dim)) for key, info in found])

    def check(self) -> dict[str, Any]:
        """Verify counts, ids and vectors; "checksums" says if Postgres guards its own pages."""
        with self._transaction(read_only=True) as connection:
            found = all_collections(connection)
            for key, info in found:
                check_rows(connection, key, info)
            checksums = connection.execute("SHOW data_checksums").fetchone()[0] == "on"
        persons, faces = (sum(getattr(info, name) for _, info in found) for name in ("persons", "faces"))
        return {"collections": len(found), "persons": persons, "faces": faces, "checksums": checksums}

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
    connection.execute(SCHEMA)


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


# --- rows: each function runs in its caller's transaction ---


def all_collections(connection: Any) -> list[tuple[int, Collection]]:
    """Return every collection with its key, by name."""
    rows = connection.execute(f"{_COLLECTION} ORDER BY name").fetchall()
    return [(row[0], Collection(*row[1:])) for row in rows]


def find_collection(connection: Any, name: str, *, lock: bool = False) -> tuple[int, Collection]:
    """Return a collection's key and the collection; ``lock`` keeps other writers out until the transaction ends."""
    is_possible = isinstance(name, str) and name.isascii() and "\0" not in name
    text = f"{_COLLECTION} WHERE name = %s" + (" FOR UPDATE" if lock else "")
    row = connection.execute(text, [name]).fetchone() if is_possible else None
    if row is None:
        raise NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")
    return row[0], Collection(*row[1:])


def check_rows(connection: Any, key: int, info: Collection) -> None:
    """Raise :class:`IntegrityError` unless the counts, ids and vectors of a collection are consistent."""
    counted = connection.execute(
        "SELECT (SELECT count(*) FROM plsc_persons WHERE collection = %(key)s), "
        "(SELECT count(*) FROM plsc_faces WHERE collection = %(key)s)",
        {"key": key},
    ).fetchone()
    if counted != (info.persons, info.faces):
        raise IntegrityError(
            f"collection {info.name} holds {counted[0]} persons and {counted[1]} faces instead of {info.persons} and "
            f"{info.faces}; restore a snapshot"
        )
    wrong = connection.execute(
        "SELECT f.id FROM plsc_faces f JOIN plsc_collections c ON c.key = f.collection WHERE f.collection = %s AND "
        "(vector_dims(f.embedding) <> c.dim OR abs(vector_norm(f.embedding) - 1) > %s OR f.id >= c.next_id) LIMIT 1",
        [key, _LENGTH_TOLERANCE],
    ).fetchone()
    if wrong:
        raise IntegrityError(f"face {wrong[0]} of collection {info.name} is no vector of length 1; restore a snapshot")


def _find_person(connection: Any, key: int, info: Collection, person: int) -> Person:
    found = _read_persons(connection.execute(f"{_PERSON} AND p.id = %s", [key, person])) if is_id(person) else []
    if not found:
        raise NotFoundError(f"collection {info.name} has no person {ascii(person)[:40]}")
    return found[0]


def _select_page(connection: Any, key: int, after: int, limit: int, filter: Filter | None) -> list[Person]:
    text, values = filter_clause(filter, "p.metadata")
    statement = f"{_PERSON} AND p.id > %s{text} ORDER BY p.id LIMIT %s"
    return _read_persons(connection.execute(statement, [key, after, *values, limit]))


def _read_persons(rows: Any) -> list[Person]:
    return [Person(row[0], row[1], row[2], tuple(row[4]), row[3]) for row in rows]


def _read_vectors(connection: Any, key: int, persons: Sequence[int], dim: int) -> dict[int, Float32]:
    """Return {person: vectors (n, dim) in the order of the faces' ids}."""
    rows = connection.execute(
        "SELECT person, embedding::real[] FROM plsc_faces WHERE collection = %s AND person = ANY(%s::bigint[]) "
        "ORDER BY id",
        [key, list(persons)],
        binary=True,
    )
    found: dict[int, list[Any]] = {person: [] for person in persons}
    for person, vector in rows:
        found[person].append(vector)
    return {person: np.array(part, dtype=np.float32).reshape(-1, dim) for person, part in found.items()}


def _all_persons(connection: Any, key: int, dim: int) -> Iterator[tuple[Person, Float32]]:
    """Yield every person of a collection with the vectors, by id."""
    after = 0
    while persons := _select_page(connection, key, after, _PAGE_PERSONS, None):
        vectors = _read_vectors(connection, key, [person.id for person in persons], dim)
        for person in persons:
            yield person, vectors[person.id]
        after = persons[-1].id


def _insert_persons(connection: Any, key: int, persons: Sequence[ValidPerson]) -> list[Person]:
    """Insert persons and faces under the next ids."""
    count = sum(len(person.vectors) for person in persons)
    id, created = _take_ids(connection, key, len(persons), count), now()
    created_persons, rows, vectors = [], [], []
    for person in persons:
        faces = range(id + 1, id + 1 + len(person.vectors))
        created_persons.append(Person(id, person.name, person.metadata, tuple(faces), created))
        rows.append((key, id, person.name, metadata_json(person.metadata), created))
        vectors += [(key, face, id, row) for face, row in zip(faces, person.vectors, strict=True)]
        id = faces.stop
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO plsc_persons VALUES (%s, %s, %s, %s::jsonb, %s)", rows)
    _insert_faces(connection, vectors)
    return created_persons


def _take_ids(connection: Any, key: int, persons: int, faces: int) -> int:
    """Count rows to be inserted; returns the first of as many new ids."""
    last = connection.execute(
        "UPDATE plsc_collections SET next_id = next_id + %s, persons = persons + %s, faces = faces + %s "
        "WHERE key = %s RETURNING next_id",
        [persons + faces, persons, faces, key],
    ).fetchone()
    return int(last[0]) - persons - faces


def _insert_faces(connection: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    if rows:
        with connection.cursor() as cursor, cursor.copy("COPY plsc_faces FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["int8", "int8", "int8", "vector"])
            for row in rows:
                copy.write_row(row)


def _subtract_counts(connection: Any, key: int, persons: int, faces: int) -> None:
    connection.execute(
        "UPDATE plsc_collections SET persons = persons - %s, faces = faces - %s WHERE key = %s", [persons, faces, key]
    )


def _face_search(connection: Any, key: int, query: Float32, filter: Filter | None) -> Fetch:
    """Return the ``fetch`` of :func:`plsc.gallery.person_search.group_by_person` for ``query`` (dim,)."""
    text, values = filter_clause(filter, "p.metadata")
    joined = "JOIN plsc_persons p ON p.collection = f.collection AND p.id = f.person" if filter else ""

    def fetch(count: int, excluded: list[int]) -> Rows:
        rows: Rows = connection.execute(
            f"SELECT f.person, f.id, -(f.embedding <#> %s) FROM plsc_faces f {joined} "
            f"WHERE f.collection = %s AND f.person <> ALL(%s::bigint[]){text} "
            "ORDER BY f.embedding <#> %s, f.id LIMIT %s",
            [query, key, excluded, *values, query, count],
        ).fetchall()
        return rows

    return fetch


# --- metadata and filters ---


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Return ``metadata`` as JSON for jsonb, whose numbers are decimals: floats are written so that they stay exact."""
    return "{" + ", ".join(f"{json.dumps(key)}: {_scalar_json(value)}" for key, value in metadata.items()) + "}"


def filter_clause(filter: Filter | None, column: str) -> tuple[str, list[Any]]:
    """Return SQL on a jsonb column that begins with AND, or "" without a filter, and its parameters.

    Keys and values are parameters, never part of the text.
    """
    parts = [_condition_sql(condition, column) for condition in (filter.conditions if filter else ())]
    return "".join(f" AND {text}" for text, _ in parts), [value for _, values in parts for value in values]


def _condition_sql(condition: Condition, column: str) -> tuple[str, list[Any]]:
    key, value, found = condition.key, condition.value, f"({column} -> %s)"
    if condition.operator == "exists":
        return f"({found} IS NOT NULL) = %s", [key, bool(value)]
    if condition.operator == "in":
        return f"coalesce({found} = ANY(%s::jsonb[]), false)", [key, [_scalar_json(member) for member in value]]
    if condition.operator in ("eq", "ne"):
        sign = "" if condition.operator == "eq" else "NOT "
        return f"{sign}coalesce({found} = %s::jsonb, false)", [key, _scalar_json(value)]
    is_text = kind_of(value) == Kind.TEXT
    ordered = f'({column} ->> %s) COLLATE "C"' if is_text else f"({column} ->> %s)::numeric"
    compared = f"{ordered} {COMPARISONS[condition.operator]} %s" + ("" if is_text else "::numeric")
    # CASE, because AND may be evaluated in any order, and a cast of what is no number fails.
    return (
        f"CASE WHEN jsonb_typeof({found}) = '{'string' if is_text else 'number'}' THEN {compared} ELSE false END",
        [key, key, value if is_text else _scalar_json(value)],
    )


def _scalar_json(value: Any) -> str:
    """Return JSON of a scalar; a float from 2^53 on with all its digits, for its shortest form is another decimal."""
    if isinstance(value, float) and abs(value) >= 2**53:
        return f"{value:.1f}"
    return json.dumps(value)
