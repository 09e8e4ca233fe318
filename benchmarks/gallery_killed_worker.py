"""The process that benchmarks/gallery_durability.py kills: it works on a gallery with several threads, and tells of it.

What it is about to do, and what the store acknowledged, it sends into a pipe: ("tries" | "did", what, …), besides
("opened",), ("refused",) and ("failed", why).
"""

import contextlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gallery_moving_store import MovingStore
from gallery_repeated_writes import Putter, keyed_persons, once, send_once_more

from plsc.errors import ConflictError, NotFoundError, StorageError
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson

GALLERY, MODEL, DIM = "people", "a model", 64
SAME = 0.9999  # a cosine that only the vector itself has
FILLER = "filler"
KEY_FILE = "gallery.key"
MOVING = "moving"  # a file beside the store says that its collection moves between two models

Float32 = npt.NDArray[np.float32]


def vector(key: int) -> Float32:
    """The vector (DIM,) of a key: parent and child make the same."""
    return np.random.default_rng(key).standard_normal(DIM).astype(np.float32)


def vectors(keys: Sequence[int]) -> Float32:
    """The vectors (n, DIM) of keys."""
    return np.array([vector(key) for key in keys], dtype=np.float32).reshape(-1, DIM)


class Worker:
    """Works on the store until it is killed. Sends ("tries" | "did", what, …) before and after each change."""

    def __init__(self, folder: Path, pipe: Connection, seed: int, full_disk: bool) -> None:
        self._store, self._pipe, self._seed = opened(folder), pipe, seed
        self._filler = folder.parent / FILLER if full_disk else None
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._count = 0
        self._alive: dict[int, list[tuple[int, int]]] = {}  # person: faces and their keys, as this round enrolled them
        self._leaving: set[int] = set()  # persons of whom something was deleted
        self._putter = Putter(self._store, GALLERY, MODEL, vectors)
        self._send("opened")
        with contextlib.suppress(NotFoundError, StorageError):
            if GALLERY not in {about.name for about in self._store.collections()}:
                self._store.create_collection(GALLERY, DIM, MODEL)

    def run(self) -> None:
        """Start the threads; never returns."""
        jobs: list[Callable[[random.Random], None]] = [
            self._enrol,
            self._enrol_once,
            self._put,
            self._change,
            self._delete,
            self._search,
            self._upkeep,
        ]
        if self._filler is not None:
            jobs.append(self._fill)
        if isinstance(self._store, MovingStore):
            jobs.append(self._move)
        for index, job in enumerate(jobs):
            threading.Thread(target=self._forever, args=(job, random.Random(self._seed * 100 + index))).start()

    def _forever(self, job: Callable[[random.Random], None], chance: random.Random) -> None:
        while True:
            try:
                job(chance)
            except StorageError:
                self._send("refused")
                time.sleep(0.005)
            except NotFoundError:  # another thread deleted it, or a full disk hindered the collection
                time.sleep(0.001)
            except BaseException as error:
                self._send("failed", f"{type(error).__name__}: {error}")
                os._exit(1)

    def _send(self, *message: Any) -> None:
        with self._sending:
            self._pipe.send_bytes(json.dumps(message).encode())

    def _keys(self, count: int) -> list[int]:
        with self._counting:
            self._count += count
            return [self._seed * 10**6 + self._count - index for index in range(count)]

    def _enrol(self, chance: random.Random) -> None:
        keys = [self._keys(chance.randint(0, 3)) for _ in range(chance.choice([1, 1, 2, 40]))]
        lot = self._keys(1)[0]
        new = [
            NewPerson(
                np.array([vector(key) for key in of]).reshape(-1, DIM),
                None,
                {"keys": json.dumps(of), "lot": lot, "of": len(keys)},
            )
            for of in keys
        ]
        for person, of in zip(self._store.add_persons(GALLERY, new, MODEL), keys, strict=True):
            self._send("did", "enrol", person.id, list(zip(person.faces, of, strict=True)), lot, len(keys))
            self._alive[person.id] = list(zip(person.faces, of, strict=True))

    def _enrol_once(self, chance: random.Random) -> None:
        keys, lot = [self._keys(chance.randint(0, 3)) for _ in range(chance.choice([1, 1, 5]))], self._keys(1)[0]
        key = f"{self._seed}-{lot}"
        self._send("tries", "once", key, keys, lot)
        new = keyed_persons(keys, lot, key, vectors)
        persons = self._store.add_persons(GALLERY, new, MODEL, idempotent=once(key))
        for person, of in zip(persons, keys, strict=True):
            self._send("did", "enrol", person.id, list(zip(person.faces, of, strict=True)), lot, len(keys))
        self._send("did", "once", key)
        if chance.random() < 0.5:
            send_once_more(self._store, GALLERY, MODEL, new, key)

    def _put(self, chance: random.Random) -> None:
        self._putter.run(chance, self._keys(chance.randint(0, 3)), self._send)

    def _change(self, chance: random.Random) -> None:
        person = self._someone(chance)
        if chance.random() < 0.5:
            (key,) = self._keys(1)
            self._send("tries", "face", person, key)
            (face,) = self._store.add_faces(GALLERY, person, vector(key)[None], MODEL)
            self._send("did", "face", person, face, key)
        else:
            name = f"name {chance.random()}"
            self._send("tries", "name", person, name)
            self._store.update_person(GALLERY, person, name=name)
            self._send("did", "name", person, name)

    def _delete(self, chance: random.Random) -> None:
        time.sleep(0.002)
        person = self._someone(chance)
        faces = self._alive[person]  # nobody else takes anyone out
        if faces and chance.random() < 0.3:
            self._leaving.add(person)
            self._send("tries", "delete face", person, faces[0][0])
            self._store.delete_face(GALLERY, person, faces[0][0])
            self._send("did", "delete face", person, faces[0][0])
            del faces[0]
            return
        self._leaving.add(person)
        del self._alive[person]
        self._send("tries", "delete", person)
        self._store.delete_person(GALLERY, person)
        self._send("did", "delete", person)

    def _search(self, chance: random.Random) -> None:
        """Acknowledged is searchable at once: except where another thread deletes it meanwhile."""
        person = self._someone(chance)
        faces = list(self._alive.get(person, []))
        if not faces:
            return
        found = self._store.search(GALLERY, vector(faces[-1][1])[None], k=3)[0]
        if faces[-1] in self._alive.get(person, []) and person not in self._leaving:
            assert found, f"person {person} was acknowledged and is not found"
            assert found[0].person == person, f"person {person} was acknowledged and is not found"
            assert found[0].score > SAME, f"person {person} was acknowledged and is not found"

    def _upkeep(self, chance: random.Random) -> None:
        if chance.random() < 0.8:
            self._store.compact(GALLERY)
            return
        target = self._store.folder / "snapshots" / f"{self._seed}-{chance.randint(0, 10**9)}"
        self._store.snapshot(target)
        leaving = target.with_name(f".{target.name}")  # as the service does it: killed, it leaves no half of a snapshot
        target.rename(leaving)
        shutil.rmtree(leaving)

    def _fill(self, chance: random.Random) -> None:
        assert self._filler is not None
        fill(self._filler)
        time.sleep(chance.random() * 0.3)
        self._filler.unlink(missing_ok=True)
        time.sleep(chance.random() * 0.3)

    def _move(self, chance: random.Random) -> None:
        assert isinstance(self._store, MovingStore)
        with contextlib.suppress(ConflictError):  # another step was taken meanwhile
            self._send("moved", self._store.move(GALLERY, chance))

    def _someone(self, chance: random.Random) -> int:
        everyone = list(self._alive)
        if not everyone:
            raise NotFoundError("nobody yet")
        return chance.choice(everyone)


def opened(folder: Path) -> SqliteStore:
    """The store; an encrypted one has its key file beside it."""
    key_file, kind = folder.parent / KEY_FILE, SqliteStore
    if (folder.parent / MOVING).exists():
        kind = MovingStore
    return kind(folder, key_file=key_file if key_file.exists() else None)


def fill(path: Path) -> None:
    """Fill the disk to the last byte."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def child(folder: Path, pipe: Connection, seed: int, full_disk: bool) -> None:
    """Run a worker in the child process."""
    try:
        Worker(folder, pipe, seed, full_disk).run()
    except StorageError as error:  # no room to open it
        pipe.send_bytes(json.dumps(["refused", str(error)]).encode())
        time.sleep(60)
