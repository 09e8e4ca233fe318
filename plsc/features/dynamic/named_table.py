"""The class table of a checkpoint whose classes are known by name, to be changed without ranks and written back.

A change passes through the memory of one process, with the whole checkpoint. The checkpoint takes the place of the one
that was read: it is never half of either. Rows stay dense, so that nothing of a removed class remains in it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.config import KeepConfig
from plsc.errors import IntegrityError, UsageError
from plsc.feature_config import keeper_of_tables
from plsc.features.dynamic.key_map import KeyMap, Keys
from plsc.files import read_json, write_json
from plsc.head.class_table import SMALLEST_NORM
from plsc.parallel import Mesh
from plsc.progress import note
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.byte_search import parts_of
from plsc.train.checkpoint import CHECKPOINTS, CheckpointFolder
from plsc.train.checkpoint_reader import StoredCheckpoint

_ALONE = Mesh(0, 1, 0, torch.device("cpu"))
_ALL = KeepConfig(last=10**9)
_REMOVED = ""  # in the place of a name in classes.json, where others keep their numbers


class NamedTable:
    """A table of the checkpoint ``path``, and all else that it holds, in memory.

    Args:
        path: the checkpoint's folder.
        table: its name, where the run has several.

    Attributes:
        key_map: the keys; all classes are of one shard.
        names: of the classes that have a row, sorted.
        in_files: its rows lie in the run's own files, and are not in memory: they stay as they are.

    Raises:
        UsageError: its classes are numbers of the data, and have no names; or there is no such table.
        IntegrityError, DataError: the checkpoint is corrupt.
    """

    def __init__(self, path: Path, table: str = "") -> None:
        self.path, prefix = path, f"{table}." if table else ""
        stored = StoredCheckpoint(path, _ALONE)
        self._step, self._state, self._tensors = stored.step, stored.state, stored.read("")
        self.in_files = keeper_of_tables(stored.state) is not None
        stored.value("config.head", dict)
        config = stored.state["config"]
        trees = [config, *(each for each in config.get("table", ()) if each.get("name") == table)]
        # keys of [dynamic] were of [head] in former versions
        sections = [tree.get(name, {}) for tree in trees for name in ("head", "dynamic")]
        self._head: dict[str, Any] = {name: value for section in sections for name, value in section.items()}
        self._keys_prefix, self._weight = f"keys.{prefix}", f"head.{prefix}weight"
        names = [self._weight, *(f"head_optimizer.{prefix}{name}" for name in _column_names(stored, prefix))]
        state = {name.removeprefix(self._keys_prefix): self._tensors[name] for name in self._key_names()}
        if "name_bytes" not in state:
            raise UsageError(
                f"{path} holds no table {table} whose classes have names: they are numbers of the data, which cannot "
                "change, unless a run has dynamic.max_classes"
            )
        self.key_map = KeyMap()
        self.key_map.load_state(state, [0])
        # checkpoints hold no empty tensors
        self._rows = {name: self._tensors[name] for name in names if name in self._tensors}
        count = int(self.key_map.classes.max()) + 1 if len(self.key_map) else 0
        self._centers = int(self._head["centers"])
        for name, rows in self._rows.items():
            if len(rows) != count * self._centers:
                raise IntegrityError(
                    f"{path} holds {len(rows):,} rows of {name} for {count:,} classes; use another copy"
                )

    @property
    def names(self) -> list[str]:
        """Of the classes that have a row, sorted."""
        return sorted(self.key_map.names.get(key, str(key)) for key in self.key_map.keys.tolist())

    @property
    def num_classes(self) -> int:
        """Classes that have a row; several names may share one."""
        return len(np.unique(self.key_map.classes))

    def columns(self) -> dict[str, Tensor]:
        """The weight and the optimizer's tables by their names, a row for each class and sub-centre; int8's scales."""
        return {name.rpartition(".")[2]: rows for name, rows in self._rows.items()}

    def check_names(self, names: Iterable[str]) -> None:
        """Raise UsageError for a name that the table does not know, with a row or without."""
        self._known_keys(names)

    def remove(self, names: Sequence[str]) -> None:
        """Remove the classes of ``names``; one that other names share stays theirs. Names without a row go too.

        Raises:
            UsageError: the table does not know a name; or its rows lie in files.
        """
        self._refuse_in_files()
        self._drop(self._known_keys(names))

    def merge(self, names: Sequence[str], into: str) -> None:
        """Let ``names`` be of the class ``into``; see :meth:`plsc.DynamicHead.merge`.

        Raises:
            UsageError: a name is none of the table, or all are ``into`` itself; or its rows lie in files.
        """
        self._refuse_in_files()
        keys, (target,) = self._keys_of([name for name in names if name != into]), self._keys_of([into])
        if not len(keys):
            raise UsageError(f"{into} is merged into itself alone; name the classes that are to become {into}")
        weight = self._by_class(self._weight)
        places = self.key_map.find(np.array([target, *keys]))[1]
        rows = weight[torch.from_numpy(places)].double()
        lengths = rows.norm(dim=2, keepdim=True).clamp(min=SMALLEST_NORM)
        mean = torch.nn.functional.normalize((rows / lengths).mean(0), dim=1) * lengths[0]
        weight[int(places[0])] = mean.to(weight.dtype)
        shared = {key: self.key_map.names[key] for key in keys.tolist()}
        self._drop(keys)
        (place,) = self.key_map.find(np.array([target]))[1]
        self.key_map.add(keys, np.zeros(len(keys), np.int32), np.full(len(keys), place))
        self.key_map.enter_names(shared)

    def split(self, name: str, into: Sequence[str]) -> None:
        """Make classes of the names ``into``, with the rows of ``name``; see :meth:`plsc.DynamicHead.split`.

        Raises:
            UsageError: ``name`` is none of the table, or one of ``into`` is of another class, is given twice or is
                empty; there is no room; or rows lie in files.
        """
        self._refuse_in_files()
        _check_names(into)
        (key,), new = self._keys_of([name]), self.key_map.keys_of(into)
        place = int(self.key_map.find(np.array([key]))[1][0])
        owners = self.key_map.find(new)[1]
        for other, owner in zip(into, owners.tolist(), strict=True):
            if other == name or owner not in (-1, place):
                raise UsageError(
                    f"{self.path} has a class {other} already; a class is split into others, or its own names"
                )
        self._refuse_beyond_room(len(new))
        self.key_map.leave(new)
        count = self.num_classes
        for column, rows in self._rows.items():
            copied = self._by_class(column)[place].repeat(len(new), *[1] * (rows.dim() - 1))
            self._rows[column] = torch.cat([rows, copied if column == self._weight else torch.zeros_like(copied)])
        self.key_map.add(new, np.zeros(len(new), np.int32), np.arange(count, count + len(new)))

    def rename(self, old: str, new: str) -> None:
        """Give the class ``old`` another name.

        Raises:
            UsageError: ``old`` is none of the table, or ``new`` is, or is empty.
        """
        _check_names([new])
        (key,), (other,) = self._keys_of([old]), self.key_map.keys_of([new])
        if self.key_map.find(np.array([other]))[0][0] >= 0:
            raise UsageError(f"{self.path} has a class {new} already; merge the two, or give another name")
        self.key_map.renamed(int(key), int(other))

    def add(self, source: "NamedTable", names: Sequence[str] | None = None) -> int:
        """Take rows of another table by name, with optimizer state of zeros; returns how many.

        Args:
            source: a table of the same width and sub-centres.
            names: of classes there; None: all that are missing here.

        Raises:
            UsageError: the tables do not fit, a name is none of ``source``, is one here or is given twice; or rows lie
                in files.
        """
        for table in (self, source):
            table._refuse_in_files()
            if not table.num_classes:
                raise UsageError(f"{table.path} has no class with a row yet; train it further first")
        mine, theirs = self._by_class(self._weight), source._by_class(source._weight)
        if mine.shape[1:] != theirs.shape[1:]:
            shapes = " and ".join("x".join(map(str, rows.shape[1:])) for rows in (theirs, mine))
            raise UsageError(f"rows of {source.path} and {self.path} are {shapes}: they need to be of one shape")
        have = set(self.names)
        wanted = [name for name in source.names if name not in have] if names is None else list(names)
        _check_names(wanted)
        if known := have.intersection(wanted):
            raise UsageError(f"{self.path} has a class {min(known)} already; remove it first, or leave it out")
        self._refuse_beyond_room(len(wanted))
        places = source.key_map.find(source._keys_of(wanted))[1]
        first = self.num_classes
        for name, rows in self._rows.items():
            new = theirs[torch.from_numpy(places)].reshape(-1, *rows.shape[1:]) if name == self._weight else None
            shape = (len(wanted) * self._centers, *rows.shape[1:])
            self._rows[name] = torch.cat([rows, torch.zeros(shape, dtype=rows.dtype) if new is None else new.to(rows)])
        keys = self.key_map.keys_of(wanted)
        self.key_map.add(keys, np.zeros(len(keys), np.int32), np.arange(first, first + len(keys)))
        return len(wanted)

    def save(self) -> None:
        """Write the checkpoint anew in its place. A signature of it goes: sign it again.

        Raises:
            DataError: it cannot be written; the former stays then.
        """
        keys = {self._keys_prefix + name: tensor for name, tensor in self.key_map.state([0]).items()}
        for name in keys:  # which may be of no elements now, and then have no place
            self._tensors.pop(name, None)
        folder = CheckpointFolder(self.path.parent, _ALONE, _ALL)
        checkpointer = AsyncCheckpointer(folder, note, background=False)
        try:
            checkpointer.save(self._step, {**self._tensors, **self._rows, **keys}, self._state)
        finally:
            checkpointer.close()

    def _drop(self, keys: Keys) -> None:
        count = self.num_classes
        self.key_map.discard(keys)
        stays = np.isin(np.arange(count), self.key_map.classes)
        self.key_map.classes = (np.cumsum(stays) - 1)[self.key_map.classes]
        kept = torch.from_numpy(np.repeat(stays, self._centers))
        self._rows = {name: rows[kept] for name, rows in self._rows.items()}

    @property
    def known_names(self) -> set[str]:
        """Of the classes that have a row, and of those that the data had and no batch has met."""
        return {*self.names, *self.key_map.names.values()}

    def _known_keys(self, names: Iterable[str]) -> Keys:
        return self._keys_of(names, {name: key for key, name in self.key_map.names.items()})

    def _keys_of(self, names: Iterable[str], others: Mapping[str, int] | None = None) -> Keys:
        """The keys of names that have a row, or are among ``others``."""
        rows = {self.key_map.names.get(key, str(key)): key for key in self.key_map.keys.tolist()}
        known = {**(others or {}), **rows}
        listed = list(dict.fromkeys(names))
        for name in listed:
            if name not in known:
                raise UsageError(f"{self.path} has no class {name}; plsc table info --names lists them")
        return np.array([known[name] for name in listed], np.int64)

    def _refuse_in_files(self) -> None:
        if self.in_files:
            raise UsageError(
                f"rows of {self.path} lie in files that the run alone changes: let dynamic.expire_after remove "
                "classes, or a script that trains"
            )

    def _refuse_beyond_room(self, more: int) -> None:
        most = int(self._head["max_classes"])
        if self.num_classes + more > most:
            raise UsageError(f"{more:,} classes do not fit beside {self.num_classes:,}: max_classes is {most:,}")

    def _by_class(self, name: str) -> Tensor:
        rows = self._rows[name]
        return rows.view(-1, self._centers, *rows.shape[1:])

    def _key_names(self) -> list[str]:
        prefix = self._keys_prefix
        return [name for name in self._tensors if name.startswith(prefix) and "." not in name.removeprefix(prefix)]


def _check_names(names: Sequence[str]) -> None:
    """UsageError unless ``names`` can be those of new classes, one each."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"the class {repeated[0]} is named twice; each name is of one class: name it once")
    if _REMOVED in names:
        raise UsageError("one of the names is empty; give each new class a name")


def _column_names(stored: StoredCheckpoint, prefix: str) -> list[str]:
    """The optimizer's tables, and the scales of their rows."""
    start = f"head_optimizer.{prefix}"
    return [
        name.removeprefix(start)
        for name in stored.stored
        if name.startswith(start) and "." not in name.removeprefix(start)
    ]


def forget_names(run: Path, names: Iterable[str]) -> None:
    """Take names out of the list of classes that a run's folder holds, where others keep their numbers."""
    path = run / "classes.json"
    if path.exists():
        content, gone = read_json(path), set(names)
        content["classes"] = [_REMOVED if name in gone else name for name in content["classes"]]
        write_json(path, content)


def find_names(
    paths: Sequence[Path], names: Sequence[str], files: Iterable[Path], table: str = ""
) -> list[tuple[Path, str]]:
    """Where names of classes still are: in the keys of checkpoints ``paths``, and as text in all other ``files``.

    Checkpoints' own files are no text: their keys say which names they hold.
    """
    found: list[tuple[Path, str]] = []
    if not names:
        return found
    for path in paths:
        known = set(NamedTable(path, table).key_map.names.values())
        found += [(path, name) for name in names if name in known]
    folders = {path.resolve() for path in paths}
    for file in (file for file in files if file.parent.resolve() not in folders):
        is_json = file.suffix in (".json", ".jsonl")  # where a name stands in quotes, and may be part of another's
        texts = {name: _texts(name, is_json) for name in names}
        longest = max(len(text) for each in texts.values() for text in each)
        there = {
            name
            for content in parts_of(file, longest)
            for name, each in texts.items()
            if any(text in content for text in each)
        }
        found += [(file, name) for name in names if name in there]
    return found


def _texts(name: str, is_json: bool) -> set[bytes]:
    texts = {f'"{name}"', json.dumps(name)} if is_json else {name}
    return {text.encode("utf-8", "surrogateescape") for text in texts}


def class_names(path: Path, table: str = "") -> list[list[str]] | None:
    """The names of each class of the table of a checkpoint; None where classes are numbers of the data."""
    prefix = f"keys.{table}." if table else "keys."
    state = StoredCheckpoint(path, _ALONE, prefixes=(prefix,)).read(prefix)
    if "name_bytes" not in state:
        return None
    keys = KeyMap()
    keys.load_state(state, [0])
    return keys.names_of_classes()


def other_copies(run: Path) -> list[Path]:
    """Folders of a run's checkpoints that a change does not reach: superseded ones, and what a killed writer left."""
    folder = run / CHECKPOINTS
    published = CheckpointFolder(folder, _ALONE).published()
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and path not in published]
