"""Reading checkpoints, on any number of ranks or on none: every byte that is used is checked first.

The manifest's hashes find damage, not forgery: whoever writes a checkpoint writes them too. One that came from
elsewhere may hold anything, so that nothing in it is unpickled but a checkpoint's own types, and no name leads out of
its folder.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from plsc.errors import DataError, IntegrityError, PlscError, UsageError
from plsc.files import MANIFEST, read_json, verify_files
from plsc.parallel import Mesh
from plsc.parallel.collectives import broadcast_object
from plsc.train.checkpoint import FORMAT, METADATA, STATE, CheckpointFolder, step_of
from plsc.train.failures import raise_on_all_ranks

_NOT_A_PICKLE = (pickle.UnpicklingError, EOFError, AttributeError, TypeError, LookupError, ValueError)


class StoredCheckpoint:
    """A published checkpoint whose files all match the manifest."""

    def __init__(self, path: Path, mesh: Mesh) -> None:
        """Check ``path``, sharing the work; IntegrityError or DataError names what is wrong with it."""
        self.path, self.mesh = path, mesh
        raise_on_all_ranks(mesh, lambda: _verify(path, mesh))
        self.state: dict[str, Any] = read_json(path / STATE)
        self.stored = _stored_tensors(path)

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
        with _quiet():
            load(dict(targets), storage_reader=_Reader(self.path), planner=_TensorPlanner(), no_dist=True)

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with ``prefix``, by the rest of their names, on the CPU."""
        tensors: dict[str, torch.Tensor] = {}
        for name, stored in self.stored.items():
            if name.startswith(prefix):
                tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.load_into(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


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
        try:
            raise_on_all_ranks(mesh, lambda path=path: _verify(path, mesh))  # type: ignore[misc]
        except PlscError:
            continue
        return path
    return None


def _verify(path: Path, mesh: Mesh) -> None:
    """Check this rank's share of the files against the manifest."""
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IntegrityError(f"{path / MANIFEST} is not a manifest of format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files or METADATA not in files:
        raise IntegrityError(f"{path / MANIFEST} does not list the checkpoint's files")
    names = sorted(files)[mesh.rank :: mesh.world_size]
    for name in names:
        entry = files[name]
        if Path(name).name != name or not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise IntegrityError(f"{path / MANIFEST} describes {name!r} wrongly")
    verify_files(path, {name: files[name] for name in names})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that it loads in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninit.*")
        yield


def _stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Read the stored tensors' entries in ``.metadata``; IntegrityError if it names anything but tensors and own files.

    The manifest's hashes show damage, not forgery: whoever writes a checkpoint writes them too. A checkpoint that came
    from elsewhere may therefore hold anything here. torch would unpickle a stored object that is no tensor without
    ``weights_only``, and would follow a path out of the folder.
    """
    metadata = _Reader(path).read_metadata()
    listed = read_json(path / MANIFEST)["files"]
    entries, locations = metadata.state_dict_metadata, metadata.storage_data
    if not (isinstance(entries, dict) and isinstance(locations, dict)):
        raise IntegrityError(f"{path / METADATA} is not a checkpoint's metadata")
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if others := entries.keys() - tensors.keys():
        raise IntegrityError(f"{path / METADATA} holds {others.pop()!r}, which is not a tensor; use another copy")
    for location in locations.values():
        file = getattr(location, "relative_path", None)
        if not isinstance(file, str) or file not in listed or Path(file).name != file:
            raise IntegrityError(f"{path / METADATA} names {file!r}, which is no file of the checkpoint")
    return tensors


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
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except _NOT_A_PICKLE as error:
            raise IntegrityError(f"{path} is not a checkpoint's metadata: {error}") from None
        if not isinstance(metadata, Metadata):
            raise IntegrityError(f"{path} is not a checkpoint's metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
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
