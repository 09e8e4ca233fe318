"""Snapshots: a store's SQLite file as it was at one moment, sealed; and stores made of them again.

    SNAPSHOT/
      manifest.json      sealed: when it was taken, every collection's figures, and {file: {"bytes", "sha256"}}
      gallery.sqlite     all there was, and no vector of what had been deleted by then

Bases are not copied, for they are made from SQLite.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plsc.errors import ConflictError, UsageError
from plsc.files import Manifest, atomic_replace_dir, describe_files, read_manifest, verify_files, write_manifest
from plsc.gallery import records
from plsc.gallery.database import Database, errors_of
from plsc.gallery.storage_errors import storage_errors
from plsc.gallery.validation import now

FORMAT = "plsc gallery snapshot"
VERSION = 1
SQLITE = "gallery.sqlite"
# A restored store counts on from here above: what was given an id after the snapshot does not share it with others.
IDS_SKIPPED = 1_000_000_000


def write_snapshot(database: Database, target: Path) -> None:
    """Copy what is committed at this moment into the new folder ``target``; writes go on meanwhile.

    :class:`ConflictError` if ``target`` exists, :class:`StorageError` where there is no room; nothing is left then.
    """
    _refuse_existing(target)
    with _published(target) as tmp_path:
        with database.reading() as db:
            db.execute("VACUUM INTO ?", (str(tmp_path / SQLITE),))
        with _opened(tmp_path / SQLITE) as db:
            collections = _without_forgotten(db)
        content: Manifest = {"format": FORMAT, "version": VERSION, "created": now(), "collections": collections}
        write_manifest(tmp_path, {**content, "files": describe_files(tmp_path, [SQLITE])})


def read_snapshot(folder: Path) -> Manifest:
    """The manifest of a snapshot whose every file was hashed.

    Raises :class:`UsageError` or :class:`DataError` if ``folder`` is none, :class:`IntegrityError` where it is damaged.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no snapshot {folder}")
    manifest = read_manifest(folder, FORMAT, VERSION)
    verify_files(folder, manifest["files"])
    return manifest


def restore(snapshot: str | Path, store: str | Path) -> dict[str, Any]:
    """Make the new store ``store`` of a snapshot; returns when it was taken and what it holds.

    Ids go on a billion higher, so that none that was given after the snapshot is given again. Bases are made when the
    store is opened. :class:`ConflictError` if ``store`` exists; what :func:`read_snapshot` raises.
    """
    source, target = Path(snapshot), Path(store)
    manifest = read_snapshot(source)
    _refuse_existing(target)
    with _published(target) as tmp_path:
        shutil.copyfile(source / SQLITE, tmp_path / SQLITE)
        verify_files(tmp_path, manifest["files"])
        with _opened(tmp_path / SQLITE) as db:
            _skip_ids(db)
    return {"store": str(target), "created": manifest["created"], "collections": manifest["collections"]}


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ConflictError(f"{target} exists already; name a new folder")


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` at the end; nothing is left where that fails."""
    target = target.absolute()
    tmp_path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with storage_errors(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(tmp_path, ignore_errors=True)
            tmp_path.mkdir(mode=0o700)  # biometrics are nobody else's to read
            yield tmp_path
            atomic_replace_dir(tmp_path, target)
        finally:
            shutil.rmtree(tmp_path, ignore_errors=True)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A copy that nobody else uses, in one transaction; it is thrown away where this fails, so it needs no log."""
    with errors_of(path):
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()


def _without_forgotten(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Overwrite what was deleted and let go of bases; returns the collections' figures."""
    found = records.all_collections(db)
    for number in [*(one.number for one in found), *records.orphaned(db)]:
        records.erase(db, records.forgotten(db, number))
    db.execute("UPDATE collections SET base = 0, seal = '', covered = 0")
    records.set_finished(db)
    return [asdict(one.about) for one in found]


def _skip_ids(db: sqlite3.Connection) -> None:
    for table in ("persons", "faces"):
        last = records.last_id(db, table)
        db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
        db.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last + IDS_SKIPPED))
