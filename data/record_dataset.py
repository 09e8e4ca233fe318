"""A data set in MXNet's RecordIO, as insightface's tools write it, read without mxnet."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.data.dataset import MAX_BAD_RECORDS, EncodedDataset
from plsc.data.labels import map_numbers
from plsc.data.packed import NumberNames, PackedStrings
from plsc.data.record_index import DAMAGED, RecordTable, record_table
from plsc.data.record_io import RecordFile
from plsc.errors import DataError, UsageError
from plsc.files import read_json

_SHOWN = 10
_log = logging.getLogger("plsc.data")


class RecordDataset(EncodedDataset):
    """The images of ``X.rec``, with ``X.idx`` beside it or, where that is missing, found by scanning.

    Both conventions of insightface are read: a header record 0 that announces the images' keys, or every key an
    image. A label is the record's own, or the first of its array; gaps between the numbers are closed. If
    ``X.classes.json`` (as ``save_label_map`` writes it) lies beside it, classes have the names that it gives.

    ``skipped`` gives what is wrong with each record left out, by key. Raises UsageError if the file does not
    exist, and DataError when more than ``max_bad_records`` are damaged (``None``: any number) or none is sound.
    """

    def __init__(
        self, path: Path, image_size: int | None = 112, *, max_bad_records: int | None = MAX_BAD_RECORDS
    ) -> None:
        self._file = RecordFile(path)
        table = record_table(self._file)
        damaged = table.labels == DAMAGED
        sound = ~damaged
        self._check_damage(table, damaged, max_bad_records)
        self._keys, self._offsets = table.keys[sound], table.offsets[sound]
        labels, numbers = map_numbers(table.labels[sound])
        super().__init__(str(path), labels, _class_names(path, numbers), image_size)
        rows = np.flatnonzero(damaged)
        self.skipped = {str(table.keys[row]): self._fault(int(table.offsets[row])) for row in rows}
        self._report()

    def key(self, index: int) -> str:
        """The record's key in the index."""
        return str(self._keys[index])

    def encoded(self, index: int) -> bytes:
        """The record's image, without its header."""
        try:
            return self._file.read_image(int(self._offsets[index])).image
        except ValueError as error:
            raise DataError(f"record {self.key(index)} of {self.source} is damaged: {error}") from None

    def _check_damage(self, table: RecordTable, damaged: NDArray[np.bool_], max_bad_records: int | None) -> None:
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
        """What keeps the record at ``offset`` from being an image with a label."""
        if offset < 0:
            return "it is not in the index"
        try:
            record = self._file.read_image(offset)
        except ValueError as error:
            return str(error)
        return f"its label is {record.labels[0]}" if record.image else "it holds no image"

    def _report(self) -> None:
        for key in list(self.skipped)[:_SHOWN]:
            _log.warning("left out: record %s of %s: %s", key, self.source, self.skipped[key])
        if len(self.skipped) > _SHOWN:
            _log.warning("left out: %d records more of %s", len(self.skipped) - _SHOWN, self.source)


def label_map_path(records: Path) -> Path:
    """Where the class names of ``X.rec`` lie: ``X.classes.json``."""
    return records.with_suffix(".classes.json")


def _class_names(path: Path, numbers: NDArray[np.int64]) -> Sequence[str]:
    """The names of the numbered classes, from the label map beside the records if there is one."""
    stored = label_map_path(path)
    if not stored.is_file():
        return NumberNames(numbers)
    content = read_json(stored)
    names = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f'{stored} has no list of names under "classes"; delete it, or mend it')
    if len(names) <= int(numbers[-1]):
        raise UsageError(f"{stored} names {len(names)} classes, but {path} has a label {numbers[-1]}; delete it")
    return PackedStrings(names[number] for number in numbers)
