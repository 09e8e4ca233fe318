"""Room on the disk that a store keeps back: so that it can be opened, and can forget, where nothing else has room."""

import os
from contextlib import suppress
from pathlib import Path

from plsc.errors import StorageError

RESERVE = "reserve"
BYTES = 4 << 20  # some deletions' worth of log, and SQLite's own files
_LEAST_BYTES = 64 << 10  # SQLite's own files alone


class Reserve:
    """The file ``folder/reserve``; while it is used up, what adds to the store is refused."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE
        self._held = False

    def release(self) -> None:
        """Give the room up for deletions on a full disk, but for what the next opening needs."""
        self._held = False
        with suppress(OSError):
            os.truncate(self._path, _LEAST_BYTES)

    def release_all(self) -> None:
        """Give the room up for opening the store on a full disk."""
        self._held = False
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def hold(self) -> bool:
        """Take the room, if it is there; whether it is held. Where there is less, what opening needs is taken."""
        if not self._held:
            self._held = self._take(BYTES)
            if not self._held:
                self._take(_LEAST_BYTES)
        return self._held

    def require(self) -> None:
        """:class:`StorageError` unless the room is held: the last of it is for forgetting."""
        if not self.hold():
            raise StorageError(
                f"the disk of {self._path.parent} is full; nothing was changed: deletions are still taken, "
                "and everything else when there is room again"
            )

    def _take(self, count: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(descriptor, 0, count)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True
