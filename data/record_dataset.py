"""Data sets in MXNet's RecordIO, as insightface's tools write them.

Opening one reads the table of its image records (keys, offsets, labels) without decoding any image. For a large file
the table is cached beside it (``X.rec.table.npy``), because reading the label of every record touches most of the
file. The cache is valid as long as sizes and modification times of the .rec and the .idx are unchanged.
"""

import contextlib
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.data.dataset import MAX_BAD_RECORDS, EncodedDataset, PackedStringColumn, map_numbers, number_names
from plsc.data.recordio import (
    KEYS_HEADER,
    LARGEST_FLOAT,
    LEAST_RECORD,
    RecordFile,
    keys_path,
    label_map_path,
    unescaped,
)
from plsc.errors import DataError, UsageError
from plsc.files import LARGEST_JSON, atomic_write, read_json
from plsc.image_files import suffix_of
from plsc.models.preprocessing import ImageSize
from plsc.progress import warn
from plsc.regular_files import open_regular
from plsc.text_files import read_integers

DAMAGED = -1
CACHE_FROM = 100_000  # records: below, reading the table again takes a fraction of a second
_LOGGED = 10
_CHECKED = 1024  # records
_VERSION = 1
_LARGEST_LABEL = 2**53
_KEYS_CHUNK = 2**26  # bytes of a keys file in which line ends are searched for
_UNFINISHED = 1 << 20  # bytes of records that the index of a file which was cut off may still name


class RecordDataset(EncodedDataset):
    """Images of ``X.rec``, located by ``X.idx`` or, if that is missing, by scanning the file.

    Both conventions of insightface are read: a header record 0 that announces the images' keys, or every key an image.
    A label is the record's own, or the first of its array; gaps between the numbers are closed. Class names come from
    ``X.classes.json`` (as ``save_label_map`` writes it) if there is one, images' names from ``X.keys.tsv``
    (:class:`RecordKeys`). ``skipped`` holds the fault of each record left out, by key.

    Args:
        path: of the .rec.
        image_size: as :class:`plsc.data.ImageDataset`'s.
        max_bad_records: damaged records that are left out; None: any number.
        own_labels: False where others take the labels' place, which then may be past what float32 holds.

    Raises:
        UsageError: the file does not exist.
        DataError: more than ``max_bad_records`` records are damaged, or all; or float32 has rounded a label.
    """

    def __init__(
        self,
        path: Path,
        image_size: ImageSize | None = 112,
        *,
        max_bad_records: int | None = MAX_BAD_RECORDS,
        own_labels: bool = True,
    ) -> None:
        self._file = RecordFile(path)
        keys, offsets, stored = record_table(self._file).T
        damaged = stored == DAMAGED
        self._check_damage(keys, offsets, damaged, max_bad_records)
        self._paths = RecordKeys(keys_path(path)) if keys_path(path).is_file() else None
        self._keys, self._offsets = keys[~damaged], offsets[~damaged]
        if own_labels:
            self._check_labels(stored[~damaged])
        labels, numbers = map_numbers(stored[~damaged])
        super().__init__(str(path), labels, _class_names(path, numbers), image_size)
        rows = np.flatnonzero(damaged)
        self.skipped = {str(keys[row]): self._fault(int(offsets[row])) for row in rows}
        self._report()

    def key(self, index: int) -> str:
        """Return the image's path in its source if the keys file has it, else the record's key in the index."""
        return self.record_key(index) if self._paths is None else self._paths[int(self._keys[index])]

    def record_key(self, index: int) -> str:
        """Return the record's key in the index."""
        return str(self._keys[index])

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the images' paths in their source; without them the records' keys and their places in the file.

        Another file has its records elsewhere, for they are as long as their images. Where these have one length, the
        checksums of 1,024 of the file's images tell it.
        """
        if self._paths is not None:
            return self._paths.of(self._keys[start:stop])
        pairs = zip(self._keys[start:stop].tolist(), self._offsets[start:stop].tolist(), strict=True)
        found = [f"{key} at {offset}" for key, offset in pairs]
        step = -(-len(self) // _CHECKED)
        for index in range(start + -start % step, stop, step):
            with contextlib.suppress(DataError):
                found[index - start] += f" of {zlib.crc32(self.encoded(index)):08x}"
        return found

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the sizes and times of the .rec and its .idx, whichever images are asked for."""
        return _stamp(self._file.path).tobytes()

    def encoded(self, index: int) -> bytes:
        """Read the record's image, without its header."""
        try:
            return self._file.read_image(int(self._offsets[index])).image
        except ValueError as error:
            raise DataError(f"record {self.record_key(index)} of {self.source} is damaged: {error}") from None

    def _check_damage(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64], damaged: NDArray[np.bool_], most: int | None
    ) -> None:
        count, path = int(damaged.sum()), self._file.path
        if len(damaged) == 0:
            raise DataError(f"{path} holds no image record; use another copy")
        if count == len(damaged) or (most is not None and count > most):
            row = int(np.argmax(damaged))
            raise DataError(
                f"{count:,} of the {len(damaged):,} records of {path} are damaged, the first with key "
                f"{keys[row]} ({self._fault(int(offsets[row]))}); use another copy"
            )

    def _check_labels(self, stored: NDArray[np.int64]) -> None:
        """From 2²⁴ on, float32 gives several numbers the same value: people would be one without a word."""
        row = int(np.argmax(stored))
        if stored[row] >= LARGEST_FLOAT:
            raise DataError(
                f"record {self._keys[row]} of {self._file.path} has the label {stored[row]:,}, and a .rec's labels are "
                f"float32, which is not exact from {LARGEST_FLOAT:,} on: people may share it; number the people from 0 "
                "on, or give each image its label by data.labels = FILE.npy"
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
    return PackedStringColumn.of(names[number] for number in numbers)


def record_table(file: RecordFile) -> NDArray[np.int64]:
    """Return the table of a ``.rec``, from the cache beside it or from the file itself.

    Its rows, int64 (N, 3), are key, offset and label of the image records, in order of key. A label is the stored one,
    or ``DAMAGED``; an offset is -1 where the index lacks a record that the header announces.

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
    return table


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


class RecordKeys:
    """The paths of a keys file by key, memory-mapped when the first is asked for; pickles as its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __getitem__(self, key: int) -> str:
        """Return the path of the image with this key; :class:`DataError` if the file is not that of its ``.rec``."""
        row = key - self._first
        if 0 <= row < len(self._starts) - 1:
            fields = self._fields(row)
            if len(fields) == len(KEYS_HEADER) and fields[0] == str(key):
                return fields[2]
        raise DataError(f"{self.path} has no line for record {key} in its place; delete it, or use another copy")

    def of(self, keys: NDArray[np.int64]) -> list[str]:
        """Return the paths of images, a block of lines at a time where their keys (n,) follow one another."""
        first, last = (int(keys[0]) - self._first, int(keys[-1]) - self._first) if len(keys) else (0, -1)
        if not 0 <= first <= last < len(self._starts) - 1 or last - first + 1 != len(keys):
            return [self[key] for key in keys.tolist()]
        block = self._bytes[self._starts[first] : self._starts[last + 1] - 1].tobytes()
        lines = [line.split("\t") for line in block.decode("utf-8", "surrogateescape").split("\n")]
        for key, fields in zip(keys.tolist(), lines, strict=True):
            if len(fields) != len(KEYS_HEADER) or fields[0] != str(key):
                return [self[key]]  # which raises
        return [unescaped(path) for _, _, path in lines]

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        if not self.path.stat().st_size:
            raise DataError(f"{self.path} is empty; delete it, or use another copy")
        with open_regular(self.path) as file:
            return np.memmap(file, dtype=np.uint8, mode="r")

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each line after the header begins, int64 (N + 1,); the last is the end of the file."""
        parts = [
            np.flatnonzero(self._bytes[start : start + _KEYS_CHUNK] == ord("\n")) + start + 1
            for start in range(0, len(self._bytes), _KEYS_CHUNK)
        ]
        return np.concatenate(parts).astype(np.int64)

    @cached_property
    def _first(self) -> int:
        text = self._fields(0)[0] if len(self._starts) > 1 else ""
        if not text.isdecimal():
            raise DataError(f"{self.path} has no lines of key<TAB>class<TAB>path; delete it, or use another copy")
        return int(text)

    def _fields(self, row: int) -> list[str]:
        line = self._bytes[self._starts[row] : self._starts[row + 1] - 1].tobytes()
        return [unescaped(field) for field in line.decode("utf-8", "surrogateescape").split("\t")]
