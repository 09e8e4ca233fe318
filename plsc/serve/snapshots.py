"""Snapshots of a store: consistent copies taken while it works; plsc gallery restore restores them offline."""

import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from plsc.errors import NotFoundError, UsageError
from plsc.files import make_folder
from plsc.gallery.store import Store

_ID = re.compile(r"\d{8}T\d{6}\d{6}Z")
_FORMAT = "%Y%m%dT%H%M%S%fZ"


@dataclass(frozen=True)
class Snapshot:
    """A consistent copy of the store: ``created`` in ISO 8601, UTC; ``bytes`` of all files."""

    id: str
    created: str
    bytes: int


class Snapshots:
    """Snapshots of ``store``: folders in ``folder``, each named for its time; None where the service keeps none."""

    def __init__(self, store: Store, folder: Path | None) -> None:
        self._store, self._folder = store, folder
        self._lock = threading.Lock()

    def take(self) -> Snapshot:
        """Take a snapshot; :class:`StorageError` if the store cannot write it."""
        folder = make_folder(self._require_folder())
        with self._lock:
            name = datetime.now(UTC).strftime(_FORMAT)
            self._store.snapshot(folder / name)
        return _describe(folder / name)

    def list(self) -> Sequence[Snapshot]:
        """All snapshots, oldest first."""
        return [] if self._folder is None else [_describe(path) for path in self._paths()]

    def delete(self, name: str) -> None:
        """Delete one; :class:`NotFoundError` if there is none of this id."""
        found = [path for path in self._paths() if path.name == name]  # a caller's text never becomes a path
        if not found:
            raise NotFoundError(f"there is no snapshot {ascii(name)[:80]}; GET /v1/snapshots lists them")
        tmp_path = found[0].with_name(f".{found[0].name}.deleted")
        found[0].replace(tmp_path)  # half a snapshot never stands under its name
        shutil.rmtree(tmp_path)

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise UsageError("this service keeps no snapshots: its store has no folder; start it with --snapshots DIR")
        return self._folder

    def _paths(self) -> Sequence[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _ID.fullmatch(path.name) and path.is_dir())


def _describe(path: Path) -> Snapshot:
    taken = datetime.strptime(path.name, _FORMAT).replace(tzinfo=UTC)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Snapshot(path.name, taken.isoformat(timespec="milliseconds").replace("+00:00", "Z"), size)
