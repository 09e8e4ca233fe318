"""Data sets in MXNet's RecordIO, as insightface's tools write them.

Opening one reads the table of its image records (keys, offsets, labels) without decoding any image. For a large file
the table is cached beside it (``X.rec.table.npy``), because reading the label of every record touches most of the
file. The cache is valid as long as sizes and modification times of the .rec and the .idx are unchanged.
"""

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.data.codec import suffix_of
from plsc.data.dataset import MAX_BAD_RECORDS, EncodedDataset, PackedStringColumn, map_numbers, number_names
from plsc.data.record_keys import RecordKeys, keys_path
from plsc.data.recordio import LEAST_RECORD, RecordFile, label_map_path
from plsc.errors import DataError, UsageError
from plsc.files import LARGEST_JSON, atomic_write, read_json
from plsc.models.preprocessing import ImageSize
from plsc.progress import warn
from plsc.text_files import read_integers

DAMAGED = -1
CACHE_FROM = 100_000  # records: below, reading the table again takes a fraction of a second
_LOGGED = 10
_VERSION = 1
_LARGEST_LABEL = 2**53
_UNFINISHED = 1 << 20  # bytes of records that the index of a file which was cut off may still name


class RecordDataset(EncodedDataset):
    """Images of ``X.rec``, located by ``X.idx`` or, if that is missing, by scanning the file.

    Both conventions of insightface are read: a header record 0 that announces the images' keys, or every key an image.
    A label is the record's own, or the first of its array; gaps between the numbers are closed. Class names come from
    ``X.classes.json`` (as ``save_label_map`` writes it) if there is one, images' names from ``X.keys.tsv``
    (:mod:`plsc.data.record_keys`). ``skipped`` holds the fault of each record left out, by key.

    Raises:
        UsageError: the file does not exist.
        DataError: more than ``max_bad_records`` records are damaged (None: any number), or all.
    """

    def __init__(
        self, path: Path, image_size: ImageSize | None = 112, *, max_bad_records: int | None = MAX_BAD_RECORDS
    ) -> None:
        self._file = RecordFile(path)
        table = record_table(self._file)
        damaged = table.labels == DAMAGED
        self._check_damage(table, damaged, max_bad_records)
        self._paths = RecordKeys(keys_path(path)) if keys_path(path).is_file() else None
        self._keys, self._offsets = table.keys[~damaged], table.offsets[~damaged]
        labels, numbers = map_numbers(table.labels[~damaged])
        super().__init__(str(path), labels, _class_names(path, numbers), image_size)
        rows = np.flatnonzero(damaged)
        self.skipped = {str(table.keys[row]): self._fault(int(table.offsets[row])) for row in rows}
        self._report()

    def key(self, index: int) -> str:
        """Return the image's path in its source if the keys file has it, else the record's key in the index."""
        return self.record_key(index) if self._paths is None else self._paths[int(self._keys[index])]

    def record_key(self, index: int) -> str:
        """Return the record's key in the index."""
        return str(self._keys[index])

    def encoded(self, index: int) -> bytes:
        """Read the record's image, without its header."""
        try:
            return self._file.read_image(int(self._offsets[index])).image
        except ValueError as error:
            raise DataError(f"record {self.record_key(index)} of {self.source} is damaged: {error}") from None

    def _check_damage(self, table: "RecordTable", damaged: NDArray[np.bool_], max_bad_records: int | None) -> None:
        count, path = int(damaged.sum()), self._file.path
        if len(damaged) == 0:
            raise DataError(f"{path} holds no image record; use another copy")
        if count == len(damaged) or (max_bad_records is not None and count > max_bad_records):
            row = int(np.argmax(damaged))
            raise DataError(
                f"{count:,} of the {len(damaged):,} records of {path} are damaged, the first with key "
                f"{table.keys[row]} ({self._fault(int(table.offsets[row]))}); use another copy"
            )

    def _fault(self, offset: int) -> str:
        """Describe why the record at ``offset`` is no image with a label."""
        if offset < 0:
            return "it is not in the index"
        try:
            record = self._file.read_image(offset)
        except ValueError as error:
            return str(error)
        return f"its label is {record.labels[0]}" if record.image else "it holds no image"

    def _report(self) -> None:
        for key in list(self.skipped)[:_LOGGED]:
            warn("plsc.data", f"left out: record {key} of {self.source}: {self.skipped[key]}")
        if len(self.skipped) > _LOGGED:
            warn("plsc.data", f"left out: {len(self.skipped) - _LOGGED} records more of {self.source}")


def _class_names(path: Path, numbers: NDArray[np.int64]) -> Sequence[str]:
    """Return the names of the numbered classes, from the label map beside the records if there is one."""
    label_map = label_map_path(path)
    if not label_map.is_file():
        return number_names(numbers)
    content = read_json(label_map, max(LARGEST_JSON, path.stat().st_size))  # each name has an image
    names = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f'{label_map} has no list of names under "classes"; delete or correct it')
    if len(names) <= int(numbers[-1]):
        raise UsageError(f"{label_map} names {len(names)} classes, but {path} has a label {numbers[-1]}; delete it")
    return PackedStringColumn(names[number] for number in numbers)


@dataclass(frozen=True)
class RecordTable:
    """Image records in order of key: keys, offsets and labels, each int64 (N,).

    A label is the stored one, or ``DAMAGED``; an offset is -1 where the index lacks a record that the header announces.
    """

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]


def record_table(file: RecordFile) -> RecordTable:
    """Return the table of a ``.rec``, from the cache beside it or from the file itself.

    Raises:
        DataError: the ``.idx`` or the header record is inconsistent.
    """
    cache = file.path.with_name(file.path.name + ".table.npy")
    stamp = _stamp(file.path)
    table = _load(cache, stamp)
    if table is None:
        table = _read(file)
        if len(table) >= CACHE_FROM:
            _save(cache, stamp, table)
    return RecordTable(table[:, 0], table[:, 1], table[:, 2])


def read_index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Read keys and offsets of an ``.idx`` file (lines ``key<TAB>offset``), in order of key."""
    try:
        rows = read_integers(path, 2)
    except DataError:
        raise DataError(
            f"{path} is damaged: not each line is key<TAB>offset; delete it, and it is made anew from the .rec"
        ) from None
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return rows[:, 0], rows[:, 1]


def _read(file: RecordFile) -> NDArray[np.int64]:
    """Read the table as rows of (key, offset, label)."""
    index = file.path.with_suffix(".idx")
    if index.exists():
        keys, offsets = read_index(index)
        if len(keys) * LEAST_RECORD > len(file) + _UNFINISHED:
            raise DataError(f"{index} names {len(keys):,} records, which {file.path} is too short for; delete it")
    else:
        offsets = file.record_offsets()
        keys = np.arange(len(offsets), dtype=np.int64)
        if len(keys):
            warn("plsc.data", f"{file.path} has no .idx; its {len(keys)} records were found by their marks")
    keys, offsets = _select_images(file, keys, offsets)
    try:
        stored = file.labels_at(offsets)
    except ValueError as error:
        raise DataError(f"{file.path} is damaged: {error}; use another copy") from None
    with np.errstate(invalid="ignore"):
        sound = (stored >= 0) & (stored < _LARGEST_LABEL) & (stored == np.floor(stored))
    labels = np.where(sound, stored, DAMAGED).astype(np.int64)
    return np.stack([keys, offsets, labels], axis=1)


def _select_images(
    file: RecordFile, keys: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select the image records: the keys that header record 0 announces, or all if record 0 is no header."""
    if len(keys) == 0 or keys[0] != 0:
        return keys, offsets
    try:
        first = file.read_image(int(offsets[0]))
    except ValueError:
        return keys, offsets
    if first.flag == 0 or suffix_of(first.image) is not None:
        return keys, offsets
    if not 1 < first.labels[0] <= 2 * len(keys) + 1_000_000:
        raise DataError(
            f"record 0 of {file.path} announces images up to key {first.labels[0]:,.0f}, among {len(keys):,} records; "
            "use another copy"
        )
    stop = int(first.labels[0])  # the key after the last image's
    announced = (keys >= 1) & (keys < stop)
    keys, offsets = keys[announced], offsets[announced]
    missing = np.setdiff1d(np.arange(1, stop, dtype=np.int64), keys)
    if len(missing):
        keys = np.concatenate([keys, missing])
        offsets = np.concatenate([offsets, np.full(len(missing), -1, dtype=np.int64)])
        order = np.argsort(keys, kind="stable")
        keys, offsets = keys[order], offsets[order]
    return keys, offsets


def _stamp(path: Path) -> NDArray[np.int64]:
    """Return the version of the .rec and .idx: their sizes and modification times."""
    values = []
    for file in (path, path.with_suffix(".idx")):
        status = file.stat() if file.exists() else None
        values += [status.st_size, status.st_mtime_ns] if status else [-1, -1]
    return np.array([_VERSION, *values], dtype=np.int64)


def _load(cache: Path, stamp: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Memory-map the cached rows; None if the cache is stale, damaged or missing."""
    if not cache.is_file():  # nor a pipe, which numpy would wait for
        return None
    try:
        stored = np.load(cache, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if stored.dtype != np.int64 or stored.ndim != 2 or stored.shape[1] != 3 or len(stored) < 2:
        return None
    head = stored[:2].reshape(-1)
    fresh = np.array_equal(head[:5], stamp) and head[5] == zlib.crc32(np.ascontiguousarray(stored[2:]).data)
    rows: NDArray[np.int64] = stored[2:]
    return rows if fresh else None


def _save(cache: Path, stamp: NDArray[np.int64], table: NDArray[np.int64]) -> None:
    """Cache the table; a read-only folder is no error."""
    head = np.array([*stamp, zlib.crc32(np.ascontiguousarray(table).data)], dtype=np.int64).reshape(2, 3)
    with contextlib.suppress(UsageError, OSError), atomic_write(cache) as tmp_path, tmp_path.open("wb") as file:
        np.save(file, np.concatenate([head, table]))
