"""Which records of a ``.rec`` are images, where they lie and what their labels are, without decoding any.

For a large file the answer is kept beside it (``X.rec.table.npy``), since reading the label of every record touches
most of the file. It is used again as long as the .rec and the .idx are the files that it was made from.
"""

import contextlib
import logging
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.data.decode import suffix_of
from plsc.data.record_io import ImageRecord, RecordFile
from plsc.errors import DataError, UsageError
from plsc.files import atomic_write

DAMAGED = -1
KEEP_FROM = 100_000
_VERSION = 1
_LARGEST_LABEL = 2**53

_log = logging.getLogger("plsc.data")


@dataclass(frozen=True)
class RecordTable:
    """The image records in order of key: keys, offsets and labels, each (N,) int64.

    A label is as stored, or ``DAMAGED``; an offset is -1 where the index lacks a record that the header announces.
    """

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]


def record_table(file: RecordFile) -> RecordTable:
    """The table of a ``.rec``, from the copy kept beside it or from the file itself.

    Raises DataError for an ``.idx`` or a header record that makes no sense.
    """
    kept = file.path.with_name(file.path.name + ".table.npy")
    stamp = _stamp(file.path)
    table = _load(kept, stamp)
    if table is None:
        table = _read(file)
        if len(table) >= KEEP_FROM:
            _keep(kept, stamp, table)
    return RecordTable(table[:, 0], table[:, 1], table[:, 2])


def read_index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keys and offsets of an ``.idx`` file (lines ``key<TAB>offset``), in order of key."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # numpy's about an empty file; told below
            rows = np.loadtxt(path, dtype=np.int64, ndmin=2, comments=None)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); delete it, and it is made anew from the .rec") from None
    if rows.size == 0 or rows.shape[1] != 2:
        raise DataError(f"{path} has no lines of key<TAB>offset; delete it, and it is made anew from the .rec")
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return rows[:, 0], rows[:, 1]


def _read(file: RecordFile) -> NDArray[np.int64]:
    """The table as rows of (key, offset, label)."""
    index = file.path.with_suffix(".idx")
    if index.exists():
        keys, offsets = read_index(index)
    else:
        offsets = file.record_offsets()
        keys = np.arange(len(offsets), dtype=np.int64)
        _log.warning("%s has no .idx; its %d records were found by their marks", file.path, len(keys))
    keys, offsets = _images(file, keys, offsets)
    stored = file.labels_at(offsets)
    with np.errstate(invalid="ignore"):
        sound = (stored >= 0) & (stored < _LARGEST_LABEL) & (stored == np.floor(stored))
    labels = np.where(sound, stored, DAMAGED).astype(np.int64)
    return np.stack([keys, offsets, labels], axis=1)


def _images(
    file: RecordFile, keys: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Leave the images: the keys that header record 0 announces, or all of them where it is no header."""
    if len(keys) == 0 or keys[0] != 0:
        return keys, offsets
    try:
        first = file.read_image(int(offsets[0]))
    except ValueError:
        return keys, offsets
    if first.flag == 0 or suffix_of(first.image) is not None:
        return keys, offsets
    stop = _announced(first, file.path, len(keys))
    chosen = (keys >= 1) & (keys < stop)
    keys, offsets = keys[chosen], offsets[chosen]
    lost = np.setdiff1d(np.arange(1, stop, dtype=np.int64), keys)
    if len(lost):
        keys = np.concatenate([keys, lost])
        offsets = np.concatenate([offsets, np.full(len(lost), -1, dtype=np.int64)])
        order = np.argsort(keys, kind="stable")
        keys, offsets = keys[order], offsets[order]
    return keys, offsets


def _announced(header: ImageRecord, path: Path, records: int) -> int:
    """The key after the last image's, from header record 0; it cannot lie far past the records there are."""
    stop = header.labels[0]
    if not 1 < stop <= 2 * records + 1_000_000:
        raise DataError(
            f"record 0 of {path} announces images up to key {stop:,.0f}, among {records:,} records; use another copy"
        )
    return int(stop)


def _stamp(path: Path) -> NDArray[np.int64]:
    """What tells one state of the .rec and .idx from another: sizes and times of change."""
    values = []
    for file in (path, path.with_suffix(".idx")):
        status = file.stat() if file.exists() else None
        values += [status.st_size, status.st_mtime_ns] if status else [-1, -1]
    return np.array([_VERSION, *values], dtype=np.int64)


def _load(kept: Path, stamp: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The rows kept in ``kept``, by memory map, unless it is of another state, damaged or not there."""
    try:
        stored = np.load(kept, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if stored.dtype != np.int64 or stored.ndim != 2 or stored.shape[1] != 3 or len(stored) < 2:
        return None
    head = stored[:2].reshape(-1)
    fresh = np.array_equal(head[:5], stamp) and head[5] == zlib.crc32(np.ascontiguousarray(stored[2:]).data)
    rows: NDArray[np.int64] = stored[2:]
    return rows if fresh else None


def _keep(kept: Path, stamp: NDArray[np.int64], table: NDArray[np.int64]) -> None:
    """Write the table for the next time; a folder that may not be written to is no failure."""
    head = np.array([*stamp, zlib.crc32(np.ascontiguousarray(table).data)], dtype=np.int64).reshape(2, 3)
    with contextlib.suppress(UsageError, OSError), atomic_write(kept) as tmp_path, tmp_path.open("wb") as file:
        np.save(file, np.concatenate([head, table]))
