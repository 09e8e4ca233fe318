"""``plsc gallery check``: verification of every page, row and file of a store, and that deleted vectors are gone."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import DataError, IntegrityError
from plsc.gallery.sqlite import COLLECTIONS, SNAPSHOTS, SQLITE, records
from plsc.gallery.sqlite.backup import read_snapshot, reading_snapshot, store_id_of
from plsc.gallery.sqlite.compaction import deleted_faces
from plsc.gallery.sqlite.database import Database, corrupt_row
from plsc.gallery.sqlite.encryption import EncryptedVectors, keys_of_faces
from plsc.gallery.sqlite.keys import KeyTable
from plsc.gallery.sqlite.records import StoredCollection
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.sqlite.schema import SPACE, VERSION
from plsc.gallery.sqlite.segments import segment_folder, verify_segment
from plsc.index.rows import Int64

_PAGE_PERSONS = 1000


def check_store(database: Database, folder: Path, snapshots: Path | None = None) -> dict[str, Any]:
    """Verify everything in ``folder``, as it is at one moment, and its snapshots; writes go on.

    Args:
        snapshots: a folder of snapshots beside the store's own.

    Returns:
        {"version", "migrated_from" (left out unless this opening migrated the store), "collections", "persons",
        "faces", "expired" (persons whom nothing finds any more), "tombstones" (deleted faces whose vectors are in
        a file until the next compaction), "encrypted" (left out unless it is), "snapshots", "deleted_in_snapshots"
        (deleted faces that snapshots still hold, of an encrypted store those that can be read),
        "unfinished_snapshots" (what a killed process left of one, with faces unknown)}.

    Raises:
        IntegrityError: names the first thing that is damaged.
    """
    with database.snapshot() as db:
        _check_pages(db)
        stored = records.all_collections(db)
        alive = [_check_collection(db, folder / COLLECTIONS, collection) for collection in stored]
        _check_vectors(db)
        _check_keys(db)
        figures = {
            "version": VERSION,
            **({} if database.migrated_from is None else {"migrated_from": database.migrated_from}),
            "collections": len(stored),
            "persons": sum(collection.info.persons for collection in stored),
            "faces": sum(collection.info.faces for collection in stored),
            "expired": sum(len(SqliteRows(db, one.number, one.info).expired_ids()) for one in stored),
            "tombstones": int(db.execute("SELECT count(*) FROM forgotten").fetchone()[0]),
        }
    faces = np.concatenate([*alive, np.empty(0, dtype=np.int64)])
    folders = [folder / SNAPSHOTS, *([] if snapshots is None else [snapshots])]
    if not isinstance(database.codec, EncryptedVectors):
        return {**figures, **_check_snapshots(folders, faces, None)}
    return {**figures, "encrypted": True, **_check_snapshots(folders, faces, database.codec.table)}


def _check_pages(db: sqlite3.Connection) -> None:
    for table in ("persons", "faces"):
        if records.last_id(db, table) < (db.execute(f"SELECT max(id) FROM {table}").fetchone()[0] or 0):
            raise corrupt_row(db, f"ids of {table} were given that it does not know of")
    for pragma in ("integrity_check(1)", "foreign_key_check"):
        rows = db.execute(f"PRAGMA {pragma}").fetchall()
        if rows and rows != [("ok",)]:
            raise corrupt_row(db, " ".join(str(rows[0][0]).split()))


def _check_keys(db: sqlite3.Connection) -> None:
    """Verify that every key is of a face of its person; those of persons were verified as these were read."""
    stray = db.execute(
        "SELECT k.face FROM face_keys k LEFT JOIN faces f ON f.id = k.face AND f.person = k.person "
        "WHERE f.id IS NULL LIMIT 1"
    ).fetchone()
    if stray is not None:
        raise corrupt_row(db, f"it holds a key of face {stray[0]}, which its person does not have")


def _check_collection(db: sqlite3.Connection, collections: Path, stored: StoredCollection) -> Int64:
    """Verify a collection's persons, faces, attributes, counts and segment; returns its faces, ascending."""
    number, info = stored.number, stored.info
    rows = SqliteRows(db, number, info)
    persons, after, attributes = 0, 0, 0
    while page := rows.select("p.id > ?", [after], _PAGE_PERSONS):
        persons, after = persons + len(page), page[-1].id
        for person in page:
            attributes += len(person.metadata)
            if rows.count_attributes(person) != len(person.metadata):
                raise corrupt_row(db, f"filters do not see the metadata of person {person.id} as they are")
    batches = list(records.read_faces(db, stored, 0))
    faces = np.concatenate([np.empty(0, dtype=np.int64), *(batch.ids for batch in batches)])
    owners = np.concatenate([np.empty(0, dtype=np.int64), *(batch.persons for batch in batches)])
    counted = db.execute("SELECT count(*) FROM attributes WHERE collection = ?", (number,)).fetchone()[0]
    if (persons, len(faces), attributes) != (info.persons, info.faces, counted):
        raise corrupt_row(db, f"the counts of collection {info.name} are not those of its rows")
    if stored.segment:
        _check_segment(db, collections, stored, faces, owners)
    _check_second_space(db, stored)
    return faces


def _check_second_space(db: sqlite3.Connection, stored: StoredCollection) -> None:
    """Verify the vectors that the collection's faces have in its second space."""
    migration = records.find_migration(db, stored.number)
    if migration is None:
        return
    cursor = db.execute(
        "SELECT v.face, v.checksum, v.vector FROM faces f JOIN vectors v ON v.face = f.id + ? WHERE f.collection = ?",
        (migration.space, stored.number),
    )
    while rows := cursor.fetchmany(_PAGE_PERSONS):
        records.decode_vectors(db, rows, migration.info.dim)
    if records.count_second(db, migration) != records.read_second_counts(db, stored.number):
        raise corrupt_row(db, f"the counts of the migration of {stored.info.name} are not those of its rows")


def _check_segment(
    db: sqlite3.Connection, collections: Path, stored: StoredCollection, faces: Int64, owners: Int64
) -> None:
    """Verify that the segment holds every face up to its watermark, and besides them only faces with tombstones."""
    ids, persons = verify_segment(collections, stored)
    folder = segment_folder(collections, stored.number, stored.segment)
    known = np.isin(ids, faces)
    covered = faces[: np.searchsorted(faces, stored.watermark, side="right")]
    if not np.array_equal(ids[known], covered) or not np.array_equal(persons[known], owners[: len(covered)]):
        raise IntegrityError(f"{folder} does not hold the faces that {SQLITE} holds; remove it, it is rebuilt")
    if not np.isin(ids[~known], deleted_faces(db, stored.number, stored.space)).all():
        raise IntegrityError(f"{folder} holds faces that were deleted; compact the store")


def _check_vectors(db: sqlite3.Connection) -> None:
    """Verify that every vector belongs to a face, has a tombstone, or is erased."""
    stray = db.execute(
        f"SELECT v.face % {SPACE} FROM vectors v LEFT JOIN faces f ON f.id = v.face % {SPACE} "
        "LEFT JOIN collections c ON c.number = f.collection LEFT JOIN migrations m ON m.collection = f.collection "
        f"WHERE coalesce(v.face - v.face % {SPACE} NOT IN (c.space, coalesce(m.space, c.space)), 1) "
        "AND v.face NOT IN (SELECT face FROM forgotten) "
        "AND (v.checksum != x'0000000000' OR v.vector != zeroblob(length(v.vector))) LIMIT 1"
    ).fetchone()
    if stray is not None:
        raise corrupt_row(db, f"it holds a vector of face {stray[0]}, which was deleted")


def _check_snapshots(folders: Sequence[Path], alive: Int64, keys: KeyTable | None) -> dict[str, int]:
    """Hash the snapshots that the store keeps, and count their faces that were deleted since."""
    count, unfinished, deleted = 0, 0, np.empty(0, dtype=np.int64)
    for path in [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_dir()]:
        if path.name.startswith("."):
            unfinished += 1
            continue
        try:
            read_snapshot(path)
        except DataError as error:
            raise IntegrityError(str(error)) from None
        count += 1
        deleted = np.union1d(deleted, np.setdiff1d(_faces_in(path, keys), alive))
    return {"snapshots": count, "deleted_in_snapshots": len(deleted), "unfinished_snapshots": unfinished}


def _faces_in(snapshot: Path, keys: KeyTable | None) -> Int64:
    """Return the faces of a snapshot; of one that ``keys`` decrypt, those whose keys are not erased."""
    with reading_snapshot(snapshot) as db:
        if keys is None or keys.store_id.hex() != store_id_of(snapshot):
            return np.fromiter((row[0] for row in db.execute("SELECT id FROM faces")), np.int64)
        faces, slots = keys_of_faces(db)
    erased = keys.erased()
    return faces[(slots < len(erased)) & ~erased[np.minimum(slots, len(erased) - 1)]]
