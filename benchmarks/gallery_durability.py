"""Kill a gallery's process at random moments, again and again, and see whether it kept its word.

    python benchmarks/gallery_durability.py --rounds 100
    python benchmarks/gallery_durability.py --rounds 100 --full-disk      (mounts a small tmpfs: needs root)

In each round a child opens the store and works on it with several threads: it enrols, adds faces, renames, deletes,
searches, compacts and takes snapshots. What the store acknowledged it writes into a pipe. The parent ends it by
SIGKILL, opens the store, and compares it with the acknowledgements of all rounds so far: each write that was
acknowledged is there and found by search, nothing whose deletion was acknowledged is found, a lot of persons is there
whole or not at all, every row and file passes the store's own check. From time to time it compacts, and looks for the
bytes of deleted vectors in every file. With --full-disk the disk has no room left for part of each round, and during
every other opening: then writes may be refused (StorageError), and nothing else may differ.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from results_file import add_row

from plsc.errors import NotFoundError, StorageError
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.store import NewPerson, Person

GALLERY, MODEL, DIM = "people", "a model", 64
SAME = 0.9999  # a cosine that only the vector itself has
FILLER = "filler"
DISK_MEGABYTES = 48
LOOKED_FOR = 2000  # deleted vectors
CROWDED = 4000  # persons: half of them are deleted then

Float32 = npt.NDArray[np.float32]


def vector(key: int) -> Float32:
    """The vector (DIM,) of a key: parent and child make the same."""
    return np.random.default_rng(key).standard_normal(DIM).astype(np.float32)


# --- the child ---


class Worker:
    """Works on the store until it is killed. Sends ("tries" | "did", what, …) before and after each change."""

    def __init__(self, folder: Path, pipe: Connection, seed: int, full_disk: bool) -> None:
        self._store, self._pipe, self._seed = SqliteStore(folder), pipe, seed
        self._filler = folder.parent / FILLER if full_disk else None
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._count = 0
        self._alive: dict[int, list[tuple[int, int]]] = {}  # person: faces and their keys, as this round enrolled them
        self._leaving: set[int] = set()  # persons of whom something was deleted
        self._send("opened")
        with contextlib.suppress(NotFoundError, StorageError):
            if GALLERY not in {about.name for about in self._store.collections()}:
                self._store.create_collection(GALLERY, DIM, MODEL)

    def run(self) -> None:
        """Start the threads; never returns."""
        jobs: list[Callable[[random.Random], None]] = [
            self._enrol,
            self._enrol,
            self._change,
            self._delete,
            self._search,
            self._upkeep,
        ]
        if self._filler is not None:
            jobs.append(self._fill)
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
            self._send("did", "enrol", person.id, list(zip(person.faces, of, strict=True)))
            self._alive[person.id] = list(zip(person.faces, of, strict=True))

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
        shutil.rmtree(target)

    def _fill(self, chance: random.Random) -> None:
        assert self._filler is not None
        fill(self._filler)
        time.sleep(chance.random() * 0.3)
        self._filler.unlink(missing_ok=True)
        time.sleep(chance.random() * 0.3)

    def _someone(self, chance: random.Random) -> int:
        everyone = list(self._alive)
        if not everyone:
            raise NotFoundError("nobody yet")
        return chance.choice(everyone)


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


# --- the parent ---


@dataclass
class Known:
    """The acknowledged state of a person, and the changes tried last without an answer."""

    faces: dict[int, int]  # face: key
    name: str | None = None
    tried_names: set[str] = field(default_factory=set)
    tried_faces: set[int] = field(default_factory=set)  # keys
    tried_deletions: set[int] = field(default_factory=set)  # faces
    tried_delete: bool = False


class Ledger:
    """The acknowledgements of all rounds."""

    def __init__(self) -> None:
        self.persons: dict[int, Known] = {}
        self.gone_persons: dict[int, Known] = {}
        self.gone_faces: dict[int, int] = {}  # face: key
        self.figures = dict.fromkeys(("acknowledged", "refused", "opened", "unanswered"), 0)
        self._early: dict[int, list[list[Any]]] = {}

    def note(self, message: list[Any]) -> None:
        """Take a message of the child."""
        sort, *rest = message
        if sort == "failed":
            raise SystemExit(f"the child failed: {rest[0]}")
        if sort in ("refused", "opened"):
            self.figures[sort] += 1
            return
        self.figures["acknowledged"] += sort == "did"
        self._apply(sort == "did", *rest)

    def _apply(self, done: bool, what: str, person: int, *rest: Any) -> None:
        if what == "enrol":
            self.persons[person] = Known(dict(rest[0]))
            return
        if person not in self.persons:
            return  # its deletion was acknowledged before this was
        known = self.persons[person]
        if what == "face":
            self._face(done, known, *rest)
        elif what == "name":
            known.tried_names = set() if done else {*known.tried_names, rest[0]}
            known.name = rest[0] if done else known.name
        elif what == "delete face":
            known.tried_deletions.add(rest[0])
            if done:
                self.gone_faces[rest[0]] = known.faces.pop(rest[0])
        else:
            known.tried_delete = True
            if done:
                self.gone_persons[person] = self.persons.pop(person)
                self.gone_faces.update(self.gone_persons[person].faces)

    def _face(self, done: bool, known: Known, *rest: Any) -> None:
        if done:
            known.faces[rest[0]] = rest[1]
            known.tried_faces.discard(rest[1])
        else:
            known.tried_faces.add(rest[0])


def verify(store: SqliteStore, ledger: Ledger) -> None:
    """Compare the store with the acknowledgements, and take over what was done without one."""
    found = {person.id: person for person in everyone(store)}
    for person, known in list(ledger.persons.items()):
        if person not in found:
            assert known.tried_delete, f"person {person} was acknowledged and is not there"
            ledger.gone_persons[person] = ledger.persons.pop(person)
            ledger.gone_faces.update(known.faces)
            ledger.figures["unanswered"] += 1
        else:
            verify_person(store, found[person], known, ledger)
    for person in found.keys() & ledger.gone_persons.keys():
        raise AssertionError(f"the deletion of person {person} was acknowledged and it is there")
    take_over(ledger, [person for id, person in found.items() if id not in ledger.persons])
    verify_searches(store, ledger)


def verify_person(store: SqliteStore, person: Person, known: Known, ledger: Ledger) -> None:
    """A person is as acknowledged, or as something tried would have made it."""
    assert person.name == known.name or person.name in known.tried_names, f"the name of person {person.id} is another"
    vectors = store.vectors(GALLERY, person.id)
    keys = {face: nearest_key(row, known) for face, row in zip(person.faces, vectors, strict=True)}
    for face, key in known.faces.items():
        assert keys.get(face, key) == key, f"face {face} has another vector"
        if face not in keys:
            assert face in known.tried_deletions, f"face {face} was acknowledged and is not there"
            ledger.gone_faces[face] = key
    for face in keys.keys() - known.faces.keys():
        assert keys[face] in known.tried_faces, f"person {person.id} has face {face}, which nobody enrolled"
    changed = (keys, person.name) != (known.faces, known.name)
    ledger.figures["unanswered"] += changed
    ledger.persons[person.id] = Known(keys, person.name)


def nearest_key(row: Float32, known: Known) -> int:
    """Return the key of the vector ``row``."""
    for key in [*known.faces.values(), *known.tried_faces]:
        if float(row @ vector(key)) > SAME * float(np.linalg.norm(vector(key))):
            return key
    raise AssertionError("a face has a vector that nobody enrolled")


def take_over(ledger: Ledger, persons: list[Person]) -> None:
    """Persons whose enrolment was not acknowledged any more: each lot whole, counting those that were."""
    lots: dict[int, int] = {}
    for person in persons:
        keys = json.loads(str(person.metadata["keys"]))
        assert len(keys) == len(person.faces), f"person {person.id} was enrolled by half"
        lots[int(person.metadata["lot"])] = int(person.metadata["of"])
        ledger.persons[person.id] = Known(dict(zip(person.faces, keys, strict=True)))
        ledger.figures["unanswered"] += 1
    counted = dict.fromkeys(lots, 0)
    for person in persons:
        counted[int(person.metadata["lot"])] += 1
    # a lot is acknowledged person by person, so that its first ones may be known; never more than it has
    assert all(counted[lot] <= of for lot, of in lots.items())


def verify_searches(store: SqliteStore, ledger: Ledger) -> None:
    """Every face is found by its vector, and no deleted one by its."""
    alive = [(person, face, key) for person, known in ledger.persons.items() for face, key in known.faces.items()]
    for start in range(0, len(alive), 512):
        part = alive[start : start + 512]
        answers = store.search(GALLERY, np.array([vector(key) for _, _, key in part]), k=1)
        for (person, face, _), answer in zip(part, answers, strict=True):
            assert answer, f"face {face} of person {person} is not found"
            assert (answer[0].person, answer[0].face) == (person, face), f"face {face} of {person} is not found"
            assert answer[0].score > SAME, f"face {face} of {person} is not found"
    gone = list(ledger.gone_faces.items())
    for start in range(0, len(gone), 512):
        deleted = gone[start : start + 512]
        answers = store.search(GALLERY, np.array([vector(key) for _, key in deleted]), k=1)
        for (face, _), answer in zip(deleted, answers, strict=True):
            assert not answer or answer[0].score < SAME, f"face {face} was deleted and is found"


def everyone(store: SqliteStore) -> Iterator[Person]:
    """All persons; none where the collection was not made yet."""
    after = 0
    with contextlib.suppress(NotFoundError):
        while page := store.persons(GALLERY, after=after, limit=1000):
            yield from page
            after = page[-1].id


def verify_forgotten(store: SqliteStore, ledger: Ledger) -> None:
    """After a compaction no file holds the bytes of a deleted vector."""
    store.compact()
    assert store.check()["forgotten"] == 0, "a compaction left something that was deleted"
    latest = list(ledger.gone_faces.values())[-LOOKED_FOR:]  # those of former rounds were looked for then
    gone = [unit.tobytes() for unit in map(stored_form, latest)]
    for path in (path for path in store.folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for needle in gone:
            assert needle[64:96] not in content, f"{path} holds a vector that was deleted"


def stored_form(key: int) -> Float32:
    """A key's vector as it is stored."""
    row = vector(key).astype(np.float64)
    row /= np.abs(row).max()
    unit: Float32 = (row / np.linalg.norm(row)).astype(np.float32)
    return unit


def play(folder: Path, rounds: int, seconds: float, full_disk: bool, seed: int) -> dict[str, Any]:
    """Run the rounds; returns figures. Raises AssertionError if the store broke its promise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plsc.gallery.sqlite.store"])
    ledger, chance, began = Ledger(), random.Random(seed), time.monotonic()
    slowest = 0.0
    for number in range(1, rounds + 1):
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(folder, writing, seed + number, full_disk), daemon=True)
        process.start()
        writing.close()
        after = "did" if number == 1 else chance.choice(["did", "did", "opened", "opened", ""])
        listen(reading, ledger, process.kill, seconds * chance.random() ** 2, after)
        process.join()
        filler = folder.parent / FILLER
        if full_disk and number % 2:
            filler.unlink(missing_ok=True)
        opening = time.monotonic()
        store = SqliteStore(folder)
        slowest = max(slowest, time.monotonic() - opening)
        try:
            filler.unlink(missing_ok=True)
            verify(store, ledger)
            store.check()
            shutil.rmtree(folder / "snapshots", ignore_errors=True)  # they keep what was deleted after them
            if number % 5 == 0 or number == rounds:
                verify_forgotten(store, ledger)
        finally:
            store.close()
        print(f"round {number}: {len(ledger.persons)} persons, {ledger.figures}", file=sys.stderr, flush=True)
        if len(ledger.persons) > CROWDED:
            thin_out(folder, ledger)
    return {
        "rounds": rounds,
        "full_disk": full_disk,
        **ledger.figures,
        "persons": len(ledger.persons),
        "deleted_faces": len(ledger.gone_faces),
        "slowest_opening_seconds": round(slowest, 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def listen(pipe: Connection, ledger: Ledger, kill: Callable[[], None], delay: float, after: str) -> None:
    """Note what the child says, and have it killed ``delay`` seconds after the first message of the sort ``after``, or
    after it was refused something; "": after it was started."""
    timer = threading.Timer(delay, kill)
    if not after:
        timer.start()
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            message = json.loads(pipe.recv_bytes())
            if timer.ident is None and message[0] in (after, "refused"):
                timer.start()
            ledger.note(message)
    if timer.ident is not None:
        timer.join()


def thin_out(folder: Path, ledger: Ledger) -> None:
    """Keep the disk from being full of persons for good, and the rounds quick."""
    store = SqliteStore(folder)
    for person in list(ledger.persons)[: len(ledger.persons) // 2]:
        store.delete_person(GALLERY, person)
        ledger.note(["did", "delete", person])
    store.compact()
    store.close()


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of a few megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"size={DISK_MEGABYTES}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def plain_disk() -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    """Read the arguments, play, print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0, help="longest life of a child (2)")
    parser.add_argument("--full-disk", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="add the figures to results/gallery_durability.csv")
    args = parser.parse_args()
    with small_disk() if args.full_disk else plain_disk() as folder:
        figures = play(folder / "store", args.rounds, args.seconds, args.full_disk, args.seed)
    print(json.dumps(figures))
    if args.record:
        add_row("gallery_durability", figures)


if __name__ == "__main__":
    main()
