"""Keys of classes that come and go: which row of which shard holds the class of a 64-bit key, and names of keys.

A fixed table numbers its classes from 0 on. A table whose classes come and go knows them by keys, which stay while rows
move. Names hash to keys. The map holds name and key, so that two names of one hash get two keys.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plsc.errors import DataError, UsageError

Keys = NDArray[np.int64]
_NAME_BYTES = "utf-8", "surrogateescape"  # names of folders are any bytes


def name_key(name: str, attempt: int = 0) -> int:
    """Return a key from 0 to 2⁶³ - 1 for ``name``: of BLAKE2b; further attempts give others."""
    content = name.encode(*_NAME_BYTES)
    salt = attempt.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, salt=salt).digest(), "little") >> 1


class KeyMap:
    """The rows of all keys, the same on every rank. 28 bytes for each key, and its name where it has one.

    Several keys may share a class. A class is named by its shard and its number among the shard's classes.

    Attributes:
        keys: (n,) int64, sorted.
        shards: (n,) int32, of each.
        classes: (n,) int64, the number in its shard.
        seen: (n,) int64, the training step that had it last; -1 where nobody took note.
        waiting: samples so far of keys that are not admitted yet.
        names: of keys, whether they have a row or not.
    """

    def __init__(self) -> None:
        self.keys: Keys = np.empty(0, np.int64)
        self.shards: NDArray[np.int32] = np.empty(0, np.int32)
        self.classes: Keys = np.empty(0, np.int64)
        self.seen: Keys = np.empty(0, np.int64)
        self.waiting: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self._keys_of_names: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Keys) -> tuple[NDArray[np.int32], Keys]:
        """Return shards and classes of ``keys`` (any shape), -1 where a key has no row."""
        if not len(self.keys):
            return np.full(keys.shape, -1, np.int32), np.full(keys.shape, -1, np.int64)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        known = self.keys[place] == keys
        return np.where(known, self.shards[place], -1), np.where(known, self.classes[place], -1)

    def add(self, keys: Keys, shards: NDArray[np.int32], classes: Keys, step: int = -1) -> None:
        """Enter ``keys`` (m,), none of which is there, as seen in training step ``step``.

        Raises:
            UsageError: a key is there, or is given twice: the map would be one that :meth:`load_state` refuses.
        """
        distinct, counts = np.unique(keys, return_counts=True)
        taken = distinct[(counts > 1) | (self.find(distinct)[0] >= 0)]
        if len(taken):
            name = self.names.get(int(taken[0]), f"of the key {taken[0]}")
            raise UsageError(f"the class {name} is added twice, or has a row already; name each class once")
        order = np.argsort(keys)
        places = np.searchsorted(self.keys, keys[order])
        self.keys = np.insert(self.keys, places, keys[order])
        self.shards = np.insert(self.shards, places, shards[order])
        self.classes = np.insert(self.classes, places, classes[order])
        self.seen = np.insert(self.seen, places, step)
        for key in keys.tolist():
            self.waiting.pop(key, None)

    def admitted(self, keys: Keys, sightings: int) -> Keys:
        """Count samples' ``keys`` (m,) that have no row; returns those that were seen so often, without repeats."""
        distinct, counts = np.unique(keys, return_counts=True)
        if sightings <= 1:
            return distinct
        for key, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self.waiting[key] = self.waiting.get(key, 0) + count
        return distinct[[self.waiting[key] >= sightings for key in distinct.tolist()]]

    def see(self, keys: Keys, step: int) -> None:
        """Record that training step ``step`` had ``keys``, and those of which nobody took note before."""
        self.seen[np.isin(self.keys, keys) | (self.seen < 0)] = step

    def discard(self, keys: Keys) -> None:
        """Forget ``keys`` and their names."""
        self.leave(keys)
        for key in keys.tolist():
            self.waiting.pop(key, None)
            name = self.names.pop(key, None)
            if name is not None:
                del self._keys_of_names[name]

    def leave(self, keys: Keys) -> None:
        """Let ``keys`` have no row; their names stay."""
        stays = ~np.isin(self.keys, keys)
        self.keys, self.shards = self.keys[stays], self.shards[stays]
        self.classes, self.seen = self.classes[stays], self.seen[stays]

    def renamed(self, old: int, new: int) -> None:
        """Let ``new``, which is not there, take the place of ``old``; its name goes."""
        shards, classes = self.find(np.array([old]))
        self.discard(np.array([old]))
        self.add(np.array([new]), shards, classes)

    def moved(self, shard: int, sources: Keys, targets: Keys) -> None:
        """Record that a shard's classes ``sources`` (sorted) have become ``targets``."""
        hit = (self.shards == shard) & np.isin(self.classes, sources)
        self.classes[hit] = targets[np.searchsorted(sources, self.classes[hit])]

    def keys_of(self, names: Iterable[str]) -> Keys:
        """Return the keys of ``names`` (n,), and enter those that are new.

        A new name whose hash is another's key takes the next attempt's: none shares a key. Names are entered in their
        own order, so that every rank that is given the same ones, in whatever order, finds the same keys.
        """
        listed = list(names)
        for name in sorted(set(listed) - self._keys_of_names.keys()):
            attempt, key = 0, name_key(name)
            while key in self.names or self.find(np.array([key]))[0][0] >= 0:
                attempt += 1
                key = name_key(name, attempt)
            self.enter_names({key: name})
        return np.array([self._keys_of_names[name] for name in listed], np.int64)

    def known_keys(self, names: Iterable[str]) -> Keys:
        """Return the keys of those of ``names`` that were entered."""
        return np.array([self._keys_of_names[name] for name in names if name in self._keys_of_names], np.int64)

    def enter_names(self, names: Mapping[int, str]) -> None:
        """Enter names of keys."""
        self.names |= names
        self._keys_of_names |= {name: key for key, name in names.items()}

    def names_of_classes(self) -> list[list[str]]:
        """The names of each class of a map of one shard; a key's number where it has none."""
        names: list[list[str]] = [[] for _ in range(int(self.classes.max()) + 1 if len(self) else 0)]
        for key, place in zip(self.keys.tolist(), self.classes.tolist(), strict=True):
            names[place].append(self.names.get(key, str(key)))
        return names

    def state(self, firsts: Sequence[int]) -> dict[str, Tensor]:
        """The map as tensors for a checkpoint.

        Args:
            firsts: of each shard, the number of its first class among all.
        """
        named = sorted(self.names)
        texts = [self.names[key].encode(*_NAME_BYTES) for key in named]
        return {
            "keys": torch.from_numpy(self.keys.copy()),
            "classes": torch.from_numpy(np.asarray(firsts, np.int64)[self.shards] + self.classes),
            "seen": torch.from_numpy(self.seen.copy()),
            "waiting": torch.tensor(list(self.waiting.items()), dtype=torch.int64).view(-1, 2),
            "named_keys": torch.tensor(named, dtype=torch.int64),
            "name_ends": torch.tensor(np.cumsum([len(text) for text in texts]), dtype=torch.int64),
            "name_bytes": torch.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=torch.uint8),
        }

    def load_state(self, state: Mapping[str, Tensor], firsts: Sequence[int]) -> None:
        """Take what :meth:`state` gave, with the shards of this run.

        Raises:
            DataError: it is none.
        """
        keys, numbers, seen, ends, named = (  # checkpoints hold no empty tensors
            state[name].numpy().astype(np.int64) if name in state else np.empty(0, np.int64)
            for name in ("keys", "classes", "seen", "name_ends", "named_keys")
        )
        ends, text = np.concatenate([[0], ends]), state["name_bytes"].numpy().tobytes()
        is_sorted = all(bool((np.diff(each) > 0).all()) for each in (keys, named)) and bool((np.diff(ends) >= 0).all())
        is_fit = {len(keys), len(numbers), len(seen)} == {len(keys)} and len(ends) == len(named) + 1
        if not is_sorted or not is_fit or ends[-1] > len(text):
            raise DataError("these are no keys of a class table; use another copy")
        if (numbers < 0).any():
            raise DataError("keys of a class table have negative class numbers; use another copy")
        if len(numbers) and (numbers.max() >= len(numbers) or np.bincount(numbers).min() == 0):
            raise DataError("keys of a class table leave out class numbers; use another copy")
        self.keys, self.seen = keys, seen
        self.waiting = dict(state["waiting"].tolist()) if "waiting" in state else {}
        self.shards = (np.searchsorted(np.asarray(firsts), numbers, side="right") - 1).astype(np.int32)
        self.classes = numbers - np.asarray(firsts, np.int64)[self.shards]
        self.names, self._keys_of_names = {}, {}
        pieces = zip(named.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        self.enter_names({key: text[start:stop].decode(*_NAME_BYTES) for key, start, stop in pieces})
        if len(self._keys_of_names) < len(self.names):
            raise DataError("two keys of a class table have one name; use another copy")
