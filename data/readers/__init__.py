"""The readers of data sets: what a source may be, and what opens it.

A reader is found by the word before the colon of a specification (``avatars:2000x30``, ``tars:/data/*.tar``), or by
what a path names. Those of files give a :class:`ShardReader` a :class:`plsc.data.shards.ShardFormat`, a file each here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plsc.data.avatars import open_avatars
from plsc.data.dataset import MAX_BAD_RECORDS, ImageDataset
from plsc.data.glyphs import open_glyphs
from plsc.data.readers.records import RecordFormat
from plsc.data.readers.tars import TarFormat
from plsc.data.sharded import ShardedDataset
from plsc.data.shards import ShardFormat, find_shards, split_options
from plsc.errors import DataError, UsageError
from plsc.extensions import Registry
from plsc.models.preprocessing import ImageSize


@dataclass(frozen=True)
class ShardReader:
    """Opens the shards of one format.

    Attributes:
        form: what a user types, for help and errors.
        shard_format: the class of the format.
    """

    form: str
    shard_format: type[ShardFormat]

    def __call__(self, source: str, image_size: ImageSize | None, **options: Any) -> ImageDataset:
        """Open ``NAME:SHARDS``; options as of :meth:`find`."""
        shards = source.partition(":")[2]
        found = self.find(shards, image_size, source=source, **options)
        if found is None:
            path, _ = split_options(shards)
            problem = "there is no" if not Path(path).exists() else f"no {self.shard_format.suffixes[0]} file is"
            raise UsageError(f"{source}: {problem} {path}; name {self.form}")
        return found

    def find(
        self,
        path: str,
        image_size: ImageSize | None,
        *,
        max_bad_records: int | None = MAX_BAD_RECORDS,
        label_columns: int | None = 1,
        source: str | None = None,
    ) -> ShardedDataset | None:
        """Open the shards that ``path`` names; None where it names files of another kind."""
        name, given = split_options(path)
        shards = find_shards(name, self.shard_format.suffixes, self.shard_format.usual)
        if shards is None:
            return None
        return ShardedDataset(
            source or path,
            shards,
            self.shard_format(given),
            image_size,
            max_bad_records=max_bad_records,
            label_columns=label_columns,
        )


SHARDS: dict[str, ShardReader] = {
    "rec": ShardReader("one or several .rec files", RecordFormat),
    "tars": ShardReader("tars of samples (/data/{000..999}.tar)", TarFormat),
}
READERS: Registry[Callable[[str, ImageSize | None], ImageDataset]] = Registry(
    "plsc.readers",
    {"avatars": open_avatars, "glyphs": open_glyphs, **SHARDS},
    callable,
    "a function of (specification, image size or None) that returns a plsc.data.ImageDataset",
)
FORMS = ", ".join(
    [
        *("a folder per identity", "a list file (path<TAB>label)"),
        *(reader.form for reader in SHARDS.values()),
        "avatars:IDSxIMAGES, or glyphs:BLOCK",
    ]
)


def has_reader(source: str | Path) -> bool:
    """Whether ``source`` is the specification of a set of :data:`READERS`, as ``avatars:2000x30``, and no path."""
    kind, colon, _ = str(source).partition(":")
    return bool(colon) and READERS.find(kind) is not None


def read(source: str, image_size: ImageSize | None, **options: Any) -> ImageDataset:
    """Open ``NAME:…`` by the reader of that name; ``options`` are for those of shards."""
    reader = READERS[source.partition(":")[0]]
    if isinstance(reader, ShardReader):
        return reader(source, image_size, **options)
    dataset = reader(source, image_size)
    if not isinstance(dataset, ImageDataset):
        raise UsageError(
            f"{source}: its reader returns {type(dataset).__name__}, and no plsc.data.ImageDataset; mend it"
        )
    if not isinstance(dataset.labels, np.ndarray) or dataset.labels.dtype.kind not in "iu":
        raise UsageError(f"{source}: its reader's labels are no NumPy array of integers; mend it")
    if not len(dataset):
        raise DataError(f"{source} holds no image; name another set, or mend its reader")
    return dataset


def read_shards(path: str, image_size: ImageSize | None, **options: Any) -> ShardedDataset | None:
    """Open the shards that a path, a glob or a list of names stands for; None where it stands for none."""
    for reader in SHARDS.values():
        if (found := reader.find(path, image_size, **options)) is not None:
            return found
    return None
