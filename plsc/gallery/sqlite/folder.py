"""Taking possession of a store's folder: the owner's lock, access rights, and other folders refused."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType

from filelock import FileLock, Timeout

from plsc.errors import ConflictError, IntegrityError, StorageError, UsageError
from plsc.files import MANIFEST, holds_manifest, is_running, make_private_folder, restrict, storage_errors
from plsc.gallery.sqlite import COLLECTIONS, KEYS, LOCK, RESERVE, SNAPSHOTS, SQLITE
from plsc.gallery.sqlite.backup import FORMAT
from plsc.gallery.sqlite.database import PAGE_BYTES, Database
from plsc.gallery.sqlite.encryption import EncryptedVectors
from plsc.gallery.sqlite.keys import KeyTable, create_keys, read_key_file, remove_leftovers
from plsc.gallery.sqlite.rewriting import remove_unfinished
from plsc.gallery.sqlite.write_ahead_log import verify_log

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_ORPHAN_SECONDS = 2.0  # for which a child of a killed owner may have the locks: from its fork until its exec


def holds_store(folder: Path) -> bool:
    """Return True if ``folder`` has been a store, whatever its state."""
    return (folder / SQLITE).exists() or (folder / COLLECTIONS).exists()


def open_folder(folder: Path, key_file: Path | None, make_room: Callable[[], None]) -> tuple["FolderLock", Database]:
    """Lock ``folder``, creating it if there is none, and open its database.

    Args:
        folder: of the store.
        key_file: of an encrypted store.
        make_room: called where the disk is full, before another try.

    Raises:
        UsageError: ``folder`` is a file, a snapshot, or holds something else; or it is encrypted and ``key_file`` is
            missing or another one.
        ConflictError: another process has the store.
        StorageError: the folder cannot be written.
        IntegrityError: the database is missing or damaged.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    master = None if key_file is None else read_key_file(key_file)
    with storage_errors(folder):
        _refuse_others(folder)
        make_private_folder(folder)
    lock = FolderLock(folder)
    try:
        with storage_errors(folder):
            _remove_unfinished_snapshots(folder / SNAPSHOTS)
            remove_unfinished(folder / SQLITE)
            _restrict(folder)
        # Before SQLite sees the log: it would take what is damaged for never written, and remove it.
        verify_log(folder / SQLITE, PAGE_BYTES)
        try:
            return lock, _open_database(folder, master)
        except StorageError:
            make_room()
            return lock, _open_database(folder, master)
    except BaseException:
        lock.release()
        raise


def _open_database(folder: Path, master: bytes | None) -> Database:
    is_new = not _was_written(folder / SQLITE)
    if master is None:
        if is_new and (folder / KEYS).exists():
            raise UsageError(f"{folder} is an encrypted store; name its key file: --encrypt KEYFILE")
        return Database(folder / SQLITE)
    remove_leftovers(folder / KEYS)
    if not (folder / KEYS).exists():
        if not is_new:
            Database(folder / SQLITE, {"encryption": "1"}).close()  # of a plain store this is what is said
        else:
            create_keys(folder / KEYS, master)
    table = KeyTable(folder / KEYS, master)
    try:
        if is_new and len(table):
            raise IntegrityError(f"{folder / SQLITE} is missing; restore a snapshot with plsc gallery restore")
        settings = {"encryption": "1", "store_id": table.store_id.hex()}
        database = Database(folder / SQLITE, settings)
    except BaseException:
        table.close()
        raise
    database.use(codec=EncryptedVectors(table))
    if database.settings != settings:
        database.close()
        raise UsageError(f"{folder / KEYS} is of another store than {folder / SQLITE}; bring back its own")
    return database


def _was_written(path: Path) -> bool:
    """Return True if a SQLite file holds anything, if only in its log."""
    log = path.with_name(path.name + "-wal")
    return any(one.exists() and one.stat().st_size for one in (path, log))


def rotate_key(store: Path, old: Path, new: Path) -> int:
    """Put every key of ``store`` under the key file ``new`` in place of ``old``; returns how many there are.

    Killed at any moment, the store opens under one of the two.

    Raises:
        UsageError: there is no encrypted store, or ``old`` is not its key file.
        ConflictError: a process has the store.
        IntegrityError: a key is damaged; the file is as it was.
        StorageError: it cannot be written, and is as it was; or it is under the new key file, as the message says then.
    """
    path = store / KEYS
    if not path.is_file():
        raise UsageError(f"{store} holds no encrypted gallery; name the folder of one")
    former, master = read_key_file(old), read_key_file(new)
    if former == master:
        raise UsageError(f"{new} holds the same key as {old}; make another: openssl rand -base64 32 > {new}")
    lock = FolderLock(store)
    try:
        remove_leftovers(path)
        with closing(KeyTable(path, former)) as table:
            return table.rewrap(master)
    finally:
        lock.release()


class FolderLock:
    """The lock of a folder's one owner; :class:`ConflictError` names the process that has it.

    The kernel drops it with its process, however that ends; only a child that was being started may have it a moment
    longer, and is waited for where the process that ``lock`` names is gone. Beside that file the folder itself is
    locked where the system can: who removes the file opens no door.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        # thread_local would make a release by any other thread than the opening one do nothing.
        self._file = FileLock(self._path, timeout=0, mode=0o600, thread_local=False)
        give_up = time.monotonic() + _ORPHAN_SECONDS
        while not self._is_acquired(folder):
            owner = self._owner()
            if (owner.isdecimal() and is_running(int(owner))) or time.monotonic() > give_up:
                raise ConflictError(
                    f"the store {folder} is in use by process {owner}; stop it first, or name another store"
                )
            time.sleep(0.01)
        with suppress(OSError):  # on a full disk the lock holds all the same, and only a message would say less
            self._path.write_text(f"{os.getpid()}\n", encoding="utf-8")

    def _is_acquired(self, folder: Path) -> bool:
        try:
            self._file.acquire()
            self._descriptor = _lock_itself(folder)
        except (Timeout, BlockingIOError):
            self._file.release()
            return False
        except OSError as error:
            self._file.release()
            raise StorageError(f"cannot write {self._path}: {error.strerror}; check its permissions") from None
        return True

    def release(self) -> None:
        """Let others have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._file.release()

    def _owner(self) -> str:
        with suppress(OSError):
            return self._path.read_text(encoding="utf-8", errors="replace").strip()[:20] or "unknown"
        return "unknown"


def _lock_itself(folder: Path) -> int | None:
    """Lock a folder's own inode; None where the system or the file system has no such locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _restrict(folder: Path) -> None:
    """Close the folder and its files to everybody but their owner, whoever made them.

    The thumbnails are many: one by one they are closed only where the folder was open to others.
    """
    was_open = bool(folder.stat().st_mode & 0o077)
    files = [path for path in folder.iterdir() if path.is_file()]
    restrict(*([folder] if was_open else [*files, folder / COLLECTIONS, folder / SNAPSHOTS]))


def _refuse_others(folder: Path) -> None:
    if holds_manifest(folder, FORMAT):
        raise UsageError(f"{folder} is a snapshot; make a store of it with plsc gallery restore {folder} --store NEW")
    if os.path.lexists(folder / MANIFEST):  # a store has none; opening would change a snapshot whose own is damaged
        raise UsageError(f"{folder} is no store: it holds a {MANIFEST}, as snapshots do; name a store, or another copy")
    if not folder.is_dir() or (folder / SQLITE).is_file():
        return
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {LOCK, RESERVE, KEYS}
    if COLLECTIONS in found:
        raise IntegrityError(f"{folder / SQLITE} is missing; restore a snapshot with plsc gallery restore")
    if found:
        raise UsageError(f"{folder} is not empty and holds no gallery; name another folder")


def _remove_unfinished_snapshots(snapshots: Path) -> None:
    """Remove snapshots that a killed process was writing or deleting: they may hold vectors deleted since."""
    for path in snapshots.glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
