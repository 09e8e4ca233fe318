"""The index of a data set's shards: where each image lies, and its labels and keys, in columns.

A scan of the shards makes it. Of small data sets that is done anew for each process. Larger ones keep theirs in a
folder ``.plsc-index`` beside the first shard or, where nothing may be written there, in the user's cache. Its columns
are mapped: ranks and loader processes of a machine share them, and what is not looked at takes no memory. Its name
holds the sizes and times of all shards, so that a shard that changes leads to another index.

A scan that is interrupted goes on where it was: each shard's result is a file until the index is whole.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from plsc.data.dataset import PackedStringColumn, map_names, number_names
from plsc.data.identity import file_stamps, labels_digest
from plsc.data.objects import ObjectFile, RemoteShard, user_cache
from plsc.data.shards import Scanned, ShardFormat
from plsc.errors import DataError, PlscError, UsageError
from plsc.files import atomic_folder, atomic_write, write_json
from plsc.progress import Progress

KEPT_FROM = 2**28  # bytes of shards: below, a scan takes a second
PARALLEL_FROM = 2**30  # bytes: above, loader processes scan
_COUNTED = 2**28  # class numbers below are counted in a table
_FOLDER = ".plsc-index"
_VERSION = 1
_Int = NDArray[np.integer[Any]]
_New = Callable[[str, tuple[int, ...], Any], NDArray[Any]]  # a column by name, shape and dtype


class ShardIndex(NamedTuple):
    """The columns of N images.

    Attributes:
        starts: int64 (S + 1,): shard s has the rows [starts[s], starts[s + 1]).
        places: int64 (N, P), see :class:`plsc.data.shards.Scanned`.
        labels: of the smallest type, (N,) or (N, K), in -1 … C-1; None where there are none.
        names: the keys of images that are texts; None: they are numbers.
        repeated: bool (N,), whether an image of another shard has the name before; None: no one has.
        numbers: those, (N,); None: in each shard they follow one another.
        firsts: int64 (S,), the first of each shard, where they do.
        class_names: C names.
        unlabelled: the shards that have images and no labels.
        labels_sha256: :func:`plsc.data.identity.labels_digest` of ``labels``; "" where there are none.
        highest_number: the largest label before gaps were closed; -1 where there is none.
        damaged: why rows were left out, by shard and key.
        columns: further texts, by their names.
        folder: that it is mapped from; None where it lies in memory.
    """

    starts: NDArray[np.int64]
    places: NDArray[np.int64]
    labels: _Int | None
    names: Sequence[str] | None
    repeated: NDArray[np.bool_] | None
    numbers: _Int | None
    firsts: NDArray[np.int64]
    class_names: Sequence[str]
    unlabelled: list[int]
    labels_sha256: str
    highest_number: int
    damaged: list[tuple[int, str, str]]
    columns: dict[str, Sequence[str]]
    folder: Path | None

    def numbers_of(self, shard: int, start: int, stop: int) -> NDArray[np.int64]:
        """The keys (stop - start,) of images [start, stop), which are in one shard and have numbers."""
        if self.numbers is not None:
            found: NDArray[np.int64] = self.numbers[start:stop].astype(np.int64)
            return found
        first = int(self.firsts[shard] - self.starts[shard])
        return np.arange(first + start, first + stop)


def open_index(source: str, shards: Sequence[Path], shard_format: ShardFormat) -> ShardIndex:
    """Open the index of ``shards``, or make it; of several ranks one makes it, and the others wait.

    Raises:
        UsageError: a shard is missing, or shards do not go together.
        DataError: a shard cannot be read.
    """
    stamps = _stamps(shards, shard_format)
    local = [(shard, stamp) for shard, (_, stamp) in zip(shards, stamps, strict=True) if isinstance(shard, Path)]
    shard_format.noted = {shard: bytes.fromhex(stamp)[:16] for shard, stamp in local}
    if sum(size for size, _ in stamps) < KEPT_FROM:
        arrays: dict[str, NDArray[Any]] = {}

        def new(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            arrays[name] = np.empty(shape, dtype)
            return arrays[name]

        content = _join([_scan(shard_format, shard) for shard in shards], new)
        return _index(content, arrays, None)
    place = str(shards[0].absolute() if isinstance(shards[0], Path) else shards[0])  # in the user's cache all sets meet
    given = sorted(shard_format.given.items())
    of_source = hashlib.sha256(repr((source, place, given)).encode("utf-8", "surrogateescape"))
    state = hashlib.sha256(
        repr([_VERSION, [shard.name for shard in shards], stamps]).encode("utf-8", "surrogateescape")
    )
    root = index_folder(shards[0])
    folder = root / f"{of_source.hexdigest()[:12]}-{state.hexdigest()[:20]}"
    if not folder.is_dir():
        from filelock import FileLock  # here: only who makes an index needs it

        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _make(source, list(zip(shards, stamps, strict=True)), shard_format, folder)
    return _mapped(folder)


def _mapped(folder: Path) -> ShardIndex:
    try:
        content = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        return _index(
            content, {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in content["arrays"]}, folder
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(f"the index {folder} is damaged ({error}); delete it, and it is made anew") from None


def _index(content: dict[str, Any], arrays: dict[str, NDArray[Any]], folder: Path | None) -> ShardIndex:
    texts = {
        name: PackedStringColumn(arrays[name], arrays[f"{name}_ends"], "surrogateescape") for name in content["texts"]
    }
    return ShardIndex(
        starts=np.array(arrays["starts"]),
        places=arrays["places"],
        labels=arrays.get("labels"),
        names=texts.get("keys"),
        repeated=arrays.get("repeated"),
        numbers=arrays.get("numbers"),
        firsts=np.array(arrays["firsts"]),
        class_names=texts["names"] if "names" in texts else number_names(arrays["class_numbers"]),
        unlabelled=[int(shard) for shard in content["unlabelled"]],
        labels_sha256=str(content["labels_sha256"]),
        highest_number=int(content["highest_number"]),
        damaged=[(int(shard), str(key), str(why)) for shard, key, why in content["damaged"]],
        columns={name: texts[f"column_{number}"] for number, name in enumerate(content["columns"])},
        folder=folder,
    )


def _stamps(shards: Sequence[Path], shard_format: ShardFormat) -> list[tuple[int, str]]:
    """Size of each shard, and the sizes and times of the files that tell its state."""
    files = [shard_format.stamped(shard) for shard in shards]
    values = np.frombuffer(shard_stamps([path for group in files for path in group]), np.int64).reshape(-1, 2)
    found, first = [], 0
    for shard, group in zip(shards, files, strict=True):
        own = values[first : first + len(group)]
        if own[0, 0] < 0:
            raise UsageError(f"there is no {group[0]}")
        found.append((shard_format.size(shard, int(own[0, 0])), own.tobytes().hex()))
        first += len(group)
    return found


def shard_stamps(files: Sequence[Path]) -> bytes:
    """:func:`file_stamps` of files and of objects; of these the version stands for the time."""
    if not any(isinstance(file, RemoteShard) for file in files):
        return file_stamps([str(file) for file in files])
    stamps = (
        np.array(file.stamp, np.int64).tobytes() if isinstance(file, RemoteShard) else file_stamps([str(file)])
        for file in files
    )
    return b"".join(stamps)


def index_folder(shard: Path) -> Path:
    """The folder of indexes, and of what a format keeps: beside the data where that may be written, else the user's."""
    own = user_cache("index")
    beside = own if isinstance(shard, RemoteShard) else shard.absolute().parent / _FOLDER
    for root in (beside, own):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root, os.W_OK):
            return root
    raise UsageError(f"neither {beside} nor ~/.cache may be written, and the index of the data needs a place")


def _make(source: str, shards: list[tuple[Path, tuple[int, str]]], shard_format: ShardFormat, folder: Path) -> None:
    """Scan all shards, join their results into ``folder``, and remove what former states of the source left."""
    parts = folder.with_name(f"{folder.name.partition('-')[0]}.parts")
    parts.mkdir(exist_ok=True)
    files = [
        parts / f"{hashlib.sha256(stamp.encode()).hexdigest()[:16]}-{shard.name}.npz" for shard, (_, stamp) in shards
    ]
    missing = [(shard, file) for (shard, _), file in zip(shards, files, strict=True) if not file.exists()]
    progress = Progress(f"index of {source}", len(shards), "files", done=len(shards) - len(missing))
    is_large = len(missing) > 1 and sum(size for _, (size, _) in shards) >= PARALLEL_FROM
    for fault in _scanned(shard_format, missing, parallel=is_large):
        if fault is not None:
            raise fault
        progress.advance()
    progress.finish()
    with atomic_folder(folder) as tmp_path:
        names: list[str] = []

        def new(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            names.append(name)
            if 0 in shape:  # which cannot be mapped for writing
                np.save(tmp_path / f"{name}.npy", np.empty(shape, dtype))
                return np.empty(shape, dtype)
            return np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", dtype, shape)

        content = _join(_Parts(files), new)
        write_json(tmp_path / "index.json", {**content, "version": _VERSION, "source": source, "arrays": names})
    shutil.rmtree(parts, ignore_errors=True)
    for former in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
        if former.is_dir() and former != folder:
            shutil.rmtree(former, ignore_errors=True)
            Path(f"{former}.lock").unlink(missing_ok=True)


def _scanned(
    shard_format: ShardFormat, missing: list[tuple[Path, Path]], *, parallel: bool
) -> Iterator[PlscError | None]:
    """Scan shards into files, and yield for each None or what is wrong with it."""
    scan = _Scan(shard_format)
    if not parallel:
        yield from map(scan.__getitem__, missing)
        return
    from plsc.data.loader import auto_workers, map_in_workers

    yield from map_in_workers(scan, missing, auto_workers())


def _scan(shard_format: ShardFormat, shard: Path) -> Scanned:
    if shard_format.scans_objects or not isinstance(shard, ObjectFile):
        return shard_format.scan(shard)
    companions = [file for file in shard_format.companions(shard) if isinstance(file, ObjectFile)]
    with shard.fetched(companions) as local:
        return shard_format.scan(local)


class _Scan(Dataset[PlscError | None]):
    """Maps (shard, file for its result) to None or an error, which would end a loader's process if it were raised."""

    def __init__(self, shard_format: ShardFormat) -> None:
        self._format = shard_format

    def __getitem__(self, request: tuple[Path, Path]) -> PlscError | None:
        shard, file = request
        try:
            scan = _scan(self._format, shard)
        except PlscError as error:
            return error
        with atomic_write(file) as tmp_path, tmp_path.open("wb") as out:
            np.savez(out, allow_pickle=False, **_as_arrays(scan))
        return None


class _Parts(Sequence[Scanned]):
    """The results of scans, each read from its file when it is looked at."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        with np.load(self._files[index], allow_pickle=False) as stored:
            return _from_arrays(dict(stored))


def _as_arrays(scan: Scanned) -> dict[str, NDArray[Any]]:
    told = {"damaged": dict(scan.damaged), "columns": list(scan.columns)}
    arrays: dict[str, NDArray[Any]] = {
        "places": scan.places,
        "told": np.frombuffer(json.dumps(told).encode(), np.uint8),
    }
    if scan.labels is not None:
        arrays["labels"] = scan.labels
    if isinstance(scan.keys, np.ndarray):
        arrays["keys"] = scan.keys
    texts = {"names": scan.names, "texts": None if isinstance(scan.keys, np.ndarray) else scan.keys}
    for name, column in (texts | {f"column_{n}": column for n, column in enumerate(scan.columns.values())}).items():
        if column is not None:
            arrays[name], arrays[f"{name}_ends"] = packed(column)
    return arrays


def _from_arrays(arrays: dict[str, NDArray[Any]]) -> Scanned:
    told = json.loads(arrays["told"].tobytes())
    texts = {name.removesuffix("_ends"): name for name in arrays if name.endswith("_ends")}
    found = {name: PackedStringColumn(arrays[name], arrays[ends], "surrogateescape") for name, ends in texts.items()}
    columns = {name: found[f"column_{number}"] for number, name in enumerate(told["columns"])}
    keys = arrays.get("keys", found.get("texts"))
    return Scanned(arrays["places"], arrays.get("labels"), keys, found.get("names"), told["damaged"], columns)


def packed(texts: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The joined UTF-8 bytes of texts, and the ends (n + 1,) that :class:`PackedStringColumn` takes."""
    return (texts if isinstance(texts, PackedStringColumn) else PackedStringColumn.of(texts)).parts()


def _join(scans: Sequence[Scanned], new: _New) -> dict[str, Any]:
    """Write the columns of all shards one after another into arrays that ``new`` makes; return the rest."""
    starts, shape, classes = [0], _Shape(), _Classes()
    damaged: list[tuple[int, str, str]] = []
    unlabelled: list[int] = []
    for number, scan in enumerate(scans):
        starts.append(starts[-1] + len(scan.places))
        shape.add(scan)
        classes.add(scan)
        damaged += [(number, key, why) for key, why in scan.damaged.items()]
        unlabelled += [number] if scan.labels is None and len(scan.places) else []
    rows = starts[-1]
    new("starts", (len(starts),), np.int64)[:] = starts
    places = new("places", (rows, shape.places), np.int64)
    labels = new("labels", (rows, shape.labels)[: 1 + (shape.labels > 1)], classes.dtype) if shape.labels else None
    new("firsts", (len(shape.firsts),), np.int64)[:] = shape.firsts
    numbers = new("numbers", (rows,), np.int64) if shape.has_gaps else None
    texts = {name: _TextColumn(name, new, rows, size) for name, size in shape.texts.items()}
    hashes = np.zeros(rows if "keys" in texts and len(scans) > 1 else 0, np.int64)  # of keys
    for start, scan in zip(starts, scans, strict=False):
        own = slice(start, start + len(scan.places))
        places[own] = scan.places
        if labels is not None:
            _fill(labels[own], None if scan.labels is None else classes.mapped(scan))
        if numbers is not None:
            numbers[own] = np.arange(len(scan.places)) if scan.keys is None else scan.keys
        for name, column in _texts_of(scan, shape.columns).items():
            data, ends = packed(column)
            texts[name].append(data, ends)
            if name == "keys" and len(hashes):
                content = data.tobytes()
                hashes[own] = [hash(content[first:last]) for first, last in itertools.pairwise(ends.tolist())]
    if len(again := _repeated(hashes)):
        repeated = new("repeated", (rows,), np.bool_)
        repeated[:] = False
        repeated[again] = True
    text_names = list(texts)
    if classes.names is None:
        new("class_numbers", classes.numbers.shape, np.int64)[:] = classes.numbers
    else:
        _TextColumn("names", new, len(classes.names), _size(classes.names)).append(*packed(classes.names))
        text_names.append("names")
    return {
        "texts": text_names,
        "damaged": damaged,
        "unlabelled": unlabelled,
        "columns": shape.columns,
        "highest_number": int(classes.numbers.max(initial=-1)),
        "labels_sha256": "" if labels is None else labels_digest([labels]),
    }


def _repeated(hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows whose hash a row before them has. Two texts have one by chance once in 4,000 sets of 100 million."""
    ordered = np.sort(hashes)
    shared = np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))
    return np.delete(shared, np.unique(hashes[shared], return_index=True)[1])


def _fill(target: _Int, labels: NDArray[np.int64] | None) -> None:
    """Write labels (n,) or (n, k) into (n,) or (n, K), with -1 where there are none."""
    target[:] = -1
    if labels is None:
        return
    if target.ndim == 1:
        target[:] = labels.reshape(len(target))
    else:
        target[:, : labels.shape[1] if labels.ndim > 1 else 1] = labels.reshape(len(target), -1)


def _texts_of(scan: Scanned, columns: Sequence[str]) -> dict[str, Sequence[str]]:
    keys = {} if scan.keys is None or isinstance(scan.keys, np.ndarray) else {"keys": scan.keys}
    empty = [""] * len(scan.places)
    return keys | {f"column_{number}": scan.columns.get(name, empty) for number, name in enumerate(columns)}


def _size(column: Sequence[str]) -> int:
    return len(packed(column)[0])


class _Shape:
    """The shapes of the joined columns: values of a place, labels of an image, bytes of texts, and numbers as keys."""

    def __init__(self) -> None:
        self.places = self.labels = 0
        self.has_gaps = False
        self.firsts: list[int] = []
        self.texts: dict[str, int] = {}
        self.columns: list[str] = []

    def add(self, scan: Scanned) -> None:
        """Count one shard in; all have the columns of the first that has any."""
        self.places = max(self.places, scan.places.shape[1])
        self.columns = self.columns or list(scan.columns)
        keys = scan.keys if isinstance(scan.keys, np.ndarray) and len(scan.keys) else np.zeros(1, np.int64)
        self.has_gaps = self.has_gaps or bool((np.diff(keys) != 1).any())
        self.firsts.append(int(keys[0]))
        if scan.labels is not None:
            self.labels = max(self.labels, scan.labels.shape[1] if scan.labels.ndim > 1 else 1)
        for name, column in _texts_of(scan, self.columns).items():
            self.texts[name] = self.texts.get(name, 0) + _size(column)


class _TextColumn:
    """Texts that are appended to a column of so many ``rows`` and bytes."""

    def __init__(self, name: str, new: _New, rows: int, size: int) -> None:
        self._data, self._ends = new(name, (size,), np.uint8), new(f"{name}_ends", (rows + 1,), np.int64)
        self._ends[0] = self._row = 0

    def append(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        """Write texts behind what is there, as :func:`packed` gives them."""
        first = int(self._ends[self._row])
        self._data[first : first + len(data)] = data
        self._ends[self._row + 1 : self._row + len(ends)] = ends[1:] + first
        self._row += len(ends) - 1


def _present(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers from 0 on that stand in ``labels``, in order: by counting, or by sorting where they are vast."""
    if labels.max(initial=-1) >= _COUNTED:
        return np.unique(labels[labels >= 0])
    is_there = np.zeros(int(labels.max(initial=-1)) + 2, np.bool_)
    is_there[labels.reshape(-1)] = True  # -1 is the last
    return np.flatnonzero(is_there[:-1])


def _union(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    return second if not len(first) else _present(np.concatenate([first, second]))


def _replaced(labels: NDArray[np.int64], numbers: NDArray[np.int64], by: NDArray[np.int64]) -> NDArray[np.int64]:
    """``labels`` with ``by[i]`` for ``numbers[i]``, which are in order and have each label; -1 stays."""
    if numbers[-1:].max(initial=-1) >= _COUNTED:
        return np.where(labels >= 0, np.append(by, -1)[np.searchsorted(numbers, labels)], -1)
    table = np.full(int(numbers[-1:].max(initial=-1)) + 2, -1, np.int64)
    table[numbers] = by
    return table[labels]


class _Classes:
    """The classes of all shards: by number where these mean the same in each shard, else by name.

    Names are in the order of the numbers where all shards have the same ones, otherwise sorted.
    """

    def __init__(self) -> None:
        self._numbers: NDArray[np.int64] = np.empty(0, np.int64)
        self._shared: Sequence[str] | None = None  # of all shards so far
        self._is_first, self._differ = True, False
        self._found: set[str] = set()
        self._labels: dict[str, int] | None = None

    def add(self, scan: Scanned) -> None:
        """Take the classes of a shard that have an image."""
        if scan.labels is None or not scan.labels.size:
            return
        own = _present(scan.labels)
        before, self._numbers = self._numbers, _union(self._numbers, own)
        if self._is_first:
            self._shared, self._is_first = scan.names, False
        elif (self._shared is None) != (scan.names is None) or (
            self._shared is not None and scan.names is not None and list(self._shared) != list(scan.names)
        ):
            if self._shared is None and not self._differ:
                self._found.update(map(str, before.tolist()))
            self._differ = True
        if self._shared is not None or self._differ:
            self._found.update(self._names(scan, own))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Of classes without names, in order."""
        return self._numbers

    @property
    def names(self) -> Sequence[str] | None:
        """Of the classes, in order; None where numbers are their names."""
        if self._differ:
            return list(self._by_name)
        return None if self._shared is None else [self._shared[number] for number in self._numbers.tolist()]

    @property
    def dtype(self) -> Any:
        """The smallest that holds -1 and every class."""
        return np.min_scalar_type(-max(len(self._by_name) if self._differ else len(self._numbers), 1))

    def mapped(self, scan: Scanned) -> NDArray[np.int64]:
        """The labels of a shard among all classes; -1 stays."""
        if scan.labels is None:
            raise ValueError("a shard without labels has none to map")
        if not self._differ:
            return _replaced(scan.labels, self._numbers, np.arange(len(self._numbers)))
        own = _present(scan.labels)
        return _replaced(scan.labels, own, np.array([self._by_name[name] for name in self._names(scan, own)], np.int64))

    @property
    def _by_name(self) -> dict[str, int]:
        if self._labels is None:
            _, classes = map_names(list(self._found))
            self._labels = {name: number for number, name in enumerate(classes)}
        return self._labels

    @staticmethod
    def _names(scan: Scanned, numbers: NDArray[np.int64]) -> list[str]:
        if scan.names is None:
            return [str(number) for number in numbers.tolist()]
        return [scan.names[number] for number in numbers.tolist()]
