"""The tokens of a running service: reread when their file changes, and refused all together where it cannot be read."""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from plsc.errors import DataError, UsageError
from plsc.progress import note
from plsc.serve.errors import ApiError
from plsc.serve.tokens import Token, find_token, read_tokens

_REREAD_SECONDS = 1.0
_GRACE_SECONDS = 5.0  # an editor may write a file in two steps; a token that was removed must not profit for longer


class TokenBook:
    """The tokens of a file, reread when it changes: a removed token is refused without a restart.

    Where the file is gone or cannot be read, the tokens read before stay in force for a few seconds; from then on all
    are refused, for nobody knows which of them were removed. A file descriptor is kept in reserve for reading.

    Raises:
        UsageError, DataError: see :func:`plsc.serve.tokens.read_tokens`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reserve: int | None = None
        self._reported: tuple[int, ...] | None = None
        self._failing_since: float | None = None
        self._stamp = _stamp(path)
        self._tokens: Sequence[Token] = self._read()
        self._checked = time.monotonic()
        self._warn_of_mode()

    def find(self, secret: bytes) -> Token | None:
        """The token with this secret, or None; :class:`ApiError` 503 where the file has been unreadable for a while."""
        if not self.is_current():
            raise ApiError(503, "the service cannot read its tokens, and refuses all of them until it can")
        return find_token(self._tokens, secret)

    def is_current(self) -> bool:
        """False if the file could not be read for so long that no token is taken."""
        with self._lock:
            if time.monotonic() - self._checked >= _REREAD_SECONDS:
                self._checked = time.monotonic()
                self._reread_if_changed()
            return self._failing_since is None or self._checked - self._failing_since < _GRACE_SECONDS

    def _reread_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp is None or stamp != self._stamp:
            try:
                self._tokens = self._read()
            except (DataError, UsageError) as error:
                self._report(stamp, error)
                return
            self._stamp = stamp
            self._warn_of_mode()
        self._failing_since = self._reported = None

    def _report(self, stamp: tuple[int, ...] | None, error: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = self._checked
        elif stamp == self._reported:
            return
        self._reported = stamp
        message = f"the tokens read before stay in force for {_GRACE_SECONDS:g} s, then all are refused: {error}"
        note(f"plsc serve: {message}")

    def _read(self) -> Sequence[Token]:
        if self._reserve is not None:
            os.close(self._reserve)  # for the file: there may be no other descriptor left
            self._reserve = None
        try:
            return read_tokens(self._path)
        finally:
            with contextlib.suppress(OSError):  # taken meanwhile; the next reading tries again
                self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _warn_of_mode(self) -> None:
        try:
            mode = stat.S_IMODE(self._path.stat().st_mode)
        except OSError:
            return
        if os.name == "posix" and mode & 0o077:
            message = f"{self._path} is open to others (mode {mode:04o}); close it: chmod 600 {self._path}"
            note(f"plsc serve: {message}")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode
