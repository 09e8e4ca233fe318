"""Comparison of exact searches: our scan and its baselines, each in fresh processes, in turn; medians and ratios.

``python -m plsc.bench.search TASK.json RESULT.json`` is one turn of one of them.
"""

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.bench.harness import PeakMemory, answer_task, environment, median, processor_name, run_task
from plsc.bench.vectors import JUDGED, QUERIES, K, SearchData, make_search_data
from plsc.errors import DataError, UsageError
from plsc.index.rows import Float32, Int64
from plsc.index.scan import ExactScan
from plsc.progress import Progress

FAISS_BLOCKS = (1024, 4096, 16384, 65536)  # rows per matrix product that faiss is tried with; the first is its default
_FIGURES = ("qps", "p50_ms", "p99_ms")
_LEAST_SEARCHES = 3

Search = Callable[[Float32, int], Int64]  # queries (Q, D), k -> indices of rows (Q, k)
Result = Mapping[str, Any]  # figures of one turn, or {"reason": why there are none}


# Implementations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchImplementation:
    """A search under measurement.

    ``build`` makes it of the rows and a number of threads; ``prepare`` tunes it for a batch of queries and returns a
    remark on how; ``needs`` is the module that it takes; ``ours`` separates the library's from the baselines.
    """

    label: str
    build: Callable[[SearchData, int], Search]
    ours: bool = False
    needs: str = "numpy"
    prepare: Callable[[Search, Float32], str] = lambda search, queries: ""


def unavailable(name: str) -> str | None:
    """Return the reason why an implementation cannot run here; None where it can."""
    needs = IMPLEMENTATIONS[name].needs
    return None if importlib.util.find_spec(needs) else f"{needs} is not installed"


def _scan(precision: str) -> Callable[[SearchData, int], Search]:
    def build(data: SearchData, threads: int) -> Search:
        scan = ExactScan(data.rows, precision=precision)
        return lambda queries, k: scan.search(queries, k)[1]

    return build


def _numpy(data: SearchData, threads: int) -> Search:
    base = np.array(data.rows, subok=False)

    def search(queries: Float32, k: int) -> Int64:
        scores = queries @ base.T
        rows = np.argpartition(scores, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1)
        found: Int64 = np.take_along_axis(rows, order, axis=1)
        return found

    return search


def _faiss(data: SearchData, threads: int) -> Search:
    import faiss

    faiss.omp_set_num_threads(threads)
    flat = faiss.IndexFlatIP(data.rows.shape[1])
    rows = data.rows
    for start in range(0, len(rows), 16384):  # never the whole mapped file in memory beside faiss's copy
        flat.add(np.array(rows[start : start + 16384], subok=False))

    def search(queries: Float32, k: int) -> Int64:
        found: Int64 = flat.search(queries, k)[1]
        return found

    return search


def _tune_faiss(search: Search, queries: Float32) -> str:
    """Set the block size with which ``queries`` take the least time."""
    import faiss

    times = {}
    for block in FAISS_BLOCKS:
        faiss.cvar.distance_compute_blas_database_bs = block
        search(queries, 10)
        start = time.perf_counter()
        search(queries, 10)
        times[block] = time.perf_counter() - start
    best = min(times, key=lambda block: times[block])
    faiss.cvar.distance_compute_blas_database_bs = best
    return f"blocks of {best}"


def _usearch(data: SearchData, threads: int) -> Search:
    from usearch.index import MetricKind
    from usearch.index import search as exact_search

    base = np.array(data.rows, subok=False)

    def search(queries: Float32, k: int) -> Int64:
        found: Any = exact_search(base, queries, k, MetricKind.IP, exact=True, threads=threads)
        return np.asarray(found.keys, dtype=np.int64).reshape(len(queries), -1)

    return search


IMPLEMENTATIONS = {
    "plsc": SearchImplementation("plsc, bf16 + float32 ranking", _scan("bf16"), ours=True),
    "plsc-fp32": SearchImplementation("plsc, float32", _scan("fp32"), ours=True),
    "numpy": SearchImplementation("numpy", _numpy),
    "faiss": SearchImplementation("faiss flat, as shipped", _faiss, needs="faiss"),
    "faiss-tuned": SearchImplementation("faiss flat, block size tuned", _faiss, needs="faiss", prepare=_tune_faiss),
    "usearch": SearchImplementation("usearch, exact", _usearch, needs="usearch"),
}


# One turn, in a process of its own ----------------------------------------------------------------------------------


def measure_search(
    implementation: SearchImplementation, data: SearchData, batches: Sequence[int], threads: int, seconds: float
) -> dict[str, Any]:
    """Measure one search in this process, ``seconds`` long for each batch size.

    Returns:
        ``memory_mib`` at the peak above the libraries, ``build_s``, ``recall`` at 10; and ``batches``: by batch size
        (a string, for JSON) ``qps``, ``p50_ms`` and ``p99_ms`` of a search, ``searches``, ``note``.
    """
    queries, k = data.queries, min(K, len(data.rows))
    peak = PeakMemory(torch.device("cpu"))
    start = time.perf_counter()
    search = implementation.build(data, threads)
    build_s = time.perf_counter() - start
    by_batch = {}
    for batch in batches:
        note = implementation.prepare(search, queries[:batch])
        by_batch[str(batch)] = {**_time(search, queries, batch, k, seconds), "note": note}
    memory = peak.above()  # before recall is measured in batches of 32, which may not be among those asked for
    found = np.concatenate([search(queries[start : start + 32], k) for start in range(0, JUDGED, 32)])
    hits = [len(set(row) & set(true)) for row, true in zip(found.tolist(), data.truth.tolist(), strict=True)]
    return {"memory_mib": memory, "build_s": build_s, "recall": sum(hits) / (k * JUDGED), "batches": by_batch}


def _time(search: Search, queries: Float32, batch: int, k: int, seconds: float) -> dict[str, Any]:
    batches = [queries[start : start + batch] for start in range(0, len(queries) - batch + 1, batch)]
    search(batches[0], k)  # a first search allocates buffers
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST_SEARCHES or time.perf_counter() < end:
        part = batches[len(times) % len(batches)]
        start = time.perf_counter()
        search(part, k)
        times.append(time.perf_counter() - start)
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    return {"qps": batch * len(times) / sum(times), "p50_ms": p50, "p99_ms": p99, "searches": len(times)}


def _measure_task(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    implementation = IMPLEMENTATIONS[task["implementation"]]
    data = SearchData(Path(task["data"]))
    return measure_search(implementation, data, task["batches"], task["threads"], task["seconds"])


# The comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchComparison:
    """Request of a comparison; ``seconds`` is the time of a batch size in a turn, ``limit`` that of a whole turn.

    Raises:
        UsageError: an unknown implementation, or a number out of range.
    """

    implementations: Sequence[str] = tuple(IMPLEMENTATIONS)
    rows: int = 200_000
    dim: int = 512
    batches: Sequence[int] = (1, 32, 256)
    threads: int = 2
    rounds: int = 3
    seconds: float = 1.0
    limit: float = 300.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.implementations if name not in IMPLEMENTATIONS]:
            names = ", ".join(IMPLEMENTATIONS)
            raise UsageError(f"--contestants {unknown[0]}: there is no such search; choose from {names}")
        for name in ("rows", "dim", "threads", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: it must be at least 1")
        for batch in self.batches:
            if not 1 <= batch <= QUERIES:
                raise UsageError(f"--batch {batch}: it must lie between 1 and {QUERIES}")
        for name in ("seconds", "limit"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name} {getattr(self, name)}: it must be more than 0")


def compare_searches(comparison: SearchComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure all searches in turn, ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per implementation and batch (see :func:`result_row`), and ``ratios`` (see :func:`search_ratios`).
    """
    rounds: dict[str, list[Result]] = {name: [] for name in comparison.implementations}
    progress = Progress("measuring", comparison.rounds * len(rounds), "turns", interval=2.0, quiet=quiet)
    with tempfile.TemporaryDirectory(prefix="plsc-search-") as folder:
        data = make_search_data(Path(folder), comparison.rows, comparison.dim)
        for _ in range(comparison.rounds):
            for name, results in rounds.items():
                failed = bool(results) and "reason" in results[-1]
                results.append(results[-1] if failed else _turn(comparison, name, data))
                progress.advance(note=name)
    progress.finish()
    rows = [
        result_row(comparison, name, batch, results) for batch in comparison.batches for name, results in rounds.items()
    ]
    return {"rows": rows, "ratios": search_ratios(comparison, rounds)}


def _turn(comparison: SearchComparison, name: str, data: SearchData) -> Result:
    if (reason := unavailable(name)) is not None:
        return {"reason": reason}
    task = {
        "implementation": name,
        "data": str(data.folder),
        "batches": list(comparison.batches),
        "threads": comparison.threads,
        "seconds": comparison.seconds,
    }
    try:
        return run_task(__name__, task, data.folder, threads=comparison.threads, limit=comparison.limit)
    except DataError as error:
        return {"reason": str(error)}


def result_row(comparison: SearchComparison, name: str, batch: int, results: Sequence[Result]) -> dict[str, Any]:
    """Return an implementation's row at a batch: environment, sizes, medians over the rounds; None where it failed.

    ``qps`` are queries per second, ``qps_low`` and ``qps_high`` the extreme rounds; ``p50_ms`` and ``p99_ms`` are of a
    search of the batch; ``recall`` is the share of the ten true rows found; ``memory_mib`` the peak above the
    libraries.
    """
    row: dict[str, Any] = environment(processor_name()) | {
        "contestant": name,
        "label": IMPLEMENTATIONS[name].label,
        "rows": comparison.rows,
        "dim": comparison.dim,
        "batch": batch,
        "threads": comparison.threads,
        "rounds": comparison.rounds,
    }
    failed = next((result["reason"] for result in results if "reason" in result), None)
    good = [] if failed is not None else list(results)
    at_batch = [result["batches"][str(batch)] for result in good]
    row |= {key: median([figures[key] for figures in at_batch]) for key in _FIGURES}
    rates = [figures["qps"] for figures in at_batch]
    row |= {"qps_low": min(rates, default=None), "qps_high": max(rates, default=None)}
    row |= {key: median([result[key] for result in good]) for key in ("recall", "memory_mib", "build_s")}
    return row | {"failed": failed is not None, "note": failed or (at_batch[-1]["note"] if at_batch else "")}


def search_ratios(comparison: SearchComparison, rounds: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return, for each of our searches and batches, how many times the rate of the best baseline it reaches.

    ``times`` is the median of the rounds' quotients by the round's best baseline, ``best_other`` the baseline with the
    highest median.
    """
    good = {name: results for name, results in rounds.items() if not any("reason" in result for result in results)}
    baselines = [name for name in good if not IMPLEMENTATIONS[name].ours]
    ratios = []
    for batch in comparison.batches if baselines else ():
        rates = {name: [result["batches"][str(batch)]["qps"] for result in results] for name, results in good.items()}
        best = max(baselines, key=lambda name: statistics.median(rates[name]))
        for own in (name for name in good if IMPLEMENTATIONS[name].ours):
            quotients = [rate / max(rates[name][n] for name in baselines) for n, rate in enumerate(rates[own])]
            ratios.append({"batch": batch, "ours": own, "best_other": best, "times": statistics.median(quotients)})
    return ratios


if __name__ == "__main__":
    answer_task(_measure_task)
