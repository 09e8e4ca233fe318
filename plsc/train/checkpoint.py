"""Checkpoints: written by any number of ranks, read by any other; published whole or not at all.

RUN/checkpoints/step-XXXXXXXX holds the tensors as torch.distributed.checkpoint stores them (.metadata, __R_0.distcp),
state.json with all that is small, and manifest.json with every file's size and SHA-256. ``latest`` names the newest.
All ranks see one file system. :mod:`plsc.train.async_checkpoint` writes them while training goes on.

What ``kill -9`` leaves, by the moment at which it comes:

- while files are written, in the background or not: ``.step-XXXXXXXX.tmp``, which no reader looks at; the next start of
  the run removes it (:meth:`CheckpointFolder.clean`). The checkpoints before it are untouched.
- while the folder is published: the same, or the checkpoint whole. Every rank has synced its files to disk, and the
  main rank its own, then one rename gives the folder its name (:func:`plsc.files.atomic_replace_dir`). Where the same
  step is written again, the former folder waits as ``.step-XXXXXXXX.former`` for that moment; killed right then,
  ``--resume auto`` takes the one before.
- after that: the checkpoint, with ``latest`` perhaps still naming the one before (resuming does not read it), or
  with checkpoints beyond ``keep`` not removed, or half removed: those have no manifest.json and do not count.

Resuming checks every byte against the manifest first. The hashes find damage, not forgery: see _stored_tensors.
"""

import contextlib
import io
import pickle
import re
import shutil
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
from plsc.files import (
    MANIFEST,
    atomic_replace_dir,
    atomic_write,
    describe_files,
    read_json,
    verify_files,
    write_json,
)
from plsc.parallel import Mesh
from plsc.parallel.collectives import barrier, broadcast_object
from plsc.train.failures import raise_on_all_ranks

FORMAT = 1
STATE = "state.json"
METADATA = ".metadata"  # torch's own: which tensor lies in which file
LATEST = "latest"
_NOT_A_PICKLE = (pickle.UnpicklingError, EOFError, AttributeError, TypeError, LookupError, ValueError)
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointFolder:
    """RUN/checkpoints: names, publishes, and keeps the newest ``keep``."""

    def __init__(self, folder: Path, mesh: Mesh, keep: int) -> None:
        self.folder, self.mesh, self.keep = folder, mesh, keep

    def clean(self) -> None:
        """Remove what a killed writer left."""
        if self.mesh.is_main and self.folder.is_dir():
            for leftover in (*self.folder.glob(".*.tmp"), *self.folder.glob(".*.former")):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        barrier(self.mesh)

    def prepare(self, step: int) -> Path:
        """Return the empty folder that the files of ``step`` are written into; the main rank makes it."""
        tmp_path = self._path(step).with_name(f".{self._path(step).name}.tmp")
        if self.mesh.is_main:
            shutil.rmtree(tmp_path, ignore_errors=True)
            tmp_path.mkdir(parents=True)
        return tmp_path

    def publish(self, tmp_path: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
        """Give a finished folder its name, and remove the oldest beyond ``keep``. The main rank calls.

        Args:
            tmp_path: of :meth:`prepare`; every file in it is synced to disk.
            step: its number.
            files: the ranks' files as the manifest describes them; the main rank's few others are added.
        """
        files = {**files, **describe_files(tmp_path, [STATE, METADATA])}
        write_json(tmp_path / MANIFEST, {"format": FORMAT, "files": files})
        atomic_replace_dir(tmp_path, self._path(step))
        with atomic_write(self.folder / LATEST) as latest:
            latest.write_text(self._path(step).name + "\n", encoding="utf-8")
        for old in self.published()[: -self.keep]:
            (old / MANIFEST).unlink()  # first: half of a folder must not count as published
            shutil.rmtree(old)

    def published(self) -> list[Path]:
        """Return the published checkpoints, oldest first."""
        found = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted((path for path in found if (path / MANIFEST).is_file()), key=step_of)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps: the run goes on from ``step`` and will write its own."""
        later = [path for path in self.published() if step_of(path) > step]
        if self.mesh.is_main:
            for path in later:
                tmp_path = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(tmp_path, ignore_errors=True)
                path.rename(tmp_path)
        barrier(self.mesh)
        return later

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


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


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name; UsageError for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UsageError(f"{path} is no checkpoint; its folder would be named step-00001000")
    return int(match[1])


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
        older = [p for p in CheckpointFolder(path.parent, mesh, 1).published() if step_of(p) < step_of(path)]
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
