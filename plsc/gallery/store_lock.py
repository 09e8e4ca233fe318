"""One process owns a store: a lock that the kernel frees with the process, however it ends."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from plsc.errors import ConflictError, StorageError

LOCK = "lock"


class StoreLock:
    """Holds ``folder`` from construction to :meth:`release`; :class:`ConflictError` names the process that has it."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise ConflictError(
                f"the store {folder} is in use by process {owner}; stop it first, or name another store"
            ) from None
        with suppress(OSError):  # a full disk: the lock holds all the same, and the other's error says less
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process have the store."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
