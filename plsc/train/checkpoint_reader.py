"""Reading checkpoints, on any number of ranks or on none: every byte that is used is checked first.

The manifest's hashes find damage, not forgery: whoever writes a checkpoint writes them too. One that came from
elsewhere may hold anything, so that nothing in it is unpickled but a checkpoint's own types, and no name leads out of
its folder.
"""

import contextlib
import io
import math
import os
import pickle
import stat
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from plsc.errors import DataError, IntegrityError, PlscError, UsageError, first_line
from plsc.files import (
    LARGEST_JSON,
    MANIFEST,
    check_description,
    check_seal,
    file_state,
    open_described,
    parse_json,
    read_json_text,
)
from plsc.parallel import Mesh
from plsc.parallel.collectives import broadcast_object, raise_on_all_ranks
from plsc.signing import CHECKPOINT, is_asked_for, require_signed
from plsc.train.checkpoint import FORMAT, METADATA, STATE, CheckpointFolder, step_of

Files = dict[str, dict[str, Any]]
_Kind = TypeVar("_Kind")
_UNSEALED_KEYS = {"format", "saved_at", "accuracy", "files"}  # all keys of manifests of earlier versions
_MOST_AXES = 64
_MOST_COMPARISONS = 1_000_000  # of pieces that begin in the same rows: tensor parallelism cuts columns into few
_LARGEST_METADATA = 1 << 30  # some 200 bytes for each 64 MiB of a tensor


class StoredCheckpoint:
    """A published checkpoint whose files match the manifest.

    Attributes:
        path: its folder.
        files: ``{name: {"bytes", "sha256"}}`` as the manifest lists them.
        state: all that is small, as :func:`plsc.train.state.capture` made it.
        stored: torch's description of each tensor, by name.
    """

    def __init__(self, path: Path, mesh: Mesh, prefixes: Sequence[str] | None = None) -> None:
        """Check ``path``, sharing the work; all ranks call.

        Args:
            path: the checkpoint's folder.
            mesh: the ranks.
            prefixes: of the names of the tensors that will be read: the files of others are not checked; None: all.

        Raises:
            IntegrityError, DataError: a file is not the one that was written, named; or it holds what no checkpoint
                does.
        """
        self.path, self.mesh = path, mesh
        raise_on_all_ranks(mesh, lambda: self._open(prefixes))

    def _open(self, prefixes: Sequence[str] | None) -> None:
        self.files = listed_files(self.path)
        with _opened(self.path, STATE, self.files) as file:
            content = parse_json(file.read(LARGEST_JSON + 1), self.path / STATE)
            self.state: dict[str, Any] = _object(content, self.path / STATE)
        with _opened(self.path, METADATA, self.files) as file:
            self._metadata = _read_metadata(file, self.path / METADATA)
        self.stored, self._places = _stored_tensors(self.path, self.files, self._metadata)
        wanted = sorted(self.files)
        if prefixes is not None:
            wanted = sorted({file for name, file in self._places if name.startswith(tuple(prefixes))})
        self._checked = check_files(self.path, self.files, wanted[self.mesh.rank :: self.mesh.world_size])

    @property
    def step(self) -> int:
        """The step it was taken after."""
        return step_of(self.path)

    def files_of(self, name: str) -> list[str]:
        """The files that hold pieces of the tensor ``name``, sorted."""
        return sorted(file for tensor, file in self._places if tensor == name)

    def value(self, name: str, kind: type[_Kind]) -> _Kind:
        """A value of the small state, by its dotted name; IntegrityError where there is none of this type."""
        value: Any = self.state
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None or not isinstance(value, kind) or not _is_printable(value):
            raise IntegrityError(f"{self.path} holds no {name} of a run; it is the checkpoint of another program")
        return value

    def load_into(self, targets: Mapping[str, Any]) -> None:
        """Fill ``targets`` (tensors, TensorShards) in place from the tensors of the same names."""
        for name, target in targets.items():
            if name not in self.stored:
                raise DataError(f"{self.path} holds no {name}; it is the checkpoint of another configuration")
            stored, size = self.stored[name].size, target.size()
            if stored != size:
                raise DataError(f"{self.path}: {name} is {tuple(stored)} there and {tuple(size)} here")
        if not targets:
            return
        with _quiet(), _read_errors(self.path):
            reader = _Reader(self.path, self.files, self._metadata, self._checked)
            load(dict(targets), storage_reader=reader, planner=_TensorPlanner(), no_dist=True)

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with ``prefix``, by the rest of their names, on the CPU."""
        tensors: dict[str, torch.Tensor] = {}
        for name, stored in self.stored.items():
            if name.startswith(prefix):
                tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.load_into(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _is_printable(value: object) -> bool:
    return not isinstance(value, str) or value.isprintable()  # an escape sequence would reach the terminal


def listed_files(path: Path) -> Files:
    """Read the files that the manifest of the checkpoint ``path`` lists.

    Raises:
        DataError: there is no manifest.
        IntegrityError: it is not one of a checkpoint, or a name leads out of the folder.
    """
    if not _is_own_file(path / MANIFEST):
        raise IntegrityError(f"{path / MANIFEST} is no file of its own, but a link or a device; use another copy")
    text = read_json_text(path / MANIFEST)
    manifest = _object(parse_json(text, path / MANIFEST), path / MANIFEST)
    require_signed(path, CHECKPOINT, manifest)
    if not manifest.keys() <= _UNSEALED_KEYS:
        check_seal(path / MANIFEST, manifest, text)
    if manifest.get("format") != FORMAT:
        raise IntegrityError(
            f"{path / MANIFEST} is not a checkpoint's manifest of format {FORMAT}; name another folder"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files or METADATA not in files:
        raise IntegrityError(f"{path / MANIFEST} does not list the checkpoint's files; use another copy")
    for name, entry in files.items():
        check_description(path, name, entry)
    return files


def check_files(path: Path, files: Files, names: Iterable[str]) -> set[tuple[int, ...]]:
    """Hash files, and return which they are, as :func:`plsc.files.file_state` tells.

    Raises:
        IntegrityError: for the first of ``names`` that is not as ``files`` describes it.
    """
    states = set()
    for name in names:
        with _opened(path, name, files) as file:
            states.add(file_state(file))
    return states


def _opened(path: Path, name: str, files: Files, *, verify: bool = True) -> BinaryIO:
    """Open a file of the checkpoint ``path``, at its beginning, verified as it stands."""
    if not _is_own_file(path / name):
        raise IntegrityError(f"{path / name} is no file of its own, but a link or a device; use another copy")
    return open_described(path, name, files[name], verify=verify)


def _is_own_file(path: Path) -> bool:
    """False for what is there and is no regular file: a link leads elsewhere, a device has no end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return True  # it is missing, as open_described says


def _object(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} is not a checkpoint's: it holds no object; use another copy")
    return content


def open_newest(folder: CheckpointFolder) -> StoredCheckpoint | None:
    """Open the newest published checkpoint, or return None. Where it is corrupt, the error names an older one."""
    published = broadcast_object(folder.published(), folder.mesh)
    return open_checkpoint(published[-1], folder.mesh) if published else None


def open_checkpoint(path: Path, mesh: Mesh) -> StoredCheckpoint:
    """Open ``path``; an IntegrityError says which older checkpoint beside it is whole."""
    step_of(path)
    if not path.is_dir():
        raise UsageError(f"there is no checkpoint {path}; --resume auto takes the newest one of the run")
    try:
        return StoredCheckpoint(path, mesh)
    except (IntegrityError, DataError) as error:
        older = [p for p in CheckpointFolder(path.parent, mesh).published() if step_of(p) < step_of(path)]
        good = _newest_whole(older, mesh)
        hint = f"--resume {good} goes on from an older one that is whole" if good else "no older one is whole"
        raise IntegrityError(f"{error}; {hint}") from None


def _newest_whole(candidates: list[Path], mesh: Mesh) -> Path | None:
    for path in reversed(broadcast_object(candidates, mesh)):
        with contextlib.suppress(PlscError):
            return StoredCheckpoint(path, mesh).path
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings: that it loads in one process, which is intended, and of pickles that it refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninit.*")
        yield


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Translate torch's error, which is no Exception, into one line: the hashes fit, and yet a file is unreadable."""
    try:
        yield
    except CheckpointException as error:
        cause = next((failure for failure, _ in error.failures.values()), error)
        if isinstance(cause, PlscError):
            raise cause from None
        # torch's own words for a pickle would advise to load it after all
        why = "a piece is no plain tensor" if isinstance(cause, pickle.UnpicklingError) else first_line(cause)
        raise IntegrityError(f"{path} cannot be read: {why}; use another copy") from None


def _stored_tensors(
    path: Path, files: Files, metadata: Metadata
) -> tuple[dict[str, TensorStorageMetadata], set[tuple[str, str]]]:
    """Check ``.metadata``: the tensors' entries by name, and (name, file) of each of their pieces.

    A checkpoint that came from elsewhere may hold anything here. torch would unpickle a stored object that is no tensor
    without ``weights_only``, would follow a path out of the folder, and would leave what no piece covers as it was:
    whatever the memory held before.

    Raises:
        IntegrityError: it names anything but tensors, pieces that make up each of them, and own files.
    """
    entries = getattr(metadata, "state_dict_metadata", None)
    locations = getattr(metadata, "storage_data", None)
    if not (isinstance(entries, dict) and isinstance(locations, dict)):
        raise IntegrityError(f"{path / METADATA} is not a checkpoint's metadata")
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if others := entries.keys() - tensors.keys():
        raise IntegrityError(f"{path / METADATA} holds {others.pop()!r}, which is not a tensor; use another copy")
    nbytes = sum(entry["bytes"] for entry in files.values())
    for name, entry in tensors.items():
        if not isinstance(name, str) or not _is_whole(entry, nbytes):
            raise IntegrityError(f"{path / METADATA} describes {name!r} wrongly; use another copy")
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in locations:
                raise IntegrityError(f"{path / METADATA} does not say where {name!r} lies; use another copy")
    if not all(map(_is_plain_index, locations)):
        raise IntegrityError(f"{path / METADATA} names pieces wrongly; use another copy")
    for location in locations.values():
        file = getattr(location, "relative_path", None)
        if not isinstance(file, str) or file not in files:
            raise IntegrityError(f"{path / METADATA} names {file!r}, which is no file of the checkpoint")
        start, length = getattr(location, "offset", None), getattr(location, "length", None)
        if not isinstance(start, int) or not isinstance(length, int) or not 0 <= start <= start + length:
            raise IntegrityError(f"{path / METADATA} describes a piece in {file!r} wrongly; use another copy")
        if start + length > files[file]["bytes"]:
            raise IntegrityError(f"{path / METADATA} names a piece beyond the end of {file!r}; use another copy")
    return tensors, {(index.fqn, place.relative_path) for index, place in locations.items()}


def _is_whole(entry: TensorStorageMetadata, nbytes: int) -> bool:
    """Return whether the pieces lie in the tensor and are as many numbers, and files of ``nbytes`` can hold them."""
    size, dtype = getattr(entry, "size", None), getattr(getattr(entry, "properties", None), "dtype", None)
    if not isinstance(size, torch.Size) or not isinstance(dtype, torch.dtype) or not isinstance(entry.chunks, list):
        return False
    if len(size) > _MOST_AXES or math.prod(size) * dtype.itemsize > nbytes:
        return False
    numbers = 0
    for chunk in entry.chunks:
        offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
        if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size):
            return False
        if not len(offsets) == len(sizes) == len(size):
            return False
        if not all(0 <= first <= first + n <= end for first, n, end in zip(offsets, sizes, size, strict=True)):
            return False
        if len(entry.chunks) > 1 and 0 in sizes:
            return False  # hundreds of thousands of empty ones would take seconds to compare
        numbers += math.prod(sizes)
    return numbers == math.prod(size) and not _overlap(entry.chunks)


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two pieces, which lie in the tensor, share a number; too many to compare count as such."""
    ordered = sorted(chunks, key=lambda chunk: tuple(chunk.offsets))
    comparisons = 0
    for first, chunk in enumerate(ordered):
        for other in ordered[first + 1 :]:
            # In this order those that begin behind the end of this one along the first axis need no comparison.
            if not chunk.sizes or other.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                break
            comparisons += 1
            if comparisons > _MOST_COMPARISONS or _boxes_meet(chunk, other):
                return True
    return False


def _boxes_meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        first < second + length and second < first + size
        for first, size, second, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


class _TensorPlanner(DefaultLoadPlanner):
    """torch's planner, restricted to tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: torch would unpickle ``value``."""
        raise IntegrityError(f"the checkpoint holds {read_item.dest_index.fqn} as a pickled object, not as a tensor")


class _Reader(FileSystemReader):
    """torch's reader of the metadata that were checked, and of the files."""

    def __init__(self, path: Path, files: Files, metadata: Metadata, checked: set[tuple[int, ...]]) -> None:
        super().__init__(path)
        self._metadata = metadata
        self.fs = _CheckedFiles(files, checked)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class _CheckedFiles(FileSystem):
    """Opens a checkpoint's files to read what was hashed: another file of the name, or a changed one, is hashed anew.

    Where signatures are asked for, so is a file that another rank has hashed.
    """

    def __init__(self, files: Files, checked: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._files, self._checked = files, checked

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open ``path`` to read it; IntegrityError where it is not as described."""
        place = Path(path)
        with _opened(place.parent, place.name, self._files, verify=False) as file:
            if is_asked_for() and file_state(file) not in self._checked:
                file.close()
                file = _opened(place.parent, place.name, self._files)
                self._checked.add(file_state(file))
            with file:
                yield cast(io.IOBase, file)


def _read_metadata(file: BinaryIO, path: Path) -> Metadata:
    """Read ``.metadata`` by an unpickler that builds nothing but a checkpoint's own types.

    Raises:
        IntegrityError: it is not a checkpoint's metadata.
    """
    size = os.fstat(file.fileno()).st_size
    if size > _LARGEST_METADATA:
        raise IntegrityError(f"{path} has {size:,} bytes, which no checkpoint's has")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read())).load()
    except Exception as error:  # a damaged pickle raises nearly every kind
        raise IntegrityError(f"{path} is not a checkpoint's metadata: {first_line(error)}") from None
    if not isinstance(metadata, Metadata):
        raise IntegrityError(f"{path} is not a checkpoint's metadata")
    return metadata


_PythonUnpickler: Any = pickle._Unpickler  # typeshed knows nothing of its parts


class _MetadataUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Builds a checkpoint's own types, and hashes nothing but names and indices of pieces.

    It is Python's own unpickler in Python, as the one in C lets no key be seen before it is hashed: the hash of
    t = (t, t), nested 60 deep in 300 bytes, takes 2^60 steps.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)
    _allowed = frozenset(
        {
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorStorageMetadata",
                    "ChunkStorageMetadata",
                    "TensorProperties",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _ordered_dict
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in self._allowed and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def _load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        _PythonUnpickler.load_setitem(self)

    def _load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # what lies above the last mark
        _PythonUnpickler.load_setitems(self)

    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems
    for _code in (pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_code[0]]


def _ordered_dict() -> OrderedDict[Any, Any]:
    """Stands for the class, which would take its items from a list, and hash their keys."""
    return OrderedDict()


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if type(key) is not str and not _is_plain_index(key):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}")


def _is_plain_index(index: Any) -> bool:
    if type(index) is not MetadataIndex:
        return False
    fields = getattr(index, "fqn", None), getattr(index, "offset", None), getattr(index, "index", None)
    return type(fields[0]) is str and type(fields[1]) in (torch.Size, NoneType) and type(fields[2]) in (int, NoneType)
