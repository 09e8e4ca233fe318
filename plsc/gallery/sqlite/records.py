"""SQL of the gallery's rows: collections, persons and faces with their vectors, and filters.

Every row is written with a CRC-32 of its content, which reading verifies: SQLite notices a damaged page structure, but
not a flipped bit inside a value. Each function runs in its caller's transaction.
"""

import json
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from plsc.gallery.filters import COMPARISONS, Condition, Filter, kind_of
from plsc.gallery.sqlite.checksums import face_checksum, is_face, person_checksum, row_checksum
from plsc.gallery.sqlite.database import codec_of, corrupt_row
from plsc.gallery.sqlite.unfinished import note_left_texts
from plsc.gallery.sqlite.vector_codec import vector_checksum
from plsc.gallery.store import Collection, Float32, Person, PersonSummary
from plsc.gallery.validation import ValidPerson
from plsc.index.rows import Int64

CHANGES = "changes"  # its last number is that of the last change
_FETCH_ROWS = 2048  # vectors per read
_COLLECTION = "number, checksum, base, seal, covered, name, dim, contract_id, created, persons, faces"
_PERSON = "p.id, p.collection, p.name, p.metadata, p.created, p.external_id, p.revision, p.expires, p.checksum"


@dataclass(frozen=True)
class StoredCollection:
    """A row of ``collections``.

    Attributes:
        segment: number of the current sealed segment; 0: none.
        digest: of that segment's manifest, so that no other segment can be taken for it.
        watermark: the segment accounts for all faces with ids up to this one.
    """

    number: int
    info: Collection
    segment: int
    digest: str
    watermark: int


@dataclass(frozen=True)
class Faces:
    """A batch of faces: ``ids`` and ``persons`` (n,) int64, ``vectors`` (n, dim) float32."""

    ids: Int64
    persons: Int64
    vectors: Float32


# --- collections ---


def all_collections(db: sqlite3.Connection) -> list[StoredCollection]:
    """Return all collections by name."""
    return [_read_collection(db, row) for row in db.execute(f"SELECT {_COLLECTION} FROM collections ORDER BY name")]


def find_collection(db: sqlite3.Connection, number: int) -> StoredCollection | None:
    """Return the collection with a number."""
    row = db.execute(f"SELECT {_COLLECTION} FROM collections WHERE number = ?", (number,)).fetchone()
    return None if row is None else _read_collection(db, row)


def insert_collection(db: sqlite3.Connection, name: str, dim: int, contract_id: str, created: str) -> int:
    """Insert a collection; returns its number."""
    number = last_id(db, "collections") + 1
    values = (number, name, int(dim), contract_id, created)
    db.execute(
        "INSERT INTO collections (number, name, dim, contract_id, created, checksum) VALUES (?, ?, ?, ?, ?, ?)",
        (*values, row_checksum(*values)),
    )
    return number


def set_segment(db: sqlite3.Connection, stored: StoredCollection) -> None:
    """Store which sealed segment is the collection's current one."""
    db.execute(
        "UPDATE collections SET base = ?, seal = ?, covered = ? WHERE number = ?",
        (stored.segment, stored.digest, stored.watermark, stored.number),
    )


def delete_collection(db: sqlite3.Connection, number: int) -> None:
    """Delete a collection's rows and leave a tombstone for each face."""
    _note_leaving(db, "f.collection = ?", (number,))
    note_left_texts(db)
    db.execute("INSERT OR IGNORE INTO forgotten SELECT id, collection FROM faces WHERE collection = ?", (number,))
    for table in ("faces", "attributes", "persons"):
        db.execute(f"DELETE FROM {table} WHERE collection = ?", (number,))
    db.execute("DELETE FROM collections WHERE number = ?", (number,))


def _read_collection(db: sqlite3.Connection, row: tuple[Any, ...]) -> StoredCollection:
    number, checksum, segment, digest, watermark, *rest = row
    info = Collection(*rest)
    # A damaged record header changes types, also of what the checksum leaves out because it changes often.
    intact = isinstance(digest, str) and all(isinstance(n, int) for n in (segment, watermark, info.persons, info.faces))
    try:
        intact = intact and checksum == row_checksum(number, info.name, info.dim, info.contract_id, info.created)
    except TypeError:  # a text has become bytes
        intact = False
    if not intact:
        raise corrupt_row(db, f"collection {number} is not what was written")
    return StoredCollection(number, info, segment, digest, watermark)


# --- persons ---


def insert_persons(
    db: sqlite3.Connection, number: int, persons: Sequence[ValidPerson], created: str
) -> tuple[list[Person], Faces]:
    """Insert ``persons`` and their faces into collection ``number``."""
    first, face = last_id(db, "persons") + 1, last_id(db, "faces") + 1
    created_persons = []
    for id, person in enumerate(persons, first):
        ids = tuple(range(face, face + len(person.vectors)))
        face += len(ids)
        about = (person.name, person.metadata, ids, created, person.external_id)
        created_persons.append(Person(id, *about, expires=person.expires))
    db.executemany(
        "INSERT INTO persons (id, collection, name, metadata, created, external_id, revision, expires, checksum) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (_person_row(number, person) for person in created_persons),
    )
    db.executemany(
        "INSERT INTO attributes VALUES (?, ?, ?, ?, ?)",
        (row for person in created_persons for row in _attributes(number, person.id, person.metadata)),
    )
    owners = np.repeat([one.id for one in created_persons], [len(one.faces) for one in created_persons])
    faces = Faces(
        np.fromiter(chain.from_iterable(person.faces for person in created_persons), np.int64),
        owners.astype(np.int64),
        np.concatenate([person.vectors for person in persons]),
    )
    _insert_faces(db, number, faces)
    _add_counts(db, number, len(created_persons), len(faces.ids))
    return created_persons, faces


def update_person(db: sqlite3.Connection, number: int, former: Person, changed: Person) -> None:
    """Store ``changed``, which is ``former`` with another name, other metadata, expiry or revision."""
    note_left_texts(db)
    _delete_attributes(db, number, former)
    _, _, name, metadata, _, _, revision, expires, checksum = _person_row(number, changed)
    db.execute(
        "UPDATE persons SET name = ?, metadata = ?, revision = ?, expires = ?, checksum = ? WHERE id = ?",
        (name, metadata, revision, expires, checksum, former.id),
    )
    rows = _attributes(number, changed.id, changed.metadata)
    db.executemany("INSERT INTO attributes VALUES (?, ?, ?, ?, ?)", rows)


def set_revision(db: sqlite3.Connection, number: int, person: Person) -> None:
    """Store the revision of ``person``, of which nothing else has changed."""
    *_, revision, _, checksum = _person_row(number, person)
    db.execute("UPDATE persons SET revision = ?, checksum = ? WHERE id = ?", (revision, checksum, person.id))


def remove_external_id(db: sqlite3.Connection, number: int, person: Person) -> None:
    """Leave ``person`` without an external id."""
    note_left_texts(db)
    *_, checksum = _person_row(number, replace(person, external_id=None))
    db.execute("UPDATE persons SET external_id = NULL, checksum = ? WHERE id = ?", (checksum, person.id))


def replace_person(db: sqlite3.Connection, number: int, former: Person, new: ValidPerson) -> tuple[Person, Faces]:
    """Give ``former`` the name, metadata, expiry and faces of ``new``, with tombstones for the faces that it had."""
    _delete_faces(db, number, former.faces)
    _add_counts(db, number, 0, -len(former.faces))
    faces = insert_faces(db, number, former.id, new.vectors)
    changed = replace(
        former,
        name=new.name,
        metadata=new.metadata,
        faces=tuple(faces.ids.tolist()),
        expires=new.expires,
        revision=former.revision + 1,
    )
    update_person(db, number, former, changed)
    return changed, faces


def delete_person(db: sqlite3.Connection, number: int, person: Person) -> None:
    """Delete a person's rows and leave a tombstone for each face."""
    note_left_texts(db)
    _delete_faces(db, number, person.faces)
    _delete_attributes(db, number, person)
    db.execute("DELETE FROM persons WHERE id = ?", (person.id,))
    _add_counts(db, number, -1, -len(person.faces))


def find_person(db: sqlite3.Connection, number: int, person: int) -> Person | None:
    """Return a person of collection ``number``."""
    return next(iter(select_persons(db, "p.collection = ? AND p.id = ?", (number, person))), None)


def find_by_external_id(db: sqlite3.Connection, number: int, external_id: str) -> Person | None:
    """Return the person of collection ``number`` with an external id."""
    return next(iter(select_persons(db, "p.collection = ? AND p.external_id = ?", (number, external_id))), None)


def find_summaries(db: sqlite3.Connection, number: int, persons: Sequence[int]) -> dict[int, PersonSummary]:
    """Return those of ``persons`` that are in collection ``number``.

    All rows come as one JSON value: sqlite3 releases the interpreter lock for every row it fetches, and with other
    threads busy each return takes up to 5 ms (the interpreter's switch interval).
    """
    text = (
        f"SELECT json_group_array(json_array({_PERSON})) FROM persons p "
        "WHERE +p.collection = ? AND p.id IN (SELECT value FROM json_each(?))"
    )
    try:
        (found,) = db.execute(text, (number, json.dumps(list(persons)))).fetchone()
        rows = json.loads(found)
    except sqlite3.OperationalError:  # a damaged header can turn a text into bytes, which JSON cannot hold
        text = f"SELECT {_PERSON} FROM persons p WHERE p.collection = ? AND p.id = ?"
        rows = [row for person in persons for row in db.execute(text, (number, person))]
    return {row[0]: _read_summary(db, row) for row in rows}


def select_persons(db: sqlite3.Connection, condition: str, values: Sequence[Any], limit: int = -1) -> list[Person]:
    """Return persons with their faces by ascending id; ``condition`` is SQL on ``persons p``, -1 means no limit."""
    rows = db.execute(
        f"SELECT {_PERSON} FROM persons p WHERE {condition} ORDER BY p.id LIMIT ?", (*values, limit)
    ).fetchall()
    return [_read_person(db, row, _faces_of(db, row[0])) for row in rows]


def _faces_of(db: sqlite3.Connection, person: int) -> tuple[int, ...]:
    rows = db.execute("SELECT id, collection, checksum FROM faces WHERE person = ? ORDER BY id", (person,)).fetchall()
    for id, collection, checksum in rows:
        if not is_face(checksum, id, collection, person):
            raise corrupt_row(db, f"face {id} is not what was written")
    return tuple(row[0] for row in rows)


def _person_row(number: int, person: Person) -> tuple[Any, ...]:
    metadata = json.dumps(dict(person.metadata), ensure_ascii=False, allow_nan=False)
    about = (person.external_id, person.revision, person.expires)
    values = (person.id, number, person.name, metadata, person.created, *about)
    return *values, person_checksum(*values)


def _read_person(db: sqlite3.Connection, row: tuple[Any, ...], faces: tuple[int, ...]) -> Person:
    summary = _read_summary(db, row)
    created, external_id, revision, expires = row[4:8]
    return Person(summary.id, summary.name, summary.metadata, faces, created, external_id, revision, expires)


def _read_summary(db: sqlite3.Connection, row: Sequence[Any]) -> PersonSummary:
    *values, checksum = row
    id, _, name, metadata, _, external_id, _, _ = values
    try:
        intact = checksum == person_checksum(*values)
    except TypeError:  # a damaged header turned a text into bytes
        intact = False
    if not intact:
        raise corrupt_row(db, f"person {id} is not what was written")
    return PersonSummary(id, name, json.loads(metadata), external_id)


# --- metadata and filters ---


def filter_clause(db: sqlite3.Connection, number: int, filter: Filter | None) -> tuple[str, list[Any]]:
    """Return SQL that begins with AND, or "" without a filter, and its parameters.

    It is true for persons ``p`` of collection ``number`` that match. Values are parameters, never part of the text;
    those after "in" are put into this connection's table ``wanted``, so the clause is valid until the next call.
    """
    db.execute("DELETE FROM temp.wanted")
    text, parameters = "", list[Any]()
    for index, condition in enumerate(filter.conditions if filter else ()):
        inner, values = _matching_persons(db, number, index, condition)
        text += f" AND p.id {'NOT ' if condition.excludes else ''}IN ({inner})"
        parameters += values
    return text, parameters


def _matching_persons(db: sqlite3.Connection, number: int, index: int, condition: Condition) -> tuple[str, list[Any]]:
    """Return a SELECT of the persons that have the key with a value that compares as the condition says."""
    if condition.operator == "in":
        rows = ((index, kind_of(value), value) for value in condition.value)
        db.executemany("INSERT OR IGNORE INTO temp.wanted VALUES (?, ?, ?)", rows)
        return (
            "SELECT a.person FROM temp.wanted w CROSS JOIN attributes a ON a.kind = w.kind AND a.value = w.value "
            "WHERE w.condition = ? AND a.collection = ? AND a.key = ?"
        ), [index, number, condition.key]
    start = "SELECT a.person FROM attributes a WHERE a.collection = ? AND a.key = ?"
    if condition.operator == "exists":
        return start, [number, condition.key]
    sign = COMPARISONS.get(condition.operator, "=")  # "ne" selects the equal ones: the caller excludes them
    return f"{start} AND a.kind = ? AND a.value {sign} ?", [
        number,
        condition.key,
        kind_of(condition.value),
        condition.value,
    ]


def count_attributes(db: sqlite3.Connection, number: int, person: Person) -> int:
    """Count the entries of a person's metadata that filters see exactly as they are."""
    text = "SELECT count(*) FROM attributes WHERE collection = ? AND key = ? AND kind = ? AND value IS ? AND person = ?"
    return sum(int(db.execute(text, row).fetchone()[0]) for row in _attributes(number, person.id, person.metadata))


def _attributes(number: int, person: int, metadata: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for key, value in metadata.items():
        yield number, key, kind_of(value), value, person


def _delete_attributes(db: sqlite3.Connection, number: int, person: Person) -> None:
    db.executemany(
        "DELETE FROM attributes WHERE collection = ? AND key = ? AND kind = ? AND value = ? AND person = ?",
        _attributes(number, person.id, person.metadata),
    )


# --- faces and vectors ---


def insert_faces(db: sqlite3.Connection, number: int, person: int, vectors: Float32) -> Faces:
    """Insert faces of ``person``."""
    first = last_id(db, "faces") + 1
    ids = np.arange(first, first + len(vectors), dtype=np.int64)
    faces = Faces(ids, np.full(len(ids), person, dtype=np.int64), vectors)
    _insert_faces(db, number, faces)
    _add_counts(db, number, 0, len(ids))
    return faces


def delete_face(db: sqlite3.Connection, number: int, face: int) -> None:
    """Delete a face's row and leave a tombstone."""
    _delete_faces(db, number, (face,))
    _add_counts(db, number, 0, -1)


def read_faces(db: sqlite3.Connection, number: int, after: int, dim: int) -> Generator[Faces, None, None]:
    """Yield the faces of a collection with ids above ``after``, ascending, in batches."""
    cursor = db.execute(
        "SELECT f.id, f.person, f.checksum, v.checksum, v.vector FROM faces f LEFT JOIN vectors v ON v.face = f.id "
        "WHERE f.collection = ? AND f.id > ? ORDER BY f.id",
        (number, after),
    )
    while rows := cursor.fetchmany(_FETCH_ROWS):
        for id, person, checksum, _, _ in rows:
            if not is_face(checksum, id, number, person):
                raise corrupt_row(db, f"face {id} is not what was written")
        vectors = _read_vectors(db, [(row[0], row[3], row[4]) for row in rows], dim)
        ids, persons = (np.fromiter((row[column] for row in rows), np.int64, len(rows)) for column in (0, 1))
        yield Faces(ids, persons, vectors)


def read_vectors(db: sqlite3.Connection, faces: Sequence[int], dim: int) -> Float32:
    """Return the vectors (n, dim) of ``faces``."""
    rows = []
    for face in faces:
        row = db.execute("SELECT face, checksum, vector FROM vectors WHERE face = ?", (face,)).fetchone()
        rows.append((face, None, None) if row is None else row)
    return _read_vectors(db, rows, dim)


def count_faces(db: sqlite3.Connection, number: int, after: int = 0) -> int:
    """Count the faces of a collection with ids above ``after``."""
    row = db.execute("SELECT count(*) FROM faces WHERE collection = ? AND id > ?", (number, after)).fetchone()
    return int(row[0])


def last_id(db: sqlite3.Connection, table: str) -> int:
    """Return the largest id ever given in ``table``."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    if row is not None and not isinstance(row[0], int):
        raise corrupt_row(db, f"the last id of {table} is not what was written")
    return 0 if row is None else row[0]


def count_change(db: sqlite3.Connection) -> int:
    """Give the running transaction its number; returns it. SQLite keeps it beside the last ids, in every version."""
    number = last_id(db, CHANGES) + 1
    if not db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (number, CHANGES)).rowcount:
        db.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (CHANGES, number))
    return number


def _insert_faces(db: sqlite3.Connection, number: int, faces: Faces) -> None:
    ids, persons = faces.ids.tolist(), faces.persons.tolist()
    blobs = codec_of(db).encode(db, faces.ids, faces.persons, faces.vectors)
    db.executemany(
        "INSERT INTO faces (id, collection, person, checksum) VALUES (?, ?, ?, ?)",
        ((id, number, person, face_checksum(id, number, person)) for id, person in zip(ids, persons, strict=True)),
    )
    db.executemany(
        "INSERT INTO vectors (face, checksum, vector) VALUES (?, ?, ?)",
        ((id, vector_checksum(id, blob), blob) for id, blob in zip(ids, blobs, strict=True)),
    )


def _delete_faces(db: sqlite3.Connection, number: int, faces: Sequence[int]) -> None:
    """Delete rows of faces. Their vectors stay, under tombstones, until compaction erases them."""
    for face in faces:
        _note_leaving(db, "f.id = ?", (face,))
    db.executemany("INSERT INTO forgotten VALUES (?, ?)", ((face, number) for face in faces))
    db.executemany("DELETE FROM faces WHERE id = ?", ((face,) for face in faces))


def _note_leaving(db: sqlite3.Connection, condition: str, values: Sequence[Any]) -> None:
    """Tell the codec which vectors leave, where that means more to it than their rows."""
    codec = codec_of(db)
    if not codec.has_keys:
        return
    text = (
        f"SELECT f.person, v.face, v.checksum, v.vector FROM faces f JOIN vectors v ON v.face = f.id WHERE {condition}"
    )
    for person, face, checksum, vector in db.execute(text, values):
        if not isinstance(vector, bytes) or checksum != vector_checksum(face, vector):
            raise corrupt_row(db, f"the vector of face {face} is not what was written")
        codec.leave(person, vector)


def _read_vectors(db: sqlite3.Connection, rows: Sequence[tuple[int, bytes | None, bytes | None]], dim: int) -> Float32:
    """Return the vectors (n, dim) of rows (face, checksum, vector)."""
    codec = codec_of(db)
    size = codec.overhead + 4 * dim
    for face, checksum, vector in rows:
        if not isinstance(vector, bytes) or len(vector) != size or checksum != vector_checksum(face, vector):
            raise corrupt_row(db, f"the vector of face {face} is not what was written")
    stored = [vector for _, _, vector in rows if vector is not None]
    return codec.decode(db, [row[0] for row in rows], stored, dim)


def _add_counts(db: sqlite3.Connection, number: int, persons: int, faces: int) -> None:
    db.execute(
        "UPDATE collections SET persons = persons + ?, faces = faces + ? WHERE number = ?", (persons, faces, number)
    )
