"""Writing an embedding set shard by shard, each published whole, so that a killed writer can be resumed."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc import files
from plsc.embedding.columns import save_array, save_strings, string_files
from plsc.embedding.embedding_set import FORMAT, SHARD_FILES, SHARD_FORMAT, VERSION, EmbeddingSet, shard_name
from plsc.embedding.metadata import Metadata, save_metadata
from plsc.errors import DataError, IntegrityError, UsageError

DTYPES = ("float32", "float16")
SETTING_NAMES = {
    "contract_id": "the model (contract_id)",
    "data_id": "the data (data_id)",
    "rows": "a number of rows of",
}


@dataclass
class ShardRows:
    """The rows of one shard, from row ``start`` of the set on.

    Attributes:
        start: the first row.
        embeddings: (n, dim).
        ids, labels: (n,).
        keys: n strings.
        errors: {row of the set: error}.
        metadata: of each row; empty: of none.
        contents: what the pictures were, as :func:`plsc.data.identity.contents_id` says it; "" is not known.
    """

    start: int
    embeddings: npt.NDArray[Any]
    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    keys: Sequence[str]
    errors: dict[int, str] = field(default_factory=dict)
    metadata: Sequence[Metadata] = ()
    contents: str = ""


class SetWriter:
    """Writer of the embedding set ``folder``.

    Several processes may write the shards of one folder: one calls :meth:`begin`, all :meth:`publish`, one
    :meth:`finish`.

    Args:
        folder: of the set.
        settings: JSON-able, with at least "contract_id", "dim", "dtype", "rows" and "shard_rows"; written before the
            first shard. A folder begun with other settings is refused by the name of the first that differs.
        origin: where model and data lie; kept too, but may change between a run and its resumption.

    Raises:
        UsageError: a dtype that is not stored.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], origin: Mapping[str, Any] | None = None) -> None:
        if settings["dtype"] not in DTYPES:
            raise UsageError(f"no dtype {settings['dtype']!r} for embeddings; it is one of {', '.join(DTYPES)}")
        self.folder, self.settings, self.origin = folder, dict(settings), dict(origin or {})
        self._settings_digest = files.digest(self.settings)

    @property
    def shard_count(self) -> int:
        """Number of shards that the rows are cut into."""
        rows: int = self.settings["rows"]
        return -(-rows // int(self.settings["shard_rows"]))

    def shard_range(self, number: int) -> tuple[int, int]:
        """The rows [start, stop) of shard ``number``."""
        start = number * self.settings["shard_rows"]
        return start, min(start + self.settings["shard_rows"], self.settings["rows"])

    def begin(self, *, restart: bool = False) -> bool:
        """Begin the folder, or resume it; True if its set is already complete.

        Args:
            restart: empty a folder that was begun with other settings, instead of refusing it.

        Raises:
            UsageError: the folder cannot be written, or holds something else or a set of other settings.
        """
        files.make_folder(self.folder)
        if all(path.name.startswith(".") for path in self.folder.iterdir()):  # empty, or left by an early kill
            self._clear_leftovers()
            self._write(complete=False)
            return False
        try:
            found = files.read_manifest(self.folder, FORMAT, VERSION)
        except DataError:
            raise UsageError(f"{self.folder} is not empty and holds no embedding set; name another folder") from None
        other = next((name for name, wanted in self.settings.items() if found.get(name) != wanted), None)
        if other is not None and not restart:
            raise UsageError(
                f"{self.folder} was begun with {SETTING_NAMES.get(other, other)} {found.get(other)}, "
                f"and now it is {self.settings[other]}; name another folder, or give --overwrite to start anew"
            )
        if other is not None:
            _remove(self.folder.iterdir())  # the folder stays, with its lock
            self._write(complete=False)
            return False
        self._clear_leftovers()
        return bool(found["complete"])

    def reopen(self) -> None:
        """Let a complete set, of which shards are published anew, count as one that is not until :meth:`finish`."""
        self._write(complete=False)

    def published(self, number: int) -> str | None:
        """The ``contents`` of shard ``number``; None unless it is there, whole and of these settings.

        Reads and hashes it. Earlier versions noted no contents: they are "".
        """
        folder = self.folder / shard_name(number)
        try:
            manifest = files.read_manifest(folder, SHARD_FORMAT, VERSION)
            files.verify_files(folder, manifest["files"])
        except (DataError, IntegrityError):
            return None
        return str(manifest.get("contents", "")) if manifest["set"] == self._settings_digest else None

    def publish(self, number: int, rows: ShardRows) -> None:
        """Write a shard under a temporary name, then rename it: it appears whole or not at all."""
        tmp_path = self.folder / f".{shard_name(number)}.{os.getpid()}.tmp"
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        save_array(tmp_path / "embeddings.npy", rows.embeddings.astype(self.settings["dtype"], copy=False))
        save_array(tmp_path / "ids.npy", rows.ids.astype(np.int64, copy=False))
        save_array(tmp_path / "labels.npy", rows.labels.astype(np.int64, copy=False))
        save_strings(tmp_path, "keys", rows.keys)
        more = save_metadata(tmp_path, rows.metadata) if any(rows.metadata) else []
        lines = [json.dumps({"row": row, "error": text}) + "\n" for row, text in sorted(rows.errors.items())]
        (tmp_path / "errors.jsonl").write_text("".join(lines), encoding="utf-8")
        files.write_manifest(
            tmp_path,
            {
                "format": SHARD_FORMAT,
                "version": VERSION,
                "set": self._settings_digest,
                "start": rows.start,
                "rows": len(rows.ids),
                "errors": len(rows.errors),
                **({"contents": rows.contents} if rows.contents else {}),
                "files": files.describe_files(tmp_path, [*SHARD_FILES, *more]),
            },
        )
        files.atomic_replace_dir(tmp_path, self.folder / shard_name(number))

    def finish(self, class_names: Sequence[str]) -> EmbeddingSet:
        """Write the class names and the final manifest; :class:`DataError` if a shard is missing."""
        save_strings(self.folder, "class_names", class_names)
        shards = []
        for number in range(self.shard_count):
            folder = self.folder / shard_name(number)
            manifest = files.read_manifest(folder, SHARD_FORMAT, VERSION)
            shards.append({"name": folder.name, **{k: manifest[k] for k in ("start", "rows", "errors", "files")}})
        self._write(
            complete=True,
            errors=sum(shard["errors"] for shard in shards),
            classes=len(class_names),
            files=files.describe_files(self.folder, string_files("class_names")),
            shards=shards,
        )
        return EmbeddingSet(self.folder, own=True)

    def _write(self, *, complete: bool, **more: Any) -> None:
        head: files.Manifest = {"format": FORMAT, "version": VERSION, "complete": complete, "normalized": False}
        files.write_manifest(self.folder, {**head, **self.settings, **self.origin, **more})

    def _clear_leftovers(self) -> None:
        _remove([*self.folder.glob(".*.tmp"), *self.folder.glob(".write-test-*")])


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def sole_writer(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock ``folder`` for this process; if another is writing it, ``wait``, or raise :class:`UsageError`.

    The lock is on the folder itself, not on a file in it: nothing is left behind in a finished set, and the system
    releases it even after kill -9.
    """
    files.make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    except BlockingIOError:
        raise UsageError(f"{folder} is being written by another process; wait for it, or name another folder") from None
    finally:
        os.close(descriptor)


def write_embedding_set(
    folder: str | Path,
    embeddings: npt.NDArray[Any],
    *,
    contract_id: str,
    labels: npt.NDArray[np.int64] | None = None,
    class_names: Sequence[str] = (),
    keys: Sequence[str] | None = None,
    ids: npt.NDArray[np.int64] | None = None,
    errors: Mapping[int, str] | None = None,
    dtype: str = "float32",
    shard_rows: int = 32768,
    compatible_with: Sequence[str] = (),
) -> EmbeddingSet:
    """Write vectors in memory as an embedding set.

    Args:
        folder: of the set.
        embeddings: (N, D) float.
        contract_id: of the model and preprocessing that made them.
        labels: (N,) into ``class_names``; None: all -1.
        class_names: by label.
        keys: N strings; None: the row numbers.
        ids: (N,) unique int64; None: the row numbers.
        errors: {row: error} for rows without an embedding.
        dtype: "float32" or "float16", of what is stored.
        shard_rows: rows of a shard.
        compatible_with: contract ids of other models whose embeddings these may be compared with.

    Raises:
        UsageError: the shapes disagree, or the folder holds something else.
    """
    count, dim = embeddings.shape
    ids = np.arange(count, dtype=np.int64) if ids is None else ids
    labels = np.full(count, -1, dtype=np.int64) if labels is None else labels
    keys = [str(row) for row in range(count)] if keys is None else keys
    if not len(ids) == len(labels) == len(keys) == count:
        raise UsageError(f"{count} embeddings, {len(ids)} ids, {len(labels)} labels and {len(keys)} keys do not match")
    if count and (int(labels.min()) < -1 or int(labels.max()) >= len(class_names)):
        raise UsageError(f"labels reach {int(labels.max())}, and there are {len(class_names)} class names")
    if len(np.unique(ids)) != count:
        raise UsageError("the ids are not unique")
    about = {"contract_id": contract_id, "dim": dim, "dtype": dtype, "rows": count, "shard_rows": shard_rows}
    writer = SetWriter(Path(folder), about | ({"compatible_with": list(compatible_with)} if compatible_with else {}))
    with sole_writer(writer.folder):
        writer.begin()
        for number in range(writer.shard_count):
            start, stop = writer.shard_range(number)
            part = slice(start, stop)
            bad = {row: text for row, text in (errors or {}).items() if start <= row < stop}
            writer.publish(number, ShardRows(start, embeddings[part], ids[part], labels[part], keys[part], bad))
        return writer.finish(class_names)
