"""Snapshots of a store: consistent copies taken while it works; plsc gallery restore restores them offline."""

import contextlib
import re
import shutil
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from plsc.errors import NotFoundError, UsageError
from plsc.files import make_private_folder, remove_leftovers, restrict, storage_errors
from plsc.gallery.store import Store
from plsc.gallery.values import IdempotentRequest

_ID = re.compile(r"\d{8}T\d{6}\d{6}Z")
_LEFTOVER = re.compile(r"\.\d{8}T\d{6}\d{6}Z\.(deleted|\d+\.tmp)")
_FORMAT = "%Y%m%dT%H%M%S%fZ"


class SnapshotView(BaseModel):
    """A consistent copy of the store."""

    id: str
    created: str  # ISO 8601, UTC
    bytes: int  # of all files


class Snapshots:
    """Snapshots of ``store``: folders in ``folder``, each named for its time; None where the service keeps none."""

    def __init__(self, store: Store, folder: Path | None) -> None:
        self._store, self._folder = store, folder
        self._lock = threading.Lock()
        if folder is not None and folder.is_dir():
            self._remove_leftovers(folder)
            restrict(*self._paths())

    def take(self, idempotent: IdempotentRequest | None = None) -> SnapshotView:
        """Take a snapshot; :class:`StorageError` if the store cannot write it.

        The answer to ``idempotent`` is the id alone, and is stored first: however this ends, :meth:`finish` knows it.
        """
        self._require_folder()
        with self._lock:
            name = datetime.now(UTC).strftime(_FORMAT)
            if idempotent is not None:
                self._store.store_answer(idempotent, name)
        return self.finish(name)

    def finish(self, name: str) -> SnapshotView:
        """Return the snapshot ``name``, an id that :meth:`take` chose; takes it if it is not there."""
        folder = self._require_folder()
        with self._lock:
            with storage_errors(folder):
                make_private_folder(folder)
            if not (folder / name).is_dir():
                self._store.snapshot(folder / name)
        return _describe(folder / name)

    def list(self) -> Sequence[SnapshotView]:
        """All snapshots, oldest first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):  # it is being deleted
                described = _describe(path)
                found += [described] if path.is_dir() else []
        return found

    def delete(self, name: str) -> None:
        """Delete one; :class:`NotFoundError` if there is none of this id."""
        try:
            found = next(path for path in self._paths() if path.name == name)  # a caller's text never becomes a path
            deleted = found.replace(found.with_name(f".{name}.deleted"))  # half a snapshot never stands under its name
        except (StopIteration, FileNotFoundError):  # the latter where another request was faster
            raise NotFoundError(f"there is no snapshot {ascii(name)[:80]}; GET /v1/snapshots lists them") from None
        shutil.rmtree(deleted)

    def _remove_leftovers(self, folder: Path) -> None:
        """Remove what a killed service was writing or deleting: unlisted, and with faces that were deleted since."""
        for path in folder.glob(".*"):
            if _LEFTOVER.fullmatch(path.name):
                if path.suffix == ".tmp":
                    remove_leftovers(path.with_name(path.name[1:].split(".")[0]))
                else:
                    shutil.rmtree(path)

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise UsageError("this service keeps no snapshots: its store has no folder; start it with --snapshots DIR")
        return self._folder

    def _paths(self) -> Sequence[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _ID.fullmatch(path.name) and path.is_dir())


def _describe(path: Path) -> SnapshotView:
    taken = datetime.strptime(path.name, _FORMAT).replace(tzinfo=UTC)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    created = taken.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return SnapshotView(id=path.name, created=created, bytes=size)
