"""The class table of a checkpoint and its optimizer's tables without ranks, read by rows, in pieces of 64 MiB.

A table may be larger than the memory: whoever copies it reads one stored piece after another. A table whose rows a
feature keeps is read there, as it was at the checkpoint; nothing is changed, and the run may be training.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plsc.embedding.columns import write_npy_header
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.feature_config import FEATURES, RowsOutside, keeper_of_tables, section_class
from plsc.files import atomic_write, write_json
from plsc.head.low_precision import scale_name
from plsc.parallel import Mesh
from plsc.parallel.tensor_shard import TensorShard
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.checkpoint_writer import write_errors

WEIGHT = "weight"
_ALONE = Mesh(0, 1, 0, torch.device("cpu"))
_PIECE_BYTES = 64 << 20


class Read(Protocol):
    """Reads rows [start, stop) of a column."""

    def __call__(self, column: str, start: int, stop: int) -> Tensor:
        """The rows, as they are stored."""


@dataclass(frozen=True)
class Column:
    """What a table holds for each row: values of ``dtype``, of ``shape`` (rows, D), or (rows,), in ``files``.

    ``bounds`` are the rows by which it is cut into pieces, 0 and the last one's end included.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    files: tuple[str, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class StoredTable:
    """A class table of ``classes`` x ``centers`` rows of ``dim``, as it was after ``step``.

    Attributes:
        path: the checkpoint.
        name: the table's, empty where the run has a single one.
        columns: ``weight``, and the optimizer's tables by their names; scales of int8 rows end in ``_scale``.
        in_files: it lies in files beside the checkpoint, of which the weights alone are read.
        read: reads rows of a column as they are stored.
    """

    path: Path
    name: str
    step: int
    classes: int
    centers: int
    dim: int
    margin: str
    columns: dict[str, Column]
    in_files: bool
    read: Read

    @property
    def rows(self) -> int:
        """Classes x sub-centres."""
        return self.classes * self.centers

    @property
    def state(self) -> dict[str, Column]:
        """The optimizer's tables (rows, D)."""
        return {name: each for name, each in self.columns.items() if name != WEIGHT and len(each.shape) == 2}

    def pieces(self, column: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Bounds of pieces that make up rows [start, stop), all if not given."""
        stop = self.rows if stop is None else stop
        for first, end in pairwise(self.columns[column].bounds):
            if max(first, start) < min(end, stop):
                yield max(first, start), min(end, stop)

    def floats(self, column: str, start: int, stop: int) -> Tensor:
        """Rows of a column (rows, D) in float32; int8 rows times their scales."""
        values = self.read(column, start, stop).float()
        if (scale := scale_name(column)) in self.columns:
            values.mul_(self.read(scale, start, stop).float()[:, None])
        return values

    def rows_of(self, first: int, stop: int) -> Tensor:
        """Weights of the classes [first, stop) in float32, (stop - first, centers, dim)."""
        return self.floats(WEIGHT, first * self.centers, stop * self.centers).view(-1, self.centers, self.dim)


@contextmanager
def open_table(path: Path, name: str = "", *, state: bool = True, scratch: Path | None = None) -> Iterator[StoredTable]:
    """Open a class table; its files, and no others, are checked against the manifest.

    Args:
        path: the checkpoint.
        name: of the table, where the run has several. Its classes are numbered from 0.
        state: the optimizer's tables too.
        scratch: a folder for the rows of a table in files, as they were at the checkpoint; they take as many
            bytes as the table in float32, until the block ends. None: that of the system's temporary files.

    Raises:
        UsageError: there is no table of that name; or several, and none is named; or no class has come into it yet.
        DataError: the checkpoint holds no class table, or its files are not there.
        IntegrityError: the checkpoint, or one of these files, is corrupt.
    """
    of_table = f"{name}." if name else ""
    weight, prefix = f"head.{of_table}{WEIGHT}", f"head_optimizer.{of_table}"
    counts = f"keys.{of_table}counts"
    stored = StoredCheckpoint(path, _ALONE, prefixes=(weight, counts, prefix) if state else (weight, counts))
    tables = {each["name"]: each for each in described_tables(stored)}
    if name not in (tables or [""]):
        names = ", ".join(tables) or "none, as it has a single one"
        raise UsageError(f"{path} has the class tables {names}; name one by --table")
    centers = max(stored.value("config.head.centers", int), 1)
    outside = _rows_outside(stored, counts, centers)
    rows, dim = _stored_size(stored, weight) if outside is None else (outside.rows, outside.dim)
    classes = tables[name]["classes"] if name else rows // centers
    is_named = any(key.startswith(f"keys.{of_table}") for key in stored.stored)
    if is_named and not rows:
        raise UsageError(f"{path} has no class with a row yet; train it further first")
    if classes < 1 or rows % classes or not (name or is_named or classes == stored.value("data.classes", int)):
        raise DataError(f"{path} holds no table of its {stored.value('data.classes', int):,} classes")
    margin = tables[name]["margin"] if name else stored.value("config.head.margin", str)
    make = partial(StoredTable, path, name, stored.step, classes, rows // classes, dim, margin)
    if outside is None:
        keys = {WEIGHT: weight} | (_state_keys(stored, prefix, rows, dim) if state else {})
        yield make(_stored_columns(stored, keys), False, partial(_read_stored, stored, keys))
        return
    size = max(_PIECE_BYTES // (4 * max(dim, 1)), 1)
    bounds = tuple(min(number * size, rows) for number in range(math.ceil(rows / size) + 1))
    columns = {WEIGHT: Column(outside.dtype, (rows, dim), outside.files, bounds)}
    with write_errors(f"into {scratch or tempfile.gettempdir()}"), tempfile.TemporaryFile(dir=scratch) as file:
        file.truncate(rows * dim * 4)
        centres = np.memmap(file, np.float32, "r+", 0, (rows, dim))
        outside.copy_into(centres)
        yield make(columns, True, lambda column, start, stop: torch.from_numpy(centres[start:stop].copy()))


def write_centres(path: Path, out: Path, table: str = "") -> dict[str, Any]:
    """Write the class table as a float32 array (C, D), or (C, K, D) where classes have K sub-centres, into ``out``.

    Rows are as trained, not normalised; class numbers are those of RUN/classes.json, but of classes that are known by
    name (:func:`write_class_names`).

    Args:
        path: the checkpoint.
        out: a .npy file.
        table: the name of the class table, where the run has several.

    Raises:
        PlscError: as :func:`open_table`; or ``out`` cannot be written.
    """
    with open_table(path, table, state=False, scratch=out.absolute().parent) as opened:
        centers = [opened.centers] if opened.centers > 1 else []
        shape = [opened.classes, *centers, opened.dim]
        with write_errors(str(out)), atomic_write(out) as tmp_path, tmp_path.open("wb") as file:
            write_npy_header(file, shape)
            for start, stop in opened.pieces(WEIGHT):
                file.write(opened.floats(WEIGHT, start, stop).numpy().data.cast("B"))
    return {"file": str(out), "shape": shape}


def write_class_names(path: Path, out: Path, table: str = "") -> Path | None:
    """Write which names each class of a table has that knows them by name: OUT.json beside the rows ``out``.

    Args:
        path: the checkpoint.
        out: the file that holds the rows.
        table: the name of the class table, where the run has several.

    Returns:
        The file, ``{"classes": [[name, …], …]}`` in the order of the rows; None where classes are numbers of the data.
    """
    if (names := class_names(path, table)) is None:
        return None
    write_json(out.with_suffix(".json"), {"classes": names})
    return out.with_suffix(".json")


def class_names(path: Path, table: str = "") -> list[list[str]] | None:
    """The names of each class of the table of a checkpoint; None where classes are numbers of the data."""
    found = (section_class(name).class_names(path, table) for name in FEATURES)
    return next((names for names in found if names is not None), None)


def described_tables(stored: StoredCheckpoint) -> list[dict[str, Any]]:
    """What a checkpoint holds of each of several class tables; IntegrityError where its configuration is none."""
    head, found = stored.value("config.head", dict), []
    for tree in stored.state["config"].get("table", []):
        own = (
            {**head, **tree.get("head", {})}
            if isinstance(tree, dict) and isinstance(tree.get("head", {}), dict)
            else {}
        )
        if not isinstance(name := tree.get("name") if own else None, str) or not isinstance(own.get("centers"), int):
            raise IntegrityError(f"{stored.path} names no class tables; it is the checkpoint of another program")
        key = f"head.{name}.{WEIGHT}"
        found.append(
            {
                "name": name,
                "classes": _stored_size(stored, key)[0] // max(own["centers"], 1),
                "margin": str(own.get("margin")),
                "weight_dtype": next(iter(stored_dtypes(stored, key).values()), None),
                "state_dtypes": stored_dtypes(stored, f"head_optimizer.{name}."),
            }
        )
    return found


def stored_dtypes(stored: StoredCheckpoint, prefix: str) -> dict[str, str]:
    """The types of the tables under ``prefix``, without the scales of int8 rows."""
    found = {name: entry for name, entry in stored.stored.items() if name.startswith(prefix) and len(entry.size) == 2}
    return {
        name.removeprefix(prefix): str(entry.properties.dtype).removeprefix("torch.") for name, entry in found.items()
    }


def _stored_size(stored: StoredCheckpoint, key: str) -> tuple[int, int]:
    """(Rows, D) of the class table ``key`` in the checkpoint; (0, 0) without one."""
    entry = stored.stored.get(key)
    return (entry.size[0], entry.size[1]) if entry is not None and len(entry.size) == 2 else (0, 0)


def _state_keys(stored: StoredCheckpoint, prefix: str, rows: int, dim: int) -> dict[str, str]:
    """The optimizer's tables of these rows, by their names."""
    shapes = ((rows, dim), (rows,))
    found = {key.removeprefix(prefix): key for key in stored.stored if key.startswith(prefix)}
    return {name: key for name, key in found.items() if tuple(stored.stored[key].size) in shapes}


def _stored_columns(stored: StoredCheckpoint, keys: dict[str, str]) -> dict[str, Column]:
    columns = {}
    for name, key in keys.items():
        entry, files = stored.stored[key], tuple(stored.files_of(key))
        cuts = {bound for chunk in entry.chunks for bound in (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])}
        columns[name] = Column(entry.properties.dtype, tuple(entry.size), files, tuple(sorted(cuts)))
    return columns


def _read_stored(stored: StoredCheckpoint, keys: dict[str, str], column: str, start: int, stop: int) -> Tensor:
    entry = stored.stored[keys[column]]
    rows = torch.empty(stop - start, *entry.size[1:], dtype=entry.properties.dtype)
    stored.load_into({keys[column]: TensorShard.of_rows(rows, start, entry.size[0])})
    return rows


def _rows_outside(stored: StoredCheckpoint, counts: str, centers: int) -> RowsOutside | None:
    """The rows that a feature keeps; ``counts`` names the classes of each shard, where it has rows in reserve."""
    if (kept := keeper_of_tables(stored.state)) is None:
        return None
    section, state = kept
    found = stored.read(counts).get("")
    used = None if found is None else [count * centers for count in found.long().reshape(-1).tolist()]
    return section.open_rows(stored, state, used)
