"""A large gallery: how fast it fills, compacts, opens and answers, and what memory each takes beyond the libraries'.

    python benchmarks/gallery_size.py [--rows 1000000] [--dim 512] [--precision bf16] [--limit-gb 0] [--folder DIR]

Each part runs in a process of its own. Persons with a face each and a number for a filter; vectors of identities, a
hundred of each (as ten_million.py draws them). Prints a line per part and adds a row to
benchmarks/results/gallery_size.csv. "times the vectors" is the memory resident after opening, above that of the
libraries, by the vectors' bytes in the precision searched. A compaction is searched beside, once a second. With
--limit-gb all but the filling runs in a cgroup of so much, whose peak counts the system's cache of the files, too.
About three minutes on two cores.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results_file import add_row, script_parser
from ten_million import Drawing, read_queries, run_part, searching

from plsc.bench.harness import MIB, PeakMemory
from plsc.bench.search import K, percentiles
from plsc.gallery.backends import open_store
from plsc.gallery.filters import Filter
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson
from plsc.index.scan import ExactScan

COLLECTION, CONTRACT = "large", "a model"
TOGETHER = 10_000  # persons enrolled at once
GROUPS = 100  # a filter on one of them leaves a hundredth
BYTES = {"int8": 1, "bf16": 2, "fp32": 4}
OPTIONS = ("rows", "dim", "kind", "per_identity", "precision", "folder", "queries", "searches", "seed")


def fill(args: argparse.Namespace) -> dict[str, float]:
    """Enrol every row, without a compaction but for those in the background."""
    drawing = Drawing(args)
    labels = np.random.default_rng(args.seed + 1).integers(0, drawing.identities, args.queries)
    np.save(args.folder / "queries.npy", drawing(args.rows, labels))
    store = open_store(args.folder / "store", precision=args.precision)
    store.create_collection(COLLECTION, args.dim, CONTRACT)
    begun, peak = time.perf_counter(), PeakMemory(torch.device("cpu"))
    for start in range(0, args.rows, TOGETHER):
        numbers = np.arange(start, min(start + TOGETHER, args.rows))
        rows = drawing(start, numbers % drawing.identities)
        people = [NewPerson(row[None], f"person {n}", {"group": n % GROUPS}) for n, row in enumerate(rows, start)]
        store.add_persons(COLLECTION, people, CONTRACT)
    seconds = time.perf_counter() - begun
    store.close()
    return {"seconds": seconds, "persons_per_second": args.rows / seconds, "peak_mib": peak.above()}


def compact(args: argparse.Namespace) -> dict[str, float]:
    """Bring everything into one segment, searched meanwhile, and count what that took above the opened store."""
    queries = read_queries(args)
    store = open_store(args.folder / "store", precision=args.precision)
    store.add_persons(COLLECTION, [NewPerson(queries[:1])], CONTRACT)  # else it may have nothing to do
    begun, peak = time.perf_counter(), PeakMemory(torch.device("cpu"))
    with searching(lambda query: store.search(COLLECTION, query, k=K), queries) as times:
        store.compact(COLLECTION)
    figures = {"seconds": time.perf_counter() - begun, "peak_mib": peak.above()}
    store.close()
    return {**figures, "slowest_search_ms": 1000 * max(times)}


def serve(args: argparse.Namespace) -> dict[str, float]:
    """Open it and search: seconds, resident memory, milliseconds."""
    queries = read_queries(args)
    ExactScan(queries).search(queries[:1], K)  # compiled, loaded: the libraries' part
    peak = PeakMemory(torch.device("cpu"))
    begun = time.perf_counter()
    store = open_store(args.folder / "store", precision=args.precision)
    seconds = time.perf_counter() - begun
    opened = PeakMemory(torch.device("cpu")).before - peak.before
    figures = {"seconds": seconds, "resident_mib": opened, "libraries_mib": peak.before}
    figures["times_the_vectors"] = opened * MIB / (args.rows * args.dim * BYTES[args.precision])
    filtered = Filter.parse({"group": 3})
    figures |= _milliseconds("search_1", args, lambda row: store.search(COLLECTION, queries[row : row + 1], k=K))
    figures |= _milliseconds("search_32", args, lambda row: store.search(COLLECTION, queries[row : row + 32], k=K))
    figures |= _milliseconds("filtered_1", args, lambda row: _filtered(store, queries[row : row + 1], filtered))
    figures["searching_mib"] = PeakMemory(torch.device("cpu")).before - peak.before
    store.close()
    return figures


def _filtered(store: Store, queries: Any, filter: Filter) -> None:
    answers = store.search(COLLECTION, queries, k=K, filter=filter)
    assert all(len(answer) == K for answer in answers), "a filter must never under-return"


def _milliseconds(name: str, args: argparse.Namespace, search: Callable[[int], object]) -> dict[str, float]:
    """The median and the 99th percentile of searches of different queries, the first left out."""
    times = []
    for number in range(args.searches + 1):
        begun = time.perf_counter()
        search(number * 32 % (args.queries - 31))
        times.append(time.perf_counter() - begun)
    figures = percentiles(times[1:])
    return {f"{name}_ms": figures["p50_ms"], f"{name}_p99_ms": figures["p99_ms"]}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {"fill": fill, "compact": compact, "serve": serve}


def main() -> None:
    defaults: dict[str, Any] = {"rows": 1_000_000, "dim": 512, "per_identity": 100, "queries": 1000, "searches": 20}
    parser = script_parser(__doc__, results="gallery_size", **defaults, seed=0, limit_gb=0.0)
    parser.add_argument("--kind", choices=["clustered", "spread"], default="clustered")
    parser.add_argument("--precision", choices=list(BYTES), default="bf16")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="an empty one, kept; else a temporary one")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps(PARTS[args.part](args)))
        return
    with tempfile.TemporaryDirectory(prefix="plsc-gallery-") as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(exist_ok=True)
        row: dict[str, Any] = {"rows": args.rows, "dim": args.dim, "precision": args.precision}
        row |= {"threads": torch.get_num_threads(), "limit_gb": args.limit_gb}
        for part in PARTS:
            found = run_part(args, __file__, part, OPTIONS, args.limit_gb if part != "fill" else 0.0)
            figures = {f"{part}_{name}": round(value, 3) for name, value in found.items()}
            print(", ".join(f"{name} {value:,}" for name, value in figures.items()), flush=True)
            row |= {f"{part}_cgroup_gb": "", **figures} if part != "fill" else figures
    add_row("gallery_size", row, args.out)


if __name__ == "__main__":
    main()
