"""Columns on disk: ``.npy`` arrays and lists of strings, memory-mapped and free of pickles.

A list of N strings called ``keys`` is two arrays: ``keys.npy``, uint8, all strings in UTF-8 one behind the other, and
``keys.offsets.npy``, int64 (N + 1,): string i is the bytes [offsets[i], offsets[i + 1]). So reading one of 10^8
strings costs one seek.
"""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from plsc.data.dataset import PackedStringColumn, StringColumn
from plsc.errors import IntegrityError, first_line
from plsc.files import pinned

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# The files of maps: their names may lead to others meanwhile.
_FILES: "WeakKeyDictionary[mmap, os.stat_result]" = WeakKeyDictionary()


def searchable(vectors: Array) -> tuple[Mask, Mask]:
    """Masks (n,) of the rows of ``vectors`` (n, D) that are finite, and of those among them that are not zero."""
    finite = np.logical_and.reduce(np.isfinite(vectors), axis=1)
    nonzero = np.logical_or.reduce(vectors != 0, axis=1)
    return finite, finite & nonzero


def save_array(path: Path, array: Array) -> None:
    """Write ``array`` as ``.npy`` in C order, without pickles."""
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)


def write_npy_header(file: BinaryIO, shape: Sequence[int], dtype: str = "<f4") -> None:
    """Write what stands before the values in a ``.npy`` file, of one length for all ``shape[0]``: numpy pads it."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": tuple(shape)})


def open_array(file: Path | BinaryIO, shape: tuple[int | None, ...], dtype: str) -> Array:
    """Memory-map a ``.npy`` file for reading; an open one is closed, and the map stays.

    Raises:
        IntegrityError: it is missing, no ``.npy`` file, shorter than its header says, or not of ``shape`` (None: any
            length) and ``dtype``.
    """
    path = file if isinstance(file, Path) else file.name
    if isinstance(file, Path):
        if not file.is_file():  # a pipe or a device neither
            raise IntegrityError(f"{path} is missing; restore it, or use another copy")
        file = file.open("rb")
    try:
        with file:
            mapped: Any = np.lib.format.open_memmap(pinned(file), mode="r")  # refuses objects, which would be pickled
            _FILES[mapped._mmap] = os.fstat(file.fileno())
            array: Array = mapped
    except Exception as error:  # its header is an expression of Python, and may be anything
        raise IntegrityError(f"{path} is corrupt: {first_line(error)}; use another copy") from None
    fits = len(array.shape) == len(shape) and all(
        expected is None or actual == expected for actual, expected in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype != np.dtype(dtype) or not array.flags.c_contiguous:
        raise IntegrityError(
            f"{path} holds {array.dtype}{list(array.shape)} and not what the manifest says; use another copy"
        )
    return array


def is_of_file(array: Any, descriptor: int) -> bool:
    """False if ``array`` was mapped by :func:`open_array` from another file than the open one."""
    mapped = _FILES.get(array._mmap)
    return mapped is None or os.path.samestat(mapped, os.fstat(descriptor))


def check_maps(*columns: Any) -> None:
    """Check the files of maps before they are read: to read what was cut off ends the process, by SIGBUS.

    In the moment between this and the read, a file can still be cut.

    Raises:
        IntegrityError: a file is shorter than its map, or was written over since :func:`open_array` mapped it.
    """
    for column in columns:
        mapped = getattr(column, "_mmap", None)
        if mapped is None:
            continue
        opened = _FILES.get(mapped)
        is_known = opened is not None and check_unwritten(column.filename, opened)
        if not is_known and mapped.size() < len(mapped):
            raise written_over(column.filename)


def check_unwritten(path: str | Path, opened: os.stat_result) -> bool:
    """Check that a file has the length and time of when it was ``opened``; False where ``path`` is another one now.

    Raises:
        IntegrityError: it has not.
    """
    try:
        now = os.stat(path)  # noqa: PTH116 (a Path would cost as much again, for every search)
    except OSError:
        return False
    if not os.path.samestat(now, opened):
        return False
    if (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
        raise written_over(path)
    return True


def written_over(path: str | Path) -> IntegrityError:
    """The error about a file that was changed while it was in use."""
    return IntegrityError(f"{path} was cut, or written over, while it was in use; open it again")


class ChainedStringColumn(StringColumn):
    """Several string sequences one behind the other, as one."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(self, index: int) -> str:
        """Return string ``index``."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - int(self._ends[part]) + len(self._parts[part])]

    def packed(self, rows: Int64) -> Iterator[PackedStringColumn]:
        """See :meth:`StringColumn.packed`."""
        parts = np.searchsorted(self._ends, rows, side="right")
        bounds = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(rows)]
        for first, last in pairwise(bounds if len(rows) else []):
            part, own = self._parts[parts[first]], rows[first:last] - self._ends[parts[first]]
            if isinstance(part, StringColumn):
                yield from part.packed(own + len(part))
            else:
                yield PackedStringColumn.of(part[row] for row in own.tolist())  # counted from its end


def string_files(name: str) -> list[str]:
    """Names of the two files that hold the string column ``name``."""
    return [f"{name}.npy", f"{name}.offsets.npy"]


def save_strings(folder: Path, name: str, strings: Iterable[str] | Iterable[PackedStringColumn]) -> None:
    """Write a string column, holding 8 bytes for each string in memory; packed ones as they are.

    File names with bytes that are not UTF-8 (old file systems) keep a replacement mark in place of these.
    """
    data_file, offsets_file = string_files(name)
    offsets = array("q", [0])
    with (folder / data_file).open("wb") as file:
        write_npy_header(file, (0,), "|u1")  # overwritten below, once it is known
        for text in [strings] if isinstance(strings, PackedStringColumn) else strings:
            if isinstance(text, str):
                offsets.append(offsets[-1] + file.write(text.encode("utf-8", errors="replace")))
            else:
                content, ends = text.parts()
                file.write(content.data)
                offsets.frombytes((ends[1:] + offsets[-1]).tobytes())
        file.seek(0)
        write_npy_header(file, (offsets[-1],), "|u1")
    save_array(folder / offsets_file, np.frombuffer(offsets, dtype=np.int64))


def open_strings(files: Callable[[str], Path | BinaryIO], name: str, count: int) -> PackedStringColumn:
    """Open a string column of ``count`` strings; ``files`` gives its files by their names.

    Raises:
        IntegrityError: they disagree.
    """
    data_file, offsets_file = string_files(name)
    offsets = open_array(files(offsets_file), (count + 1,), "int64")
    return PackedStringColumn(open_array(files(data_file), (int(offsets[-1]),), "uint8"), offsets)
