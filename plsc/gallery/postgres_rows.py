"""The statements of :mod:`plsc.gallery.postgres_store`; each runs in its caller's transaction."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from plsc.errors import IntegrityError, NotFoundError
from plsc.gallery.filters import Filter
from plsc.gallery.person_search import Fetch, Rows
from plsc.gallery.postgres_filters import conditions, metadata_text
from plsc.gallery.store import Collection, Float32, Person
from plsc.gallery.validation import ValidPerson, is_id, now

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
_TOLERANCE = 1e-3  # of a stored vector's length
_PAGE = 1000  # persons read at once


def all_collections(connection: Any) -> list[tuple[int, Collection]]:
    """The key and the face of every collection, by name."""
    rows = connection.execute(f"{_COLLECTION} ORDER BY name").fetchall()
    return [(row[0], Collection(*row[1:])) for row in rows]


def find_collection(connection: Any, name: str, *, lock: bool = False) -> tuple[int, Collection]:
    """A collection and its key; ``lock`` keeps other writers out until the transaction ends."""
    plain = isinstance(name, str) and name.isascii() and "\0" not in name
    asked = f"{_COLLECTION} WHERE name = %s" + (" FOR UPDATE" if lock else "")
    row = connection.execute(asked, [name]).fetchone() if plain else None
    if row is None:
        raise NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")
    return row[0], Collection(*row[1:])


def find_person(connection: Any, key: int, about: Collection, person: int) -> Person:
    """One person of the collection ``key``."""
    row = connection.execute(f"{_PERSON} AND p.id = %s", [key, person]).fetchone() if is_id(person) else None
    if row is None:
        raise NotFoundError(f"collection {about.name} has no person {ascii(person)[:40]}")
    return Person(row[0], row[1], row[2], tuple(row[4]), row[3])


def page(connection: Any, key: int, after: int, limit: int, where: Filter | None) -> list[Person]:
    """Up to ``limit`` persons above ``after`` that fit."""
    text, values = conditions(where, "p.metadata")
    asked = f"{_PERSON} AND p.id > %s{text} ORDER BY p.id LIMIT %s"
    return _persons(connection.execute(asked, [key, after, *values, limit]))


def some(connection: Any, key: int, ids: Sequence[int]) -> dict[int, Person]:
    """Those of ``ids`` that exist."""
    rows = _persons(connection.execute(f"{_PERSON} AND p.id = ANY(%s::bigint[])", [key, list(ids)]))
    return {person.id: person for person in rows}


def _persons(rows: Any) -> list[Person]:
    return [Person(row[0], row[1], row[2], tuple(row[4]), row[3]) for row in rows]


def vectors_of(connection: Any, key: int, persons: Sequence[int], dim: int) -> dict[int, Float32]:
    """{person: vectors (n, dim) in the order of the faces' ids}."""
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


def everyone(connection: Any, key: int, dim: int) -> Iterator[tuple[Person, Float32]]:
    """Every person of a collection with the vectors, by id."""
    after = 0
    while persons := page(connection, key, after, _PAGE, None):
        vectors = vectors_of(connection, key, [person.id for person in persons], dim)
        for person in persons:
            yield person, vectors[person.id]
        after = persons[-1].id


def enrol(connection: Any, key: int, persons: Sequence[ValidPerson]) -> list[Person]:
    """Insert persons and faces under the next ids."""
    count = sum(len(person.vectors) for person in persons)
    id, created = _take_ids(connection, key, len(persons), count), now()
    made, rows, vectors = [], [], []
    for person in persons:
        faces = range(id + 1, id + 1 + len(person.vectors))
        made.append(Person(id, person.name, person.metadata, tuple(faces), created))
        rows.append((key, id, person.name, metadata_text(person.metadata), created))
        vectors += [(key, face, id, row) for face, row in zip(faces, person.vectors, strict=True)]
        id = faces.stop
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO plsc_persons VALUES (%s, %s, %s, %s::jsonb, %s)", rows)
    _insert_faces(connection, vectors)
    return made


def insert_faces(connection: Any, key: int, person: int, vectors: Float32) -> list[int]:
    """Insert faces of a person under the next ids."""
    first = _take_ids(connection, key, 0, len(vectors))
    faces = list(range(first, first + len(vectors)))
    _insert_faces(connection, [(key, face, person, row) for face, row in zip(faces, vectors, strict=True)])
    return faces


def _take_ids(connection: Any, key: int, persons: int, faces: int) -> int:
    """Count what is about to be inserted; returns the first of as many new ids."""
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


def delete(connection: Any, key: int, *, person: int | None = None, face: int | None = None) -> None:
    """Delete a person with the faces, or one face, and count it."""
    table, id = ("plsc_persons", person) if person is not None else ("plsc_faces", face)
    gone = connection.execute(
        "SELECT count(*) FROM plsc_faces WHERE collection = %s AND (person = %s OR id = %s)", [key, person, face]
    ).fetchone()[0]
    connection.execute(f"DELETE FROM {table} WHERE collection = %s AND id = %s", [key, id])
    connection.execute(
        "UPDATE plsc_collections SET persons = persons - %s, faces = faces - %s WHERE key = %s",
        [int(person is not None), gone, key],
    )


def nearest(connection: Any, key: int, query: Float32, where: Filter | None) -> Fetch:
    """What :func:`plsc.gallery.person_search.group_by_person` asks for; ``query`` (dim,) of length 1."""
    text, values = conditions(where, "p.metadata")
    joined = "JOIN plsc_persons p ON p.collection = f.collection AND p.id = f.person" if where else ""

    def fetch(count: int, without: list[int]) -> Rows:
        rows: Rows = connection.execute(
            f"SELECT f.person, f.id, -(f.embedding <#> %s) FROM plsc_faces f {joined} "
            f"WHERE f.collection = %s AND f.person <> ALL(%s::bigint[]){text} "
            "ORDER BY f.embedding <#> %s, f.id LIMIT %s",
            [query, key, without, *values, query, count],
        ).fetchall()
        return rows

    return fetch


def check_rows(connection: Any, key: int, about: Collection) -> None:
    """:class:`IntegrityError` unless counts, ids and vectors are what they have to be."""
    counted = connection.execute(
        "SELECT (SELECT count(*) FROM plsc_persons WHERE collection = %(key)s), "
        "(SELECT count(*) FROM plsc_faces WHERE collection = %(key)s)",
        {"key": key},
    ).fetchone()
    if counted != (about.persons, about.faces):
        raise IntegrityError(
            f"collection {about.name} holds {counted[0]} persons and {counted[1]} faces instead of {about.persons} and "
            f"{about.faces}; restore a snapshot"
        )
    wrong = connection.execute(
        "SELECT f.id FROM plsc_faces f JOIN plsc_collections c ON c.key = f.collection WHERE f.collection = %s AND "
        "(vector_dims(f.embedding) <> c.dim OR abs(vector_norm(f.embedding) - 1) > %s OR f.id >= c.next_id) LIMIT 1",
        [key, _TOLERANCE],
    ).fetchone()
    if wrong:
        raise IntegrityError(f"face {wrong[0]} of collection {about.name} is no vector of length 1; restore a snapshot")
