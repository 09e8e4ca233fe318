"""Snapshots of a store in a folder, stores restored from them, and who in those of encrypted stores can be read.

SNAPSHOT/
  manifest.json      with its own digest: when it was taken, every collection's figures, {file: {"bytes", "sha256"}}
  gallery.sqlite     every row of one moment, and no vector of what had been deleted by then

Segments are not copied: opening a restored store rebuilds them from SQLite. Nor are the keys of an encrypted store: its
snapshots are read with its present file of keys, from which those of everybody who was deleted since have been erased.
"""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from plsc.errors import IntegrityError, UsageError
from plsc.files import (
    Manifest,
    atomic_private_folder,
    describe_files,
    manifest_value,
    read_manifest,
    storage_errors,
    verify_files,
    write_manifest,
)
from plsc.gallery.sqlite import KEYS, SQLITE, records
from plsc.gallery.sqlite.compaction import erase, orphaned_collections, tombstones
from plsc.gallery.sqlite.database import Database, check_schema, corrupt_row, translate_errors
from plsc.gallery.sqlite.encryption import SEARCHED, decrypted_vectors, living_keys
from plsc.gallery.sqlite.keys import KeyTable, read_key_file
from plsc.gallery.sqlite.rows import SqliteRows
from plsc.gallery.sqlite.schema import VERSION, migrate, read_settings
from plsc.gallery.sqlite.unfinished import clear_deletion_time, mark_written_anew
from plsc.gallery.validation import check_new, now

FORMAT = "plsc gallery snapshot"
_OLDEST_VERSION = 1  # a restored store is migrated when it is opened
# Ids of a restored store begin this much higher, so that none is given again that was given after the snapshot.
IDS_SKIPPED = 1_000_000_000
_FETCH_ROWS = 2048


def write_snapshot(database: Database, target: Path) -> None:
    """Copy what is committed at this moment into the new folder ``target``; writes go on meanwhile.

    Raises:
        ConflictError: ``target`` exists.
        StorageError: there is no room; nothing is left then.
    """
    check_new(target)
    with storage_errors(target), atomic_private_folder(target) as tmp_path:
        with database.reading() as db:
            db.execute("VACUUM INTO ?", (str(tmp_path / SQLITE),))  # one read transaction, so one moment
        with _opened(tmp_path / SQLITE) as db:
            collections = _erase_deleted(db)
        content: Manifest = {"format": FORMAT, "version": VERSION, "created": now(), "collections": collections}
        write_manifest(tmp_path, {**content, "files": describe_files(tmp_path, [SQLITE])})


def read_snapshot(folder: Path) -> Manifest:
    """Return a snapshot's manifest after hashing every file.

    Raises:
        UsageError, DataError: ``folder`` is no snapshot.
        IntegrityError: it is damaged; names the file.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no snapshot {folder}")
    manifest = read_manifest(folder, FORMAT, VERSION, oldest=_OLDEST_VERSION)
    manifest_value(folder, manifest, "created", str)
    for info in manifest_value(folder, manifest, "collections", list):
        if not isinstance(info, dict):
            raise IntegrityError(f"{folder} lists its collections wrongly; use another copy")
        manifest_value(folder, info, "name", str)
        for name in ("persons", "faces"):
            manifest_value(folder, info, name, int)
    verify_files(folder, manifest_value(folder, manifest, "files", dict))
    return manifest


def restore(
    snapshot: str | Path, store: str | Path, *, key_file: Path | None = None, keys: Path | None = None
) -> dict[str, Any]:
    """Create the new store ``store`` from a snapshot.

    Ids continue a billion higher: ids given after the snapshot may be known to others, and must not mean someone else.

    Args:
        snapshot: its folder.
        store: a new folder.
        key_file: of an encrypted snapshot, and of the new store.
        keys: the file of keys of the snapshot's store; None: of the store that the snapshot lies in.

    Returns:
        {"store", "created" (when the snapshot was taken), "collections", "left_out" (of an encrypted one: persons
        whose keys were erased since)}.

    Raises:
        ConflictError: ``store`` exists.
        UsageError, DataError, IntegrityError: see :func:`read_snapshot` and :func:`open_keys`.
    """
    source, target = Path(snapshot), Path(store)
    manifest = read_snapshot(source)
    check_new(target)
    table = open_keys(source, key_file, keys)
    result = {"store": str(target), "created": manifest["created"]}
    keys_open = nullcontext() if table is None else closing(table)
    with keys_open, storage_errors(target), atomic_private_folder(target) as tmp_path:
        shutil.copyfile(source / SQLITE, tmp_path / SQLITE)
        verify_files(tmp_path, manifest["files"])  # the copy, too: it is what will be used
        if table is not None:
            _migrate_copy(tmp_path / SQLITE)
        with _opened(tmp_path / SQLITE) as db:
            left_out = {} if table is None else {"left_out": _leave_out(db, table)}
            _skip_ids(db)
            collections = [asdict(stored.info) for stored in records.all_collections(db)] if left_out else None
        if table is not None:
            _finish_copy(tmp_path / SQLITE, table, tmp_path / KEYS)
    return {**result, "collections": manifest["collections"] if collections is None else collections, **left_out}


def _migrate_copy(path: Path) -> None:
    with translate_errors(path), closing(sqlite3.connect(path, isolation_level=None)) as db:
        version = check_schema(db, path)
        if version != VERSION:
            migrate(db, version)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy that nobody else uses, in one transaction. It is discarded on failure, so it needs no journal."""
    with translate_errors(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("BEGIN")
        yield connection
        connection.execute("COMMIT")


def _erase_deleted(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Erase deleted vectors and forget the segments, which are not copied; returns the collections' figures."""
    found = records.all_collections(db)
    for number in [*(stored.number for stored in found), *orphaned_collections(db)]:
        erase(db, tombstones(db, number))
    db.execute("UPDATE collections SET base = 0, seal = '', covered = 0")
    clear_deletion_time(db)
    mark_written_anew(db)
    return [asdict(stored.info) for stored in found]


def _skip_ids(db: sqlite3.Connection) -> None:
    for table in ("persons", "faces"):
        last = records.last_id(db, table)
        db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        db.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last + IDS_SKIPPED))
    db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (records.CHANGES,))  # they are in another store's log


# --- snapshots of encrypted stores ---


class ReadablePersons(NamedTuple):
    """Persons of a snapshot as (collection's number, person): those whose vectors can be decrypted, and the others.

    Attributes:
        faces: how many vectors can be decrypted.
    """

    readable: set[tuple[int, int]]
    gone: set[tuple[int, int]]
    faces: int


@contextmanager
def reading_snapshot(snapshot: Path) -> Iterator[sqlite3.Connection]:
    """Open a snapshot's rows for reading alone.

    Raises:
        DataError: they are another program's, or of a later version.
        IntegrityError: they are damaged.
    """
    path = snapshot / SQLITE
    with (
        translate_errors(path),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as db,
    ):
        if check_schema(db, path) < 3:
            db.execute("CREATE TEMP VIEW collections AS SELECT *, 0 AS space FROM main.collections")
        yield db


def store_id_of(snapshot: Path) -> str | None:
    """Return the id of the encrypted store that a snapshot was taken of; None: of one that is not encrypted."""
    with reading_snapshot(snapshot) as db:
        return read_settings(db).get("store_id")


def open_keys(snapshot: Path, key_file: Path | None, keys: Path | None) -> KeyTable | None:
    """Open the keys of a snapshot's store for reading; None where it is not encrypted.

    Args:
        snapshot: its folder.
        key_file: with the master key.
        keys: the file of keys; None: of the store that the snapshot lies in.

    Raises:
        UsageError: ``key_file`` is missing, of another store, or not needed; or there is no such file of keys.
    """
    store_id = store_id_of(snapshot)
    if store_id is None:
        if key_file is not None or keys is not None:
            raise UsageError(f"{snapshot} is not encrypted; leave --encrypt and --keys out")
        return None
    if key_file is None:
        raise UsageError(f"{snapshot} is encrypted; name its key file: --encrypt KEYFILE")
    path = snapshot.absolute().parent.parent / KEYS if keys is None else keys
    if not path.is_file():
        raise UsageError(f"there is no file of keys {path}; name the newest copy of its store's: --keys FILE")
    table = KeyTable(path, read_key_file(key_file), writable=False)
    if table.store_id.hex() != store_id:
        table.close()
        raise UsageError(f"{path} is of another store than {snapshot}; name its own: --keys FILE")
    return table


def find_readable(db: sqlite3.Connection, table: KeyTable) -> ReadablePersons:
    """Try to decrypt every vector; raises :class:`IntegrityError` for one that is damaged."""
    readable, everyone, count = set[tuple[int, int]](), set[tuple[int, int]](), 0
    cursor = db.execute(f"SELECT f.collection, f.person, f.id, v.face, v.vector FROM {SEARCHED} ORDER BY f.id")
    while rows := cursor.fetchmany(_FETCH_ROWS):
        texts = decrypted_vectors(table, [row[3] for row in rows], [row[4] for row in rows])
        for (number, person, face, _, _), (_, text) in zip(rows, texts, strict=True):
            if not (isinstance(number, int) and isinstance(person, int)):
                raise corrupt_row(db, f"face {face} is not what was written")
            everyone.add((number, person))
            if text is not None:
                readable.add((number, person))
                count += 1
    return ReadablePersons(readable, everyone - readable, count)


def check_readers(snapshot: Path, key_file: Path | None, keys: Path | None) -> dict[str, int]:
    """Return how many persons and faces of a snapshot can be read, after trying each, and how many are gone for good.

    Raises:
        UsageError, IntegrityError: see :func:`open_keys` and :func:`find_readable`.
    """
    table = open_keys(snapshot, key_file, keys)
    assert table is not None, "what is not encrypted was refused"
    with closing(table), reading_snapshot(snapshot) as db:
        found = find_readable(db, table)
    return {"readable": len(found.readable), "readable_faces": found.faces, "gone": len(found.gone)}


def _leave_out(db: sqlite3.Connection, table: KeyTable) -> int:
    """Delete the persons who cannot be read from a copy of a snapshot; returns how many."""
    gone = find_readable(db, table).gone
    infos = {stored.number: stored.info for stored in records.all_collections(db)}
    for number, id in sorted(gone):
        rows = SqliteRows(db, number, infos[number]) if number in infos else None
        if rows is None or not (found := rows.find_all([id])):
            raise IntegrityError(f"the snapshot holds a face of person {id}, who is not in it; use another copy")
        rows.delete(found[0])
    for number in {number for number, _ in gone}:
        erase(db, tombstones(db, number))
    if gone:
        clear_deletion_time(db)
        db.execute("DELETE FROM idempotency")  # answers that may name them
        mark_written_anew(db)  # by _finish_copy
    return len(gone)


def _finish_copy(db_path: Path, table: KeyTable, target: Path) -> None:
    """Write the keys that a copy of a snapshot needs, and no others, and rewrite the copy without its free space."""
    with translate_errors(db_path), closing(sqlite3.connect(db_path, isolation_level=None)) as db:
        db.execute("VACUUM")
        table.copy(target, living_keys(db))
