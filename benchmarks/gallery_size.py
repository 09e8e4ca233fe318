"""A large gallery: how fast it fills, compacts, opens and answers, and what memory each takes beyond the libraries'.

    python benchmarks/gallery_size.py [--rows 1000000] [--dim 512] [--precision bf16] [--folder DIR] [--out DIR]

Each part runs in a process of its own. Persons with a face each and a number for a filter; vectors of identities, as
in `plsc bench search`. Prints a line per part and adds a row to benchmarks/results/gallery_size.csv. "times the
vectors" is the memory resident after opening, above that of the libraries, by the vectors' bytes in the precision
searched. About three minutes on two cores.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import add_row, in_process, script_parser

from plsc.bench.harness import MIB, PeakMemory
from plsc.bench.search import K, SearchData, make_search_data
from plsc.gallery.backends import open_store
from plsc.gallery.filters import Filter
from plsc.gallery.store import Store
from plsc.gallery.values import NewPerson
from plsc.index.scan import ExactScan

COLLECTION, CONTRACT = "large", "a model"
TOGETHER = 10_000  # persons enrolled at once
GROUPS = 100  # a filter on one of them leaves a hundredth
REPEATS = 20


def fill(args: argparse.Namespace) -> dict[str, float]:
    """Enrol every row, without a compaction but for those in the background."""
    data = make_search_data(args.folder, args.rows, args.dim)
    store = open_store(args.folder / "store", precision=args.precision)
    store.create_collection(COLLECTION, args.dim, CONTRACT)
    begun, peak = time.perf_counter(), PeakMemory(torch.device("cpu"))
    for start in range(0, args.rows, TOGETHER):
        rows = data.rows[start : start + TOGETHER]
        people = [NewPerson(row[None], f"person {n}", {"group": n % GROUPS}) for n, row in enumerate(rows, start)]
        store.add_persons(COLLECTION, people, CONTRACT)
    seconds = time.perf_counter() - begun
    store.close()
    return {"seconds": seconds, "persons_per_second": args.rows / seconds, "peak_mib": peak.above()}


def compact(args: argparse.Namespace) -> dict[str, float]:
    """Bring everything into one base, and count what that took above the opened store."""
    store = open_store(args.folder / "store", precision=args.precision)
    store.delete_person(COLLECTION, store.persons(COLLECTION, limit=1)[0].id)  # else it may have nothing to do
    begun, peak = time.perf_counter(), PeakMemory(torch.device("cpu"))
    store.compact(COLLECTION)
    figures = {"seconds": time.perf_counter() - begun, "peak_mib": peak.above()}
    store.close()
    return figures


def serve(args: argparse.Namespace) -> dict[str, float]:
    """Open it and search: seconds, resident memory, milliseconds."""
    queries = SearchData(args.folder).queries
    ExactScan(queries).search(queries[:1], K)  # compiled, loaded: the libraries' part
    peak = PeakMemory(torch.device("cpu"))
    begun = time.perf_counter()
    store = open_store(args.folder / "store", precision=args.precision)
    seconds = time.perf_counter() - begun
    opened = PeakMemory(torch.device("cpu")).before - peak.before
    figures = {"seconds": seconds, "resident_mib": opened, "libraries_mib": peak.before}
    width = 2 if args.precision == "bf16" else 4
    figures["times_the_vectors"] = opened * MIB / (args.rows * args.dim * width)
    filtered = Filter.parse({"group": 3})
    figures["search_1_ms"] = _milliseconds(lambda row: store.search(COLLECTION, queries[row : row + 1], k=K))
    figures["search_32_ms"] = _milliseconds(lambda row: store.search(COLLECTION, queries[row : row + 32], k=K))
    figures["filtered_1_ms"] = _milliseconds(lambda row: _filtered(store, queries[row : row + 1], filtered))
    figures["searching_mib"] = PeakMemory(torch.device("cpu")).before - peak.before
    store.close()
    return figures


def _filtered(store: Store, queries: Any, filter: Filter) -> None:
    answers = store.search(COLLECTION, queries, k=K, filter=filter)
    assert all(len(answer) == K for answer in answers), "a filter must never under-return"


def _milliseconds(search: Callable[[int], object]) -> float:
    """The median of some searches of different queries, the first left out."""
    times = []
    for number in range(REPEATS + 1):
        begun = time.perf_counter()
        search(number * 32)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times[1:])


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {"fill": fill, "compact": compact, "serve": serve}


def main() -> None:
    parser = script_parser(__doc__, results="gallery_size", rows=1_000_000, dim=512)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="an empty one, kept; else a temporary one")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps(PARTS[args.part](args)))
        return
    with tempfile.TemporaryDirectory(prefix="plsc-gallery-") as folder:
        args.folder = args.folder or Path(folder)
        row: dict[str, Any] = {"rows": args.rows, "dim": args.dim, "precision": args.precision}
        row["threads"] = torch.get_num_threads()
        sizes = {"folder": args.folder, "precision": args.precision, "rows": args.rows, "dim": args.dim}
        for part in PARTS:
            figures = {f"{part}_{name}": round(value, 3) for name, value in in_process(__file__, part, **sizes).items()}
            print(", ".join(f"{name} {value:,}" for name, value in figures.items()), flush=True)
            row |= figures
    add_row("gallery_size", row, args.out)


if __name__ == "__main__":
    main()
