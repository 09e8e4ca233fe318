"""Taking possession of a store's folder: the owner's lock, the disk reserve, and the refusal of other folders."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from plsc.errors import ConflictError, IntegrityError, StorageError, UsageError
from plsc.files import holds_manifest, storage_errors
from plsc.gallery.sqlite import COLLECTIONS, LOCK, RESERVE, SNAPSHOTS, SQLITE
from plsc.gallery.sqlite.backup import FORMAT
from plsc.gallery.sqlite.database import PAGE_BYTES, Database
from plsc.gallery.sqlite.integrity import verify_log

_RESERVE_BYTES = 4 << 20  # the log of some deletions, and SQLite's own files
_MIN_RESERVE_BYTES = 64 << 10  # SQLite's own files alone


def holds_store(folder: Path) -> bool:
    """Return True if ``folder`` has been a store, whatever its state."""
    return (folder / SQLITE).exists() or (folder / COLLECTIONS).exists()


def open_folder(folder: Path) -> tuple[FileLock, "Reserve", Database]:
    """Lock ``folder``, creating it if there is none, and open its database, on a full disk by giving up the reserve.

    Raises:
        UsageError: ``folder`` is a file, a snapshot, or holds something else.
        ConflictError: another process has the store.
        StorageError: the folder cannot be written.
        IntegrityError: the database is missing or damaged.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    with storage_errors(folder):
        _refuse_others(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # biometric data: readable by the owner alone
    lock, reserve = lock_folder(folder), Reserve(folder)
    try:
        with storage_errors(folder):
            _remove_unfinished_snapshots(folder / SNAPSHOTS)
        # Before SQLite sees the log: it would take what is damaged for never written, and remove it.
        verify_log(folder / SQLITE, PAGE_BYTES)
        try:
            return lock, reserve, Database(folder / SQLITE)
        except StorageError:
            reserve.release_all()
            return lock, reserve, Database(folder / SQLITE)
    except BaseException:
        lock.release()
        raise


def lock_folder(folder: Path) -> FileLock:
    """Lock ``folder`` for this process; :class:`ConflictError` names the process that has it.

    The kernel drops the lock with its process, however that ends. The process id in the file serves the message only.
    """
    path = folder / LOCK
    # thread_local would make a release by any other thread than the opening one do nothing.
    lock = FileLock(path, timeout=0, mode=0o600, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        owner = path.read_text(encoding="utf-8", errors="replace").strip() or "unknown"
        raise ConflictError(
            f"the store {folder} is in use by process {owner}; stop it first, or name another store"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; check its permissions") from None
    with suppress(OSError):  # on a full disk the lock holds all the same, and only a message would say less
        path.write_text(f"{os.getpid()}\n", encoding="utf-8")
    return lock


class Reserve:
    """Disk space kept back in ``folder/reserve``, so that a store on a full disk can still be opened and deleted from.

    While it is used up, everything that adds to the store is refused.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE
        self._held = False

    def release(self) -> None:
        """Free the space for deletions, but for what the next opening needs."""
        self._held = False
        with suppress(OSError):
            os.truncate(self._path, _MIN_RESERVE_BYTES)

    def release_all(self) -> None:
        """Free all of the space, for opening the store."""
        self._held = False
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def hold(self) -> bool:
        """Allocate the space again; returns True if all of it is held. With less, what opening needs is taken."""
        if not self._held:
            self._held = self._allocate(_RESERVE_BYTES)
            if not self._held:
                self._allocate(_MIN_RESERVE_BYTES)
        return self._held

    def require(self) -> None:
        """Raise :class:`StorageError` unless the space is held: the last of it is for deletions."""
        if not self.hold():
            raise StorageError(
                f"the disk of {self._path.parent} is full; nothing was changed: deletions are still taken, "
                "and everything else when there is room again"
            )

    def _allocate(self, count: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, count)  # real blocks, where a truncated file would be a hole
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


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


def _remove_unfinished_snapshots(snapshots: Path) -> None:
    """Remove snapshots that a killed process was writing or deleting: they may hold vectors deleted since."""
    for path in snapshots.glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
