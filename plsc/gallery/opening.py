"""Opening a store's folder: whose it is, what is in it, and what a killed process left behind."""

import shutil
import sys
from pathlib import Path

from plsc.errors import IntegrityError, StorageError, UsageError
from plsc.files import holds_manifest
from plsc.gallery import records
from plsc.gallery.base import Base, base_folder, open_base
from plsc.gallery.compaction import Compactor
from plsc.gallery.database import Database
from plsc.gallery.records import StoredCollection
from plsc.gallery.reserve import RESERVE, Reserve
from plsc.gallery.searched import DELTA_SHARE, LEAST_DELTA, SearchedCollection
from plsc.gallery.snapshot import FORMAT, SQLITE
from plsc.gallery.storage_errors import storage_errors
from plsc.gallery.store_lock import LOCK, StoreLock

COLLECTIONS = "collections"
SNAPSHOTS = "snapshots"


def holds_store(folder: Path) -> bool:
    """Whether ``folder`` has been a store, whatever its state."""
    return (folder / SQLITE).exists() or (folder / COLLECTIONS).exists()


def open_files(folder: Path) -> tuple[StoreLock, Reserve, Database]:
    """Take ``folder``, made where there is none, and open its database, on a full disk with the room kept back."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    with storage_errors(folder):
        _refuse_others(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # biometrics are nobody else's to read
    lock, reserve = StoreLock(folder), Reserve(folder)
    try:
        try:
            return lock, reserve, Database(folder / SQLITE)
        except StorageError:
            reserve.release_all()
            return lock, reserve, Database(folder / SQLITE)
    except BaseException:
        lock.release()
        raise


def open_collections(database: Database, folder: Path, compactor: Compactor) -> dict[str, SearchedCollection]:
    """All collections by name, ready to be searched. A damaged base is made anew, with a line on stderr."""
    with database.reading() as db:
        stored = records.all_collections(db)
    with storage_errors(folder):
        _drop_unknown(folder, stored)
        _drop_unfinished(folder.parent / SNAPSHOTS)
        opened = {one.about.name: _open(database, folder, compactor, one) for one in stored}
    compactor.finish()
    return opened


def _refuse_others(folder: Path) -> None:
    if holds_manifest(folder, FORMAT):
        raise UsageError(f"{folder} is a snapshot; make a store of it with plsc gallery restore {folder} --store NEW")
    if not folder.is_dir() or (folder / SQLITE).is_file():
        return
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {LOCK, RESERVE}
    if COLLECTIONS in found:
        raise IntegrityError(f"{folder / SQLITE} is missing; restore a snapshot with plsc gallery restore")
    if found:
        raise UsageError(f"{folder} is not empty and holds no gallery; name another folder")


def _drop_unknown(folder: Path, stored: list[StoredCollection]) -> None:
    """Remove unfinished and former bases, and those of collections that are no more."""
    current = {base_folder(folder, one.number, one.base) for one in stored if one.base}
    for path in list(folder.glob("*/*")):
        if path not in current:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in folder.iterdir() if folder.is_dir() else ():
        if not any(parent.parent == path for parent in current):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _drop_unfinished(snapshots: Path) -> None:
    """Remove snapshots that were being taken, or deleted: they hold what later deletions would have to find."""
    for path in snapshots.glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _open(database: Database, folder: Path, compactor: Compactor, stored: StoredCollection) -> SearchedCollection:
    stored, base = _with_base(database, folder, compactor, stored)
    with database.snapshot() as db:
        newer = list(records.read_faces(db, stored.number, stored.covered, stored.about.dim))
        gone = records.forgotten(db, stored.number)
    return SearchedCollection(stored, base, newer, gone)


def _with_base(
    database: Database, folder: Path, compactor: Compactor, stored: StoredCollection
) -> tuple[StoredCollection, Base | None]:
    """The base, made anew where it is damaged, or where it covers too little to be opened quickly."""
    base = None
    if stored.base:
        path = base_folder(folder, stored.number, stored.base)
        try:
            base = open_base(path, stored, compactor.precision)
        except IntegrityError as error:
            print(f"plsc gallery: {error}; making it anew from {SQLITE}", file=sys.stderr, flush=True)
            return _anew(compactor, stored)
    with database.reading() as db:
        newer = records.count_newer(db, stored.number, stored.covered)
    if newer > max(LEAST_DELTA, (0 if base is None else len(base)) // DELTA_SHARE):
        return _anew(compactor, stored)
    return stored, base


def _anew(compactor: Compactor, former: StoredCollection) -> tuple[StoredCollection, Base | None]:
    stored, base, _ = compactor.write(former.number)
    assert stored is not None, "nobody else has the store"
    compactor.point_to(stored)
    compactor.drop_other_bases(stored.number, stored.base)
    return stored, base
