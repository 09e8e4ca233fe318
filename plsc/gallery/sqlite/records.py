"""The rows of a gallery's SQLite file but for persons: collections, faces with vectors, answers; and all checksums.

Every row is written with a CRC-32 of its content, which reading verifies: SQLite notices a damaged page structure, but
not a flipped bit inside a value. Each function runs in its caller's transaction.
"""

import json
import sqlite3
import struct
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import numpy as np

from plsc.errors import ConflictError
from plsc.gallery.sqlite.database import clock_of, codec_of, corrupt_row
from plsc.gallery.sqlite.schema import SPACE
from plsc.gallery.validation import MAX_ID, now
from plsc.gallery.values import FORGOTTEN_AT_ONCE, Collection, Float32, IdempotentRequest, Migration, StoredAnswer
from plsc.index.rows import Int64, Mask

CHANGES = "changes"  # its last number is that of the last change
MEASURED, ESTIMATED = b"\1", b"\2"  # first bytes of the checksums of a face's own vector, and of one by an adapter
_FETCH_ROWS = 2048  # vectors per read
SPACES = "spaces"  # the last number that a space had, so that none is used again
_COLLECTION = "number, checksum, space, base, seal, covered, name, dim, contract_id, created, persons, faces"


@dataclass(frozen=True)
class StoredCollection:
    """A row of ``collections``.

    Attributes:
        segment: number of the current sealed segment; 0: none.
        digest: of that segment's manifest, so that no other segment can be taken for it.
        watermark: the segment accounts for all faces with ids up to this one.
        space: what is added to the ids of faces to give the keys of their vectors.
    """

    number: int
    info: Collection
    segment: int
    digest: str
    watermark: int
    space: int = 0


@dataclass(frozen=True)
class StoredMigration:
    """A row of ``migrations``: the vectors of a collection's faces that no search reads.

    Attributes:
        space: what is added to the ids of faces to give the keys of these vectors.
    """

    number: int
    info: Migration
    space: int


@dataclass(frozen=True)
class Faces:
    """A batch of faces: ``ids`` and ``persons`` (n,) int64, ``vectors`` (n, dim) float32."""

    ids: Int64
    persons: Int64
    vectors: Float32

    @classmethod
    def empty(cls, count: int, dim: int) -> "Faces":
        """Return room for ``count`` faces, of any content."""
        ids, persons = np.empty((2, count), dtype=np.int64)
        return cls(ids, persons, np.empty((count, dim), dtype=np.float32))

    def put(self, start: int, others: "Faces") -> None:
        """Write ``others`` over the rows from ``start`` on."""
        part = slice(start, start + len(others.ids))
        self.ids[part], self.persons[part], self.vectors[part] = others.ids, others.persons, others.vectors

    def take(self, rows: slice | Mask) -> "Faces":
        """Return some of the faces: a view of a slice, a copy of what a mask (n,) selects."""
        return Faces(self.ids[rows], self.persons[rows], self.vectors[rows])


# --- collections ---


def all_collections(db: sqlite3.Connection) -> list[StoredCollection]:
    """Return all collections by name."""
    return [_read_collection(db, row) for row in db.execute(f"SELECT {_COLLECTION} FROM collections ORDER BY name")]


def find_collection(db: sqlite3.Connection, number: int) -> StoredCollection | None:
    """Return the collection with a number."""
    row = db.execute(f"SELECT {_COLLECTION} FROM collections WHERE number = ?", (number,)).fetchone()
    return None if row is None else _read_collection(db, row)


def insert_collection(db: sqlite3.Connection, name: str, dim: int, contract_id: str) -> StoredCollection:
    """Insert a collection."""
    values = (last_id(db, "collections") + 1, name, dim, contract_id, now(clock_of(db)))
    db.execute(
        "INSERT INTO collections (number, name, dim, contract_id, created, checksum) VALUES (?, ?, ?, ?, ?, ?)",
        (*values, row_checksum(*values)),
    )
    return StoredCollection(values[0], Collection(*values[1:], persons=0, faces=0), 0, "", 0)


def set_segment(db: sqlite3.Connection, stored: StoredCollection) -> None:
    """Store which sealed segment is the collection's current one."""
    db.execute(
        "UPDATE collections SET base = ?, seal = ?, covered = ? WHERE number = ?",
        (stored.segment, stored.digest, stored.watermark, stored.number),
    )


def set_contract(db: sqlite3.Connection, stored: StoredCollection) -> None:
    """Store the contract id of ``stored`` as the collection's."""
    values = _collection_values(stored.number, stored.info, stored.space)
    db.execute(
        "UPDATE collections SET contract_id = ?, checksum = ? WHERE number = ?",
        (stored.info.contract_id, row_checksum(*values), stored.number),
    )


def _read_collection(db: sqlite3.Connection, row: tuple[Any, ...]) -> StoredCollection:
    number, checksum, space, segment, digest, watermark, *rest = row
    info = Collection(*rest)
    # A damaged record header changes types, also of what the checksum leaves out because it changes often.
    typed = isinstance(digest, str) and all(isinstance(n, int) for n in (segment, watermark, info.persons, info.faces))
    values = _collection_values(number, info, space)
    require_intact(db, checksum if typed else None, row_checksum, values, f"collection {number}")
    return StoredCollection(number, info, segment, digest, watermark, space)


def _collection_values(number: int, info: Collection, space: int) -> tuple[Any, ...]:
    """Return what a collection's checksum is of; space 0 is left out, so that former versions' rows keep theirs."""
    values = (number, info.name, info.dim, info.contract_id, info.created)
    return (*values, space) if space != 0 else values


# --- migrations ---


def find_migration(db: sqlite3.Connection, number: int) -> StoredMigration | None:
    """Return the migration of the collection with a number."""
    text = (
        "SELECT checksum, collection, space, dim, contract_id, began, is_cut_over, details FROM migrations "
        "WHERE collection = ?"
    )
    row = db.execute(text, (number,)).fetchone()
    if row is None:
        return None
    checksum, *values = row
    require_intact(db, checksum, row_checksum, values, f"the migration of collection {number}")
    _, space, dim, contract_id, began, is_cut_over, details = values
    return StoredMigration(number, Migration(dim, contract_id, began, bool(is_cut_over), json.loads(details)), space)


def put_migration(db: sqlite3.Connection, migration: StoredMigration) -> None:
    """Insert or replace the migration of a collection."""
    info = migration.info
    details = json.dumps(dict(info.details), allow_nan=False)
    about = (info.dim, info.contract_id, info.began, int(info.is_cut_over), details)
    values = (migration.number, migration.space, *about)
    db.execute(
        "INSERT INTO migrations (collection, space, dim, contract_id, began, is_cut_over, details, checksum) "
        "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (collection) DO UPDATE SET "
        "space = ?2, dim = ?3, contract_id = ?4, began = ?5, is_cut_over = ?6, details = ?7, checksum = ?8",
        (*values, row_checksum(*values)),
    )


def count_second(db: sqlite3.Connection, migration: StoredMigration) -> tuple[int, int]:
    """Count the faces that have a vector in the second space, and those that have an estimate there: reads them all."""
    text = (
        f"SELECT count(*), coalesce(sum(substr(v.checksum, 1, 1) = x'{ESTIMATED.hex()}'), 0) "
        "FROM faces f JOIN vectors v ON v.face = f.id + ? WHERE f.collection = ?"
    )
    filled, estimated = db.execute(text, (migration.space, migration.number)).fetchone()
    return int(filled), int(estimated)


def set_second_counts(db: sqlite3.Connection, number: int, filled: int, estimated: int) -> None:
    """Store what :func:`count_second` counts."""
    db.execute("UPDATE migrations SET filled = ?, estimated = ? WHERE collection = ?", (filled, estimated, number))


def read_second_counts(db: sqlite3.Connection, number: int) -> tuple[int, int]:
    """Return what :func:`count_second` counts, as it was kept."""
    filled, estimated = db.execute(
        "SELECT filled, estimated FROM migrations WHERE collection = ?", (number,)
    ).fetchone()
    if not (isinstance(filled, int) and isinstance(estimated, int)):
        raise corrupt_row(db, f"the counts of the migration of collection {number} are not what was written")
    return filled, estimated


def new_space(db: sqlite3.Connection) -> int:
    """Return what is added to ids of faces in a space that no vector was ever in."""
    number = _count_up(db, SPACES)
    if number >= MAX_ID // SPACE:
        raise ConflictError("this store has seen as many migrations as it can; export its collections into a new one")
    return number * SPACE


def exchange_spaces(db: sqlite3.Connection, stored: StoredCollection, migration: StoredMigration) -> None:
    """Store ``stored`` as the collection, whose space, model and segment are others now, and its ``migration``."""
    values = _collection_values(stored.number, stored.info, stored.space)
    db.execute(
        "UPDATE collections SET dim = ?, contract_id = ?, space = ?, checksum = ? WHERE number = ?",
        (stored.info.dim, stored.info.contract_id, stored.space, row_checksum(*values), stored.number),
    )
    set_segment(db, stored)
    put_migration(db, migration)
    set_second_counts(db, stored.number, *count_second(db, migration))


# --- faces and vectors ---


def read_faces(db: sqlite3.Connection, stored: StoredCollection, after: int) -> Generator[Faces, None, None]:
    """Yield the faces of a collection with ids above ``after``, ascending, in batches, with their searched vectors."""
    number, space, dim = stored.number, stored.space, stored.info.dim
    cursor = db.execute(
        "SELECT f.id, f.person, f.checksum, v.checksum, v.vector FROM faces f "
        "LEFT JOIN vectors v ON v.face = f.id + ? WHERE f.collection = ? AND f.id > ? ORDER BY f.id",
        (space, number, after),
    )
    while rows := cursor.fetchmany(_FETCH_ROWS):
        for id, person, checksum, _, _ in rows:
            if not is_face(checksum, id, number, person):
                raise corrupt_row(db, f"face {id} is not what was written")
        vectors = decode_vectors(db, [(row[0] + space, row[3], row[4]) for row in rows], dim)
        ids, persons = (np.fromiter((row[column] for row in rows), np.int64, len(rows)) for column in (0, 1))
        yield Faces(ids, persons, vectors)


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


def decode_vectors(db: sqlite3.Connection, rows: Sequence[tuple[int, bytes | None, bytes | None]], dim: int) -> Float32:
    """Return the vectors (n, dim) of rows (key, checksum, vector)."""
    codec = codec_of(db)
    size = codec.overhead + 4 * dim
    stored = [checked_vector(db, *row, size) for row in rows]
    return codec.decode(db, [row[0] for row in rows], stored, dim)


def checked_vector(
    db: sqlite3.Connection, key: int, checksum: bytes | None, vector: bytes | None, size: int | None = None
) -> bytes:
    """Return a stored vector, of ``size`` bytes if that is known, if it is what was written."""
    is_whole = isinstance(vector, bytes) and size in (None, len(vector))
    if vector is None or not is_whole or not is_vector(key, checksum, vector):
        raise corrupt_row(db, f"the vector of face {key % SPACE} is not what was written")
    return vector


def count_change(db: sqlite3.Connection) -> int:
    """Give the running transaction its number; returns it. SQLite keeps it beside the last ids, in every version."""
    return _count_up(db, CHANGES)


def _count_up(db: sqlite3.Connection, name: str) -> int:
    number = last_id(db, name) + 1
    if not db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (number, name)).rowcount:
        db.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (name, number))
    return number


# --- answers to requests with an idempotency key ---


def insert_answer(db: sqlite3.Connection, idempotent: IdempotentRequest | None, result: object) -> None:
    """Store the answer to ``idempotent`` (None: nothing) of a write that returned ``result``.

    Raises:
        ConflictError: there is one, of a request that was done meanwhile.
    """
    if idempotent is None:
        return
    status, body = idempotent.answer(result)
    values = (idempotent.token, idempotent.key, idempotent.fingerprint, status, body, now(clock_of(db)))
    try:
        db.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, _answer_checksum(*values)))
    except sqlite3.IntegrityError:
        raise ConflictError("the request of this Idempotency-Key was done meanwhile; send it again") from None


def find_answer(db: sqlite3.Connection, token: str, key: str) -> StoredAnswer | None:
    """Return the answer stored under a key."""
    row = db.execute(
        "SELECT token, key, fingerprint, status, body, created, checksum FROM idempotency WHERE token = ? AND key = ?",
        (token, key),
    ).fetchone()
    if row is None:
        return None
    *values, checksum = row
    require_intact(db, checksum, _answer_checksum, values, "an answer stored under an idempotency key")
    _, _, fingerprint, status, body, _ = values
    return StoredAnswer(fingerprint, status, body)


def delete_answers(db: sqlite3.Connection, before: str, most: int) -> int:
    """Delete some of what :meth:`plsc.gallery.store.Store.forget_answers` forgets; returns how many."""
    deleted = db.execute(
        "DELETE FROM idempotency WHERE rowid IN (SELECT rowid FROM idempotency WHERE created < ? LIMIT ?)",
        (before, FORGOTTEN_AT_ONCE),
    ).rowcount
    crowded = db.execute("SELECT token FROM idempotency GROUP BY token HAVING count(*) > ?", (most,)).fetchall()
    for (token,) in crowded:
        deleted += db.execute(
            "DELETE FROM idempotency WHERE rowid IN "
            "(SELECT rowid FROM idempotency WHERE token = ? ORDER BY created DESC, rowid DESC LIMIT ? OFFSET ?)",
            (token, max(FORGOTTEN_AT_ONCE - deleted, 0), most),
        ).rowcount
    return deleted


def _answer_checksum(token: str, key: str, fingerprint: bytes, status: int, body: bytes, created: str) -> int:
    head = repr((token, key, fingerprint, status, created)).encode()
    return zlib.crc32(body, zlib.crc32(head))


# --- checksums ---


def require_intact(
    db: sqlite3.Connection, checksum: int | None, checksum_of: Callable[..., int], values: Sequence[Any], what: str
) -> None:
    """Raise the error for damage unless ``values`` of a row have its checksum."""
    try:
        if checksum == checksum_of(*values):
            return
    except (TypeError, AttributeError):  # a damaged header turned a text into bytes, or bytes into a text
        pass
    raise corrupt_row(db, f"{what} is not what was written")


def is_face(checksum: int, face: int, collection: int, person: int) -> bool:
    """Return True if a row of faces is what was written; a damaged record header may have changed its types."""
    integers = isinstance(collection, int) and isinstance(person, int)
    return integers and checksum == face_checksum(face, collection, person)


def face_checksum(face: int, collection: int, person: int) -> int:
    """Return the checksum of a row of faces."""
    return zlib.crc32(struct.pack("<qqq", face, collection, person))


def row_checksum(*values: Any) -> int:
    """Return the checksum of a row with ``values``; raises TypeError where damage has turned a text into bytes."""
    return zlib.crc32(json.dumps(values).encode())


def person_checksum(
    id: int,
    collection: int,
    name: str | None,
    metadata: str,
    created: str,
    external_id: str | None,
    revision: int,
    expires: str | None,
) -> int:
    """Return the same as :func:`row_checksum`, at a third of its cost: every match of every search is verified.

    What has its default value is left out, so that rows of version 1 keep their checksums.
    """
    name_json = "null" if name is None else quoted(name)
    text = f"[{id}, {collection}, {name_json}, {quoted(metadata)}, {quoted(created)}]"
    if external_id is not None or revision != 1 or expires is not None:
        text += json.dumps([external_id, revision, expires])
    return zlib.crc32(text.encode())


def vector_checksum(key: int, stored: bytes, *, is_estimated: bool = False) -> bytes:
    """Return 5 bytes, of which the first is not that of an erased vector (``database.ERASED``)."""
    crc = zlib.crc32(stored, zlib.crc32(struct.pack("<q", key)))
    return (ESTIMATED if is_estimated else MEASURED) + crc.to_bytes(4, "little")


def is_vector(key: int, checksum: bytes | None, stored: bytes) -> bool:
    """Return True if a row of vectors is what was written."""
    found = vector_checksum(key, stored)
    return checksum in (found, ESTIMATED + found[1:])
