"""Blocks of objects that were read from a store, in a folder of bounded size that all processes of a machine share.

A block is one megabyte of an object: a request for it takes little longer than one for a picture, and its neighbours
are read next. Its file begins with a checksum for each page of 64 KiB, so that a picture's pages alone are verified. A
block that is torn or flipped is as if it were not there. Files appear whole, by a rename, and may be removed at any
time: no process waits for another. Those not used for longest go first.
"""

import contextlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from plsc.errors import UsageError
from plsc.files import make_private_folder, remove_leftovers
from plsc.progress import log_once

BLOCK, _PAGE = 2**20, 2**16
_FOLDERS = 16  # each holds its share of the bound, and is looked through alone
_LEAST_SHARE = 4 * BLOCK
_USED = 60 * 10**9  # nanoseconds: a use is noted if the one before is that old
_MOST = 20e9  # bytes


class BlockCache:
    """The blocks in ``root``; it pickles.

    Args:
        root: the folder, made when the first block is written.
        bound: bytes of all blocks, which processes may pass by a sixteenth each; None: 20 GB, or a tenth of what is
            free on the disk if that is less.
    """

    def __init__(self, root: Path, bound: float | None = None) -> None:
        self.root, self._bound = root, bound
        self._written: dict[str, int] = {}  # by this process, since it looked through a folder

    def read(self, name: str, size: int, fetch: Callable[[], bytes], start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the block ``name`` of ``size`` bytes; where it is not here, ``fetch`` gives it."""
        path = self._path(name)
        found = _verified(path, size, start, stop)
        if found is None:
            content = fetch()
            try:
                self._write(path, content)
            except OSError as error:
                log_once("plsc.data", f"{self.root} keeps no blocks ({error.strerror}): they are fetched each time")
            found = content[start:stop]
        return found

    def copy(self, name: str, fetch: Callable[[Path], None]) -> Path:
        """The file ``name``, which ``fetch`` writes where it is not here, for those who need a whole one."""
        path = self._path(name)
        if not path.is_file():
            with self.folder() as folder:
                fetch(folder / name)
                make_private_folder(path.parent)
                (folder / name).replace(path)
            self._count(path.parent, path.stat().st_size)
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder for whole files that is removed in the end, or by the next one if this process is killed."""
        path = self.root / f".whole.{os.urandom(4).hex()}.{os.getpid()}.tmp"
        try:
            make_private_folder(self.root)
            remove_leftovers(self.root / "whole")
            path.mkdir(mode=0o700)
        except OSError as error:
            raise UsageError(f"cannot write into {self.root}: {error.strerror}; name a folder by ?cache=") from None
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self.root / name[0] / name

    def _write(self, path: Path, content: bytes) -> None:
        make_private_folder(path.parent)
        sums = np.array([zlib.crc32(content[at : at + _PAGE]) for at in range(0, len(content), _PAGE)], "<u4")
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor)
                file.write(sums.tobytes() + content)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._count(path.parent, len(content))

    def _count(self, folder: Path, size: int) -> None:
        """Look through a folder of blocks when this process first writes there, and then after each sixteenth of it."""
        if self._bound is None:
            self._bound = min(_MOST, shutil.disk_usage(self.root).free / 10)
        share = max(int(self._bound / _FOLDERS), _LEAST_SHARE)
        self._written[folder.name] = self._written.get(folder.name, share) + size
        if self._written[folder.name] >= share // 16:
            self._written[folder.name] = 0
            _shrink(folder, share)


def _verified(path: Path, size: int, start: int, stop: int) -> bytes | None:
    """Bytes [start, stop) of a block of ``size`` bytes; None where it is not there, or not what was written."""
    sums_size = 4 * -(-size // _PAGE)
    first, end = start // _PAGE, -(-stop // _PAGE)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_size != sums_size + size:
            return None
        if time.time_ns() - status.st_mtime_ns > _USED:
            os.utime(descriptor)
        sums = os.pread(descriptor, sums_size, 0)
        content = os.pread(descriptor, min(end * _PAGE, size) - first * _PAGE, sums_size + first * _PAGE)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    for number in range(first, end):
        at = (number - first) * _PAGE
        if zlib.crc32(content[at : at + _PAGE]) != int.from_bytes(sums[4 * number : 4 * number + 4], "little"):
            return None
    return content[start - first * _PAGE : stop - first * _PAGE]


def _shrink(folder: Path, share: int) -> None:
    """Remove what was not used for longest, until the folder has ``share`` bytes or less."""
    found: list[tuple[int, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # removed meanwhile
                status = entry.stat()
                found.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= share:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 (of thousands)
        total -= size
