"""Ten million exact faces in little memory: a segment is made, opened, searched, compacted, and its answers checked.

    python benchmarks/ten_million.py [--rows 10000000] [--dim 512] [--kind clustered] [--limit-gb 6] [--folder DIR]

Vectors are "spread" over the sphere, or "clustered": --per-identity faces of each identity, with cosines of 0.6 on
average. Parts: make (writes the sealed segment), open (hashes and maps it), search, compact (writes the next segment
beside the open one, which answers meanwhile: as much disk again) and check (not by itself: --parts names them). Each
runs in a process of its own, all but check in a cgroup of --limit-gb where the system lets the script make one; what is
in the system's cache of the files is dropped before. Figures are the cgroup's peak, which counts that cache, and the
most that was resident. `check` compares --queries answers with a float64 ranking that shares nothing with the scan:
candidates by PyTorch's bfloat16 products, less twice what rounding can change, ranked in float64.
Adds a row to benchmarks/results/ten_million.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results_file import add_row, script_parser

from plsc.bench.search import SAME_COSINE, K, percentiles
from plsc.gallery.sqlite.records import Faces, StoredCollection
from plsc.gallery.sqlite.segments import SealedSegment, open_segment, segment_folder, write_segment
from plsc.gallery.values import Collection
from plsc.index.rows import Float32, Int64
from plsc.native.scan import ScanKernel
from plsc.sizes import peak_resident_bytes

BLOCK = 2048  # rows drawn, copied or checked at once
CHECKED = 32  # queries searched at once by check
PAUSE = 1.0  # seconds between the searches beside a compaction
WARM = 2  # searches before times are taken
ROUNDING = 3 * 2.0**-8  # at most, of a score: bfloat16 rounds both factors and the product by 2⁻⁹ of them
MEMORY, UNIFIED = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

Figures = dict[str, float]


# --- vectors ---------------------------------------------------------------------------------------------------------


class Drawing:
    """Unit vectors of the benchmark's kind; row ``i`` is of identity ``i % identities``.

    Of ten million rows most of the time would go into normal numbers. So a row's are a window of one long sequence of
    them, which begins where no other row's does: the products of two windows are distributed as those of two draws.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        random = np.random.default_rng(args.seed)
        self.identities = args.rows if args.kind == "spread" else max(1, args.rows // args.per_identity)
        numbers = random.standard_normal(args.rows + args.queries + args.dim, dtype=np.float32)
        self._windows = np.lib.stride_tricks.sliding_window_view(numbers, args.dim)
        self._centres: Float32 | None = None
        if args.kind == "clustered":
            self._centres = random.standard_normal((self.identities, args.dim), dtype=np.float32)
            self._centres *= np.float32((SAME_COSINE / (1 - SAME_COSINE)) ** 0.5)

    def __call__(self, start: int, labels: Int64) -> Float32:
        """(n, dim) float32, of the identities ``labels``, by the windows from ``start`` on."""
        rows = self._windows[start : start + len(labels)]
        rows = rows.copy() if self._centres is None else rows + self._centres[labels]
        rows *= 1 / np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
        return rows


def stored(args: argparse.Namespace, segment: int = 0, digest: str = "") -> StoredCollection:
    """The collection as a store would remember it; without a digest, what ``make`` wrote."""
    if segment and not digest:
        digest = (args.folder / f"digest-{segment}").read_text()
    info = Collection("large", args.dim, "a model", "2026-01-01T00:00:00Z", args.rows, args.rows)
    return StoredCollection(1, info, segment, digest, args.rows if segment else 0)


# --- parts -----------------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> Figures:
    """Draw the queries, then write the first segment."""
    drawing = Drawing(args)
    labels = np.random.default_rng(args.seed + 1).integers(0, drawing.identities, args.queries)
    np.save(args.folder / "queries.npy", drawing(args.rows, labels))

    def batches() -> Iterator[Faces]:
        for start in range(0, args.rows, BLOCK):
            ids = np.arange(start, min(start + BLOCK, args.rows))
            yield Faces(ids + 1, ids % drawing.identities, drawing(start, ids % drawing.identities))

    return write(args, 0, batches())


def write(args: argparse.Namespace, former: int, batches: Iterator[Faces]) -> Figures:
    """Write the segment that follows ``former``."""
    begun = time.perf_counter()
    made = write_segment(args.folder, stored(args, former), args.rows, args.rows, batches, args.precision)
    (args.folder / f"digest-{made.segment}").write_text(made.digest)
    return {"seconds": time.perf_counter() - begun}


def opened(args: argparse.Namespace) -> Figures:
    """Open the segment and hash all of its files, as a store does when it starts."""
    begun = time.perf_counter()
    open_segment(args.folder, stored(args, 1), args.precision)
    return {"seconds": time.perf_counter() - begun}


def search(args: argparse.Namespace) -> Figures:
    """Milliseconds of searches of one query and of 32, and the rows of each that were ranked in float64.

    ``cpu_ms`` is the time of all threads on processors, which other work on the machine lengthens least.
    """
    torch.set_num_threads(args.threads)
    segment, queries = open_segment(args.folder, stored(args, 1), args.precision, verify=False), read_queries(args)
    ranked = counted()
    figures: Figures = {}
    for batch in (1, 32):
        times, processor = list[float](), 0.0
        for number in range(args.searches + WARM):
            asked = queries[number * batch % (len(queries) - batch + 1) :][:batch]
            if number == WARM:
                ranked.clear()
                processor = time.process_time()
            begun = time.perf_counter()
            segment.scan.search(asked, K)
            times.append(time.perf_counter() - begun)
        figures |= {f"{batch}_{name}": value for name, value in percentiles(times[WARM:]).items()}
        figures[f"{batch}_least_ms"] = 1000 * min(times[WARM:])
        figures[f"{batch}_cpu_ms"] = 1000 * (time.process_time() - processor) / args.searches
        figures[f"{batch}_candidates"] = sum(ranked) / (batch * args.searches)
    return figures


def compact(args: argparse.Namespace) -> Figures:
    """Write the next segment from the one that is open and searched all the while, and open that as well."""
    torch.set_num_threads(args.threads)
    segment, queries = open_segment(args.folder, stored(args, 1), args.precision, verify=False), read_queries(args)

    def batches() -> Iterator[Faces]:
        for start in range(0, args.rows, BLOCK):
            rows = slice(start, start + BLOCK)
            vectors = segment.scan._copy.source._range(start, min(start + BLOCK, args.rows))
            yield Faces(segment.faces[rows], segment.persons[rows], vectors)

    with searching(lambda query: segment.scan.search(query, K), queries) as times:
        figures = write(args, 1, batches())
        following = open_segment(args.folder, stored(args, 2), args.precision, verify=False)
        following.scan.search(queries[:1], K)
    return {**figures, "searches": len(times), "slowest_search_ms": 1000 * max(times)}


@contextmanager
def searching(search: Callable[[Float32], object], queries: Float32) -> Iterator[list[float]]:
    """Search for one query after the other in a thread until the block ends; gives the seconds that each took."""
    times, stop = list[float](), threading.Event()

    def run() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            search(queries[len(times) % len(queries) :][:1])
            times.append(time.perf_counter() - begun)
            stop.wait(PAUSE)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


def check(args: argparse.Namespace) -> Figures:
    """Compare the rows found with the float64 ranking; "ties" are queries with equal scores among the best K + 1."""
    segment, queries = open_segment(args.folder, stored(args, 1), args.precision, verify=False), read_queries(args)
    parts = [segment.scan.search(queries[start : start + CHECKED], K)[1] for start in range(0, len(queries), CHECKED)]
    truth, ties = float64_ranking(segment, queries)
    wrong = int((np.concatenate(parts) != truth).any(axis=1).sum())
    return {"queries": len(queries), "wrong": wrong, "ties": ties}


def float64_ranking(segment: SealedSegment, queries: Float32) -> tuple[Int64, int]:
    """Rows (Q, K) by float64 products, ties by number, and the number of queries with a tie that matters."""
    asked, asked_f64 = torch.from_numpy(queries).bfloat16(), queries.astype(np.float64)
    least = torch.full((len(queries), 1), -torch.inf)
    kept: list[list[tuple[float, int]]] = [[] for _ in queries]
    for number, start in enumerate(range(0, len(segment), BLOCK)):
        rows = np.array(segment.vectors[start : start + BLOCK], subok=False)
        scores = (asked @ torch.from_numpy(rows).bfloat16().T).float()
        if not number:
            least = scores.topk(K + 1, dim=1).values[:, K:] - 2 * ROUNDING
        near = (scores >= least).nonzero().numpy()
        exact = (rows[near[:, 1]].astype(np.float64) * asked_f64[near[:, 0]]).sum(axis=1)
        for query, row, score in zip(near[:, 0].tolist(), near[:, 1].tolist(), exact.tolist(), strict=True):
            kept[query].append((-score, start + row))
        if number % 16 == 0:
            kept = [sorted(found)[: K + 1] for found in kept]
            least = torch.tensor([[-found[K][0] - ROUNDING] for found in kept], dtype=torch.float32)
    ranked = [sorted(found)[: K + 1] for found in kept]
    ties = sum(len({score for score, _ in found}) < len(found) for found in ranked)
    return np.array([[row for _, row in found[:K]] for found in ranked]), ties


def read_queries(args: argparse.Namespace) -> Float32:
    return np.asarray(np.load(args.folder / "queries.npy", allow_pickle=False), dtype=np.float32)


def counted() -> list[int]:
    """A list that every search of the compiled scan appends to: the rows that it ranked in float64."""
    found, real = list[int](), ScanKernel.__call__

    def counting(*args: Any, **options: Any) -> Any:
        answer = real(*args, **options)
        found.append(answer[2])
        return answer

    ScanKernel.__call__ = counting  # type: ignore[method-assign]
    return found


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "make": make,
    "open": opened,
    "search": search,
    "compact": compact,
    "check": check,
}


# --- limits ----------------------------------------------------------------------------------------------------------


class Limit:
    """A cgroup that a process can join, of ``bytes``; without one (``folder`` None) where the system grants none."""

    def __init__(self, limit: int) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        paths = {names: path for _, names, path in lines}
        self.folder: Path | None = None
        is_first = "memory" in paths
        parent = MEMORY / paths["memory"].lstrip("/") if is_first else UNIFIED / paths.get("", "/").lstrip("/")
        folder = parent / f"plsc-ten-million-{os.getpid()}"
        self._peak = "memory.max_usage_in_bytes" if is_first else "memory.peak"
        try:
            folder.mkdir()
            self.folder = folder
            (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit))
        except OSError as error:
            print(f"no cgroup: {error}", file=sys.stderr)
            self.close()

    def join(self) -> None:
        """Put this process into it."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        return 0 if self.folder is None else int((self.folder / self._peak).read_text())

    def close(self) -> None:
        if self.folder is not None:
            self.folder.rmdir()
            self.folder = None


def drop_cache(folder: Path) -> None:
    """Take the files out of the system's cache, which else counts for whoever read them first."""
    for path in [*folder.rglob("*.npy"), *folder.rglob("*.sqlite")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_part(args: argparse.Namespace, script: str, part: str, options: Sequence[str], limit_gb: float) -> Figures:
    """The figures of a part of a script, from a process of its own, with the most memory that it took.

    It gets those of ``args`` that ``options`` names, and runs in a cgroup of ``limit_gb`` (0: in none).
    """
    command = [sys.executable, script, "--part", part]
    command += [word for name in options for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    drop_cache(args.folder)
    limit = Limit(int(limit_gb * 1e9)) if limit_gb else None
    try:
        join = None if limit is None else limit.join
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=join)
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures if limit is None else {**figures, "cgroup_gb": limit.peak / 1e9}
    finally:
        if limit is not None:
            limit.close()


def main() -> None:
    defaults: dict[str, Any] = {"rows": 10_000_000, "dim": 512, "per_identity": 100, "queries": 1000, "searches": 100}
    parser = script_parser(__doc__, results="ten_million", **defaults, threads=2, seed=0, limit_gb=6.0, parts="")
    parser.add_argument("--kind", choices=["clustered", "spread"], default="clustered")
    parser.add_argument("--precision", choices=["int8", "bf16", "fp32"], default="int8")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="kept; else a temporary one")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        figures = PARTS[args.part](args)
        print(json.dumps({**figures, "resident_gb": (peak_resident_bytes() or 0) / 1e9}))
        return
    with tempfile.TemporaryDirectory(prefix="plsc-ten-million-") as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(exist_ok=True)
        segment_folder(args.folder, 1, 1).parent.mkdir(exist_ok=True)
        row: dict[str, Any] = {name: getattr(args, name) for name in ("rows", "dim", "kind", "precision", "threads")}
        row |= {"per_identity": args.per_identity if args.kind == "clustered" else 1, "limit_gb": args.limit_gb}
        chosen = args.parts.split(",") if args.parts else [part for part in PARTS if part != "check"]
        row["load"] = round(os.getloadavg()[0], 1)
        for part in PARTS:
            limit_gb = 0.0 if part == "check" else args.limit_gb
            figures = run_part(args, __file__, part, OPTIONS, limit_gb) if part in chosen else Figures()
            if figures:
                print(part, ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
            row |= {f"{part}_{name}": figures.get(name, "") for name in COLUMNS[part]}
    add_row("ten_million", row, args.out)


OPTIONS = ("rows", "dim", "kind", "per_identity", "precision", "folder", "queries", "searches", "threads", "seed")
_LATENCIES = [
    f"{batch}_{name}" for batch in (1, 32) for name in ("p50_ms", "p99_ms", "least_ms", "cpu_ms", "candidates")
]
COLUMNS = {
    "make": ["seconds", "cgroup_gb", "resident_gb"],
    "open": ["seconds", "cgroup_gb", "resident_gb"],
    "search": [*_LATENCIES, "cgroup_gb", "resident_gb"],
    "compact": ["seconds", "searches", "slowest_search_ms", "cgroup_gb", "resident_gb"],
    "check": ["queries", "wrong", "ties"],
}


if __name__ == "__main__":
    main()
