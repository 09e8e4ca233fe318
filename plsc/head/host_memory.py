"""Memory outside the compute device for tables of rows: ordinary memory, pinned for a GPU, or a mapped file.

A mapped file's pages count as this process's memory once they were touched. Every access here therefore goes over a
few rows at a time and gives the pages back behind itself: the kernel keeps what was written.
"""

import errno
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError, UsageError

PLACEMENTS = 'placement is "device", "host" or "mmap:FILE"'
_CONSECUTIVE_BYTES = 16 << 20  # of consecutive rows between two releases of a mapped file's pages
_SCATTERED_ROWS = 512  # likewise of scattered rows: the kernel maps up to 64 KiB around each
_PIN_BYTES = 1 << 30  # pinned at a time; torch's own pinned memory is rounded up to a power of two


def mapped_file(placement: str) -> Path | None:
    """FILE of ``"mmap:FILE"``, None for ``"device"`` and ``"host"``; UsageError for anything else."""
    kind, _, file = placement.partition(":")
    if placement in ("device", "host"):
        return None
    if kind != "mmap" or not file or Path(file).name in ("", ".."):
        raise UsageError(f"{PLACEMENTS}, not {placement!r}")
    return Path(file)


class Column:
    """One value, or one row of values, for each row of a table: ``values`` (rows,) or (rows, D) in host memory.

    Args:
        values: the memory.
        mapping: of the file that it is mapped from, if its pages are to be given back.
        path: of the file that holds it, if one does.

    Attributes:
        pinned_rows: rows of each piece that is registered with a GPU, which may copy to and from them directly; 0: no
            memory is registered. See :meth:`pinned_parts`.
        row_bytes: bytes of a row.
        before_write: is given the rows of every :meth:`write` before it is made.
    """

    def __init__(self, values: Tensor, mapping: mmap.mmap | None = None, path: Path | None = None) -> None:
        self.values, self.pinned_rows, self.path = values, 0, path
        self._reserved = values
        self.before_write: Callable[[slice | Tensor], None] | None = None
        self._mapping = mapping
        self.row_bytes = math.prod(values.shape[1:]) * values.element_size()

    def use(self, rows: int) -> None:
        """Let the first ``rows`` of the memory be the column."""
        self.values = self._reserved[:rows]

    def put_back(self, rows: Tensor, values: Tensor) -> None:
        """Store ``values`` (n, …) as rows (n,) of all the memory, in use or not, asking nobody before."""
        used, before_write = len(self.values), self.before_write
        self.values, self.before_write = self._reserved, None
        self.write(rows, values, ahead=True)
        self.before_write = before_write
        self.use(used)

    def read(self, rows: slice | Tensor, out: Tensor, *, ahead: bool = True) -> None:
        """Copy rows (a slice, or int64 numbers (n,) on the CPU) into ``out`` (n, …), a CPU tensor of the same dtype.

        ``ahead``: ask the kernel for their pages first, which only takes time where they were read just before.
        """
        for start, stop, part in self._parts(rows):
            if isinstance(part, slice):
                self._will_need(part)
                out[start:stop] = self.values[part]
            else:
                if ahead:
                    self._will_need_each(part)
                torch.index_select(self.values, 0, part, out=out[start:stop])
            self.release(part)

    def write(self, rows: slice | Tensor, values: Tensor, *, ahead: bool = False) -> None:
        """Store ``values`` (n, …), on the CPU and of the same dtype, as rows without repeats; ``ahead``: see read."""
        if self.before_write is not None:
            self.before_write(rows)
        for start, stop, part in self._parts(rows):
            if isinstance(part, slice):
                self.values[part] = values[start:stop]
            else:
                if ahead:
                    self._will_need_each(part)
                self.values.index_copy_(0, part, values[start:stop])
            self.release(part)

    def pinned_parts(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Yield consecutive rows, piece by piece, as (rows of the column, positions in ``rows``).

        A copy must not cross from one registered piece into the next: the CUDA driver may refuse it as invalid.
        """
        start, stop, _ = rows.indices(len(self.values))
        if start >= stop:
            return
        for first in range(start // self.pinned_rows * self.pinned_rows, stop, self.pinned_rows):
            part = slice(max(first, start), min(first + self.pinned_rows, stop))
            yield part, slice(part.start - start, part.stop - start)

    def release(self, rows: slice | Tensor | None = None) -> None:
        """Give back the pages between the first and the last of ``rows`` (None: all), where a file is mapped."""
        if self._mapping is None:
            return
        first, stop = 0, len(self.values)
        if isinstance(rows, slice):
            first, stop, _ = rows.indices(len(self.values))
        elif rows is not None:
            first, stop = int(rows.min()), int(rows.max()) + 1
        self._advise(mmap.MADV_DONTNEED, first, stop)

    def _will_need(self, rows: slice) -> None:
        """Ask the kernel to read consecutive rows ahead, which MADV_RANDOM switches off for the mapping."""
        if self._mapping is not None:
            first, stop, _ = rows.indices(len(self.values))
            self._advise(mmap.MADV_WILLNEED, first, stop)

    def _will_need_each(self, rows: Tensor) -> None:
        """Ask the kernel to read the pages of scattered rows, all at a time: one fault after another would wait."""
        if self._mapping is not None:
            starts = rows.numpy() * self.row_bytes
            pages = np.concatenate([starts, starts + self.row_bytes - 1]) // mmap.PAGESIZE * mmap.PAGESIZE
            for page in np.unique(pages).tolist():
                self._mapping.madvise(mmap.MADV_WILLNEED, page, mmap.PAGESIZE)

    def _advise(self, advice: int, first: int, stop: int) -> None:
        assert self._mapping is not None
        start = first * self.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._mapping.madvise(advice, start, stop * self.row_bytes - start)

    def _parts(self, rows: slice | Tensor) -> Iterator[tuple[int, int, slice | Tensor]]:
        """Yield (start, stop, rows[start:stop]) of parts of bounded size; a single part where no file is mapped."""
        scattered = isinstance(rows, Tensor)
        first, last, _ = (0, len(rows), 1) if isinstance(rows, Tensor) else rows.indices(len(self.values))
        size = _SCATTERED_ROWS if scattered else max(_CONSECUTIVE_BYTES // max(self.row_bytes, 1), 1)
        if self._mapping is None:
            size = max(last - first, 1)
        for start in range(0, last - first, size):
            stop = min(start + size, last - first)
            yield start, stop, rows[start:stop] if isinstance(rows, Tensor) else slice(first + start, first + stop)


class HostMemory:
    """Allocates the memory of one rank's table and of its optimizer's state.

    Args:
        file: None for ordinary memory. Else the path whose siblings ``FILE.rankR-of-W.NAME`` hold the rows. They are
            working memory and no checkpoint: files of these names are replaced, and may be deleted after the run.
        rank, world_size: R and W.
        pinned: pin ordinary memory, for a GPU.
    """

    def __init__(self, file: Path | None, rank: int, world_size: int, pinned: bool) -> None:
        self.file, self.pinned = file, pinned
        self._suffix = f"rank{rank}-of-{world_size}"

    def table(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Column:
        """A column of zeros (rows, columns).

        Raises:
            UsageError: the file's folder does not exist or cannot be written.
            DataError: the disk has no room for it.
        """
        size = rows * columns * dtype.itemsize
        if size == 0:
            return Column(torch.zeros(rows, columns, dtype=dtype))
        if self.file is not None:
            memory = self._mapped(name, size)
            memory.madvise(mmap.MADV_RANDOM)
            return Column(torch.frombuffer(memory, dtype=dtype).view(rows, columns), memory, self.path(name))
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        column = Column(torch.frombuffer(memory, dtype=dtype).view(rows, columns))
        if self.pinned:
            # Of pinned pages a fork (of a loader's workers) would copy all, or break the GPU's view of them.
            memory.madvise(mmap.MADV_DONTFORK)
            _pin(column)
        return column

    def numbers(self, name: str, rows: int, dtype: torch.dtype) -> Column:
        """A column of zeros (rows,), whose pages stay in memory: it is small beside the table."""
        return Column(torch.zeros(rows, dtype=dtype))

    @property
    def prefix(self) -> Path:
        """``FILE.rankR-of-W``."""
        assert self.file is not None
        return self.file.with_name(f"{self.file.name}.{self._suffix}")

    def path(self, name: str) -> Path:
        """This rank's file for ``name``."""
        return self.prefix.with_name(f"{self.prefix.name}.{name}")

    def _mapped(self, name: str, size: int) -> mmap.mmap:
        return _map_existing(self.path(name), size) if self._keeps_files() else _map_file(self.path(name), size)

    def _keeps_files(self) -> bool:
        """Whether the files hold a table that is to be taken as it is."""
        return False


def _map_file(path: Path, size: int) -> mmap.mmap:
    """Create a file of ``size`` zero bytes with its blocks allocated, and map it."""
    try:
        path.unlink(missing_ok=True)  # a run that still maps the old file keeps it
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileNotFoundError:
        raise UsageError(f"cannot make the table's file {path}: make its folder first") from None
    except OSError as error:
        raise UsageError(f"cannot make the table's file {path}: {error.strerror}; choose another") from None
    try:
        os.posix_fallocate(descriptor, 0, size)  # otherwise a full disk is a SIGBUS in the middle of a step
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise DataError(
            f"cannot reserve {size / 1e9:.1f} GB for the table's file {path}: {error.strerror}; name a larger disk"
        ) from None
    finally:
        os.close(descriptor)
    return memory


def _map_existing(path: Path, size: int) -> mmap.mmap:
    """Map a file of ``size`` bytes as it is."""
    try:
        with path.open("r+b") as file:
            if (found := path.stat().st_size) != size:
                raise UsageError(
                    f"the table's file {path} has {found:,} bytes, and this head's would have {size:,}: set dtypes and "
                    "optimizer back, remove the table's files, or name another file"
                )
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise DataError(
            f"cannot map the table's file {path}: {error.strerror}; remove the table's other files to begin anew"
        ) from None


def _pin(column: Column) -> None:
    """Register the column's memory with the GPU, in pieces of whole rows and whole pages, until it is collected."""
    runtime: Any = torch.cuda.cudart()
    start, size, row_bytes = column.values.data_ptr(), column.values.nbytes, column.values[:1].nbytes
    unit = math.lcm(row_bytes, mmap.PAGESIZE)  # two registrations must not share a page
    piece_bytes = max(_PIN_BYTES // unit, 1) * unit
    for offset in range(0, size, piece_bytes):
        piece = start + offset
        torch.cuda.check_error(int(runtime.cudaHostRegister(piece, min(piece_bytes, size - offset), 0)))
        weakref.finalize(column, runtime.cudaHostUnregister, piece)
    column.pinned_rows = piece_bytes // row_bytes
