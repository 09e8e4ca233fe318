"""The readers of data sets: what a source may be, and what opens it.

A reader is found by the word before the colon of a specification (``avatars:2000x30``, ``tars:/data/*.tar``), or by
what a path names. Those of files give a :class:`ShardReader` a :class:`plsc.data.shards.ShardFormat`, a file each here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from plsc.data.avatars import open_avatars
from plsc.data.dataset import MAX_BAD_RECORDS, ImageDataset
from plsc.data.glyphs import open_glyphs
from plsc.data.objects import SCHEMES, ObjectFolder, is_object, take_cache
from plsc.data.readers.arrow import ArrowFormat, HubFormat
from plsc.data.readers.lance import LanceFormat
from plsc.data.readers.objects import ObjectPictures, PicturePrefix
from plsc.data.readers.parquet import ParquetFormat
from plsc.data.readers.records import RecordFormat
from plsc.data.readers.tars import TarFormat
from plsc.data.sharded import ShardedDataset
from plsc.data.shards import ShardFormat, split_options
from plsc.errors import DataError, UsageError
from plsc.extensions import Registry
from plsc.models.preprocessing import ImageSize
from plsc.progress import log_once


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
        cache = take_cache(given) if is_object(name) else None
        shards = self.shard_format.find(name, given, cache)
        if shards is None:
            return None
        options: dict[str, Any] = {"max_bad_records": max_bad_records, "label_columns": label_columns}
        return ShardedDataset(source or path, shards, self.shard_format(given), image_size, **options)


class ObjectReader:
    """Opens what the URL of an object store names: shards, shards below a prefix, or pictures below a prefix."""

    def __call__(
        self,
        source: str,
        image_size: ImageSize | None,
        *,
        max_bad_records: int | None = MAX_BAD_RECORDS,
        label_columns: int | None = 1,
    ) -> ImageDataset:
        """Open ``s3://…``; options as of :meth:`ShardReader.find`."""
        options: dict[str, Any] = {"max_bad_records": max_bad_records, "label_columns": label_columns}
        url, given = split_options(source)
        for reader in SHARDS.values():
            if url.rstrip("/").lower().endswith(reader.shard_format.suffixes):
                return cast("ImageDataset", reader.find(source, image_size, **options))
        folder = ObjectFolder(url, take_cache(given), whole=True)
        for reader in SHARDS.values():
            kind = reader.shard_format
            has_some = folder.files(kind.suffixes, are_folders=kind.are_folders)
            if has_some and (found := reader.find(source, image_size, **options)) is not None:
                return found
        prefix = PicturePrefix(folder)
        if not prefix.pictures:
            raise UsageError(f"there is no picture and no shard below {folder.url}; images come from {FORMS}")
        return ObjectPictures(source, prefix, image_size, given, **options)


SHARDS: dict[str, ShardReader] = {
    "rec": ShardReader("one or several .rec files", RecordFormat),
    "tars": ShardReader("tars of samples (/data/{000..999}.tar)", TarFormat),
    "parquet": ShardReader("one or several .parquet files", ParquetFormat),
    "arrow": ShardReader("one or several .arrow files", ArrowFormat),
    "lance": ShardReader("X.lance tables", LanceFormat),
}
HUB = ShardReader("hub:ORG/NAME?split=NAME", HubFormat)
READERS: Registry[Callable[[str, ImageSize | None], ImageDataset]] = Registry(
    "plsc.readers",
    {"avatars": open_avatars, "glyphs": open_glyphs, **SHARDS, "hub": HUB, **dict.fromkeys(SCHEMES, ObjectReader())},
    callable,
    "a function of (specification, image size or None) that returns a plsc.data.ImageDataset",
)
FORMS = ", ".join(
    [
        *("a folder per identity", "a list file (path<TAB>label)"),
        *(reader.form for reader in (*SHARDS.values(), HUB)),
        "these as s3://, gs:// or az://BUCKET/PREFIX",
        "avatars:IDSxIMAGES, or glyphs:BLOCK",
    ]
)


def names_shards(source: str | Path) -> bool:
    """Whether ``source`` names shards of a known format by their suffix, or is a folder that holds some."""
    path = Path(split_options(str(source))[0])
    suffixes = tuple(suffix for reader in SHARDS.values() for suffix in reader.shard_format.suffixes)
    if path.name.lower().endswith(suffixes):
        return True
    return path.is_dir() and any(entry.name.lower().endswith(suffixes) for entry in path.iterdir())


def has_reader(source: str | Path) -> bool:
    """Whether ``source`` is the specification of a set of :data:`READERS`, as ``avatars:2000x30``, and no path."""
    kind, colon, _ = str(source).partition(":")
    return bool(colon) and READERS.find(kind) is not None


def is_named(source: str | Path) -> bool:
    """Whether ``source`` is a specification, a path that exists, or a pattern, whose shards its opening looks for."""
    path = split_options(str(source))[0]
    return has_reader(source) or Path(path).exists() or (names_shards(path) and any(mark in path for mark in "*?[{"))


def read(source: str, image_size: ImageSize | None, **options: Any) -> ImageDataset:
    """Open ``NAME:…`` by the reader of that name; ``options`` are for those of shards."""
    reader = READERS[source.partition(":")[0]]
    if isinstance(reader, ShardReader | ObjectReader):
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
            _tell_others(path, reader)
            return found
    return None


def _tell_others(source: str, taken: ShardReader) -> None:
    """Warn where a folder holds shards of other formats than the one that is ``taken``."""
    folder, own = Path(split_options(source)[0]), taken.shard_format.suffixes
    if not folder.is_dir() or folder.name.lower().endswith(own):
        return
    names = [entry.name.lower() for entry in folder.iterdir()]
    kinds = [reader.shard_format.suffixes for reader in SHARDS.values() if reader is not taken]
    if others := [kind[0] for kind in kinds if any(name.endswith(kind) for name in names)]:
        line = f"{source}: its {own[0]} files are read, and its {' and '.join(others)} files are not"
        log_once("plsc.data", f"{line}; to read those, name them, as '{folder}/*{others[0]}'")
