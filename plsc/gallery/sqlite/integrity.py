"""Verification of a store: every page, row and file, that deleted vectors are gone, and the write-ahead log.

:func:`check_store` is ``plsc gallery check``. :func:`verify_log` runs whenever a store is opened.
"""

import sqlite3
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import DataError, IntegrityError
from plsc.gallery.sqlite import COLLECTIONS, SNAPSHOTS, SQLITE, records
from plsc.gallery.sqlite.backup import read_snapshot, reading_snapshot, store_id_of
from plsc.gallery.sqlite.compaction import deleted_faces
from plsc.gallery.sqlite.database import Database, corrupt, corrupt_row
from plsc.gallery.sqlite.encryption import EncryptedVectors, keys_of_faces
from plsc.gallery.sqlite.keys import KeyTable
from plsc.gallery.sqlite.records import StoredCollection
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.sqlite.schema import SPACE, VERSION
from plsc.gallery.sqlite.segments import segment_folder, verify_segment
from plsc.index.rows import Int64, Mask

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

_PAGE_PERSONS = 1000
_WAL_HEADER, _WAL_FRAME_HEADER = 32, 24
_WAL_MAGIC = {0x377F0682: "<u4", 0x377F0683: ">u4"}  # the byte order of the words that checksums sum
_FRAMES_AT_ONCE = 1024


def check_store(database: Database, folder: Path, snapshots: Path | None = None) -> dict[str, Any]:
    """Verify everything in ``folder``, as it is at one moment, and its snapshots; writes go on.

    Args:
        snapshots: a folder of snapshots beside the store's own.

    Returns:
        {"version", "migrated_from" (left out unless this opening migrated the store), "collections", "persons",
        "faces", "expired" (persons whom nothing finds any more), "forgotten" (deleted faces whose vectors are in a
        file until the next compaction), "encrypted" (left out unless it is), "snapshots", "forgotten_in_snapshots"
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
            "forgotten": int(db.execute("SELECT count(*) FROM forgotten").fetchone()[0]),
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
    return {"snapshots": count, "forgotten_in_snapshots": len(deleted), "unfinished_snapshots": unfinished}


def _faces_in(snapshot: Path, keys: KeyTable | None) -> Int64:
    """Return the faces of a snapshot; of one that ``keys`` decrypt, those whose keys are not erased."""
    with reading_snapshot(snapshot) as db:
        if keys is None or keys.store_id.hex() != store_id_of(snapshot):
            return np.fromiter((row[0] for row in db.execute("SELECT id FROM faces")), np.int64)
        faces, slots = keys_of_faces(db)
    erased = keys.erased()
    return faces[(slots < len(erased)) & ~erased[np.minimum(slots, len(erased) - 1)]]


# --- the write-ahead log ---


def verify_log(database: Path, page_bytes: int) -> None:
    """Verify that the write-ahead log of ``database`` still holds every acknowledged transaction.

    After a crash, committed transactions may exist only in the log. SQLite replays it up to the first frame with a
    wrong checksum and takes the rest for the torn end of a last transaction. One flipped bit therefore undoes,
    silently, all that was acknowledged behind it: an operator who promised a person deletion would find that person
    again. So the checksums are verified before SQLite opens the file. The last transaction cannot be told from one that
    a power failure tore; for it alone SQLite's judgement stands.

    Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log.

    Args:
        database: the SQLite file; without a log beside it nothing is wrong.
        page_bytes: the page size to assume if the log's own header is damaged.

    Raises:
        IntegrityError: a transaction was lost; names the frame.
    """
    path = database.with_name(database.name + "-wal")
    if not path.exists() or path.stat().st_size < _WAL_HEADER + _WAL_FRAME_HEADER:
        return
    with path.open("rb") as file:
        header = file.read(_WAL_HEADER)
    magic, _, size = struct.unpack(">3I", header[:12])
    order = _WAL_MAGIC.get(magic, "<u4")
    sums = np.frombuffer(header[24:], dtype=">u4").astype(np.uint32)
    intact = magic in _WAL_MAGIC and np.array_equal(_checksums(np.frombuffer(header[:24], order)[None])[0], sums)
    frames = _map_frames(path, size if intact else page_bytes)
    commits = np.any(frames[:, 4:8], axis=1)  # a frame that commits holds the database's size in pages, others zero
    if not intact:
        if commits.any():
            raise corrupt(path, "its header is not what was written")
        return
    valid = _valid_frames(frames, np.frombuffer(header[16:24], np.uint8), order, sums)
    bad, lost = _lost_transactions(valid, commits)
    if lost > 1:
        raise corrupt(path, f"frame {bad + 1} is not what was written, and {lost} transactions from there on are lost")


def _map_frames(path: Path, page_bytes: int) -> Bytes:
    """Map the log's frames, (F, 24 + page_bytes)."""
    width = _WAL_FRAME_HEADER + page_bytes
    count = (path.stat().st_size - _WAL_HEADER) // width
    if not count:
        return np.empty((0, width), dtype=np.uint8)
    return np.memmap(path, np.uint8, "r", offset=_WAL_HEADER, shape=(count, width))


def _lost_transactions(valid: Mask, commits: Mask) -> tuple[int, int]:
    """Return the first invalid frame, and how many transactions end in it or in the valid run behind it.

    A log that was restarted, or whose commit failed, is overwritten from some frame on: stale frames behind it are
    chained to nothing, so they are not valid. A second commit in a valid run proves that the first was synced.
    """
    bad = len(valid) if valid.all() else int(np.argmin(valid))
    # Damage in a frame's checksum field breaks the next frame as well, which continues from it.
    begin = bad + 1 if valid[bad + 1 : bad + 2].all() else bad + 2
    rest = valid[begin:]
    end = begin + (len(rest) if rest.all() else int(np.argmin(rest)))
    return bad, int(np.count_nonzero(commits[bad:end])) if commits[begin:end].any() else 0


def _valid_frames(frames: Bytes, salts: Bytes, order: str, previous: Words) -> Mask:
    """Return which frames carry the log's ``salts`` and continue the checksum (2,) of the frame before."""
    valid = np.empty(len(frames), dtype=np.bool_)
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        part = np.asarray(frames[start : start + _FRAMES_AT_ONCE])
        stored = np.ascontiguousarray(part[:, 16:24]).view(">u4").astype(np.uint32)
        summed = np.ascontiguousarray(np.concatenate([part[:, :8], part[:, _WAL_FRAME_HEADER:]], axis=1)).view(order)
        initial = np.concatenate([previous[None], stored[:-1]])
        valid[start : start + len(part)] = (_checksums(summed, initial) == stored).all(axis=1)
        valid[start : start + len(part)] &= (part[:, 8:16] == salts).all(axis=1)
        previous = stored[-1]
    return valid


def _checksums(words: Words, initial: Words | None = None) -> Words:
    """Return SQLite's checksums (F, 2) of ``words`` (F, W), W even, each continued from ``initial`` (F, 2) or zeros.

    SQLite's loop adds, per pair of words a, b: s0 += a + s1; s1 += b + s0, modulo 2^32. Unrolled, the word that is j-th
    from the end counts F(j) times in s0 and F(j+1) times in s1, F being the Fibonacci numbers. So all frames are summed
    by one integer matrix product instead of a Python loop over every word.
    """
    count = words.shape[1]
    fibonacci = _fibonacci(count + 2)
    weights = np.stack([fibonacci[:count][::-1], fibonacci[1 : count + 1][::-1]], axis=1)
    sums: Words = words.astype(np.uint32, copy=False) @ weights
    if initial is None:
        return sums
    carry = np.array([[fibonacci[count - 1], fibonacci[count]], [fibonacci[count], fibonacci[count + 1]]])
    continued: Words = sums + initial @ carry
    return continued


@lru_cache(maxsize=8)
def _fibonacci(count: int) -> Words:
    """Return the first ``count`` Fibonacci numbers from 0, 1 on, modulo 2^32."""
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append((numbers[-1] + numbers[-2]) % 2**32)
    return np.array(numbers, dtype=np.uint32)
