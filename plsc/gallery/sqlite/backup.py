"""Snapshots of a store in a folder, and stores restored from them.

SNAPSHOT/
  manifest.json      with its own digest: when it was taken, every collection's figures, {file: {"bytes", "sha256"}}
  gallery.sqlite     every row of one moment, and no vector of what had been deleted by then

Segments are not copied: opening a restored store rebuilds them from SQLite.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plsc.errors import ConflictError, IntegrityError, UsageError
from plsc.files import (
    Manifest,
    atomic_replace_dir,
    describe_files,
    make_private_folder,
    manifest_value,
    read_manifest,
    restrict,
    storage_errors,
    verify_files,
    write_manifest,
)
from plsc.gallery.sqlite import KEYS, SQLITE, records
from plsc.gallery.sqlite.compaction import erase, orphaned_collections, tombstones
from plsc.gallery.sqlite.database import Database, translate_errors
from plsc.gallery.sqlite.encrypted_snapshot import finish_copy, leave_out, open_keys
from plsc.gallery.sqlite.unfinished import clear_deletion_time, mark_written_anew
from plsc.gallery.validation import now

FORMAT = "plsc gallery snapshot"
VERSION = 2  # that of the SQLite file in it
_OLDEST_VERSION = 1  # a restored store is migrated when it is opened
# Ids of a restored store begin this much higher, so that none is given again that was given after the snapshot.
IDS_SKIPPED = 1_000_000_000


def write_snapshot(database: Database, target: Path) -> None:
    """Copy what is committed at this moment into the new folder ``target``; writes go on meanwhile.

    Raises:
        ConflictError: ``target`` exists.
        StorageError: there is no room; nothing is left then.
    """
    _require_new(target)
    with _atomic_folder(target) as tmp_path:
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
        UsageError, DataError, IntegrityError: see :func:`read_snapshot` and
            :func:`plsc.gallery.sqlite.encrypted_snapshot.open_keys`.
    """
    source, target = Path(snapshot), Path(store)
    manifest = read_snapshot(source)
    _require_new(target)
    table = open_keys(source, key_file, keys)
    result = {"store": str(target), "created": manifest["created"]}
    with nullcontext() if table is None else closing(table), _atomic_folder(target) as tmp_path:
        shutil.copyfile(source / SQLITE, tmp_path / SQLITE)
        verify_files(tmp_path, manifest["files"])  # the copy, too: it is what will be used
        with _opened(tmp_path / SQLITE) as db:
            left_out = {} if table is None else {"left_out": leave_out(db, table)}
            _skip_ids(db)
            collections = [asdict(stored.info) for stored in records.all_collections(db)] if left_out else None
        if table is not None:
            finish_copy(tmp_path / SQLITE, table, tmp_path / KEYS)
    return {**result, "collections": manifest["collections"] if collections is None else collections, **left_out}


def _require_new(target: Path) -> None:
    if target.exists():
        raise ConflictError(f"{target} exists already; name a new folder")


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which becomes ``target`` on success and is removed on failure."""
    target = target.absolute()
    tmp_path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with storage_errors(target):
        try:
            make_private_folder(target.parent)
            shutil.rmtree(tmp_path, ignore_errors=True)
            make_private_folder(tmp_path)
            yield tmp_path
            restrict(tmp_path)
            atomic_replace_dir(tmp_path, target)
        finally:
            shutil.rmtree(tmp_path, ignore_errors=True)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy that nobody else uses, in one transaction. It is discarded on failure, so it needs no journal."""
    with translate_errors(path):
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()


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
