"""The folder of a run's checkpoints: they are published whole or not at all, and the keep policy removes them.

RUN/checkpoints/step-XXXXXXXX holds the tensors as torch.distributed.checkpoint stores them (.metadata, __R_0.distcp),
state.json with all that is small, and manifest.json with every file's size and SHA-256, the time, the mean accuracy,
and its own digest.
``latest`` names the newest. All ranks see one file system. :mod:`plsc.train.async_checkpoint` writes checkpoints while
training goes on, :mod:`plsc.train.checkpoint_reader` reads them on any other number of ranks.

What ``kill -9`` leaves, by the moment at which it comes:

1. while files are written, in the background or not: ``.step-XXXXXXXX.tmp``, which no reader looks at; the next start
   of the run removes it (:meth:`CheckpointFolder.clean`). The checkpoints before it are untouched.
2. once all ranks' files are synced to disk, while the main rank replaces RUN/model.safetensors: the same, and the
   weights of this step or of the one before.
3. while the folder is published: the same, or the checkpoint whole. The main rank has synced its own files, then one
   rename gives the folder its name (:func:`plsc.files.atomic_replace_dir`). Where the same step is written again, the
   former folder waits as ``.step-XXXXXXXX.former`` for that moment; killed right then, ``--resume auto`` takes the one
   before.
4. before ``latest`` is replaced: the checkpoint; resuming does not read ``latest``.
5. while others are removed (:func:`removable`): each is renamed to ``.step-XXXXXXXX.removed`` first, so that it is
   there whole or does not count; the next start removes the rest of it. The newest is never among them.

A full disk is an error until the rename of 3. is done, and the files are removed at once; from then on the checkpoint
counts, and what fails is reported.
"""

import contextlib
import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plsc.config import KeepConfig
from plsc.errors import DataError, PlscError, UsageError
from plsc.files import MANIFEST, atomic_replace_dir, atomic_write, describe_files, read_json, write_manifest
from plsc.parallel import Mesh
from plsc.parallel.collectives import barrier

FORMAT = 1
STATE = "state.json"
METADATA = ".metadata"  # torch's own: which tensor lies in which file
LATEST = "latest"
CHECKPOINTS = "checkpoints"  # of a run's folder
CLASSES = "classes.json"  # the names of the classes, by number
_ALONE = Mesh(0, 1, 0, torch.device("cpu"))
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVERS = (".*.tmp", ".*.former", ".*.removed")


@dataclass(frozen=True)
class Published:
    """A published checkpoint as the keep policy sees it.

    Attributes:
        path: the folder.
        saved_at: seconds since 1970.
        accuracy: the mean accuracy of the evaluation after its step; None without one.
    """

    path: Path
    saved_at: float
    accuracy: float | None


def removable(checkpoints: Sequence[Published], keep: KeepConfig) -> list[Published]:
    """Return the checkpoints, given oldest first, that no key of [checkpoint.keep] keeps.

    Of each period of ``every_hours`` the last one stays, so that the choice is the same whenever it is made.
    """
    kept = set(checkpoints[-keep.last :])
    if keep.every_hours:
        kept |= set({each.saved_at // (3600 * keep.every_hours): each for each in checkpoints}.values())
    ranked = [each for each in checkpoints if each.accuracy is not None]
    ranked.sort(key=lambda each: each.accuracy or 0.0, reverse=True)  # stable: of equal ones the earlier
    kept |= set(ranked[: keep.best])
    return [each for each in checkpoints if each not in kept]


class CheckpointFolder:
    """RUN/checkpoints: names, publishes, and removes what ``keep`` does not keep."""

    def __init__(self, folder: Path, mesh: Mesh, keep: KeepConfig | None = None) -> None:
        self.folder, self.mesh, self.keep = folder, mesh, keep or KeepConfig()
        self._known: dict[Path, Published] = {}

    def clean(self) -> None:
        """Remove what a killed writer left."""
        if self.mesh.is_main and self.folder.is_dir():
            for leftover in (path for pattern in _LEFTOVERS for path in self.folder.glob(pattern)):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        barrier(self.mesh)

    def prepare(self, step: int) -> Path:
        """Return the empty folder that the files of ``step`` are written into; the main rank makes it."""
        tmp_path = self._path(step).with_name(f".{self._path(step).name}.tmp")
        if self.mesh.is_main:
            shutil.rmtree(tmp_path, ignore_errors=True)
            tmp_path.mkdir(parents=True)
        return tmp_path

    def publish(
        self, tmp_path: Path, step: int, files: dict[str, dict[str, Any]], accuracy: float | None = None
    ) -> str | None:
        """Give a finished folder its name, and remove what the keep policy does not keep. The main rank calls.

        Args:
            tmp_path: of :meth:`prepare`; every file in it is synced to disk.
            step: its number.
            files: the ranks' files as the manifest describes them; the main rank's few others are added.
            accuracy: the mean accuracy of an evaluation after this step.

        Returns:
            What failed once the checkpoint was published, in words; None where nothing did.
        """
        files = {**files, **describe_files(tmp_path, [STATE, METADATA])}
        about = {"format": FORMAT, "saved_at": time.time(), "accuracy": accuracy}
        write_manifest(tmp_path, {**about, "files": files})
        atomic_replace_dir(tmp_path, self._path(step))
        self._known.pop(self._path(step), None)
        try:
            with atomic_write(self.folder / LATEST) as latest:
                latest.write_text(self._path(step).name + "\n", encoding="utf-8")
            self._remove_surplus()
        except OSError as error:
            return f"{error.filename or self.folder}: {error.strerror or error}"
        except PlscError as error:
            return str(error)
        return None

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

    def _remove_surplus(self) -> None:
        for each in removable([self._described(path) for path in self.published()], self.keep):
            removed = each.path.with_name(f".{each.path.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            each.path.rename(removed)  # first: half of a folder must not count as published
            shutil.rmtree(removed)

    def _described(self, path: Path) -> Published:
        if path not in self._known:
            self._known[path] = describe_published(path)
        return self._known[path]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name; UsageError for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UsageError(f"{path} is no checkpoint; its folder would be named step-00001000")
    return int(match[1])


def describe_published(path: Path) -> Published:
    """Read when a published checkpoint was saved, and its accuracy; one of an older version has the file's time."""
    saved_at, accuracy = None, None
    with contextlib.suppress(DataError):  # one that is damaged is removed in its turn
        manifest = read_json(path / MANIFEST)
        if isinstance(manifest, dict):
            saved_at, accuracy = _number(manifest.get("saved_at")), _number(manifest.get("accuracy"))
    return Published(path, (path / MANIFEST).stat().st_mtime if saved_at is None else saved_at, accuracy)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints that ``path`` names, oldest first: a checkpoint's folder, a run's, or RUN/checkpoints.

    Raises:
        UsageError: there is none.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is no folder; name a checkpoint, a run, or its {CHECKPOINTS} folder")
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return [path]
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if published := CheckpointFolder(folder, _ALONE).published():
        return published
    raise UsageError(f"{path} holds no finished checkpoint; name a checkpoint, a run, or its {CHECKPOINTS} folder")


def listed_names(checkpoint: Path) -> Path:
    """The file that lists the names of a checkpoint's classes: its run's, or the one beside a copy without its run."""
    folder = checkpoint.absolute().parent
    return (folder.parent if folder.name == CHECKPOINTS else folder) / CLASSES
