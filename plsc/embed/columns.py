"""Columns on disk: ``.npy`` arrays and lists of strings, both opened by memory map and free of pickles.

A list of N strings called ``keys`` is two arrays: ``keys.npy``, uint8, all strings in UTF-8 one behind the
other, and ``keys.offsets.npy``, int64 (N + 1,): string i is the bytes [offsets[i], offsets[i + 1]). So string
i of 10^8 costs one seek.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.data.lazy_strings import LazyStrings
from plsc.errors import IntegrityError

Array = npt.NDArray[Any]


def save_array(path: Path, array: Array) -> None:
    """Write ``array`` as ``.npy`` in C order, without pickles."""
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)


def open_array(path: Path, shape: tuple[int | None, ...], dtype: str) -> Array:
    """Memory-map a ``.npy`` file for reading.

    Raises :class:`IntegrityError` if it is missing, not a ``.npy`` file, shorter than its header says, or not
    of ``shape`` (None: any length) and ``dtype``.
    """
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing; restore it, or use another copy") from None
    except (ValueError, OSError, EOFError, SyntaxError, TypeError) as error:
        raise IntegrityError(f"{path} is corrupt: {error}; use another copy") from None
    fits = len(array.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype != np.dtype(dtype):
        raise IntegrityError(
            f"{path} holds {array.dtype}{list(array.shape)} and not what the manifest says; use another copy"
        )
    return array


class StringColumn(LazyStrings):
    """N strings in memory-mapped UTF-8; a string is decoded when it is asked for."""

    def __init__(self, data: Array, offsets: Array) -> None:
        self._data, self._offsets = data, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def at(self, position: int) -> str:
        """The string at ``position``."""
        first, last = int(self._offsets[position]), int(self._offsets[position + 1])
        return bytes(self._data[first:last]).decode("utf-8", errors="replace")


def string_files(name: str) -> list[str]:
    """The two files that hold the string column ``name``."""
    return [f"{name}.npy", f"{name}.offsets.npy"]


def save_strings(folder: Path, name: str, strings: Iterable[str]) -> None:
    """Write a string column. Names with bytes that are not UTF-8 (old file systems) keep a replacement
    mark."""
    encoded = [text.encode("utf-8", errors="replace") for text in strings]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    data, places = string_files(name)
    save_array(folder / data, np.frombuffer(b"".join(encoded), dtype=np.uint8))
    save_array(folder / places, offsets)


def open_strings(folder: Path, name: str, count: int) -> StringColumn:
    """Open a string column of ``count`` strings; :class:`IntegrityError` if its files disagree."""
    data, places = string_files(name)
    offsets = open_array(folder / places, (count + 1,), "int64")
    return StringColumn(open_array(folder / data, (int(offsets[-1]),), "uint8"), offsets)
