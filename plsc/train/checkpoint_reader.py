"""Reading checkpoints, on any number of ranks or on none: every byte that is used is checked first.

The manifest's hashes find damage, not forgery: whoever writes a checkpoint writes them too. One that came from
elsewhere may hold anything, so that nothing in it is unpickled but a checkpoint's own types, and no name leads out of
its folder.
"""

import contextlib
import io
import pickle
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from plsc.errors import DataError, IntegrityError, PlscError, UsageError, first_line
from plsc.files import MANIFEST, read_json, verify_files
from plsc.parallel import Mesh
from plsc.parallel.collectives import broadcast_object
from plsc.train.checkpoint import FORMAT, METADATA, STATE, CheckpointFolder, step_of
from plsc.train.failures import raise_on_all_ranks

Files = dict[str, dict[str, Any]]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NOT_A_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    TypeError,
    LookupError,
    ValueError,
    MemoryError,
    RecursionError,
)
_LARGEST_JSON = 64 << 20  # a manifest has some 100 bytes for each rank
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
        check_files(self.path, self.files, (STATE, METADATA))
        self.state: dict[str, Any] = _read_small_json(self.path / STATE)
        self.stored, places = _stored_tensors(self.path, self.files)
        wanted = sorted(self.files)
        if prefixes is not None:
            wanted = sorted({file for name, file in places if name.startswith(tuple(prefixes))})
        check_files(self.path, self.files, wanted[self.mesh.rank :: self.mesh.world_size])

    @property
    def step(self) -> int:
        """The step it was taken after."""
        return step_of(self.path)

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
            load(dict(targets), storage_reader=_Reader(self.path), planner=_TensorPlanner(), no_dist=True)

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with ``prefix``, by the rest of their names, on the CPU."""
        tensors: dict[str, torch.Tensor] = {}
        for name, stored in self.stored.items():
            if name.startswith(prefix):
                tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.load_into(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def listed_files(path: Path) -> Files:
    """Read the files that the manifest of the checkpoint ``path`` lists.

    Raises:
        DataError: there is no manifest.
        IntegrityError: it is not one of a checkpoint, or a name leads out of the folder.
    """
    manifest = _read_small_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise IntegrityError(
            f"{path / MANIFEST} is not a checkpoint's manifest of format {FORMAT}; name another folder"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files or METADATA not in files:
        raise IntegrityError(f"{path / MANIFEST} does not list the checkpoint's files; use another copy")
    for name, entry in files.items():
        is_plain = Path(name).name == name and name.isprintable()
        if not is_plain or not isinstance(entry, dict) or not _describes_a_file(entry):
            raise IntegrityError(f"{path / MANIFEST} describes {name!r} wrongly; use another copy")
    return files


def _describes_a_file(entry: Mapping[str, Any]) -> bool:
    size, digest = entry.get("bytes"), entry.get("sha256")
    return (
        type(size) is int
        and size in range(1 << 63)
        and isinstance(digest, str)
        and _SHA256.fullmatch(digest) is not None
    )


def check_files(path: Path, files: Files, names: Iterable[str]) -> None:
    """Raise an :class:`IntegrityError` for the first of ``names`` that is not as ``files`` describes it."""
    for name in names:
        if not _is_own_file(path / name):
            raise IntegrityError(f"{path / name} is no file of its own, but a link or a device; use another copy")
        verify_files(path, {name: files[name]})


def _is_own_file(path: Path) -> bool:
    """False for what is there and is no regular file: a link leads elsewhere, a device has no end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return True  # it is missing, as verify_files says


def _read_small_json(path: Path) -> dict[str, Any]:
    """Read one of a checkpoint's own JSON files."""
    if not _is_own_file(path):
        raise IntegrityError(f"{path} is no file of its own, but a link or a device; use another copy")
    if path.exists() and path.stat().st_size > _LARGEST_JSON:
        raise IntegrityError(f"{path} has {path.stat().st_size:,} bytes, which no checkpoint's has; use another copy")
    try:
        content = read_json(path)
    except RecursionError:
        raise IntegrityError(f"{path} is nested too deeply for a checkpoint's; use another copy") from None
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


def _stored_tensors(path: Path, files: Files) -> tuple[dict[str, TensorStorageMetadata], set[tuple[str, str]]]:
    """Read ``.metadata``: the tensors' entries by name, and (name, file) of each of their pieces.

    A checkpoint that came from elsewhere may hold anything here. torch would unpickle a stored object that is no tensor
    without ``weights_only``, would follow a path out of the folder, and would leave what no piece covers as it was.

    Raises:
        IntegrityError: it names anything but tensors, pieces that make up each of them, and own files.
    """
    metadata = _Reader(path).read_metadata()
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
    for location in locations.values():
        file = getattr(location, "relative_path", None)
        if not isinstance(file, str) or file not in files:
            raise IntegrityError(f"{path / METADATA} names {file!r}, which is no file of the checkpoint")
        start, length = getattr(location, "offset", None), getattr(location, "length", None)
        if not isinstance(start, int) or not isinstance(length, int) or not 0 <= start <= start + length:
            raise IntegrityError(f"{path / METADATA} describes a piece in {file!r} wrongly; use another copy")
        if start + length > files[file]["bytes"]:
            raise IntegrityError(f"{path / METADATA} names a piece beyond the end of {file!r}; use another copy")
    return tensors, {(str(getattr(index, "fqn", "")), place.relative_path) for index, place in locations.items()}


def _is_whole(entry: TensorStorageMetadata, nbytes: int) -> bool:
    """Return whether the pieces lie in the tensor and are as many numbers, and files of ``nbytes`` can hold them."""
    size, dtype = getattr(entry, "size", None), getattr(getattr(entry, "properties", None), "dtype", None)
    if not isinstance(size, torch.Size) or not isinstance(dtype, torch.dtype) or not isinstance(entry.chunks, list):
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
        numbers += sizes.numel()
    return numbers == size.numel() and numbers * dtype.itemsize <= nbytes


class _TensorPlanner(DefaultLoadPlanner):
    """torch's planner, restricted to tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: torch would unpickle ``value``."""
        raise IntegrityError(f"the checkpoint holds {read_item.dest_index.fqn} as a pickled object, not as a tensor")


class _Reader(FileSystemReader):
    """torch's reader with a restricted unpickler of the metadata: it builds nothing but a checkpoint's own types."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata; IntegrityError where it is not that."""
        path = Path(self.path) / METADATA
        if path.stat().st_size > _LARGEST_METADATA:
            raise IntegrityError(f"{path} has {path.stat().st_size:,} bytes, which no checkpoint's has")
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except _NOT_A_PICKLE as error:
            raise IntegrityError(f"{path} is not a checkpoint's metadata: {error}") from None
        if not isinstance(metadata, Metadata):
            raise IntegrityError(f"{path} is not a checkpoint's metadata")
        about = getattr(metadata, "storage_meta", None)
        metadata.storage_meta = about if isinstance(about, StorageMeta) else StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
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
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in self._allowed and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
