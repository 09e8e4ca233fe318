"""The one way to open a file that somebody else supplied: a regular one, where it should be, and not too large.

In a folder from elsewhere, ``9.jpg`` may be a pipe that nobody writes to, a link to a device that never ends, or a link
to a picture of the reader's own, which would go into what the reader passes on. A list may name such a picture.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from plsc.errors import DataError, first_line

ALLOW_OUTSIDE = "PLSC_ALLOW_OUTSIDE"  # the environment's: "1" lets links and lists lead out of their folders
LARGEST_PICTURE = 3 * 2**26 + 2**20  # bytes: of the pixels that are decoded at most, with nothing compressed


def open_regular(path: Path, *, below: Path | None = None, largest: int | None = None) -> BufferedReader:
    """Open a file for reading, without waiting for anybody.

    Args:
        path: the file; links are followed.
        below: the folder, resolved, in which it has to lie in the end, unless :data:`ALLOW_OUTSIDE` is set; None is
            anywhere.
        largest: bytes that it may have.

    Raises:
        DataError: it lies elsewhere, is larger, or is a folder, a pipe, a socket or a device.
        OSError: it is missing, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its other end
    fault = _fault(descriptor, path, below, largest)
    if fault is not None:
        os.close(descriptor)
        raise DataError(f"cannot read {path}: {fault}")
    return open(path, "rb", opener=lambda name, flags: descriptor)  # a file that knows its name


def read_bytes(path: Path, *, below: Path | None = None, largest: int = LARGEST_PICTURE) -> bytes:
    """Read a file whole; arguments as :func:`open_regular`'s.

    Raises:
        DataError: as :func:`open_regular`, and for its OSError.
    """
    try:
        with open_regular(path, below=below, largest=largest) as file:
            return file.read(os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def check_links(folder: Path, *, below: Path) -> None:
    """Raise :class:`DataError` where a folder, or a link in it, leads out of another, unless that is allowed."""
    if os.environ.get(ALLOW_OUTSIDE) == "1":
        return
    found = (Path(root, name) for root, *names in os.walk(folder) for name in [*names[0], *names[1]])
    for path in (folder, *filter(Path.is_symlink, found)):
        if not path.resolve().is_relative_to(below.resolve()):
            raise DataError(f"cannot read {path}: {_outside(below)}")


def _outside(below: Path) -> str:
    return f"it lies outside of {below}; --allow-outside ({ALLOW_OUTSIDE}=1) reads it"


def map_npy(path: Path, named: str) -> Any:
    """Map a ``.npy`` file, which may hold no array after all: whoever calls looks.

    Raises:
        DataError: it is none, or cannot be read; the message begins with ``named``.
    """
    import numpy as np  # here: commands read files before they need it

    try:
        with open_regular(path):
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{named} is no .npy file: {first_line(error)}") from None


def _fault(descriptor: int, path: Path, below: Path | None, largest: int | None) -> str | None:
    """Why an open file is not read; None if it may be."""
    if below is not None and os.environ.get(ALLOW_OUTSIDE) != "1" and not _lies_in(descriptor, path, below):
        return _outside(below)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is no regular file"
    if largest is not None and status.st_size > largest:
        return f"it has {status.st_size:,} bytes, where {largest:,} are the most; it is another kind of file"
    return None


def _lies_in(descriptor: int, path: Path, folder: Path) -> bool:
    """Whether an open file does, as the system tells (Linux), in half of the time that resolving its path takes."""
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 (once a picture)
    except OSError:
        real = os.path.realpath(path)
    return real.startswith(os.path.join(folder, ""))  # noqa: PTH118 (with a slash at its end)
