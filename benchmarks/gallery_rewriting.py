"""What it costs that deleted texts leave a large store: its file is written anew while searches and writes go on.

    python benchmarks/gallery_rewriting.py [--rows 1000000] [--dim 512] [--folder DIR] [--out DIR]

A plain store and an encrypted one, each in a process of its own: persons with a face, a name and metadata. Each is
opened; searched; and compacted after some persons were deleted and changed. Meanwhile one thread enrols persons, one
a transaction, and one searches, names included, and the longest that any of them waited is told: of some seconds
without anything else, of a whole compaction, of the rewriting in it (plsc.gallery.sqlite.rewriting), and of what stands
in its place without it: VACUUM, under the lock of all writes. Prints a line per store and adds a row for each to
benchmarks/results/gallery_rewriting.csv. Needs rows x dim x 16 bytes of disk.
"""

import argparse
import base64
import json
import math
import os
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from results_file import add_row, in_process, script_parser

from plsc.bench.harness import PeakMemory
from plsc.gallery.sqlite import SQLITE, rewriting
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson

COLLECTION, CONTRACT = "large", "a model"
TOGETHER = 10_000  # persons enrolled at once
SEARCHES = 20
CHANGED = 500  # persons deleted, and as many changed, before each part
QUIET_SECONDS = 10.0
MODES = ("plain", "encrypted")
Float32 = npt.NDArray[np.float32]


class Load:
    """A thread that enrols and one that searches; the moments at which each began and ended what it did."""

    def __init__(self, store: SqliteStore, dim: int) -> None:
        self._store, self._dim, self._ends = store, dim, threading.Event()
        self.writes: list[tuple[float, float]] = []
        self.searches: list[tuple[float, float]] = []
        self._failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._go_on, args=(self._enrol, self.writes, 1)),
            threading.Thread(target=self._go_on, args=(self._search, self.searches, 2)),
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def longest(self, begun: float, ended: float) -> dict[str, float]:
        """The longest write and search of those that overlap a time, in milliseconds."""
        parts = {"write_ms": self.writes, "search_ms": self.searches}
        return {
            name: max((1000 * (end - start) for start, end in times if end > begun and start < ended), default=0.0)
            for name, times in parts.items()
        }

    def _go_on(self, work: Callable[[Float32], object], times: list[tuple[float, float]], seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            while not self._ends.is_set():
                vector = chance.standard_normal((1, self._dim), dtype=np.float32)
                begun = time.perf_counter()
                work(vector)
                times.append((begun, time.perf_counter()))
                self._ends.wait(0.02)
        except BaseException as error:
            self._failed.append(error)

    def _enrol(self, vector: Float32) -> None:
        self._store.add_persons(COLLECTION, [NewPerson(vector, "somebody new", {"city": "Bern"})], CONTRACT)

    def _search(self, vector: Float32) -> None:
        found = self._store.search(COLLECTION, vector)[0]
        self._store.person_summaries(COLLECTION, [match.person for match in found])


def fill(store: SqliteStore, rows: int, dim: int) -> float:
    """Enrol the persons; returns the seconds."""
    chance, begun = np.random.default_rng(0), time.perf_counter()
    store.create_collection(COLLECTION, dim, CONTRACT)
    for start in range(0, rows, TOGETHER):
        vectors = chance.standard_normal((min(TOGETHER, rows - start), dim), dtype=np.float32)
        new = [
            NewPerson(vector[None], f"person {number} of a large store", {"group": number % 100, "city": f"c {number}"})
            for number, vector in enumerate(vectors, start)
        ]
        store.add_persons(COLLECTION, new, CONTRACT)
    return time.perf_counter() - begun


def change(store: SqliteStore, after: int) -> int:
    """Delete some persons and rename some; returns the last of them."""
    persons = store.persons(COLLECTION, after=after, limit=2 * CHANGED)
    for person in persons[:CHANGED]:
        store.delete_person(COLLECTION, person.id)
    for person in persons[CHANGED:]:
        store.update_person(COLLECTION, person.id, name=f"another name of {person.id}")
    return persons[-1].id


@contextmanager
def timed(figures: dict[str, float], name: str, load: Load) -> Iterator[None]:
    """Note the seconds of the block, and the longest waits in it."""
    begun = time.perf_counter()
    yield
    ended = time.perf_counter()
    figures[f"{name}_seconds"] = ended - begun
    time.sleep(0.5)  # what waited has ended, and is noted
    figures |= {f"{name}_{part}": value for part, value in load.longest(begun, ended).items()}


def vacuum(store: SqliteStore) -> None:
    """What keeps deleted texts out of the file without the rewriting."""
    with store._write_lock, closing(sqlite3.connect(store.folder / SQLITE, isolation_level=None)) as db:
        db.execute("PRAGMA temp_store = FILE")
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def measure(folder: Path, mode: str, rows: int, dim: int) -> dict[str, float]:
    """All figures of one store."""
    key_file = folder / "gallery.key" if mode == "encrypted" else None
    if key_file is not None and not key_file.exists():
        key_file.write_bytes(base64.b64encode(os.urandom(32)))
        key_file.chmod(0o600)
    within = 10 * 24 * 3600.0  # nothing is rewritten by itself while this measures
    store = SqliteStore(folder / mode, key_file=key_file, compact_within=within)
    figures = {"fill_seconds": math.nan if store.collections() else fill(store, rows, dim)}
    store.close()
    peak, begun = PeakMemory(torch.device("cpu")), time.perf_counter()
    store = SqliteStore(folder / mode, key_file=key_file, compact_within=within)
    figures |= {"open_seconds": time.perf_counter() - begun, "open_mib": peak.above()}
    figures["search_ms"] = searches(store, dim)
    figures["file_mib"] = (store.folder / SQLITE).stat().st_size / 2**20
    with Load(store, dim) as load:
        with timed(figures, "quiet", load):
            time.sleep(QUIET_SECONDS)
        last = change(store, 0)
        with noted_rewriting(figures, load), timed(figures, "compaction", load):
            store.compact()
        change(store, last)
        with timed(figures, "vacuum", load):
            vacuum(store)
    store.close()
    return figures


@contextmanager
def noted_rewriting(figures: dict[str, float], load: Load) -> Iterator[None]:
    """Note what the rewriting within the block takes."""
    original = rewriting.rewrite

    def rewrite(*args: object) -> None:
        with timed(figures, "rewriting", load):
            original(*args)  # type: ignore[arg-type]

    with patch("plsc.gallery.sqlite.compaction.rewrite", rewrite):
        yield


def searches(store: SqliteStore, dim: int) -> float:
    """The median of some searches of one query each, in milliseconds, the first left out."""
    times = []
    for query in np.random.default_rng(3).standard_normal((SEARCHES + 1, 1, dim), dtype=np.float32):
        begun = time.perf_counter()
        store.search(COLLECTION, query)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times[1:])


def main() -> None:
    """Read the arguments, measure both stores, print and record the figures."""
    parser = script_parser(__doc__, results="gallery_rewriting", rows=1_000_000, dim=512)
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="an empty one, kept, or one that was filled; else a temporary one"
    )
    parser.add_argument("--part", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps(measure(args.folder, args.part, args.rows, args.dim)))
        return
    with tempfile.TemporaryDirectory(prefix="plsc-gallery-") as temporary:
        sizes = {"folder": args.folder or Path(temporary), "rows": args.rows, "dim": args.dim}
        for mode in MODES:
            figures = {name: round(value, 3) for name, value in in_process(__file__, mode, **sizes).items()}
            row = {"store": mode, "rows": args.rows, "dim": args.dim, "load": round(os.getloadavg()[0], 1), **figures}
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            add_row("gallery_rewriting", row, args.out)


if __name__ == "__main__":
    main()
