"""What the operating system's errors mean to a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plsc.errors import StorageError


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Turn an OSError (a full disk, a lost permission) into a :class:`StorageError` that names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or place}: {error.strerror or error}; nothing was changed: "
            "make room on the disk, or check its permissions"
        ) from None
