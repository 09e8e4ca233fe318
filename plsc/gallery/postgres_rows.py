"""SQL of the gallery in Postgres: tables, rows, metadata as jsonb, filters; all of it runs in a transaction.

A statement of :data:`SCHEMA` changes nothing where what it makes is there: it also brings the tables of a former plsc
up to date.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from plsc.errors import ConflictError, IntegrityError
from plsc.gallery import validation
from plsc.gallery.filters import COMPARISONS, Condition, Filter
from plsc.gallery.person_search import Fetch, Neighbours
from plsc.gallery.rows import MovableRows
from plsc.gallery.second_space import exchanged
from plsc.gallery.validation import Kind, ValidPerson, kind_of, now
from plsc.gallery.values import (
    FORGOTTEN_AT_ONCE,
    Clock,
    Collection,
    Float32,
    IdempotentRequest,
    Metadata,
    Migration,
    Person,
    SecondVector,
    StoredAnswer,
)

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
ALTER TABLE plsc_faces ADD COLUMN IF NOT EXISTS is_estimated boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS key text COLLATE "C";
CREATE TABLE IF NOT EXISTS plsc_migrations (
    collection bigint PRIMARY KEY REFERENCES plsc_collections ON DELETE CASCADE, dim integer NOT NULL,
    contract_id text NOT NULL, began text NOT NULL, is_cut_over boolean NOT NULL, details json NOT NULL);
CREATE TABLE IF NOT EXISTS plsc_second_vectors (
    collection bigint NOT NULL REFERENCES plsc_migrations ON DELETE CASCADE, face bigint NOT NULL,
    embedding vector NOT NULL, is_estimated boolean NOT NULL, PRIMARY KEY (collection, face),
    FOREIGN KEY (collection, face) REFERENCES plsc_faces (collection, id) ON DELETE CASCADE);
CREATE INDEX IF NOT EXISTS plsc_idempotency_by_age ON plsc_idempotency (token, created);
"""
TABLES = "plsc_collections, plsc_persons, plsc_faces, plsc_idempotency, plsc_migrations, plsc_second_vectors"
_COLLECTION = "SELECT key, name, dim, contract_id, created, persons, faces FROM plsc_collections"
_PERSON = """SELECT p.id, p.name, p.metadata, p.external_id, p.created, p.revision, p.expires,
    ARRAY(SELECT f.id FROM plsc_faces f WHERE f.collection = p.collection AND f.person = p.id ORDER BY f.id),
    ARRAY(SELECT f.key FROM plsc_faces f WHERE f.collection = p.collection AND f.person = p.id ORDER BY f.id)
    FROM plsc_persons p WHERE p.collection = %s"""
_ALIVE = " AND (p.expires IS NULL OR p.expires > %s)"


def all_collections(connection: Any, clock: Clock) -> list["PostgresRows"]:
    """Return every collection, by name."""
    found = connection.execute(f"{_COLLECTION} ORDER BY name").fetchall()
    return [PostgresRows(connection, clock, *row) for row in found]


def find_collection(connection: Any, name: str, clock: Clock, *, lock: bool = False) -> "PostgresRows":
    """Return a collection; ``lock`` keeps other writers out until the transaction ends."""
    text = f"{_COLLECTION} WHERE name = %s" + (" FOR UPDATE" if lock else "")
    row = connection.execute(text, [name]).fetchone() if validation.is_collection_name(name) else None
    if row is None:
        raise validation.no_collection(name)
    return PostgresRows(connection, clock, *row)


class PostgresRows(MovableRows):
    """A collection in a transaction of ``connection``.

    Attributes:
        key: of its row.
    """

    def __init__(self, connection: Any, clock: Clock, key: int, *about: Any) -> None:
        self._connection, self.clock, self.key, self.info = connection, clock, key, Collection(*about)

    # --- reads ---

    def find_all(self, ids: Sequence[int]) -> list[Person]:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        return self._select("p.id = ANY(%s::bigint[]) ORDER BY p.id", list(ids))

    def find_external(self, external_id: str) -> Person | None:
        """Return the person with an external id, even if its time has come."""
        return next(iter(self._select("p.external_id = %s", external_id)), None)

    def page(self, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match and did not expire, by ascending id."""
        text, values = filter_clause(filter, "p.metadata")
        return self._select(f"p.id > %s{_ALIVE}{text} ORDER BY p.id LIMIT %s", after, now(self.clock), *values, limit)

    def expired(self, limit: int) -> list[Person]:
        """Return up to ``limit`` persons whose time has come."""
        return self._select("p.expires <= %s ORDER BY p.expires LIMIT %s", now(self.clock), limit)

    def _select(self, condition: str, *values: Any) -> list[Person]:
        rows = self._connection.execute(f"{_PERSON} AND {condition}", [self.key, *values])
        return [_read_person(*row) for row in rows]

    def expired_ids(self) -> list[int]:
        """Return the ids of the persons whose time has come."""
        text = "SELECT id FROM plsc_persons WHERE collection = %s AND expires <= %s"
        return [row[0] for row in self._connection.execute(text, [self.key, now(self.clock)])]

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
        made = validation.number_persons(persons, self._next_ids(len(persons), count), self.clock)
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
        for person, valid in zip(made, persons, strict=True):
            if valid.second is not None:
                self.put_second(person.id, person.faces, valid.second, is_estimated=False)
        return made

    def insert_faces(self, owner: Person, vectors: Float32, second: Float32 | None) -> list[int]:
        """Insert faces of a person under the next ids, which are returned."""
        first = self._next_ids(0, len(vectors))
        faces = list(range(first, first + len(vectors)))
        self._copy_faces((face, owner.id, vector) for face, vector in zip(faces, vectors, strict=True))
        if second is not None:
            self.put_second(owner.id, faces, second, is_estimated=False)
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
        self._next_ids(-1, -len(person.faces))

    def delete_faces(self, owner: Person, faces: Sequence[int]) -> None:
        """Delete faces, all of which exist."""
        text = "DELETE FROM plsc_faces WHERE collection = %s AND id = ANY(%s::bigint[])"
        self._connection.execute(text, [self.key, list(faces)])
        self._next_ids(0, -len(faces))

    def put_keys(self, owner: Person, keys: Mapping[int, str]) -> None:
        """Store keys of faces of a person, which have none."""
        with self._connection.cursor() as cursor:
            cursor.executemany(
                "UPDATE plsc_faces SET key = %s WHERE collection = %s AND id = %s",
                [(key, self.key, face) for face, key in keys.items()],
            )

    def set_contract(self, contract_id: str) -> None:
        """Store ``contract_id`` as the collection's."""
        self.info = replace(self.info, contract_id=contract_id)
        self._connection.execute("UPDATE plsc_collections SET contract_id = %s WHERE key = %s", [contract_id, self.key])

    # --- the second space ---

    @cached_property
    def migration(self) -> Migration | None:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        row = self._connection.execute(
            "SELECT dim, contract_id, began, is_cut_over, details FROM plsc_migrations WHERE collection = %s",
            [self.key],
        ).fetchone()
        return None if row is None else Migration(*row)

    def begin_migration(self, migration: Migration) -> None:
        """Give the faces room for vectors of another model."""
        self._connection.execute(
            "INSERT INTO plsc_migrations VALUES (%s, %s, %s, %s, %s, %s)", [self.key, *_migration_values(migration)]
        )
        self.migration = migration

    def update_migration(self, migration: Migration) -> None:
        """Store ``migration`` in place of the former one."""
        self._connection.execute(
            "UPDATE plsc_migrations SET dim = %s, contract_id = %s, began = %s, is_cut_over = %s, details = %s "
            "WHERE collection = %s",
            [*_migration_values(migration), self.key],
        )
        self.migration = migration

    def end_migration(self) -> None:
        """Delete the second space; its vectors go by ON DELETE CASCADE."""
        self._connection.execute("DELETE FROM plsc_migrations WHERE collection = %s", [self.key])
        self.migration = None

    def put_second(self, person: int, faces: Sequence[int], vectors: Float32, *, is_estimated: bool) -> None:
        """Store vectors (n, dim) of faces in the second space, in place of those that they have there."""
        with self._connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO plsc_second_vectors VALUES (%s, %s, %s, %s) ON CONFLICT (collection, face) "
                "DO UPDATE SET embedding = excluded.embedding, is_estimated = excluded.is_estimated",
                [(self.key, face, vector, is_estimated) for face, vector in zip(faces, vectors, strict=True)],
            )

    def second_vectors(self, persons: Sequence[Person]) -> dict[int, SecondVector]:
        """Return {face: its vector in the second space}, of the faces of ``persons`` that have one."""
        rows = self._connection.execute(
            "SELECT face, embedding::real[], is_estimated FROM plsc_second_vectors "
            "WHERE collection = %s AND face = ANY(%s::bigint[])",
            [self.key, [face for person in persons for face in person.faces]],
            binary=True,
        )
        return {face: SecondVector(np.array(vector, dtype=np.float32), estimate) for face, vector, estimate in rows}

    def estimated_faces(self, persons: Sequence[Person]) -> set[int]:
        """Return the faces of ``persons`` whose searched vectors are estimates."""
        text = "SELECT id FROM plsc_faces WHERE collection = %s AND person = ANY(%s::bigint[]) AND is_estimated"
        return {row[0] for row in self._connection.execute(text, [self.key, [person.id for person in persons]])}

    def count_second(self) -> tuple[int, int]:
        """Return how many faces have no vector in the second space, and how many an estimate."""
        lacking, estimated = self._connection.execute(
            "SELECT count(*) - count(s.face), count(*) FILTER (WHERE s.is_estimated) FROM plsc_faces f "
            "LEFT JOIN plsc_second_vectors s ON s.collection = f.collection AND s.face = f.id WHERE f.collection = %s",
            [self.key],
        ).fetchone()
        return int(lacking), int(estimated)

    def lacking(self, after: int, limit: int, *, estimated: bool) -> list[int]:
        """Return up to ``limit`` persons above ``after`` with a face that has no vector in the second space."""
        rows = self._connection.execute(
            "SELECT DISTINCT f.person FROM plsc_faces f LEFT JOIN plsc_second_vectors s "
            "ON s.collection = f.collection AND s.face = f.id "
            "WHERE f.collection = %s AND f.person > %s AND (s.face IS NULL OR (%s AND s.is_estimated)) "
            "ORDER BY f.person LIMIT %s",
            [self.key, after, estimated, limit],
        )
        return [row[0] for row in rows]

    def exchange_spaces(self) -> None:
        """Exchange the two vectors of every face, and the models of the collection and its migration."""
        assert self.migration is not None, "it was checked"
        self._connection.execute(
            "WITH former AS (SELECT id, embedding, is_estimated FROM plsc_faces WHERE collection = %(key)s), "
            "searched AS (UPDATE plsc_faces f SET embedding = s.embedding, is_estimated = s.is_estimated "
            "FROM plsc_second_vectors s "
            "WHERE f.collection = %(key)s AND s.collection = f.collection AND s.face = f.id) "
            "UPDATE plsc_second_vectors s SET embedding = former.embedding, is_estimated = former.is_estimated "
            "FROM former WHERE s.collection = %(key)s AND s.face = former.id",
            {"key": self.key},
        )
        self.info, migration = exchanged(self.info, self.migration)
        self._connection.execute(
            "UPDATE plsc_collections SET dim = %s, contract_id = %s WHERE key = %s",
            [self.info.dim, self.info.contract_id, self.key],
        )
        self.update_migration(migration)

    def _row(self, person: Person) -> dict[str, Any]:
        return {**vars(person), "key": self.key, "metadata": _metadata_json(person.metadata)}

    def _next_ids(self, persons: int, faces: int) -> int:
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
            cursor.copy("COPY plsc_faces (collection, id, person, embedding) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(["int8", "int8", "int8", "vector"])
            for row in rows:
                copy.write_row((self.key, *row))


def _read_person(id: int, name: str | None, metadata: Metadata, external_id: str | None, *others: Any) -> Person:
    created, revision, expires, faces, keys = others
    known = {face: key for face, key in zip(faces, keys, strict=True) if key is not None}
    about: Any = {"created": created, "revision": revision, "expires": expires}
    return Person(id, name, metadata, external_id, faces=tuple(faces), keys=known, **about)


def _migration_values(migration: Migration) -> list[Any]:
    details = json.dumps(dict(migration.details), allow_nan=False)
    return [migration.dim, migration.contract_id, migration.began, migration.is_cut_over, details]


# --- answers under idempotency keys ---


def insert_answer(connection: Any, idempotent: IdempotentRequest | None, result: object, clock: Clock) -> None:
    """Store the answer to ``idempotent`` (None: nothing); :class:`ConflictError` if there is one."""
    if idempotent is None:
        return
    status, body = idempotent.answer(result)
    stored = connection.execute(
        "INSERT INTO plsc_idempotency VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING key",
        [idempotent.token, idempotent.key, idempotent.fingerprint, status, body, now(clock)],
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
    """Delete some of what :meth:`plsc.gallery.store.Store.forget_answers` forgets; returns how many."""
    deleted = connection.execute(
        "DELETE FROM plsc_idempotency WHERE (token, key) IN (SELECT token, key FROM "
        "(SELECT token, key, created, row_number() OVER (PARTITION BY token ORDER BY created DESC, key) AS place "
        "FROM plsc_idempotency) ranked WHERE created < %s OR place > %s LIMIT %s)",
        [before, most, FORGOTTEN_AT_ONCE],
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
