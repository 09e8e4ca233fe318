"""The exact search on a GPU: Triton's kernels beside PyTorch's products, in turn, by precision, rows and queries.

    python benchmarks/search_gpu.py [--out FOLDER] [--minutes 8] [--rounds 5] [--only clusters]
    TRITON_INTERPRET=1 python benchmarks/search_gpu.py --dry     # tiny, on a CPU; keeps no row

Searches 1,000,000 and 10,000,000 made-up rows of 512 numbers for the 10 best of 1,000 queries and of one. After each
measurement a row is added to search_gpu.csv in --out. "first kernel" is the part of a search that multiplies all rows.
`agrees` is the share of queries for which both found the same rows and scores. 10,000,000 rows take 20 GB of the
host's memory and 30 GB of the GPU's: what does not fit is left out, and so is what would begin after --minutes.

First, "assignment" is what an iteration of `plsc cluster --k ROWS` does for each of its queries, the points,
in the first place, and "graph" what `plsc cluster --method connected` does: on the GPU and on this machine's CPU in
turn. The CPU assigns the first 4,096 points alone, so compare tflops. --only clusters measures these alone.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from results_file import add_row, script_parser

from plsc.cluster import scan as points_scan
from plsc.cluster.assignment import Nearest, Points
from plsc.cluster.graph import neighbour_graph
from plsc.cluster.scan import SearchDevice
from plsc.index import triton_scan
from plsc.index.rows import Float32
from plsc.index.scan import PRECISIONS, ExactScan
from plsc.index.triton_scan import FusedScan

K, DIM, QUERIES = 10, 512, (1000, 1)
ROWS, DRY_ROWS, DRY_DIM = (1_000_000, 10_000_000), (3000,), 32
AT_ONCE = 1 << 18  # rows made
CENTRES, POINTS, POINTS_ON_CPU = (10_000, 800_000), 131_072, 4096
GRAPH, NEIGHBOURS = 50_000, 32
DRY_CENTRES, DRY_POINTS, DRY_GRAPH = (128,), 24, 128


def made_up(rows: int, dim: int, device: str) -> Float32:
    """Unit rows (N, D), made on ``device``."""
    made = np.empty((rows, dim), dtype=np.float32)
    generator = torch.Generator(device).manual_seed(0)
    for start in range(0, rows, AT_ONCE):
        part = torch.randn(min(AT_ONCE, rows - start), dim, generator=generator, device=device)
        made[start : start + len(part)] = torch.nn.functional.normalize(part).cpu().numpy()
    return made


def searches(scan: ExactScan, queries: Float32) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: the scan that was chosen first."""
    chosen = scan._scan
    if not isinstance(chosen, FusedScan):
        return {scan.backend: lambda: scan.search(queries, K)}

    def by_torch() -> Any:
        scan._scan = chosen.by_torch
        try:
            return scan.search(queries, K)
        finally:
            scan._scan = chosen

    asked = chosen._asked(queries)
    return {
        "fused": lambda: scan.search(queries, K),
        "torch": by_torch,
        "first kernel": lambda: chosen.maxima(asked, None),
    }


def measured(scan: ExactScan, queries: Float32, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each way to search: milliseconds in turn, after one search that compiles, and whether they agree."""
    ways = searches(scan, queries)
    answers = {name: way() for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(milliseconds(way))
    mine, *others = (answers[name] for name in ways if name != "first kernel")
    same = [(mine[0] == other[0]).all(1) & (mine[1] == other[1]).all(1) for other in others]
    for name, times in taken.items():
        agrees = float(np.mean(same)) if same else ""
        yield row_of((len(scan), *queries.shape[::-1]), K, scan.precision, name, times, agrees)


def row_of(
    shape: tuple[int, int, int], k: int, precision: str, way: str, times: list[float], agrees: float | str
) -> dict[str, Any]:
    """A row of results: ``shape`` is rows, dim and queries, ``times`` are milliseconds."""
    rows, dim, queries = shape
    median = statistics.median(times)
    return {
        "rows": rows,
        "dim": dim,
        "queries": queries,
        "k": k,
        "precision": precision,
        "way": way,
        "ms": median,
        "ms_low": min(times),
        "ms_high": max(times),
        "tflops": 2e-9 * rows * dim * queries / median,
        "agrees": agrees,
    }


def clusters(rows: Float32, device: str, args: Any) -> Iterator[dict[str, Any]]:
    """Rows of assignments to the first ``rows``, of the last, and of a graph: on a GPU and on the CPU in turn."""
    points = rows[-DRY_POINTS if args.dry else -POINTS :]
    some = points[:POINTS_ON_CPU]
    for count in DRY_CENTRES if args.dry else CENTRES:
        ways = {
            "gpu": (len(points), partial(assigned, points, rows[:count], device)),
            "cpu": (len(some), partial(assigned, some, rows[:count], "cpu")),
        }
        yield from beside("assignment", ways, count, 2, args)
    part, neighbours = (rows[:DRY_GRAPH], 1) if args.dry else (rows[:GRAPH], NEIGHBOURS)
    where = {"gpu": device, "cpu": "cpu"}
    graphs = {name: (len(part), partial(graph, part, neighbours, place)) for name, place in where.items()}
    yield from beside("graph", graphs, len(part), neighbours + 1, args)


def assigned(points: Float32, centres: Float32, device: str) -> list[Any]:
    """The nearest centre of each of ``points``; what is copied to the GPU is copied anew."""
    nearest = Nearest(centres, len(points), SearchDevice(device))
    starts = range(0, len(points), nearest.block)
    return [np.concatenate([nearest.find(points[at : at + nearest.block])[1] for at in starts])]


def graph(points: Float32, neighbours: int, device: str) -> list[Any]:
    """The edges between ``points``, and their cosines."""
    edges = neighbour_graph(Points.of(points, SearchDevice(device)), neighbours)
    return [edges.pairs, edges.cosines]


def beside(
    what: str, ways: Mapping[str, tuple[int, Callable[[], list[Any]]]], rows: int, k: int, args: Any
) -> Iterator[dict[str, Any]]:
    """A row for each of two ways and its queries, in turn, after a call of each; what the second finds is compared."""
    first, second = (way() for _, way in ways.values())
    agrees = all(np.array_equal(mine[: len(theirs)], theirs) for mine, theirs in zip(first, second, strict=True))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if args.dry else min(args.rounds, 3)):  # the CPU takes its time
        for name, (_, way) in ways.items():
            taken[name].append(milliseconds(way))
    for name, times in taken.items():
        shape = rows, DRY_DIM if args.dry else DIM, ways[name][0]
        yield row_of(shape, k, "fp32", f"{what}, {name}", times, float(agrees))


def milliseconds(way: Callable[[], Any]) -> float:
    """The time of a call."""
    wait()
    start = time.perf_counter()
    way()
    wait()
    return 1e3 * (time.perf_counter() - start)


def wait() -> None:
    """Until the GPU has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    """Time what fits; 1 where two ways answered differently."""
    parser = script_parser(__doc__, results="search_gpu", minutes=8.0, rounds=5)
    parser.add_argument("--only", choices=("clusters",))
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU where there is no GPU; keeps no row")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.dry:
        print("search_gpu needs an NVIDIA GPU that torch sees; --dry runs tiny on a CPU", file=sys.stderr)
        return 2
    end, wrong = time.monotonic() + 60 * args.minutes, 0
    for count in DRY_ROWS if args.dry else ROWS:
        dim = DRY_DIM if args.dry else DIM
        try:
            rows = made_up(count + max(QUERIES), dim, device)
        except MemoryError:
            print(f"{count:,} rows do not fit into this machine's memory")
            continue
        if count == (DRY_ROWS if args.dry else ROWS)[0]:
            wrong += time_clusters(rows, device, args, end)
        for precision in PRECISIONS if args.only is None else ():
            if time.monotonic() > end:
                print(f"no time left for {count:,} rows in {precision}")
                continue
            try:
                wrong += time_scan(rows, count, precision, device, args)
            except torch.OutOfMemoryError:
                print(f"{count:,} rows in {precision} do not fit into the GPU's memory")
            torch.cuda.empty_cache()
    return int(wrong > 0)


def time_scan(rows: Float32, count: int, precision: str, device: str, args: Any) -> int:
    """Print and keep the rows of one scan of the first ``count`` of ``rows``; the number of them that disagree."""
    scan, wrong = ExactScan(rows[:count], precision=precision, device=device), 0
    for queries in QUERIES:
        asked = rows[count : count + (min(queries, 3) if args.dry else queries)]
        for row in measured(scan, asked, 1 if args.dry else args.rounds):
            wrong += keep(row, args)
    return wrong


def time_clusters(rows: Float32, device: str, args: Any, end: float) -> int:
    """The same of :func:`clusters`, of which none begins after ``end``."""
    wrong = 0
    with ExitStack() as tiny:
        if args.dry:  # the kernels take as little as there is
            tiny.enter_context(patch.multiple(points_scan, LEAST_PRODUCTS=1, _GPU_QUERIES=16))
            tiny.enter_context(patch.object(triton_scan, "_LEAST_GROUPS", 1))
        for row in clusters(rows, device, args):
            wrong += keep(row, args)
            if time.monotonic() > end:
                print("no time left for more of plsc cluster")
                break
    return wrong


def keep(row: dict[str, Any], args: Any) -> bool:
    """Print a row and keep it; whether two ways disagree."""
    print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), flush=True)
    if not args.dry:
        add_row("search_gpu", row, args.out)
    return row["agrees"] not in ("", 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
