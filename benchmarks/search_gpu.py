"""The exact search on a GPU: Triton's kernels beside PyTorch's products, in turn, by precision, rows and queries.

    python benchmarks/search_gpu.py [--out FOLDER] [--minutes 8] [--rounds 5]
    TRITON_INTERPRET=1 python benchmarks/search_gpu.py --dry     # tiny, on a CPU; keeps no row

Searches 1,000,000 and 10,000,000 made-up rows of 512 numbers for the 10 best of 1,000 queries and of one. After each
measurement a row is added to search_gpu.csv in --out. "first kernel" is the part of a search that multiplies all rows.
`agrees` is the share of queries for which both found the same rows and scores. 10,000,000 rows take 20 GB of the
host's memory and 30 GB of the GPU's: what does not fit is left out, and so is what would begin after --minutes.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from results_file import add_row, script_parser

from plsc.index.rows import Float32
from plsc.index.scan import PRECISIONS, ExactScan
from plsc.index.triton_scan import FusedScan

K, DIM, QUERIES = 10, 512, (1000, 1)
ROWS, DRY_ROWS = (1_000_000, 10_000_000), (3000,)
AT_ONCE = 1 << 18  # rows made


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
            wait()
            start = time.perf_counter()
            way()
            wait()
            taken[name].append(1e3 * (time.perf_counter() - start))
    mine, *others = (answers[name] for name in ways if name != "first kernel")
    same = [(mine[0] == other[0]).all(1) & (mine[1] == other[1]).all(1) for other in others]
    for name, times in taken.items():
        median = statistics.median(times)
        yield {
            "rows": len(scan),
            "dim": queries.shape[1],
            "queries": len(queries),
            "k": K,
            "precision": scan.precision,
            "way": name,
            "ms": median,
            "ms_low": min(times),
            "ms_high": max(times),
            "tflops": 2e-9 * len(scan) * queries.shape[1] * len(queries) / median,
            "agrees": float(np.mean(same)) if same else "",
        }


def wait() -> None:
    """Until the GPU has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    """Time what fits; 1 where two ways answered differently."""
    parser = script_parser(__doc__, results="search_gpu", minutes=8.0, rounds=5)
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU where there is no GPU; keeps no row")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.dry:
        print("search_gpu needs an NVIDIA GPU that torch sees; --dry runs tiny on a CPU", file=sys.stderr)
        return 2
    end, wrong = time.monotonic() + 60 * args.minutes, 0
    for count in DRY_ROWS if args.dry else ROWS:
        dim = 32 if args.dry else DIM
        try:
            rows = made_up(count + max(QUERIES), dim, device)
        except MemoryError:
            print(f"{count:,} rows do not fit into this machine's memory")
            continue
        for precision in PRECISIONS:
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
            print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), flush=True)
            wrong += row["agrees"] not in ("", 1.0)
            if not args.dry:
                add_row("search_gpu", row, args.out)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
