"""Rows of a gallery's SQLite file as persons, faces and vectors: written with checksums, which reading verifies."""

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import numpy as np

from plsc.gallery.database import ERASED, damaged
from plsc.gallery.store import Collection, Float32, Person, PersonSummary
from plsc.gallery.validation import CheckedPerson
from plsc.index.rows import Int64

TRUTH, NUMBER, TEXT = 0, 1, 2
_ROWS = 2048  # vectors read at a time
_COLLECTION = "number, checksum, base, seal, covered, name, dim, contract_id, created, persons, faces"
_PERSON = "p.id, p.collection, p.name, p.metadata, p.created, p.checksum"


@dataclass(frozen=True)
class StoredCollection:
    """A collection, and which base covers its faces up to the id ``covered`` (base 0: none)."""

    number: int
    about: Collection
    base: int
    seal: str
    covered: int


@dataclass(frozen=True)
class Faces:
    """Some faces: ``ids`` and ``persons`` (n,) int64, ``vectors`` (n, dim) float32."""

    ids: Int64
    persons: Int64
    vectors: Float32


def kind_of(value: Any) -> int:
    """What ``value`` is compared with: truths, numbers and texts are never equal to one another."""
    if isinstance(value, bool):
        return TRUTH
    return TEXT if isinstance(value, str) else NUMBER


# --- collections ---


def all_collections(db: sqlite3.Connection) -> list[StoredCollection]:
    """All collections by name."""
    return [_collection(db, row) for row in db.execute(f"SELECT {_COLLECTION} FROM collections ORDER BY name")]


def find_collection(db: sqlite3.Connection, number: int) -> StoredCollection | None:
    """The collection of a number."""
    row = db.execute(f"SELECT {_COLLECTION} FROM collections WHERE number = ?", (number,)).fetchone()
    return None if row is None else _collection(db, row)


def insert_collection(db: sqlite3.Connection, name: str, dim: int, contract_id: str, created: str) -> int:
    """Its number."""
    number = last_id(db, "collections") + 1
    values = (number, name, int(dim), contract_id, created)
    db.execute(
        "INSERT INTO collections (number, name, dim, contract_id, created, checksum) VALUES (?, ?, ?, ?, ?, ?)",
        (*values, _checksum(*values)),
    )
    return number


def point_to_base(db: sqlite3.Connection, stored: StoredCollection) -> None:
    """Store which base covers the collection's faces, and how far."""
    db.execute(
        "UPDATE collections SET base = ?, seal = ?, covered = ? WHERE number = ?",
        (stored.base, stored.seal, stored.covered, stored.number),
    )


def delete_collection(db: sqlite3.Connection, number: int) -> None:
    """Remove a collection; its vectors are forgotten."""
    db.execute("INSERT OR IGNORE INTO forgotten SELECT id, collection FROM faces WHERE collection = ?", (number,))
    for table in ("faces", "attributes", "persons"):
        db.execute(f"DELETE FROM {table} WHERE collection = ?", (number,))
    db.execute("DELETE FROM collections WHERE number = ?", (number,))


def _collection(db: sqlite3.Connection, row: tuple[Any, ...]) -> StoredCollection:
    number, checksum, base, seal, covered, *rest = row
    about = Collection(*rest)
    if checksum != _checksum(number, about.name, about.dim, about.contract_id, about.created):
        raise damaged(db, f"collection {number} is not what was written")
    return StoredCollection(number, about, base, seal, covered)


# --- persons ---


def insert_persons(
    db: sqlite3.Connection, number: int, persons: Sequence[CheckedPerson], created: str
) -> tuple[list[Person], Faces]:
    """Write ``persons`` with their faces."""
    first, face = last_id(db, "persons") + 1, last_id(db, "faces") + 1
    made = []
    for place, one in enumerate(persons):
        ids = tuple(range(face, face + len(one.vectors)))
        face += len(ids)
        made.append(Person(first + place, one.name, one.metadata, ids, created))
    db.executemany(
        "INSERT INTO persons (id, collection, name, metadata, created, checksum) VALUES (?, ?, ?, ?, ?, ?)",
        (_person_row(number, one) for one in made),
    )
    db.executemany(
        "INSERT INTO attributes VALUES (?, ?, ?, ?, ?)",
        (row for one in made for row in _attributes(number, one.id, one.metadata)),
    )
    owners = np.repeat([one.id for one in made], [len(one.faces) for one in made]).astype(np.int64)
    faces = Faces(
        np.fromiter(chain.from_iterable(one.faces for one in made), np.int64),
        owners,
        np.concatenate([one.vectors for one in persons]),
    )
    _insert_faces(db, number, faces)
    _count(db, number, len(made), len(faces.ids))
    return made, faces


def update_person(db: sqlite3.Connection, number: int, former: Person, changed: Person) -> None:
    """Replace the row of ``former``."""
    _delete_attributes(db, number, former)
    _, _, name, metadata, _, checksum = _person_row(number, changed)
    db.execute(
        "UPDATE persons SET name = ?, metadata = ?, checksum = ? WHERE id = ?", (name, metadata, checksum, former.id)
    )
    rows = _attributes(number, changed.id, changed.metadata)
    db.executemany("INSERT INTO attributes VALUES (?, ?, ?, ?, ?)", rows)


def delete_person(db: sqlite3.Connection, number: int, person: Person) -> None:
    """Remove a person; the vectors are forgotten."""
    _forget(db, number, person.faces)
    _delete_attributes(db, number, person)
    db.execute("DELETE FROM persons WHERE id = ?", (person.id,))
    _count(db, number, -1, -len(person.faces))


def find_person(db: sqlite3.Connection, number: int, person: int) -> Person | None:
    """A person of collection ``number``."""
    where = "p.collection = ? AND p.id = ?"
    return next(iter(select_persons(db, where, (number, person))), None)


def find_names(db: sqlite3.Connection, number: int, persons: Sequence[int]) -> dict[int, PersonSummary]:
    """Those of ``persons`` that are in collection ``number``.

    All come as one value: Python's thread lets go of the interpreter for every row that SQLite fetches, and while
    others keep it busy each return takes up to 5 ms.
    """
    text = (
        f"SELECT json_group_array(json_array({_PERSON})) FROM persons p "
        "WHERE +p.collection = ? AND p.id IN (SELECT value FROM json_each(?))"
    )
    try:
        (found,) = db.execute(text, (number, json.dumps(list(persons)))).fetchone()
        rows = json.loads(found)
    except sqlite3.OperationalError:  # JSON cannot hold the bytes that a damaged header makes of a text
        text = f"SELECT {_PERSON} FROM persons p WHERE p.collection = ? AND p.id = ?"
        rows = [row for person in persons for row in db.execute(text, (number, person))]
    return {row[0]: _named(db, row) for row in rows}


def select_persons(db: sqlite3.Connection, where: str, values: Sequence[Any], limit: int = -1) -> list[Person]:
    """Persons (``p`` in ``where``) by id, with their faces; -1: as many as there are."""
    rows = db.execute(
        f"SELECT {_PERSON} FROM persons p WHERE {where} ORDER BY p.id LIMIT ?", (*values, limit)
    ).fetchall()
    faces = _faces_of(db, [row[0] for row in rows])
    return [_person(db, row, faces.get(row[0], ())) for row in rows]


def _faces_of(db: sqlite3.Connection, persons: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The faces of ``persons``, ascending."""
    found: dict[int, tuple[int, ...]] = {}
    for person in persons:
        text = "SELECT id, collection, checksum FROM faces WHERE person = ? ORDER BY id"
        rows = db.execute(text, (person,)).fetchall()
        for id, collection, checksum in rows:
            if checksum != _face_checksum(id, collection, person):
                raise damaged(db, f"face {id} is not what was written")
        found[person] = tuple(row[0] for row in rows)
    return found


def _person_row(number: int, person: Person) -> tuple[Any, ...]:
    metadata = json.dumps(dict(person.metadata), ensure_ascii=False, allow_nan=False)
    values = (person.id, number, person.name, metadata, person.created)
    return *values, _person_checksum(*values)


def _person(db: sqlite3.Connection, row: tuple[Any, ...], faces: tuple[int, ...]) -> Person:
    named = _named(db, row)
    return Person(named.id, named.name, named.metadata, faces, created=row[4])


def _named(db: sqlite3.Connection, row: Sequence[Any]) -> PersonSummary:
    id, collection, name, metadata, created, checksum = row
    try:
        intact = checksum == _person_checksum(id, collection, name, metadata, created)
    except TypeError:  # a damaged header makes bytes of a text
        intact = False
    if not intact:
        raise damaged(db, f"person {id} is not what was written")
    return PersonSummary(id, name, json.loads(metadata))


def _attributes(number: int, person: int, metadata: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for key, value in metadata.items():
        yield number, key, kind_of(value), value, person


def _delete_attributes(db: sqlite3.Connection, number: int, person: Person) -> None:
    db.executemany(
        "DELETE FROM attributes WHERE collection = ? AND key = ? AND kind = ? AND value = ? AND person = ?",
        _attributes(number, person.id, person.metadata),
    )


# --- faces ---


def insert_faces(db: sqlite3.Connection, number: int, person: int, vectors: Float32) -> Faces:
    """Write faces of ``person``."""
    first = last_id(db, "faces") + 1
    ids = np.arange(first, first + len(vectors), dtype=np.int64)
    faces = Faces(ids, np.full(len(ids), person, dtype=np.int64), vectors)
    _insert_faces(db, number, faces)
    _count(db, number, 0, len(ids))
    return faces


def delete_face(db: sqlite3.Connection, number: int, face: int) -> None:
    """Remove a face; its vector is forgotten."""
    _forget(db, number, (face,))
    _count(db, number, 0, -1)


def read_faces(db: sqlite3.Connection, number: int, after: int, dim: int) -> Iterator[Faces]:
    """The faces of a collection with ids above ``after``, ascending, some thousand at a time."""
    cursor = db.execute(
        "SELECT f.id, f.person, f.checksum, v.checksum, v.vector FROM faces f LEFT JOIN vectors v ON v.face = f.id "
        "WHERE f.collection = ? AND f.id > ? ORDER BY f.id",
        (number, after),
    )
    while rows := cursor.fetchmany(_ROWS):
        for id, person, checksum, _, _ in rows:
            if checksum != _face_checksum(id, number, person):
                raise damaged(db, f"face {id} is not what was written")
        vectors = _vectors(db, [(row[0], row[3], row[4]) for row in rows], dim)
        ids, persons = (np.fromiter((row[place] for row in rows), np.int64, len(rows)) for place in (0, 1))
        yield Faces(ids, persons, vectors)


def read_vectors(db: sqlite3.Connection, faces: Sequence[int], dim: int) -> Float32:
    """The vectors (n, dim) of ``faces``."""
    rows = []
    for face in faces:
        row = db.execute("SELECT face, checksum, vector FROM vectors WHERE face = ?", (face,)).fetchone()
        rows.append((face, None, None) if row is None else row)
    return _vectors(db, rows, dim)


def vector_checksum(face: int, vector: bytes) -> bytes:
    """Never that of a vector which was overwritten."""
    return b"\1" + zlib.crc32(vector, zlib.crc32(struct.pack("<q", face))).to_bytes(4, "little")


def extent(db: sqlite3.Connection, number: int) -> tuple[int, int]:
    """How many faces a collection has, and an id that none of them exceeds and no later one falls below."""
    count = db.execute("SELECT count(*) FROM faces WHERE collection = ?", (number,)).fetchone()[0]
    return int(count), last_id(db, "faces")


def count_newer(db: sqlite3.Connection, number: int, after: int) -> int:
    """How many faces of a collection have ids above ``after``."""
    row = db.execute("SELECT count(*) FROM faces WHERE collection = ? AND id > ?", (number, after)).fetchone()
    return int(row[0])


# --- what was forgotten ---


def forgotten(db: sqlite3.Connection, number: int) -> list[int]:
    """Deleted faces of a collection whose vectors may still lie somewhere, ascending."""
    rows = db.execute("SELECT face FROM forgotten WHERE collection = ? ORDER BY face", (number,))
    return [row[0] for row in rows]


def orphaned(db: sqlite3.Connection) -> list[int]:
    """Numbers of collections that are no more and whose vectors may still lie in SQLite's file."""
    rows = db.execute(
        "SELECT DISTINCT collection FROM forgotten WHERE collection NOT IN (SELECT number FROM collections)"
    )
    return [row[0] for row in rows]


def erased_count(db: sqlite3.Connection) -> int:
    """How many rows hold overwritten vectors."""
    return int(db.execute(f"SELECT count(*) FROM vectors WHERE checksum = x'{ERASED.hex()}'").fetchone()[0])


def vector_count(db: sqlite3.Connection) -> int:
    """How many rows hold vectors, or did."""
    faces = db.execute("SELECT coalesce(sum(faces), 0) FROM collections").fetchone()[0]
    return int(faces) + erased_count(db)


def delete_erased(db: sqlite3.Connection) -> None:
    """Take the rows of overwritten vectors out. Until the file is written anew this is unfinished work."""
    db.execute(f"DELETE FROM vectors WHERE checksum = x'{ERASED.hex()}'")
    db.execute("INSERT OR IGNORE INTO unfinished VALUES ('vacuum')")


def is_unfinished(db: sqlite3.Connection) -> bool:
    """Whether the file has to be written anew."""
    return bool(db.execute("SELECT count(*) FROM unfinished").fetchone()[0])


def set_finished(db: sqlite3.Connection) -> None:
    """The file was written anew."""
    db.execute("DELETE FROM unfinished")


def erase(db: sqlite3.Connection, faces: Sequence[int]) -> None:
    """Overwrite the vectors of forgotten ``faces`` with zeros: records of the same size, so in the same place."""
    places = [(face,) for face in faces]
    db.executemany(
        f"UPDATE vectors SET checksum = x'{ERASED.hex()}', vector = zeroblob(length(vector)) WHERE face = ?", places
    )
    db.executemany("DELETE FROM forgotten WHERE face = ?", places)


def _insert_faces(db: sqlite3.Connection, number: int, faces: Faces) -> None:
    ids, persons = faces.ids.tolist(), faces.persons.tolist()
    db.executemany(
        "INSERT INTO faces (id, collection, person, checksum) VALUES (?, ?, ?, ?)",
        ((id, number, person, _face_checksum(id, number, person)) for id, person in zip(ids, persons, strict=True)),
    )
    blobs = (vector.astype("<f4", copy=False).tobytes() for vector in faces.vectors)
    db.executemany(
        "INSERT INTO vectors (face, checksum, vector) VALUES (?, ?, ?)",
        ((id, vector_checksum(id, blob), blob) for id, blob in zip(ids, blobs, strict=True)),
    )


def _forget(db: sqlite3.Connection, number: int, faces: Sequence[int]) -> None:
    db.executemany("INSERT INTO forgotten VALUES (?, ?)", ((face, number) for face in faces))
    db.executemany("DELETE FROM faces WHERE id = ?", ((face,) for face in faces))


def _vectors(db: sqlite3.Connection, rows: Sequence[tuple[int, bytes | None, bytes | None]], dim: int) -> Float32:
    """(n, dim) of rows (face, checksum, vector)."""
    for face, checksum, vector in rows:
        if vector is None or len(vector) != 4 * dim or checksum != vector_checksum(face, vector):
            raise damaged(db, f"the vector of face {face} is not what was written")
    joined = b"".join(vector for _, _, vector in rows if vector is not None)
    return np.frombuffer(joined, dtype="<f4").astype(np.float32, copy=False).reshape(-1, dim)


def last_id(db: sqlite3.Connection, table: str) -> int:
    """The largest id that was ever given in ``table``."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    return 0 if row is None else int(row[0])


def _count(db: sqlite3.Connection, number: int, persons: int, faces: int) -> None:
    db.execute(
        "UPDATE collections SET persons = persons + ?, faces = faces + ? WHERE number = ?", (persons, faces, number)
    )


def _face_checksum(face: int, collection: int, person: int) -> int:
    return zlib.crc32(struct.pack("<qqq", face, collection, person))


def _checksum(*values: Any) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _person_checksum(id: int, collection: int, name: str | None, metadata: str, created: str) -> int:
    """As :func:`_checksum`, at a third of the cost: each match of each search is checked."""
    named = "null" if name is None else quoted(name)
    return zlib.crc32(f"[{id}, {collection}, {named}, {quoted(metadata)}, {quoted(created)}]".encode())
