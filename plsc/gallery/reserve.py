"""Room on the disk that a store keeps back: so that it can be opened, and can forget, where nothing else has room."""

import os
from contextlib import suppress
from pathlib import Path

from plsc.errors import StorageError

RESERVE = "reserve"
BYTES = 4 << 20  # some deletions' worth of log, and SQLite's own files


class Reserve:
    """The file ``folder/reserve``; while it is used up, what adds to the store is refused."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE
        self._held = False

    def release(self) -> None:
        """Give the room up, for what must be done on a full disk."""
        self._held = False
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def hold(self) -> bool:
        """Take the room, if it is there; whether it is held."""
        if not self._held:
            try:
                self._take()
                self._held = True
            except OSError:
                self.release()
        return self._held

    def require(self) -> None:
        """:class:`StorageError` unless the room is held: the last of it is for forgetting."""
        if not self.hold():
            raise StorageError(
                f"the disk of {self._path.parent} is full; nothing was changed: deletions are still taken, "
                "and everything else when there is room again"
            )

    def _take(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, BYTES)
        finally:
            os.close(descriptor)
