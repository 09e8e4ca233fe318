"""SQL of the gallery in Postgres: tables, rows, metadata as jsonb, filters; each function runs in a transaction.

A statement of :data:`SCHEMA` changes nothing where what it makes is there: it also brings the tables of a former plsc
up to date.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from plsc.errors import ConflictError, IntegrityError, NotFoundError
from plsc.gallery.filters import COMPARISONS, Condition, Filter, Kind, kind_of
from plsc.gallery.person_search import Fetch, Rows
from plsc.gallery.store import Collection, Float32, IdempotentRequest, Person, StoredAnswer
from plsc.gallery.validation import ValidPerson, is_expired, is_id, now

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
ALTER TABLE plsc_persons ADD COLUMN IF NOT EXISTS external_id text COLLATE "C",
    ADD COLUMN IF NOT EXISTS revision bigint NOT NULL DEFAULT 1, ADD COLUMN IF NOT EXISTS expires text COLLATE "C";
CREATE UNIQUE INDEX IF NOT EXISTS plsc_persons_by_external_id ON plsc_persons (collection, external_id);
CREATE INDEX IF NOT EXISTS plsc_persons_by_expiry ON plsc_persons (collection, expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS plsc_idempotency (
    token text NOT NULL, key text NOT NULL, fingerprint bytea NOT NULL, status integer NOT NULL, body bytea NOT NULL,
    created text COLLATE "C" NOT NULL, PRIMARY KEY (token, key));
CREATE INDEX IF NOT EXISTS plsc_idempotency_by_age ON plsc_idempotency (token, created);
"""
TABLES = "plsc_collections, plsc_persons, plsc_faces, plsc_idempotency"
_COLLECTION = "SELECT key, name, dim, contract_id, created, persons, faces FROM plsc_collections"
_PERSON = """SELECT p.id, p.name, p.metadata, p.created, p.external_id, p.revision, p.expires,
    ARRAY(SELECT f.id FROM plsc_faces f WHERE f.collection = p.collection AND f.person = p.id ORDER BY f.id)
    FROM plsc_persons p WHERE p.collection = %s"""
_LENGTH_TOLERANCE = 1e-3  # of a stored vector
_PAGE_PERSONS = 1000
_ALIVE = " AND (p.expires IS NULL OR p.expires > %s)"

# --- collections, persons and faces ---


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
            f"collection {info.name} holds {counted[0]} people and {counted[1]} faces instead of {info.persons} and "
            f"{info.faces}; restore a snapshot"
        )
    wrong = connection.execute(
        "SELECT f.id FROM plsc_faces f JOIN plsc_collections c ON c.key = f.collection WHERE f.collection = %s AND "
        "(vector_dims(f.embedding) <> c.dim OR abs(vector_norm(f.embedding) - 1) > %s OR f.id >= c.next_id) LIMIT 1",
        [key, _LENGTH_TOLERANCE],
    ).fetchone()
    if wrong:
        raise IntegrityError(f"face {wrong[0]} of collection {info.name} is no vector of length 1; restore a snapshot")


def find_person(connection: Any, key: int, info: Collection, person: int) -> Person:
    """Return a person; :class:`NotFoundError` if there is none, or the time of it has come."""
    found = read_persons(connection.execute(f"{_PERSON} AND p.id = %s", [key, person])) if is_id(person) else []
    if not found or is_expired(found[0].expires):
        raise NotFoundError(f"collection {info.name} has no person {ascii(person)[:40]}")
    return found[0]


def find_by_external_id(connection: Any, key: int, external_id: str) -> Person | None:
    """Return the person with an external id, even if its time has come."""
    found = read_persons(connection.execute(f"{_PERSON} AND p.external_id = %s", [key, external_id]))
    return found[0] if found else None


def select_summaries(connection: Any, key: int, ids: Sequence[int]) -> list[Person]:
    """Return those of ``ids`` that exist."""
    return read_persons(connection.execute(f"{_PERSON} AND p.id = ANY(%s::bigint[]){_ALIVE}", [key, list(ids), now()]))


def select_page(connection: Any, key: int, after: int, limit: int, filter: Filter | None) -> list[Person]:
    """Return up to ``limit`` persons with ids above ``after`` that match, by id."""
    text, values = filter_clause(filter, "p.metadata")
    statement = f"{_PERSON} AND p.id > %s{_ALIVE}{text} ORDER BY p.id LIMIT %s"
    return read_persons(connection.execute(statement, [key, after, now(), *values, limit]))


def collections_with_expired(connection: Any) -> list[tuple[int, str]]:
    """Return key and name of the collections that hold persons whose time has come."""
    rows: list[tuple[int, str]] = connection.execute(
        "SELECT c.key, c.name FROM plsc_collections c WHERE EXISTS "
        "(SELECT 1 FROM plsc_persons p WHERE p.collection = c.key AND p.expires <= %s)",
        [now()],
    ).fetchall()
    return rows


def select_expired(connection: Any, key: int, limit: int) -> list[Person]:
    """Return up to ``limit`` persons whose time has come."""
    statement = f"{_PERSON} AND p.expires <= %s ORDER BY p.expires LIMIT %s"
    return read_persons(connection.execute(statement, [key, now(), limit]))


def find_expired(connection: Any, key: int, persons: Sequence[int]) -> list[Person]:
    """Return those of ``persons`` whose time has come."""
    statement = f"{_PERSON} AND p.id = ANY(%s::bigint[]) AND p.expires <= %s ORDER BY p.id"
    return read_persons(connection.execute(statement, [key, list(persons), now()]))


def expired_ids(connection: Any, key: int) -> list[int]:
    """Return the ids of the persons whose time has come."""
    rows = connection.execute("SELECT id FROM plsc_persons WHERE collection = %s AND expires <= %s", [key, now()])
    return [row[0] for row in rows]


def read_persons(rows: Any) -> list[Person]:
    """Return the persons of rows of ``_PERSON``."""
    return [
        Person(id, name, metadata, tuple(faces), created, external_id, revision, expires)
        for id, name, metadata, created, external_id, revision, expires, faces in rows
    ]


def read_vectors(connection: Any, key: int, persons: Sequence[int], dim: int) -> dict[int, Float32]:
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


def all_persons(connection: Any, key: int, dim: int) -> Iterator[tuple[Person, Float32]]:
    """Yield every person of a collection with the vectors, by id."""
    after = 0
    while persons := select_page(connection, key, after, _PAGE_PERSONS, None):
        vectors = read_vectors(connection, key, [person.id for person in persons], dim)
        for person in persons:
            yield person, vectors[person.id]
        after = persons[-1].id


def insert_persons(connection: Any, key: int, persons: Sequence[ValidPerson]) -> list[Person]:
    """Insert persons and faces under the next ids."""
    count = sum(len(person.vectors) for person in persons)
    id, created = take_ids(connection, key, len(persons), count), now()
    created_persons, rows, vectors = [], [], []
    for person in persons:
        faces = range(id + 1, id + 1 + len(person.vectors))
        about = (person.name, person.metadata, tuple(faces), created, person.external_id)
        created_persons.append(Person(id, *about, expires=person.expires))
        rows.append((key, id, person.name, metadata_json(person.metadata), created, person.external_id, person.expires))
        vectors += [(key, face, id, row) for face, row in zip(faces, person.vectors, strict=True)]
        id = faces.stop
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO plsc_persons (collection, id, name, metadata, created, external_id, expires) "
            "VALUES (%s, %s, %s, %s::jsonb, %s, %s, %s)",
            rows,
        )
    insert_faces(connection, vectors)
    return created_persons


def update_person(connection: Any, key: int, person: Person) -> None:
    """Store name, metadata, expiry and revision of ``person``."""
    connection.execute(
        "UPDATE plsc_persons SET name = %s, metadata = %s::jsonb, expires = %s, revision = %s "
        "WHERE collection = %s AND id = %s",
        [person.name, metadata_json(person.metadata), person.expires, person.revision, key, person.id],
    )


def remove_external_id(connection: Any, key: int, person: Person) -> None:
    """Leave ``person`` without an external id."""
    connection.execute("UPDATE plsc_persons SET external_id = NULL WHERE collection = %s AND id = %s", [key, person.id])


def delete_person(connection: Any, key: int, person: Person) -> None:
    """Delete a person; the faces go by ON DELETE CASCADE."""
    connection.execute("DELETE FROM plsc_persons WHERE collection = %s AND id = %s", [key, person.id])
    subtract_counts(connection, key, 1, len(person.faces))


def delete_faces(connection: Any, key: int, faces: Sequence[int]) -> None:
    """Delete faces of a collection, all of which exist."""
    connection.execute("DELETE FROM plsc_faces WHERE collection = %s AND id = ANY(%s::bigint[])", [key, list(faces)])
    subtract_counts(connection, key, 0, len(faces))


def add_faces(connection: Any, key: int, person: int, vectors: Float32) -> list[int]:
    """Insert faces of a person under the next ids, which are returned."""
    first = take_ids(connection, key, 0, len(vectors))
    faces = list(range(first, first + len(vectors)))
    insert_faces(connection, [(key, face, person, row) for face, row in zip(faces, vectors, strict=True)])
    return faces


def take_ids(connection: Any, key: int, persons: int, faces: int) -> int:
    """Count rows to be inserted; returns the first of as many new ids."""
    last = connection.execute(
        "UPDATE plsc_collections SET next_id = next_id + %s, persons = persons + %s, faces = faces + %s "
        "WHERE key = %s RETURNING next_id",
        [persons + faces, persons, faces, key],
    ).fetchone()
    return int(last[0]) - persons - faces


def insert_faces(connection: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows (collection, face, person, vector)."""
    if rows:
        with connection.cursor() as cursor, cursor.copy("COPY plsc_faces FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["int8", "int8", "int8", "vector"])
            for row in rows:
                copy.write_row(row)


def subtract_counts(connection: Any, key: int, persons: int, faces: int) -> None:
    """Count rows that were deleted."""
    connection.execute(
        "UPDATE plsc_collections SET persons = persons - %s, faces = faces - %s WHERE key = %s", [persons, faces, key]
    )


def face_search(connection: Any, key: int, query: Float32, filter: Filter | None, hidden: Sequence[int]) -> Fetch:
    """Return the ``fetch`` of :func:`plsc.gallery.person_search.group_by_person` for ``query`` (dim,).

    The persons ``hidden`` are never found.
    """
    text, values = filter_clause(filter, "p.metadata")
    joined = "JOIN plsc_persons p ON p.collection = f.collection AND p.id = f.person" if filter else ""

    def fetch(count: int, excluded: list[int]) -> Rows:
        rows: Rows = connection.execute(
            f"SELECT f.person, f.id, -(f.embedding <#> %s) FROM plsc_faces f {joined} "
            f"WHERE f.collection = %s AND f.person <> ALL(%s::bigint[]){text} "
            "ORDER BY f.embedding <#> %s, f.id LIMIT %s",
            [query, key, [*hidden, *excluded], *values, query, count],
        ).fetchall()
        return rows

    return fetch


# --- answers under idempotency keys ---


def insert_answer(connection: Any, idempotent: IdempotentRequest | None, result: object) -> None:
    """Store the answer to ``idempotent`` (None: nothing); :class:`ConflictError` if there is one."""
    if idempotent is None:
        return
    status, body = idempotent.answer(result)
    stored = connection.execute(
        "INSERT INTO plsc_idempotency VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING key",
        [idempotent.token, idempotent.key, idempotent.fingerprint, status, body, now()],
    ).fetchone()
    if stored is None:
        raise ConflictError("the request of this Idempotency-Key was done meanwhile; send it again")


def find_answer(connection: Any, token: str, key: str) -> StoredAnswer | None:
    """Return the answer stored under a key."""
    row = connection.execute(
        "SELECT fingerprint, status, body FROM plsc_idempotency WHERE token = %s AND key = %s", [token, key]
    ).fetchone()
    return None if row is None else StoredAnswer(bytes(row[0]), row[1], bytes(row[2]))


def delete_answers(connection: Any, before: str, most: int) -> int:
    """Delete the answers stored before a time, and all but the ``most`` newest of each token; returns how many."""
    deleted = connection.execute("DELETE FROM plsc_idempotency WHERE created < %s", [before]).rowcount
    deleted += connection.execute(
        "DELETE FROM plsc_idempotency i USING (SELECT token, key, row_number() OVER "
        "(PARTITION BY token ORDER BY created DESC, key) AS place FROM plsc_idempotency) ranked "
        "WHERE ranked.place > %s AND i.token = ranked.token AND i.key = ranked.key",
        [most],
    ).rowcount
    return int(deleted)


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
