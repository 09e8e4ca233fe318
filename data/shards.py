"""The files that a data set lies in, its shards: how a format reads them, and which files a source names.

A source is one file, a folder, a glob, names with ranges in braces (``/data/{000..999}.tar``), or a text file with a
name on each line; ``?label=FIELD&…`` at its end says what the format is told besides.
"""

import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from plsc.data.block_cache import BlockCache
from plsc.data.dataset import map_names
from plsc.data.identity import file_stamps
from plsc.data.objects import ObjectFile, ObjectFolder, is_object
from plsc.errors import UsageError
from plsc.regular_files import check_links, open_regular
from plsc.text_files import text_lines

if TYPE_CHECKING:
    from plsc.data.sharded import ShardedDataset

_OPTIONS = re.compile(r"\?([a-z_]+=[^&?]*(?:&[a-z_]+=[^&?]*)*)\Z")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 1_000_000
_OPEN_FILES = 256  # of a process
NO_LABEL = "it has no label"  # how the fault of a row without one begins
_LISTS = ("", ".txt", ".list", ".lst")

T = TypeVar("T")


@dataclass(frozen=True)
class Scanned:
    """What one shard holds, row by row, without any image.

    Attributes:
        places: int64 (n, P), what :meth:`ShardFormat.read` finds image i by; P may be 0.
        labels: int64 (n,), or (n, K) with -1 where there is none; None where the shard has no labels.
        keys: the images' ids, strings or int64 (n,); None: their numbers in the shard.
        names: ``names[label]`` is the name of a class; None: labels are its names.
        damaged: why a row was left out, by its key.
        columns: further texts of each image, by their names.
    """

    places: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    keys: Sequence[str] | NDArray[np.int64] | None = None
    names: Sequence[str] | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)


def text_labels(texts: Sequence[str]) -> tuple[NDArray[np.int64], Sequence[str] | None]:
    """Labels and names for :class:`Scanned` from a text for each image: numbers where all are plain integers."""
    labels, classes = map_names(texts)
    names = list(classes)
    numbers = np.array([int(name) for name in names], np.int64) if _are_numbers(names) else None
    return (labels, names) if numbers is None or (len(numbers) and numbers.min() < 0) else (numbers[labels], None)


def _are_numbers(names: Sequence[str]) -> bool:
    return all(re.fullmatch(r"0|[1-9][0-9]{0,17}", name) for name in names)


class ShardFormat(ABC):
    """A format whose files are scanned once and then read at any place. It pickles, and is one of each data set.

    Attributes:
        suffixes: of its files' names, in lower case.
        usual: the name of a folder's one shard beside which others are another set; "": all are one set.
        are_folders: a shard is a folder with such a name, and no file.
        scans_objects: :meth:`scan` reads objects of a store itself; for others they are fetched as wholes.
        noun: what a row is called in messages.
        options: what ``?NAME=VALUE`` may say, by name, with a text for the error that lists them.
    """

    suffixes: ClassVar[tuple[str, ...]]
    usual: ClassVar[str] = ""
    are_folders: ClassVar[bool] = False
    scans_objects: ClassVar[bool] = False
    noun: ClassVar[str] = "record"
    options: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: Mapping[str, str]) -> None:
        unknown = sorted(options.keys() - self.options.keys())
        if unknown:
            known = ", ".join(f"{name} ({text})" for name, text in self.options.items()) or "none"
            raise UsageError(f"?{unknown[0]}= is no option of {self.suffixes[0]} files, which have: {known}")
        self.given = dict(options)
        self.noted: dict[Path, bytes] = {}  # the states of shards when they were indexed
        self._opened: dict[Path, Any] = {}

    @classmethod
    def find(cls, source: str, given: Mapping[str, str], cache: BlockCache | None = None) -> list[Path] | None:
        """The shards that ``source`` names, which was ``given`` these options; as :func:`find_shards`."""
        return find_shards(source, cls.suffixes, cls.usual, cache, are_folders=cls.are_folders)

    @abstractmethod
    def scan(self, shard: Path) -> Scanned:
        """Find the rows of a shard.

        Raises:
            DataError: it cannot be read at all; single damaged rows are named in the result.
        """

    @abstractmethod
    def read(self, shard: Path, row: int, place: NDArray[np.int64]) -> bytes:
        """Read the encoded image of a shard's ``row``, found at ``place`` (P,); ValueError gives a damaged one's fault.

        Called by the loader's processes; :meth:`opened` keeps what is open.
        """

    def companions(self, shard: Path) -> list[Path]:
        """The files beside a shard that are read with it, whether they exist or not."""
        return []

    def stamped(self, shard: Path) -> list[Path]:
        """The files whose sizes and times tell a shard's state; where the first is missing, so is the shard."""
        return [shard, *self.companions(shard)]

    def size(self, shard: Path, stamped: int) -> int:
        """The bytes of a shard, of whose stamped files the first has ``stamped``."""
        return stamped

    def check(self, shards: Sequence[Path]) -> None:  # noqa: B027 (most formats have nothing to check)
        """UsageError where the shards do not go together."""

    def check_classes(self, dataset: "ShardedDataset") -> None:  # noqa: B027 (likewise)
        """DataError where labels are past what the format holds exactly."""

    def names(self, shard: Path, keys: NDArray[np.int64]) -> list[str] | None:
        """The readable ids of images whose keys are integers; None where these are all that they have."""
        return None

    def opened(self, path: Path, open_file: Callable[[Path], T]) -> T:
        """What ``open_file`` gives for a file, kept for the next call; of many the oldest is dropped.

        Raises:
            ValueError: the file is a shard that has changed since it was indexed.
        """
        is_noted = path in self.noted and path not in self._opened
        if is_noted and file_stamps([str(path)]) != self.noted[path]:
            raise ValueError("its file has changed since it was indexed; begin again")
        found: T = self._opened.pop(path) if path in self._opened else open_file(path)
        self._opened[path] = found
        if len(self._opened) > _OPEN_FILES:
            del self._opened[next(iter(self._opened))]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open."""
        return {**self.__dict__, "_opened": {}}


def split_options(source: str) -> tuple[str, dict[str, str]]:
    """Split ``X.tar?label=id`` into the path and its options; a file that has this very name is a path."""
    found = None if os.path.lexists(source) else _OPTIONS.search(source)
    if found is None:
        return source, {}
    return source[: found.start()], dict(item.split("=", 1) for item in found[1].split("&"))


def find_shards(
    source: str,
    suffixes: tuple[str, ...],
    usual: str = "",
    cache: BlockCache | None = None,
    *,
    are_folders: bool = False,
) -> list[Path] | None:
    """The shards that ``source`` names, in order of their names; None where it names files of another kind.

    A folder's are those directly in it, and have to lie there in the end; or the one that has the ``usual`` name.

    Raises:
        UsageError: a pattern, or a list of names, finds none or too many.
    """
    if cache is not None and is_object(source):
        return cast("list[Path] | None", _objects(source, suffixes, usual, cache, are_folders))
    path = Path(source)
    if path.is_dir() and not (are_folders and _has_suffix(path.name, suffixes)):
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if _has_suffix(entry.name, suffixes))
        names = [usual] if usual in names else [name for name in names if not name.startswith(".")]
        shards = [path / name for name in names]
        for shard in shards:  # a link may lead to files of the reader's own
            if are_folders:
                check_links(shard, below=path)
            else:
                open_regular(shard, below=path.resolve()).close()
        return shards or None
    if path.is_file() and path.suffix in _LISTS:
        return _listed(path, suffixes)
    if not _has_suffix(source.rstrip("/"), suffixes):
        return None
    if path.exists() or not (has_magic(source) or _BRACES.search(source)):
        return [path]
    found = [Path(name) for pattern in _unbraced(source) for name in _matching(pattern)]
    if not found:
        raise UsageError(f"{source} matches no file; quote it, and name files that exist")
    return found


def _objects(
    url: str, suffixes: tuple[str, ...], usual: str, cache: BlockCache, are_folders: bool
) -> list[ObjectFile] | None:
    """As :func:`find_shards`: one object, several by braces, or those directly below a prefix; one listing of each."""
    if (url.endswith("/") and not are_folders) or not _has_suffix(url.rstrip("/"), suffixes):
        folder = ObjectFolder(url, cache, whole=are_folders)
        found = folder.files(suffixes, usual, are_folders=are_folders)
        folder.objects = {} if are_folders else folder.objects  # what is in a table is not for other processes
        return found or None
    folders: dict[str, ObjectFolder] = {}
    found = []
    for each in _unbraced(url.rstrip("/")):
        prefix, _, name = each.rpartition("/")
        if prefix not in folders:
            folders[prefix] = ObjectFolder(prefix, cache, whole=False)
        found.append(ObjectFile(folders[prefix], name))
    return found


def _has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes)


def _listed(path: Path, suffixes: tuple[str, ...]) -> list[Path] | None:
    """The shards that a text file names, a path below its folder on each line; None where its first line names none."""
    found: list[Path] = []
    for number, line in text_lines(path, "surrogateescape"):
        name = line.strip()
        if not name:
            continue
        if not _has_suffix(name, suffixes):
            if not found:
                return None
            raise UsageError(f"{path} line {number} names {name[:80]!r}, which does not end in {suffixes[0]}")
        found.append(path.parent / name)
    return found or None


def _unbraced(pattern: str) -> Iterator[str]:
    """Spell ``{000..999}`` and ``{a,b}`` out, as shells and webdataset do."""
    parts = _BRACES.split(pattern)
    choices = [[part] if number % 2 == 0 else list(_choices(part)) for number, part in enumerate(parts)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > _MOST_SHARDS:
        raise UsageError(f"{pattern} stands for {total:,} names, and {_MOST_SHARDS:,} are the most")
    return map("".join, itertools.product(*choices))


def _choices(inner: str) -> Sequence[str]:
    ends = _RANGE.fullmatch(inner)
    if ends is None:
        return inner.split(",") if "," in inner else ["{" + inner + "}"]
    first, last = ends[1], ends[2]
    if int(last) - int(first) > _MOST_SHARDS:
        raise UsageError(f"{{{inner}}} stands for {int(last) - int(first) + 1:,} names; {_MOST_SHARDS:,} are the most")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _matching(name: str) -> list[str]:
    """The files of a glob in order; a plain name is one whether it exists or not, so that a missing shard is told."""
    return sorted(glob(name)) if has_magic(name) and not os.path.lexists(name) else [name]  # noqa: PTH207 (of any path)
