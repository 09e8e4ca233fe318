"""A line of JSON for every write that was asked for: who, when, what, and how it ended; never a vector or a name."""

import errno
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from plsc.errors import UsageError


class Audit:
    """Appends lines to a file, readable by its owner alone; without a file, to standard error."""

    def __init__(self, path: Path | None) -> None:
        self._descriptor = sys.stderr.fileno() if path is None else _opened(path)
        self._owned = path is not None
        self._is_torn = False  # the file ends in a part of a line

    def write(self, token: str | None, operation: str, collection: str | None, ids: Sequence[int], status: int) -> None:
        """One line, written at once and whole (one write to a file opened for appending).

        What was done stays done where the file takes no more (a full disk): standard error has the line then.
        """
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "token": token,
            "operation": operation,
            "collection": collection,
            "ids": list(ids),
            "status": status,
        }
        line = json.dumps(entry)
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            print(
                f"plsc serve: the audit log takes no lines ({error.strerror}); free its disk. It lacks: {line}",
                file=sys.stderr,
                flush=True,
            )

    def _append(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        if self._owned:
            os.close(self._descriptor)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write the audit log {path}: {error.strerror}; name another place") from None
