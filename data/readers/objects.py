"""Pictures of an object store, a prefix per identity. Shards there are read as those of the disk are."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from plsc.data.folder import SYSTEM_FOLDERS, is_picture, kind, kinds_text
from plsc.data.objects import ObjectFolder, RemoteShard, number_of
from plsc.data.sharded import ShardedDataset
from plsc.data.shards import Scanned, ShardFormat
from plsc.errors import DataError
from plsc.models.preprocessing import ImageSize
from plsc.progress import counted, log_once
from plsc.regular_files import LARGEST_PICTURE


class PicturePrefix(RemoteShard):
    """The pictures that a listing found below a prefix, as one shard; it pickles without the listing."""

    def __init__(self, folder: ObjectFolder) -> None:
        self.folder, self.name = folder, folder.prefix.rstrip("/").rpartition("/")[2] or "bucket"
        objects = sorted(folder.objects.items())
        self.pictures = [(name, state) for name, state in objects if _is_shown(name) and is_picture(name)]
        self.others = Counter(kind(name) for name, _ in objects if _is_shown(name) and not is_picture(name))
        versions = hashlib.sha256(repr(self.pictures).encode("utf-8", "surrogateescape")).hexdigest()
        self.stamp = sum(size for _, (size, _) in self.pictures), number_of(versions)

    def __str__(self) -> str:
        return self.folder.url

    def forget(self) -> None:
        """Let go of the listing, once the index has it."""
        self.pictures, self.folder.objects = [], {}


def _is_shown(name: str) -> bool:
    """Whether neither it nor a folder on its way is hidden, or a system's; the name of a folder itself is none."""
    parts = name.split("/")
    return parts[-1] != "" and not any(part.startswith(".") or part.casefold() in SYSTEM_FOLDERS for part in parts)


class PictureFormat(ShardFormat):
    """Pictures by their names below a prefix, labelled by the first part of these."""

    suffixes = ("picture",)
    noun = "picture"
    options: ClassVar[Mapping[str, str]] = {}

    def scan(self, shard: Path) -> Scanned:
        """See :meth:`ShardFormat.scan`; pictures beside folders are of nobody, and are left out."""
        prefix = cast("PicturePrefix", shard)
        below = [(name, state) for name, state in prefix.pictures if "/" in name]
        taken = below or prefix.pictures
        if len(taken) < len(prefix.pictures):
            beside = counted(len(prefix.pictures) - len(taken), "picture")
            log_once("plsc.data", f"{prefix}: {beside} left out beside the identities' folders")
        if prefix.others:
            others = counted(prefix.others.total(), "object")
            log_once("plsc.data", f"{prefix}: {others} left out: {kinds_text(prefix.others)}")
        names = [name for name, _ in taken]
        classes, labels = np.unique([name.partition("/")[0] for name in names], return_inverse=True)
        return Scanned(
            places=np.array([size for _, (size, _) in taken], np.int64)[:, None],
            labels=labels.astype(np.int64) if below else None,
            keys=names,
            names=classes.tolist() if below else None,
            columns={"version": [version for _, (_, version) in taken]},
        )

    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """A picture is read by its name: see :meth:`ObjectPictures.encoded`."""
        raise NotImplementedError


class ObjectPictures(ShardedDataset):
    """The pictures below a prefix; keys are their names there. Arguments as of :class:`ShardedDataset`."""

    def __init__(
        self, source: str, prefix: PicturePrefix, image_size: ImageSize | None, given: dict[str, str], **options: Any
    ) -> None:
        shards = cast("Sequence[Path]", [prefix])
        super().__init__(source, shards, PictureFormat(given), image_size, **options)
        self._prefix = prefix
        prefix.forget()

    def encoded(self, index: int) -> bytes:
        """Read the picture, in the state that it was listed in."""
        name, size = self.key(index), int(self.index.places[index, 0])
        if size > LARGEST_PICTURE:
            raise DataError(f"{self._prefix}{name} has {size:,} bytes, where {LARGEST_PICTURE:,} are the most")
        return self._prefix.folder.cached(name, (size, self.index.columns["version"][index]), 0, size)

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the sizes of images [start, stop), and hashes of their versions."""
        versions = [number_of(version) for version in self.index.columns["version"][start:stop]]
        return np.column_stack([self.index.places[start:stop, 0], np.array(versions, np.int64)]).tobytes()

    def metadata(self, index: int) -> dict[str, str]:
        """Return nothing: versions are the store's."""
        return {}
