"""Checking a store: every page, row and file, and that what was deleted is gone."""

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from plsc.errors import DataError, IntegrityError
from plsc.gallery import records
from plsc.gallery.base import base_folder, verify_base
from plsc.gallery.database import Database, damaged
from plsc.gallery.filter_sql import attributes_of
from plsc.gallery.records import StoredCollection
from plsc.gallery.snapshot import SQLITE, read_snapshot
from plsc.index.rows import Int64


def check_store(database: Database, folder: Path) -> dict[str, Any]:
    """Verify everything in ``folder``, as it is at one moment; writes go on.

    Returns {"collections", "persons", "faces", "forgotten" (deleted faces whose vectors still lie in a file until the
    next compaction), "snapshots", "forgotten_in_snapshots" (deleted faces that snapshots still hold)}. Raises
    :class:`IntegrityError` naming the first thing that is damaged.
    """
    with database.snapshot() as db:
        _check_pages(db)
        stored = records.all_collections(db)
        alive = [_check_collection(db, folder / "collections", one) for one in stored]
        _check_vectors(db)
        forgotten = int(db.execute("SELECT count(*) FROM forgotten").fetchone()[0])
        figures = {
            "collections": len(stored),
            "persons": sum(one.about.persons for one in stored),
            "faces": sum(one.about.faces for one in stored),
            "forgotten": forgotten,
        }
    everyone = np.concatenate([*alive, np.empty(0, dtype=np.int64)])
    return {**figures, **_check_snapshots(folder / "snapshots", everyone)}


def _check_pages(db: sqlite3.Connection) -> None:
    for table in ("persons", "faces"):
        if records.last_id(db, table) < (db.execute(f"SELECT max(id) FROM {table}").fetchone()[0] or 0):
            raise damaged(db, f"ids of {table} were given that it does not know of")
    for pragma in ("integrity_check(1)", "foreign_key_check"):
        rows = db.execute(f"PRAGMA {pragma}").fetchall()
        if rows and rows != [("ok",)]:
            raise damaged(db, " ".join(str(rows[0][0]).split()))


def _check_collection(db: sqlite3.Connection, folder: Path, stored: StoredCollection) -> Int64:
    """Verify a collection's persons, faces, filters, counts and base; returns its faces, ascending."""
    number, about = stored.number, stored.about
    persons, after, attributes = 0, 0, 0
    while page := records.select_persons(db, "p.collection = ? AND p.id > ?", (number, after), 1000):
        persons, after = persons + len(page), page[-1].id
        for person in page:
            attributes += len(person.metadata)
            if attributes_of(db, number, person) != len(person.metadata):
                raise damaged(db, f"filters do not see the metadata of person {person.id} as they are")
    parts = list(records.read_faces(db, number, 0, about.dim))
    faces = np.concatenate([np.empty(0, dtype=np.int64), *(part.ids for part in parts)])
    owners = np.concatenate([np.empty(0, dtype=np.int64), *(part.persons for part in parts)])
    counted = db.execute("SELECT count(*) FROM attributes WHERE collection = ?", (number,)).fetchone()[0]
    if (persons, len(faces), attributes) != (about.persons, about.faces, counted):
        raise damaged(db, f"the counts of collection {about.name} are not those of its rows")
    if stored.base:
        _check_base(db, base_folder(folder, number, stored.base), stored, faces, owners)
    return faces


def _check_base(db: sqlite3.Connection, folder: Path, stored: StoredCollection, faces: Int64, owners: Int64) -> None:
    """The base holds what SQLite holds: every face up to ``covered``, and else only some that wait to be forgotten."""
    ids, persons = verify_base(folder, stored)
    known = np.isin(ids, faces)
    waiting = records.forgotten(db, stored.number)
    covered = faces[: np.searchsorted(faces, stored.covered, side="right")]
    if not np.array_equal(ids[known], covered) or not np.array_equal(persons[known], owners[: len(covered)]):
        raise IntegrityError(f"{folder} does not hold the faces that {SQLITE} holds; remove it, it is made anew")
    if not np.isin(ids[~known], waiting).all():
        raise IntegrityError(f"{folder} holds faces that were deleted; compact the store")


def _check_vectors(db: sqlite3.Connection) -> None:
    """Every vector belongs to a face, waits to be forgotten, or is nothing but zeros."""
    stray = db.execute(
        "SELECT face FROM vectors WHERE face NOT IN (SELECT id FROM faces) "
        "AND face NOT IN (SELECT face FROM forgotten) "
        "AND (checksum != x'0000000000' OR vector != zeroblob(length(vector))) LIMIT 1"
    ).fetchone()
    if stray is not None:
        raise damaged(db, f"it holds a vector of face {stray[0]}, which was deleted")


def _check_snapshots(folder: Path, alive: Int64) -> dict[str, int]:
    """Hash the snapshots that the store keeps, and count what of them was deleted since."""
    count, deleted = 0, np.empty(0, dtype=np.int64)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            read_snapshot(path)
        except DataError as error:
            raise IntegrityError(str(error)) from None
        count += 1
        deleted = np.union1d(deleted, np.setdiff1d(_faces_in(path / SQLITE), alive))
    return {"snapshots": count, "forgotten_in_snapshots": len(deleted)}


def _faces_in(path: Path) -> Int64:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        return np.fromiter((row[0] for row in connection.execute("SELECT id FROM faces")), np.int64)
    finally:
        connection.close()
