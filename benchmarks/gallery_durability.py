"""Kill a gallery's process at random moments, again and again, and see whether it kept its word.

    python benchmarks/gallery_durability.py --rounds 100
    python benchmarks/gallery_durability.py --rounds 100 --full-disk      (mounts a small tmpfs: needs root)
    python benchmarks/gallery_durability.py --rounds 100 --encrypt
    python benchmarks/gallery_durability.py --rounds 100 --migrate

In each round a child opens the store and works on it with several threads: it enrols, also under idempotency keys, puts
persons by external ids, adds faces, renames, deletes, searches, compacts and takes snapshots. What the store
acknowledged it writes into a pipe (benchmarks/gallery_killed_worker.py). The parent ends it by SIGKILL, opens the
store, and compares it with the acknowledgements of all rounds so far:

- each write that was acknowledged is there and found by search, and a lot of persons is there whole or not at all;
- nothing whose deletion was acknowledged is found by search, listed, or told when it is asked for;
- what is sent again, under a key or an external id, is done once (benchmarks/gallery_repeated_writes.py);
- every row and file passes the store's own check;
- from time to time, after a compaction, no file holds the bytes of a deleted vector, and of an encrypted store a former
  snapshot tells nobody who was deleted since (benchmarks/gallery_forgotten.py).

With --migrate the collection moves to another model and back all the time, step by step, and the same has to hold
(benchmarks/gallery_moving_store.py). With --full-disk the disk has no room left for part of each round, and during
every other opening: then writes may be refused (StorageError), and nothing else may differ.
"""

import base64
import contextlib
import json
import math
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
from gallery_forgotten import KeptSnapshot, everyone, verify_forgotten, verify_gone, verify_not_found
from gallery_killed_worker import (
    FILLER,
    GALLERY,
    KEY_FILE,
    MODEL,
    MOVING,
    SAME,
    Float32,
    child,
    opened,
    vector,
    vectors,
)
from gallery_repeated_writes import Onces, Puts, has_gallery
from results_file import add_row, script_parser

from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import Person

DISK_MEGABYTES = 48
CROWDED = 4000  # persons: half of them are deleted then
FORGOTTEN_EVERY = 5  # rounds
ASKED_FOR = 300  # deleted persons, the latest
SEARCHED_FOR = 5000  # deleted faces, the latest; all of them where files are looked into


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
        self.figures = dict.fromkeys(("acknowledged", "refused", "opened", "unanswered", "moved", "exchanged"), 0)
        self.puts, self.onces = Puts(), Onces()
        self.lots: dict[int, tuple[set[int], int]] = {}  # of this round: the persons that were seen, and all there are

    def note(self, message: list[Any]) -> None:
        """Take a message of the child."""
        sort, *rest = message
        if sort == "failed":
            raise SystemExit(f"the child failed: {rest[0]}")
        if sort in ("refused", "opened"):
            self.figures[sort] += 1
            return
        if sort == "moved":
            self.figures["moved"] += 1
            self.figures["exchanged"] += rest[0] == "exchange"
            return
        self.figures["acknowledged"] += sort == "did"
        if rest[0] in ("put", "once"):
            (self.puts if rest[0] == "put" else self.onces).note(sort == "did", *rest[1:])
            return
        self._apply(sort == "did", *rest)

    def _apply(self, done: bool, what: str, person: int, *rest: Any) -> None:
        if what == "enrol":
            self.persons[person] = Known(dict(rest[0]))
            self.see(person, *rest[1:])
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

    def see(self, person: int, lot: int, of: int) -> None:
        """Note a person of a lot that was enrolled together."""
        self.lots.setdefault(lot, (set(), of))[0].add(person)

    def _face(self, done: bool, known: Known, *rest: Any) -> None:
        if done:
            known.faces[rest[0]] = rest[1]
            known.tried_faces.discard(rest[1])
        else:
            known.tried_faces.add(rest[0])


def verify(store: SqliteStore, ledger: Ledger) -> None:
    """Compare the store with the acknowledgements, and take over what was done without one."""
    all_persons = list(everyone(store))
    if has_gallery(store, GALLERY):
        named = [person for person in all_persons if person.external_id is not None]
        ledger.puts.verify(store, GALLERY, MODEL, named, vectors)
        all_persons += ledger.onces.send_again(store, GALLERY, MODEL, all_persons, vectors)
    found = {person.id: person for person in all_persons if person.external_id is None}
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
    if has_gallery(store, GALLERY):
        verify_gone(store, [*ledger.gone_persons][-ASKED_FOR:])
        verify_not_found(store, list(ledger.gone_faces.items())[-SEARCHED_FOR:])


def verify_person(store: SqliteStore, person: Person, known: Known, ledger: Ledger) -> None:
    """A person is as acknowledged, or as something tried would have made it."""
    assert person.name == known.name or person.name in known.tried_names, f"the name of person {person.id} is another"
    stored = store.vectors(GALLERY, person.id)
    keys = {face: nearest_key(row, known) for face, row in zip(person.faces, stored, strict=True)}
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
    """Persons whose enrolment was not acknowledged any more: each lot is whole, with those that were."""
    for person in persons:
        keys = json.loads(str(person.metadata["keys"]))
        assert len(keys) == len(person.faces), f"person {person.id} was enrolled by half"
        ledger.see(person.id, int(person.metadata["lot"]), int(person.metadata["of"]))
        ledger.persons[person.id] = Known(dict(zip(person.faces, keys, strict=True)))
        ledger.figures["unanswered"] += 1
    for lot, (seen, of) in ledger.lots.items():
        assert len(seen) == of, f"of lot {lot} {len(seen)} persons of {of} were enrolled"
    ledger.lots = {}


def verify_searches(store: SqliteStore, ledger: Ledger) -> None:
    """Every face is found by its vector."""
    alive = [(person, face, key) for person, known in ledger.persons.items() for face, key in known.faces.items()]
    for start in range(0, len(alive), 512):
        part = alive[start : start + 512]
        answers = store.search(GALLERY, vectors([key for _, _, key in part]), k=1)
        for (person, face, _), answer in zip(part, answers, strict=True):
            assert answer, f"face {face} of person {person} is not found"
            assert (answer[0].person, answer[0].face) == (person, face), f"face {face} of {person} is not found"
            assert answer[0].score > SAME, f"face {face} of {person} is not found"


def play(
    folder: Path, elsewhere: Path, rounds: int, minutes: float, seconds: float, full_disk: bool, seed: int
) -> dict[str, Any]:
    """Run the rounds, or as many as ``minutes`` allow; returns figures. AssertionError: the store broke its promise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plsc.gallery.sqlite.store"])
    ledger, chance, began = Ledger(), random.Random(seed), time.monotonic()
    snapshot = KeptSnapshot(elsewhere) if is_encrypted(folder) else None
    slowest, number = 0.0, 0
    for number in range(1, rounds + 1):
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(folder, writing, seed + number, full_disk), daemon=True)
        process.start()
        writing.close()
        after = "did" if number == 1 else chance.choice(["did", "did", "opened", "opened", ""])
        listen(reading, ledger, process.kill, seconds * chance.random() ** 2, after)
        process.join()
        looks_into_files = number % FORGOTTEN_EVERY == 0 or number == rounds
        is_full = full_disk and number % 2 == 0
        slowest = max(slowest, look(folder, ledger, is_full, looks_into_files, snapshot))
        print(f"round {number}: {len(ledger.persons)} persons, {ledger.figures}", file=sys.stderr, flush=True)
        if len(ledger.persons) > CROWDED:
            thin_out(folder, ledger)
        if looks_into_files and time.monotonic() - began > 60 * minutes:
            break
    return {
        "rounds": number,
        "full_disk": full_disk,
        "encrypted": is_encrypted(folder),
        "migrate": (folder.parent / MOVING).exists(),
        **ledger.figures,
        "replayed": ledger.onces.replayed,
        "repeated": ledger.onces.repeated + ledger.puts.repeated,
        "unreadable": 0 if snapshot is None else snapshot.unreadable,
        "persons": len(ledger.persons),
        "deleted_faces": len(ledger.gone_faces),
        "slowest_opening_seconds": round(slowest, 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def is_encrypted(folder: Path) -> bool:
    """Return True if the store in ``folder`` is an encrypted one."""
    return (folder.parent / KEY_FILE).exists()


def look(folder: Path, ledger: Ledger, is_full: bool, looks_into_files: bool, snapshot: KeptSnapshot | None) -> float:
    """Open the store after a kill, on a disk that may be full, and verify it; returns the seconds of the opening."""
    filler = folder.parent / FILLER
    if not is_full:
        filler.unlink(missing_ok=True)
    began = time.monotonic()
    store = opened(folder)
    seconds = time.monotonic() - began
    try:
        filler.unlink(missing_ok=True)
        verify(store, ledger)
        store.check()
        shutil.rmtree(folder / "snapshots", ignore_errors=True)  # they keep what was deleted after them
        if looks_into_files:
            verify_not_found(store, list(ledger.gone_faces.items()))
            living = [key for known in ledger.persons.values() for key in known.faces.values()]
            verify_forgotten(store, [*ledger.gone_faces.values(), *ledger.puts.replaced], living)
            if snapshot is not None:
                snapshot.verify(store)
                snapshot.take(store)
    finally:
        store.close()
    return seconds


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
    store = opened(folder)
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
    parser = script_parser(__doc__, rounds=100, seed=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after the round of this time (no end)")
    parser.add_argument("--seconds", type=float, default=2.0, help="longest life of a child (2)")
    parser.add_argument("--full-disk", action="store_true")
    parser.add_argument("--encrypt", action="store_true", help="keep the vectors encrypted under a key per person")
    parser.add_argument("--migrate", action="store_true", help="move the collection between two models all the time")
    parser.add_argument("--record", action="store_true", help="add the figures to results/gallery_durability.csv")
    args = parser.parse_args()
    with small_disk() if args.full_disk else plain_disk() as folder, plain_disk() as elsewhere:
        if args.encrypt:
            descriptor = os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(descriptor, base64.b64encode(os.urandom(32)))
            os.close(descriptor)
        if args.migrate:
            (folder / MOVING).touch()
        figures = play(folder / "store", elsewhere, args.rounds, args.minutes, args.seconds, args.full_disk, args.seed)
    print(json.dumps(figures))
    if args.record:
        add_row("gallery_durability", figures)


if __name__ == "__main__":
    main()
