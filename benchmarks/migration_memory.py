"""What memory a move to another model takes: the peak of each step, as a multiple of what the open store takes.

    python benchmarks/migration_memory.py [--rows 200000] [--dim 512] [--precision bf16] [--folder DIR] [--out DIR]

Persons of two faces each, in one process that goes through all steps of a move, and back, while a thread searches.
Nine tenths of the faces get vectors of the new model (as gallery_moving_store.py makes them), the rest an adapter's
estimates; it trains its residual for one epoch, since more take no memory. Peaks are of resident memory above that of
the libraries. Prints a row for each step and adds it to benchmarks/results/migration_memory.csv; "times" is its peak
by that of "open", which is opening the store and searching it. "compaction without a move" is for comparison. About ten
minutes on two cores.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gallery_moving_store
import numpy as np
import torch
from gallery_moving_store import SECOND_MODEL, Float32, MovingStore, in_second_space
from results_file import add_row, in_process, script_parser

from plsc.bench.harness import PeakMemory
from plsc.gallery.migration import adapter
from plsc.gallery.migration.filling import Pairs, fill_by_adapter, fit
from plsc.gallery.migration.judgement import judge
from plsc.gallery.migration.moving import judge_move
from plsc.gallery.values import NewPerson

COLLECTION, FIRST_MODEL = "large", "a model"
FACES, TOGETHER, LATE = 2, 5_000, 1_000  # of a person; persons enrolled at once; persons enrolled as a step
FILLED_AT_ONCE = 1_000  # persons
SPREAD = 0.8  # of faces around their persons


def faces(persons: int, dim: int, seed: int) -> Float32:
    """Unit vectors (FACES * persons, dim), person by person."""
    random = np.random.default_rng(seed)
    centres = np.repeat(random.standard_normal((persons, dim), dtype=np.float32), FACES, axis=0)
    rows = centres + np.float32(SPREAD) * random.standard_normal(centres.shape, dtype=np.float32)
    unit: Float32 = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def enrol(store: MovingStore, persons: int, dim: int, seed: int) -> None:
    """Enrol persons, with vectors of both models."""
    store.add_persons(COLLECTION, [NewPerson(own) for own in np.split(faces(persons, dim, seed), persons)], FIRST_MODEL)


def fill(args: argparse.Namespace) -> dict[str, float]:
    """Enrol everybody, and compact."""
    store = MovingStore(args.folder / "store", precision=args.precision)
    store.create_collection(COLLECTION, args.dim, FIRST_MODEL)
    for start in range(0, args.rows // FACES, TOGETHER):
        enrol(store, min(TOGETHER, args.rows // FACES - start), args.dim, start)
    store.compact()
    store.close()
    return {}


@contextmanager
def searching(store: MovingStore, dim: int) -> Iterator[None]:
    """Search in a thread until the block ends."""
    ends, queries = threading.Event(), faces(4, dim, -1 % 2**32)

    def run() -> None:
        while not ends.wait(0.05):
            assert len(store.search(COLLECTION, queries, k=10)[0]) == 10

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def steps(store: MovingStore, args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """The steps of a move, in their order."""

    def compact() -> None:
        store.delete_person(COLLECTION, store.persons(COLLECTION, limit=1)[0].id)  # else it may have nothing to do
        store.compact()

    def estimate() -> None:
        fill_by_adapter(store, COLLECTION, quiet=True)

    batches = args.rows // FACES * 9 // 10 // FILLED_AT_ONCE
    yield "open", lambda: time.sleep(5)
    yield "compaction without a move", compact
    yield "begin", lambda: store.begin_migration(COLLECTION, len(in_second_space(np.zeros(args.dim))), SECOND_MODEL)
    yield "fill", lambda: store.fill(COLLECTION, SECOND_MODEL, batches)
    yield "estimate", estimate
    yield "enrolments", lambda: enrol(store, LATE, args.dim, args.rows)
    yield "judge", lambda: judge_move(store, COLLECTION, None)
    yield "cut over", lambda: store.exchange_spaces(COLLECTION, SECOND_MODEL)
    yield "enrolments after the cut-over", lambda: enrol(store, LATE, args.dim, args.rows + 1)
    yield "compaction after the cut-over", compact
    yield "roll back", lambda: store.exchange_spaces(COLLECTION, FIRST_MODEL)
    yield "cut over again", lambda: store.exchange_spaces(COLLECTION, SECOND_MODEL)
    yield "finish", lambda: store.end_migration(COLLECTION, FIRST_MODEL)
    yield "compaction after the finish", compact


def move(args: argparse.Namespace) -> dict[str, float]:
    """Take all steps; returns MiB and seconds by step."""
    adapter._MOST_EPOCHS, gallery_moving_store._FILLED_AT_ONCE = 1, FILLED_AT_ONCE
    few = faces(50, 32, 0)
    known = Pairs(few, in_second_space(few), np.arange(len(few)) // FACES)
    judge(known.searched, known.second, known.persons, threshold=None, estimated=fit(known)[1])  # the libraries' part
    libraries, figures = PeakMemory(torch.device("cpu")), dict[str, float]()
    store = MovingStore(args.folder / "store", precision=args.precision)
    with searching(store, args.dim):
        for name, step in steps(store, args):
            peak, begun = PeakMemory(torch.device("cpu")), time.perf_counter()
            step()
            figures[f"{name}/seconds"] = round(time.perf_counter() - begun, 1)
            figures[f"{name}/peak_mib"] = round(peak.peak() - libraries.before, 1)
            print(name, figures[f"{name}/peak_mib"], figures[f"{name}/seconds"], file=sys.stderr, flush=True)
    store.close()
    return {"libraries_mib": round(libraries.before, 1), **figures}


def main() -> None:
    """Measure, print and record."""
    parser = script_parser(__doc__, results="migration_memory", rows=200_000, dim=512)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="an empty one, kept; else a temporary one")
    parser.add_argument("--part", choices=["fill", "move"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps({"fill": fill, "move": move}[args.part](args)))
        return
    with tempfile.TemporaryDirectory(prefix="plsc-moving-") as folder:
        args.folder = args.folder or Path(folder)
        sizes = {"folder": args.folder, "precision": args.precision, "rows": args.rows, "dim": args.dim}
        in_process(__file__, "fill", **sizes)
        figures = in_process(__file__, "move", **sizes)
    for name in [key.partition("/")[0] for key in figures if key.endswith("/peak_mib")]:
        peak = figures[f"{name}/peak_mib"]
        row = {"rows": args.rows, "dim": args.dim, "precision": args.precision, "step": name, "peak_mib": peak}
        row["times"] = round(peak / figures["open/peak_mib"], 2)
        row |= {"seconds": figures[f"{name}/seconds"], "libraries_mib": figures["libraries_mib"]}
        print(", ".join(f"{column} {value}" for column, value in row.items()), flush=True)
        add_row("migration_memory", row, args.out)


if __name__ == "__main__":
    main()
