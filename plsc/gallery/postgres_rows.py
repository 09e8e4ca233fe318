"""SQL of the gallery in Postgres: tables, rows, metadata as jsonb, filters; all of it runs in a transaction.

A statement of :data:`SCHEMA` changes nothing where what it makes is there: it also brings the tables of a former plsc
up to date.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from plsc.errors import ConflictError, IntegrityError
from plsc.gallery import validation
from plsc.gallery.filters import COMPARISONS, Condition, Filter
from plsc.gallery.person_search import Fetch, Neighbours
from plsc.gallery.store import Rows
from plsc.gallery.validation import Kind, ValidPerson, kind_of, now
from plsc.gallery.values import Collection, Float32, IdempotentRequest, Person, StoredAnswer

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
_ALIVE = " AND (p.expires IS NULL OR p.expires > %s)"


def all_collections(connection: Any) -> list["PostgresRows"]:
    """Return every collection, by name."""
    return [PostgresRows(connection, *row) for row in connection.execute(f"{_COLLECTION} ORDER BY name").fetchall()]


def find_collection(connection: Any, name: str, *, lock: bool = False) -> "PostgresRows":
    """Return a collection; ``lock`` keeps other writers out until the transaction ends."""
    text = f"{_COLLECTION} WHERE name = %s" + (" FOR UPDATE" if lock else "")
    row = connection.execute(text, [name]).fetchone() if validation.is_collection_name(name) else None
    if row is None:
        raise validation.no_collection(name)
    return PostgresRows(connection, *row)


class PostgresRows(Rows):
    """A collection in a transaction of ``connection``.

    Attributes:
        key: of its row.
    """

    def __init__(self, connection: Any, key: int, *about: Any) -> None:
        self._connection, self.key, self.info = connection, key, Collection(*about)

    # --- reads ---

    def find_all(self, ids: Sequence[int]) -> list[Person]:
        """See :class:`plsc.gallery.store.Rows`, as for all that follows."""
        return self._select("p.id = ANY(%s::bigint[]) ORDER BY p.id", list(ids))

    def find_external(self, external_id: str) -> Person | None:
        """Return the person with an external id, even if its time has come."""
        return next(iter(self._select("p.external_id = %s", external_id)), None)

    def page(self, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match and did not expire, by ascending id."""
        text, values = filter_clause(filter, "p.metadata")
        return self._select(f"p.id > %s{_ALIVE}{text} ORDER BY p.id LIMIT %s", after, now(), *values, limit)

    def expired(self, limit: int) -> list[Person]:
        """Return up to ``limit`` persons whose time has come."""
        return self._select("p.expires <= %s ORDER BY p.expires LIMIT %s", now(), limit)

    def _select(self, condition: str, *values: Any) -> list[Person]:
        rows = self._connection.execute(f"{_PERSON} AND {condition}", [self.key, *values])
        return [
            Person(id, name, metadata, tuple(faces), created, external_id, revision, expires)
            for id, name, metadata, created, external_id, revision, expires, faces in rows
        ]

    def expired_ids(self) -> list[int]:
        """Return the ids of the persons whose time has come."""
        text = "SELECT id FROM plsc_persons WHERE collection = %s AND expires <= %s"
        return [row[0] for row in self._connection.execute(text, [self.key, now()])]

    def vectors_of(self, persons: Sequence[Person]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of the faces' ids}."""
        found: dict[int, list[Any]] = {person.id: [] for person in persons}
        rows = self._connection.execute(
            "SELECT person, embedding::real[] FROM plsc_faces WHERE collection = %s AND person = ANY(%s::bigint[]) "
            "ORDER BY id",
            [self.key, list(found)],
            binary=True,
        )
        for person, vector in rows:
            found[person].append(vector)
        return {id: np.array(part, dtype=np.float32).reshape(-1, self.info.dim) for id, part in found.items()}

    def face_search(self, query: Float32, filter: Filter | None, hidden: Sequence[int]) -> Fetch:
        """Return the ``fetch`` of :func:`plsc.gallery.person_search.group_by_person` for ``query`` (dim,).

        The persons ``hidden`` are never found.
        """
        text, values = filter_clause(filter, "p.metadata")
        joined = "JOIN plsc_persons p ON p.collection = f.collection AND p.id = f.person" if filter else ""

        def fetch(count: int, excluded: list[int]) -> Neighbours:
            rows: Neighbours = self._connection.execute(
                f"SELECT f.person, f.id, -(f.embedding <#> %s) FROM plsc_faces f {joined} "
                f"WHERE f.collection = %s AND f.person <> ALL(%s::bigint[]){text} "
                "ORDER BY f.embedding <#> %s, f.id LIMIT %s",
                [query, self.key, [*hidden, *excluded], *values, query, count],
            ).fetchall()
            return rows

        return fetch

    def check(self) -> None:
        """Raise :class:`IntegrityError` unless the counts, ids and vectors are consistent."""
        counted = self._connection.execute(
            "SELECT (SELECT count(*) FROM plsc_persons WHERE collection = %(key)s), "
            "(SELECT count(*) FROM plsc_faces WHERE collection = %(key)s)",
            {"key": self.key},
        ).fetchone()
        if counted != (self.info.persons, self.info.faces):
            raise validation.miscounted(self.info, *counted)
        wrong = self._connection.execute(
            "SELECT f.id FROM plsc_faces f JOIN plsc_collections c ON c.key = f.collection WHERE f.collection = %s AND "
            "(vector_dims(f.embedding) <> c.dim OR abs(vector_norm(f.embedding) - 1) > %s OR f.id >= c.next_id) "
            "LIMIT 1",
            [self.key, validation.LENGTH_TOLERANCE],
        ).fetchone()
        if wrong:
            raise IntegrityError(
                f"face {wrong[0]} of collection {self.info.name} is no vector of length 1; restore a snapshot"
            )

    # --- changes ---

    def insert(self, persons: Sequence[ValidPerson]) -> list[Person]:
        """Insert persons and faces under the next ids."""
        count = sum(len(person.vectors) for person in persons)
        made = validation.number_persons(persons, self._take_ids(len(persons), count))
        with self._connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO plsc_persons (collection, id, name, metadata, created, external_id, expires) VALUES "
                "(%(key)s, %(id)s, %(name)s, %(metadata)s::jsonb, %(created)s, %(external_id)s, %(expires)s)",
                [self._row(person) for person in made],
            )
        self._copy_faces(
            (face, person.id, vector)
            for person, valid in zip(made, persons, strict=True)
            for face, vector in zip(person.faces, valid.vectors, strict=True)
        )
        return made

    def insert_faces(self, owner: Person, vectors: Float32) -> list[int]:
        """Insert faces of a person under the next ids, which are returned."""
        first = self._take_ids(0, len(vectors))
        faces = list(range(first, first + len(vectors)))
        self._copy_faces((face, owner.id, vector) for face, vector in zip(faces, vectors, strict=True))
        return faces

    def update(self, former: Person, changed: Person) -> None:
        """Store name, metadata, external id, expiry and revision of ``changed``."""
        self._connection.execute(
            "UPDATE plsc_persons SET name = %(name)s, metadata = %(metadata)s::jsonb, external_id = %(external_id)s, "
            "expires = %(expires)s, revision = %(revision)s WHERE collection = %(key)s AND id = %(id)s",
            self._row(changed),
        )

    def delete(self, person: Person) -> None:
        """Delete a person; the faces go by ON DELETE CASCADE."""
        self._connection.execute("DELETE FROM plsc_persons WHERE collection = %s AND id = %s", [self.key, person.id])
        self._take_ids(-1, -len(person.faces))

    def delete_faces(self, owner: Person, faces: Sequence[int]) -> None:
        """Delete faces, all of which exist."""
        text = "DELETE FROM plsc_faces WHERE collection = %s AND id = ANY(%s::bigint[])"
        self._connection.execute(text, [self.key, list(faces)])
        self._take_ids(0, -len(faces))

    def _row(self, person: Person) -> dict[str, Any]:
        return {**vars(person), "key": self.key, "metadata": _metadata_json(person.metadata)}

    def _take_ids(self, persons: int, faces: int) -> int:
        """Count rows to be inserted, or that were deleted; returns the first of as many new ids."""
        count = max(persons + faces, 0)
        last = self._connection.execute(
            "UPDATE plsc_collections SET next_id = next_id + %s, persons = persons + %s, faces = faces + %s "
            "WHERE key = %s RETURNING next_id",
            [count, persons, faces, self.key],
        ).fetchone()
        return int(last[0]) - count

    def _copy_faces(self, rows: Iterable[tuple[int, int, Float32]]) -> None:
        """Insert rows (face, person, vector)."""
        with (
            self._connection.cursor() as cursor,
            cursor.copy("COPY plsc_faces FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(["int8", "int8", "int8", "vector"])
            for row in rows:
                copy.write_row((self.key, *row))


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


def _metadata_json(metadata: Mapping[str, Any]) -> str:
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
