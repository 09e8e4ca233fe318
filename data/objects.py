"""Objects of a store as shards: what of ``pathlib.Path`` formats need, reads of ranges, and reads of whole objects.

``s3://BUCKET/…``, ``gs://BUCKET/…`` and ``az://CONTAINER/…`` are read by obstore, which takes credentials, endpoint and
region from the environment. ``?cache=FOLDER&cache_gb=N`` at a source's end says where blocks are kept.
"""

import hashlib
import io
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from plsc.data import object_requests
from plsc.data.block_cache import BLOCK, BlockCache
from plsc.errors import DataError, UsageError
from plsc.progress import Progress
from plsc.regular_files import open_regular

SCHEMES = ("s3", "gs", "az")

_WHOLE = 8 * BLOCK  # of a request for a whole object
State = tuple[int, str]  # size in bytes, version


def is_object(source: str) -> bool:
    """Whether ``source`` is the URL of an object, or of a prefix."""
    return source.partition("://")[0] in SCHEMES and "://" in source


def user_cache(name: str) -> Path:
    """The user's folder for what can be made anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plsc" / name


def take_cache(given: dict[str, str]) -> BlockCache:
    """The cache that a source's options name; they are taken out of ``given``."""
    folder, size = given.pop("cache", ""), given.pop("cache_gb", "")
    try:
        bound = float(size) * 1e9 if size else None
    except ValueError:
        bound = -1
    if bound is not None and not 0 < bound < 1e18:
        raise UsageError(f"?cache_gb={size} is no size; give the GB that blocks may take")
    return BlockCache(Path(folder).expanduser().absolute() if folder else user_cache("objects"), bound)


class ObjectFolder:
    """What a listing found below the prefix of a URL: the size and the version of each object by its name there.

    Args:
        url: ``s3://BUCKET/PREFIX/``; a slash at its end may be missing.
        cache: of what is read.
        whole: at any depth, and not directly below alone.
    """

    def __init__(self, url: str, cache: BlockCache, *, whole: bool) -> None:
        url = url if url.endswith("/") else f"{url}/"
        scheme, _, rest = url.partition("://")
        bucket, _, self.prefix = rest.partition("/")
        self.bucket, self.url, self.cache = f"{scheme}://{bucket}", url, cache
        if not bucket:
            raise UsageError(f"{url} names no bucket; write {scheme}://BUCKET/PREFIX/")
        try:
            found = object_requests.call(object_requests.entries, self.bucket, self.prefix.rstrip("/"), whole)
        except object_requests.RequestError as error:
            raise DataError(f"cannot list {url}: {error.args[1]}") from None
        self.objects: dict[str, State] = {
            key.removeprefix(self.prefix): (size, version)
            for key, size, version in found
            if key.startswith(self.prefix) and key != self.prefix
        }

    def files(self, suffixes: tuple[str, ...], usual: str = "", *, are_folders: bool = False) -> "list[ObjectFile]":
        """The shards directly below, in order of name; as of a folder of the disk, but for the ``usual`` one."""
        parts = {name.partition("/")[:2] for name in self.objects}
        names = sorted(
            name for name, slash in parts if (slash != "") == are_folders and name.lower().endswith(suffixes)
        )
        return [ObjectFile(self, name) for name in ([usual] if usual in names else names)]

    def read(self, name: str, state: State, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object in a certain state.

        Raises:
            DataError: it is in another state, is gone, or cannot be read.
        """
        try:
            return object_requests.call(object_requests.read, self.bucket, self.prefix + name, start, stop, state[1])
        except object_requests.RequestError as error:
            kind, reason = error.args
            why = "it has changed since it was listed; begin anew" if kind == "changed" else reason
            raise DataError(f"cannot read {self.url}{name}: {why}") from None

    def cached(self, name: str, state: State, start: int, stop: int) -> bytes:
        """:meth:`read` through the cache; bytes past the object's end are left out."""
        size, version = state
        stop, parts = min(stop, size), []
        digest = hashlib.sha256(f"{self.url}{name}\n{version}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            end = min(first + BLOCK, size)
            parts.append(
                self.cache.read(
                    f"{digest}-{number}",
                    end - first,
                    lambda first=first, end=end: self.read(name, state, first, end),  # type: ignore[misc]
                    max(start - first, 0),
                    min(stop, end) - first,
                )
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Ranges(Protocol):
    """A file of ``size`` bytes that is read at any place, as :class:`FileRanges` and :class:`ObjectFile` are."""

    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from ``offset`` on, fewer than ``size`` at the end alone; ValueError or DataError where it fails."""


class FileRanges:
    """A file of the disk, read by ``pread``: what storage does not give through a map ends the process by SIGBUS."""

    def __init__(self, path: Path) -> None:
        file = open_regular(path)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """See :class:`Ranges`."""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from None


def open_ranges(path: Path) -> Ranges:
    """Open a shard for reads at any place; FileNotFoundError where it does not exist."""
    if not isinstance(path, ObjectFile):
        return FileRanges(path)
    if not path.is_file():
        raise FileNotFoundError(path)
    return path


def open_file(path: Path) -> BinaryIO:
    """Open a shard for those who read a file: one of the disk, or an object through the cache."""
    return io.BufferedReader(_RangesIO(path)) if isinstance(path, ObjectFile) else open_regular(path)


class _RangesIO(io.RawIOBase):
    """What :class:`Ranges` hold as a file."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._at = ranges, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._ranges.size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        content = self._ranges.read(self._at, len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def number_of(text: str) -> int:
    """A hash of 56 bits."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:7], "little")


class RemoteShard:
    """What is no file of the disk; ``stamp`` are its size and a number that is another one for other contents.

    Attributes:
        name: as of a Path.
        stamp: as :func:`plsc.data.identity.file_stamps` has them; -1 where it does not exist.
    """

    name: str
    stamp: tuple[int, int]


class ObjectFile(RemoteShard):
    """An object that a listing found, or might have found: what of a Path formats use. It pickles with its state."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        self._folder, self.name = folder, name

    def __str__(self) -> str:
        return self._folder.url + self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFile) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __getstate__(self) -> dict[str, Any]:
        """Take what belongs to this object along, of the listing."""
        stem, folder = self.name.partition(".")[0], ObjectFolder.__new__(ObjectFolder)
        own = {name: state for name, state in self._folder.objects.items() if name.startswith(stem)}
        folder.__dict__.update({**self._folder.__dict__, "objects": own})
        return {"_folder": folder, "name": self.name}

    @property
    def suffix(self) -> str:
        """As of a Path."""
        return PurePosixPath(self.name).suffix

    def with_name(self, name: str) -> "ObjectFile":
        """As of a Path."""
        return ObjectFile(self._folder, name)

    def with_suffix(self, suffix: str) -> "ObjectFile":
        """As of a Path."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def below(self, name: str) -> ObjectFolder:
        """The objects directly below a folder in it, where it is a folder itself."""
        return ObjectFolder(f"{self}/{name}", self._folder.cache, whole=False)

    @property
    def state(self) -> State | None:
        """Size and version; None where there is no such object."""
        return self._folder.objects.get(self.name)

    def is_file(self) -> bool:
        """As of a Path."""
        return self.state is not None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.state[0] if self.state else 0

    @property
    def stamp(self) -> tuple[int, int]:  # type: ignore[override]
        """See :class:`RemoteShard`."""
        return (-1, -1) if self.state is None else (self.size, number_of(self.state[1]))

    def read(self, offset: int, size: int) -> bytes:
        """See :class:`Ranges`."""
        return self._folder.cached(self.name, self.state or (0, ""), offset, offset + size)

    def local(self) -> Path:
        """A whole copy in the cache."""
        key = hashlib.sha256(f"{self}\n{self.state}".encode("utf-8", "surrogateescape")).hexdigest()
        return self._folder.cache.copy(key[:32] + self.suffix, self.fetch)

    def fetch(self, target: Path) -> None:
        """Write the whole object into a file, some megabytes at a time and past the cache."""
        progress = Progress(f"fetching {self}", self.size // BLOCK, "MB")
        with target.open("wb") as file:
            for start in range(0, self.size, _WHOLE):
                stop = min(start + _WHOLE, self.size)
                file.write(self._folder.read(self.name, self.state or (0, ""), start, stop))
                progress.advance((stop - start) // BLOCK)

    @contextmanager
    def fetched(self, companions: "Sequence[ObjectFile]") -> Iterator[Path]:
        """A folder's file with the whole object, beside those of its companions that exist; removed afterwards."""
        with self._folder.cache.folder() as folder:
            for file in (self, *filter(ObjectFile.is_file, companions)):
                file.fetch(folder / file.name)
            try:
                yield folder / self.name
            except (DataError, UsageError) as error:  # which name files that are gone then
                raise type(error)(str(error).replace(f"{folder}/", self._folder.url)) from None
