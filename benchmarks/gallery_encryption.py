"""What encryption costs a gallery: writes, searches and the opening, plain and encrypted in turn.

    python benchmarks/gallery_encryption.py [--rows 100000] [--dim 512] [--turns 20] [--record]

Each turn works on a plain and an encrypted store, in an order that alternates, in parts of which both do one after the
other: enrolments of one person a request and of a hundred, deletions, searches of one query each in ``rows`` faces, and
in every fifth turn the opening. Prints the medians of the turns' rates, and the median of the turns' ratios encrypted /
plain; --record adds a row to results/gallery_encryption.csv. Needs rows x dim x 16 bytes of disk.
"""

import base64
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from results_file import add_row, script_parser

from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import NewPerson

GALLERY, MODEL = "people", "a model"
FILLED_AT_ONCE = 5000
ALONE, BATCHES, TOGETHER, SEARCHES = 20, 4, 100, 20
OPENED_EVERY = 5
MODES = ("plain", "encrypted")

Float32 = npt.NDArray[np.float32]


class Subject:
    """A store, plain or encrypted, and what is measured of it."""

    def __init__(self, folder: Path, mode: str, rows: Float32) -> None:
        self._folder, self._rows = folder / mode, rows
        self._key_file = folder / "gallery.key" if mode == "encrypted" else None
        self._chance = np.random.default_rng(0)
        self._deletable: list[int] = []
        self.store = self._opened()
        self.store.create_collection(GALLERY, rows.shape[1], MODEL)
        for start in range(0, len(rows), FILLED_AT_ONCE):
            self._enrol(rows[start : start + FILLED_AT_ONCE])
        self.store.compact()

    def _opened(self) -> SqliteStore:
        return SqliteStore(self._folder, key_file=self._key_file)

    def _enrol(self, rows: Float32) -> None:
        made = self.store.add_persons(GALLERY, [NewPerson(row[None], "somebody") for row in rows], MODEL)
        self._deletable += [person.id for person in made]

    def _new(self, count: int) -> Float32:
        return self._chance.standard_normal((count, self._rows.shape[1])).astype(np.float32)

    def enrolments(self) -> float:
        """Persons a second, each in a request of its own."""
        new = self._new(ALONE)

        def enrol_each() -> None:
            for row in new:
                self._enrol(row[None])

        return rate(ALONE, enrol_each)

    def batches(self) -> float:
        """Persons a second, a hundred in a request."""
        new = self._new(TOGETHER * BATCHES).reshape(BATCHES, TOGETHER, -1)

        def enrol_each() -> None:
            for rows in new:
                self._enrol(rows)

        return rate(TOGETHER * BATCHES, enrol_each)

    def deletions(self) -> float:
        """Persons a second, one after the other."""
        gone = [self._deletable.pop() for _ in range(ALONE)]

        def delete_each() -> None:
            for person in gone:
                self.store.delete_person(GALLERY, person)

        return rate(ALONE, delete_each)

    def searches(self) -> float:
        """Single queries a second."""
        queries = self._chance.choice(self._rows, SEARCHES) + 0.1 * self._new(SEARCHES)
        self.store.search(GALLERY, queries[:1])
        return rate(SEARCHES, lambda: [self.store.search(GALLERY, query[None]) for query in queries])

    def openings(self) -> float:
        """Openings a second."""
        self.store.close()

        def open_again() -> None:
            self.store = self._opened()

        return rate(1, open_again)


def rate(count: int, work: Callable[[], object]) -> float:
    """Return how many a second ``work`` does of ``count``."""
    begun = time.perf_counter()
    work()
    return count / (time.perf_counter() - begun)


PARTS = ("enrolments", "batches", "deletions", "searches", "openings")


def measure(folder: Path, rows: int, dim: int, turns: int) -> dict[str, float]:
    """Return the median rates, and the ratios of their medians."""
    vectors = np.random.default_rng(1).standard_normal((rows, dim)).astype(np.float32)
    (folder / "gallery.key").write_bytes(base64.b64encode(os.urandom(32)))
    (folder / "gallery.key").chmod(0o600)
    subjects = {mode: Subject(folder, mode, vectors) for mode in MODES}
    rates: dict[str, dict[str, list[float]]] = {part: {mode: [] for mode in MODES} for part in PARTS}
    for turn in range(turns):
        for part in PARTS if turn % OPENED_EVERY == 0 else PARTS[:-1]:
            for mode in MODES[:: -1 if turn % 2 else 1]:
                rates[part][mode].append(getattr(subjects[mode], part)())
    figures: dict[str, float] = {}
    for part in PARTS:
        plain, encrypted = (statistics.median(rates[part][mode]) for mode in MODES)
        ratios = [two / one for one, two in zip(rates[part]["plain"], rates[part]["encrypted"], strict=True)]
        figures |= {f"{part}_plain": plain, f"{part}_encrypted": encrypted, f"{part}_ratio": statistics.median(ratios)}
    for subject in subjects.values():
        subject.store.close()
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Read the arguments, measure, print the figures as JSON."""
    parser = script_parser(__doc__, rows=100_000, dim=512, turns=20)
    parser.add_argument("--record", action="store_true", help="add the figures to results/gallery_encryption.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plsc-gallery-") as folder:
        figures = measure(Path(folder), args.rows, args.dim, args.turns)
    row = {"rows": args.rows, "dim": args.dim, "turns": args.turns, **figures}
    print(json.dumps(row))
    if args.record:
        add_row("gallery_encryption", row)


if __name__ == "__main__":
    main()
