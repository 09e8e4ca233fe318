"""MXNet's RecordIO: reading and writing ``.rec`` files without mxnet.

A record is one or more parts. A part is the magic word, a word of 3 flag bits and 29 bits of length, and that many
bytes, padded to a multiple of 4. Flag 0 is a whole record; 1, 2 and 3 are its first, middle and last part, between
which the reader inserts the magic word that the writer removed. So the magic word, at a multiple of 4, always begins a
part, and reading can resume anywhere in a damaged file.

The content of an image record is a header (flag uint32, label float32, id uint64, id2 uint64), then ``flag`` labels
of float32, then the encoded image. insightface puts ``X.idx`` (lines ``key<TAB>offset``) and ``property`` beside
``X.rec``; we add ``X.classes.json`` with the class names and ``X.keys.tsv`` with the source file of each image. That is
text in UTF-8: a header line, and then a line for each image, in order of key::

    key<TAB>class<TAB>path
    1<TAB>person-a<TAB>person-a/2021/portrait.png
    2<TAB>person-b<TAB>person-b/NAME_0001.jpg

``key`` is the record's key in ``X.idx``, ``class`` the name of its class, ``path`` that of its image in the source:
relative to the folder, or as the list has it. A backslash, tab, line feed and carriage return in a name are written as
``\\\\``, ``\\t``, ``\\n`` and ``\\r``; bytes of file names that are not UTF-8 are kept.
"""

import json
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plsc.data.objects import open_ranges
from plsc.errors import DataError, UsageError
from plsc.files import atomic_write, atomic_write_group, check_output, remove_leftovers
from plsc.regular_files import open_regular

MAGIC = 0xCED7230A
HEADER_BYTES = 24
LEAST_RECORD = 8 + HEADER_BYTES
MAX_PART_BYTES = 2**29 - 1
_MAGIC_BYTES = struct.pack("<I", MAGIC)
LARGEST_FLOAT = 2**24  # labels and keys are float32, which holds every integer up to here, and the next one as this
_LARGEST_LABEL = 2**53
NO_LABEL, _NO_INTEGER = -1, -2
_CHUNK = 2**16
_MOST_LABELS = 256  # of a record; longer arrays hold something else

WHOLE, FIRST, MIDDLE, LAST = range(4)
KEYS_HEADER = ("key", "class", "path")
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escape: character for character, escape in _ESCAPES.items()}


class ImageRecord(NamedTuple):
    """An image record: its labels (the header's, or the label array), its two ids and the encoded image."""

    flag: int
    labels: tuple[float, ...]
    ids: tuple[int, int]
    image: bytes


class RecordFile:
    """A ``.rec`` file, which pickles as its path. Records are read; to be searched, its words are mapped.

    Raises:
        UsageError: there is no such file.
        DataError: it is empty, or no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_ranges(path)
        except FileNotFoundError:
            raise UsageError(f"there is no {path}") from None
        self._size = self._file.size
        if not self._size:
            raise DataError(f"{path} is empty; use another copy")

    def __reduce__(self) -> tuple[type["RecordFile"], tuple[Path]]:
        return RecordFile, (self.path,)

    def __len__(self) -> int:
        """Size of the file in bytes."""
        return self._size

    @cached_property
    def _words(self) -> NDArray[np.uint32]:
        with open_regular(self.path) as file:
            content = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        return np.frombuffer(content, dtype="<u4", count=self._size // 4)

    def read(self, offset: int) -> bytes:
        """Read the content of the record at ``offset``, its parts joined; ValueError gives a damaged one's fault."""
        pieces, _, fault = self._parts(offset)
        if fault is not None:
            raise fault
        return _MAGIC_BYTES.join(pieces)

    def _parts(self, offset: int) -> tuple[list[bytes], int, ValueError | None]:
        """The contents of the parts from ``offset`` on, where they end, and what is wrong with the next one, if any."""
        pieces: list[bytes] = []
        expected = (WHOLE, FIRST)
        try:
            while True:
                flag, start, stop = self._part(offset)
                if flag not in expected:
                    raise ValueError("its parts are out of order")
                pieces.append(self._bytes(start, stop - start))
                expected, offset = (MIDDLE, LAST), stop + -(stop - start) % 4
                if flag in (WHOLE, LAST):
                    return pieces, offset, None
        except ValueError as error:
            return pieces, offset, error

    def read_image(self, offset: int) -> ImageRecord:
        """Read the image record at ``offset``; ValueError gives the fault of a damaged one."""
        return unpack_image(self.read(offset))

    def record_offsets(self) -> NDArray[np.int64]:
        """Find the offsets of all records by their magic words: without an index, skipping damaged ranges."""
        offsets = []
        for start in range(0, len(self._words) - 1, 2**24):
            starts = np.flatnonzero(self._words[start : start + 2**24] == MAGIC) + start
            starts = starts[starts + 1 < len(self._words)]
            flags = self._words[starts + 1] >> 29
            offsets.append(starts[(flags == WHOLE) | (flags == FIRST)] * 4)
        return np.concatenate(offsets).astype(np.int64) if offsets else np.empty(0, dtype=np.int64)

    def labels_at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the labels of each record, int64 (N,), or (N, K) where an array has K; -1 for those that it lacks.

        A record that is damaged, or holds no image, has no label. Where a number of an array behind its first is no
        label, of all records the first is.

        Raises:
            ValueError: records lie in each other: they could hold any multiple of the file's bytes.
        """
        parts, extent = [], 0
        for start in range(0, len(offsets), _CHUNK):
            found, used = self._labels_at(offsets[start : start + _CHUNK])
            extent += used
            if extent > self._size:
                raise ValueError("its records overlap")
            parts.append(found)
        width = max((part.shape[1] for part in parts), default=1)
        if width == 1 or any((part == _NO_INTEGER).any() for part in parts):
            return np.concatenate([np.empty(0, np.int64), *(part[:, 0] for part in parts)])
        labels = np.full((len(offsets), width), NO_LABEL)
        for number, part in enumerate(parts):
            labels[number * _CHUNK : number * _CHUNK + len(part), : part.shape[1]] = part
        return labels

    def _labels_at(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """The labels (n, k) of some records, and the bytes that these take in the file."""
        in_file = (offsets >= 0) & (offsets % 4 == 0) & (offsets + 8 + HEADER_BYTES <= self._size)
        rows = np.flatnonzero(in_file)
        words = offsets[rows] // 4
        # Gathers of words, for decoding millions of headers in Python takes minutes: magic, length, flag, label, and
        # behind both ids the array.
        head = self._words[words[:, None] + np.arange(4)]
        lengths, counts = (head[:, 1] & MAX_PART_BYTES).astype(np.int64), head[:, 2].astype(np.int64)
        whole = (head[:, 0] == MAGIC) & (head[:, 1] >> 29 == WHOLE) & (lengths > HEADER_BYTES + 4 * counts)
        whole &= offsets[rows] + 8 + lengths <= self._size
        counts = np.where(whole, counts, 0)
        extent = int((8 + lengths[whole]).sum())
        in_parts: dict[int, tuple[float, ...]] = {}
        for row in rows[(head[:, 0] == MAGIC) & (head[:, 1] >> 29 == FIRST)].tolist():
            in_parts[row], stop = self._labels_in_parts(int(offsets[row]))
            extent += stop - int(offsets[row])
            if extent > self._size:
                raise ValueError("its records overlap")
        width = max(1, int(counts.max(initial=0)), *map(len, in_parts.values()))
        if width > _MOST_LABELS:
            width = 1
        values = np.full((len(offsets), width), np.nan)
        values[rows[whole], 0] = head[whole, 3].view("<f4")
        places = words[:, None] + 8 + np.arange(width)
        arrays = self._words[np.minimum(places, len(self._words) - 1)].view("<f4")
        has_array = counts > 0
        is_item = np.arange(width) < counts[:, None]
        values[rows[has_array]] = np.where(is_item, arrays, NO_LABEL)[has_array]
        for row, labels in in_parts.items():
            values[row, : len(labels)] = labels[:width]
        return _as_labels(values), extent

    def _labels_in_parts(self, offset: int) -> tuple[tuple[float, ...], int]:
        """The labels of a record in parts, and where its parts end as far as they are sound."""
        pieces, stop, fault = self._parts(offset)
        stop = min(stop, self._size)
        if fault is not None:
            return (), stop
        try:
            record = unpack_image(_MAGIC_BYTES.join(pieces))
        except ValueError:
            return (), stop
        return record.labels if record.image else (), stop

    def _part(self, offset: int) -> tuple[int, int, int]:
        """Return (flag, start, stop) of the part at ``offset``."""
        if not 0 <= offset <= self._size - 8:
            raise ValueError(f"its offset {offset:,} is past the end of the file")
        magic, word = struct.unpack("<II", self._bytes(offset, 8))
        if magic != MAGIC:
            raise ValueError(f"no record begins at its offset {offset:,}")
        start = offset + 8
        stop = start + (word & MAX_PART_BYTES)
        if stop > self._size:
            raise ValueError("the file ends inside it")
        return word >> 29, start, stop

    def _bytes(self, offset: int, size: int) -> bytes:
        content = self._file.read(offset, size)
        if len(content) < size:
            raise ValueError("the file has become shorter, and ends inside it")
        return content


def _as_labels(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Labels from stored numbers (n, k): -1 for no label; :data:`_NO_INTEGER` behind the first for what is none."""
    with np.errstate(invalid="ignore"):
        is_label = (values >= NO_LABEL) & (values < _LARGEST_LABEL) & (values == np.floor(values))
    labels = np.where(is_label, values, NO_LABEL).astype(np.int64)
    later = labels[:, 1:]
    later[~is_label[:, 1:] & ~np.isnan(values[:, 1:])] = _NO_INTEGER
    return labels


def unpack_image(content: bytes) -> ImageRecord:
    """Split a record's content; ValueError if it is shorter than its header announces."""
    if len(content) < HEADER_BYTES:
        raise ValueError("it is too short for a header")
    flag, label, first_id, second_id = struct.unpack_from("<IfQQ", content)
    if len(content) < HEADER_BYTES + 4 * flag:
        raise ValueError(f"it is too short for the {flag:,} labels it announces")
    labels = struct.unpack_from(f"<{flag}f", content, HEADER_BYTES) if flag else (label,)
    return ImageRecord(flag, labels, (first_id, second_id), content[HEADER_BYTES + 4 * flag :])


def pack_image(record: ImageRecord) -> bytes:
    """Build a record's content; the inverse of :func:`unpack_image`."""
    label = 0.0 if record.flag else record.labels[0]
    array = struct.pack(f"<{record.flag}f", *record.labels) if record.flag else b""
    return struct.pack("<IfQQ", record.flag, label, *record.ids) + array + record.image


def write_record(file: BinaryIO, content: bytes) -> None:
    """Append one record, in as many parts as its magic words require; :class:`DataError` from 2^29 bytes on."""
    if len(content) > MAX_PART_BYTES:
        raise DataError(f"a record of {len(content):,} bytes is too long for a .rec; shrink the image")
    pieces = list(_split_at_magic(content))
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        flag = (WHOLE if last else FIRST) if number == 0 else (LAST if last else MIDDLE)
        file.write(struct.pack("<II", MAGIC, flag << 29 | len(piece)) + piece + bytes(-len(piece) % 4))


def _split_at_magic(content: bytes) -> Iterator[bytes]:
    """Yield the pieces between magic words at multiples of 4 of the content."""
    start = position = 0
    while (position := content.find(_MAGIC_BYTES, position)) >= 0:
        if position % 4 == 0:
            yield content[start:position]
            start = position = position + 4
        else:
            position += 1
    yield content[start:]


class RecordWriter:
    """Appends images to a ``.rec``, its ``.idx`` and its ``.keys.tsv``; created by :func:`record_writer`.

    Record 0 is the header: flag 2, labels (N+1, N+1+C). Images have the keys 1 … N; after them comes a record per
    class, with flag 2 and labels (first key, last key + 1). If ``expected`` images are too many to number in float32,
    there is no header, and every record is an image: insightface's other convention. If ``classes`` are too many, the
    images' labels are integers of ``X.labels.npy``, in order of key; without it, the records' are refused.
    """

    def __init__(self, records: BinaryIO, index: BinaryIO, keys: BinaryIO, expected: int, classes: int = 0) -> None:
        self._records, self._index, self._keys = records, index, keys
        self.integer_labels: list[Sequence[int]] | None = [] if classes > LARGEST_FLOAT else None
        self.class_names: list[str] = []
        self.height = self.width = 112  # for the property file
        self._first_keys: list[int] = []  # of each class
        self._has_header = 2 * expected < LARGEST_FLOAT
        self._next_key = int(self._has_header)
        write_key(keys, *KEYS_HEADER)
        if self._has_header:
            self._append_labels(0, 0.0, 0.0)  # a placeholder of the same size; finish() overwrites it

    def begin_class(self, name: str) -> None:
        """Let the images that follow be of a new class."""
        self.class_names.append(name)
        self._first_keys.append(self._next_key)

    def add(self, image: bytes, path: str, labels: Sequence[int] | None = None) -> None:
        """Append one encoded image, with its path in the source for the keys file.

        Args:
            image: the encoded image.
            path: in the source.
            labels: where an image has several: numbers of classes, those that begin later too; -1 for none.
        """
        label = len(self.class_names) - 1
        values = [label] if labels is None else labels
        if self.integer_labels is not None:
            self.integer_labels.append(values)
        flag = 0 if labels is None else len(values)
        record = ImageRecord(flag, tuple(map(float, values)), (self._next_key, 0), image)
        self._append(self._next_key, pack_image(record))
        write_key(self._keys, str(self._next_key), self.class_names[label], path)
        self._next_key += 1

    def finish(self) -> None:
        """Append the classes' records and write the header, if there is one."""
        if not self._has_header:
            return
        stop = self._next_key
        for number, (first, end) in enumerate(pairwise([*self._first_keys, stop])):
            self._append_labels(stop + number, float(first), float(end))
        self._records.seek(0)
        write_record(self._records, _pack_labels(0, float(stop), float(stop + len(self.class_names))))

    def _append_labels(self, key: int, first: float, second: float) -> None:
        self._append(key, _pack_labels(key, first, second))

    def _append(self, key: int, content: bytes) -> None:
        self._index.write(f"{key}\t{self._records.tell()}\n".encode("ascii"))
        write_record(self._records, content)


def _pack_labels(key: int, first: float, second: float) -> bytes:
    return pack_image(ImageRecord(2, (first, second), (key, 0), b""))


@contextmanager
def record_writer(path: Path, *, expected: int, classes: int = 0, overwrite: bool = False) -> Iterator[RecordWriter]:
    """Write ``path`` (``X.rec``) and its companion files: they appear together when the block ends without an error.

    ``property`` is one file for a folder, so it is written only if ``X.rec`` is the only ``.rec`` there.

    Args:
        path: ends in ``.rec``.
        expected: upper bound on the number of images.
        classes: upper bound on the number of classes.
        overwrite: replace a ``.rec`` that exists, with its companions.

    Raises:
        UsageError: ``path`` does not end in ``.rec``, or one of the files exists and ``overwrite`` is False.
    """
    check_records(path, overwrite=overwrite)
    paths = _files_of(path)
    for file in (*paths, path.with_name("property")):
        remove_leftovers(file)
    with atomic_write_group(paths) as (tmp_records, tmp_index, tmp_names, tmp_keys, tmp_labels):
        with tmp_records.open("wb") as records, tmp_index.open("wb") as index, tmp_keys.open("wb") as keys:
            writer = RecordWriter(records, index, keys, expected, classes)
            yield writer
            writer.finish()
        names = {"source": str(path), "classes": writer.class_names}
        tmp_names.write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
        if writer.integer_labels is not None:
            labels = np.array(writer.integer_labels, np.int64)
            with tmp_labels.open("wb") as out:
                np.save(out, labels[:, 0] if labels.shape[1] == 1 else labels)
    if list(path.parent.glob("*.rec")) == [path]:
        with atomic_write(path.with_name("property")) as tmp_path:
            tmp_path.write_text(f"{len(writer.class_names)},{writer.height},{writer.width}\n", encoding="ascii")


def check_records(path: Path, *, overwrite: bool) -> None:
    """Raise :class:`UsageError` if ``path`` cannot be a new ``.rec``, or with ``overwrite`` one that is replaced."""
    if path.suffix != ".rec":
        raise UsageError(f"{path} does not end in .rec")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    for file in _files_of(path):
        check_output(file, overwrite=overwrite)


def _files_of(records: Path) -> list[Path]:
    """Return a ``.rec`` and its companions, without ``property``."""
    beside = label_map_path(records), keys_path(records), integer_labels_path(records)
    return [records, records.with_suffix(".idx"), *beside]


def label_map_path(records: Path) -> Path:
    """Return the path of the class names of ``X.rec``: ``X.classes.json``."""
    return records.with_suffix(".classes.json")


def keys_path(records: Path) -> Path:
    """Return the path of the keys file of ``X.rec``: ``X.keys.tsv``."""
    return records.with_suffix(".keys.tsv")


def integer_labels_path(records: Path) -> Path:
    """Return the path of labels past what float32 holds of ``X.rec``: ``X.labels.npy``."""
    return records.with_suffix(".labels.npy")


def escaped(text: str) -> str:
    """Return ``text`` as a field of a line."""
    return re.sub(r"[\\\t\n\r]", lambda match: _ESCAPES[match[0]], text)


def unescaped(field: str) -> str:
    """Return the text of a field; the inverse of :func:`escaped`."""
    return re.sub(r"\\[\\tnr]", lambda match: _UNESCAPES[match[0]], field) if "\\" in field else field


def write_key(file: BinaryIO, *fields: str) -> None:
    """Write a line of fields."""
    file.write("\t".join(map(escaped, fields)).encode("utf-8", "surrogateescape") + b"\n")
