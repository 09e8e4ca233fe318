"""MXNet's .rec files, as insightface's tools write them: one, or several that are one data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plsc.data.objects import ObjectFile
from plsc.data.record_keys import RecordKeys
from plsc.data.recordio import (
    LARGEST_FLOAT,
    LEAST_RECORD,
    NO_LABEL,
    RecordFile,
    integer_labels_path,
    keys_path,
    label_map_path,
)
from plsc.data.shards import Scanned, ShardFormat
from plsc.errors import DataError, UsageError
from plsc.files import LARGEST_JSON, read_json
from plsc.image_files import suffix_of
from plsc.progress import warn
from plsc.regular_files import map_npy
from plsc.text_files import read_integers

if TYPE_CHECKING:
    from plsc.data.sharded import ShardedDataset

_UNFINISHED = 1 << 20  # bytes of records that the index of a file which was cut off may still name


class RecordFormat(ShardFormat):
    """Images of ``X.rec``, located by ``X.idx`` or, if that is missing, by scanning the file.

    Both conventions of insightface are read: a header record 0 that announces the images' keys, or every key an image.
    An image has the record's own label, or those of its array; where further numbers of arrays are no labels (a score,
    landmarks), the first alone. Integers of ``X.labels.npy``, in order of key, take the place of all these. Class names
    come from ``X.classes.json`` if there is one, images' names from ``X.keys.tsv``.
    """

    suffixes = (".rec",)
    usual = "train.rec"  # beside which val.rec lies

    def scan(self, shard: Path) -> Scanned:
        """See :meth:`ShardFormat.scan`."""
        file = RecordFile(shard)
        keys, offsets = _located(file)
        try:
            labels = file.labels_at(offsets)
        except ValueError as error:
            raise DataError(f"{shard} is damaged: {error}; use another copy") from None
        if integer_labels_path(shard).is_file():
            labels = _integer_labels(integer_labels_path(shard), labels)
        has_label = (labels if labels.ndim == 1 else labels.max(1)) != NO_LABEL
        damaged = {str(keys[row]): _fault(file, int(offsets[row])) for row in np.flatnonzero(~has_label)}
        return Scanned(
            offsets[has_label, None], labels[has_label], keys[has_label], _class_names(shard, labels), damaged
        )

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """See :meth:`ShardFormat.read`."""
        return self.opened(shard, RecordFile).read_image(int(place[0])).image

    def companions(self, shard: Path) -> list[Path]:
        """See :meth:`ShardFormat.companions`."""
        return [shard.with_suffix(".idx"), label_map_path(shard), keys_path(shard), integer_labels_path(shard)]

    def check(self, shards: Sequence[Path]) -> None:
        """See :meth:`ShardFormat.check`."""
        named = [label_map_path(shard).is_file() for shard in shards]
        if any(named) and not all(named):
            first = shards[named.index(False)]
            raise UsageError(f"{first} has no {label_map_path(first).name}, and others have theirs: add or remove it")

    def check_classes(self, dataset: "ShardedDataset") -> None:
        """From 2²⁴ on, float32 gives several numbers the same value: people would be one without a word."""
        highest = int(dataset.index.highest_number)
        if highest < LARGEST_FLOAT or all(integer_labels_path(shard).is_file() for shard in dataset.shards):
            return
        labels = dataset.labels if dataset.labels.ndim == 1 else dataset.labels.max(1)
        row = int(np.argmax(labels))
        raise DataError(
            f"record {dataset.record_key(row)} of {dataset.source} has the label {highest:,}, and a .rec's labels are "
            f"float32, which is not exact from {LARGEST_FLOAT:,} on: people may share it; number the people from 0 "
            "on, or give each image its label by data.labels = FILE.npy"
        )

    def names(self, shard: Path, keys: NDArray[np.int64]) -> list[str] | None:
        """See :meth:`ShardFormat.names`."""
        path = keys_path(shard)
        return self.opened(path, _record_keys).of(keys) if path.is_file() else None


def _record_keys(path: Path) -> RecordKeys:
    return RecordKeys(path.local() if isinstance(path, ObjectFile) else path)


def _located(file: RecordFile) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys and offsets of the image records, in order of key; an offset is -1 where the index lacks one."""
    index = file.path.with_suffix(".idx")
    if index.exists():
        keys, offsets = read_index(index)
        if len(keys) * LEAST_RECORD > len(file) + _UNFINISHED:
            raise DataError(f"{index} names {len(keys):,} records, which {file.path} is too short for; delete it")
    else:
        offsets = file.record_offsets()
        keys = np.arange(len(offsets), dtype=np.int64)
        if len(keys):
            warn("plsc.data", f"{file.path.name} has no .idx; its {len(keys)} records were found by their marks")
    return _select_images(file, keys, offsets)


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


def _fault(file: RecordFile, offset: int) -> str:
    """Describe why the record at ``offset`` is no image with a label."""
    if offset < 0:
        return "it is not in the index"
    try:
        record = file.read_image(offset)
    except ValueError as error:
        return str(error)
    return f"its label is {record.labels[0]}" if record.image else "it holds no image"


def _class_names(shard: Path, labels: NDArray[np.int64]) -> Sequence[str] | None:
    """Return the names of the numbered classes, from the label map beside the records if there is one."""
    label_map = label_map_path(shard)
    if not label_map.is_file():
        return None
    content = read_json(label_map, max(LARGEST_JSON, shard.stat().st_size))  # each name has an image
    names = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f'{label_map} has no list of names under "classes"; delete or correct it')
    if len(labels) and len(names) <= int(labels.max()):
        raise UsageError(f"{label_map} names {len(names)} classes, but {shard} has a label {labels.max()}; delete it")
    return names


def _integer_labels(path: Path, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The labels of a file, where records are images; those of others stay."""
    stored = map_npy(path, f"the labels {path}")
    if stored.dtype.kind not in "iu" or stored.ndim not in (1, 2) or len(stored) != len(labels):
        raise DataError(f"{path} is no array of integers for {len(labels):,} images; delete it, or write it anew")
    found = stored.astype(np.int64)
    is_image = (labels if labels.ndim == 1 else labels.max(1)) != NO_LABEL
    return np.where(is_image if found.ndim == 1 else is_image[:, None], found, NO_LABEL)
