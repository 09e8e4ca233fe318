"""Comparison of exact searches: our scan and its baselines, each in fresh processes, in turn; medians and ratios.

``python -m plsc.bench.search TASK.json FOLDER`` is one turn of one of them. The vectors are clustered by identity:
uniformly random ones would not do, since all are about as far from one another as from the answer, so that neither the
ranking nor an approximate index is put to the test.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plsc.bench.comparison import Contestant, VectorComparison, all_contestants, is_ours
from plsc.bench.harness import PeakMemory, Result, be_rank, failure, median, summary
from plsc.index.rows import Float32, Int64
from plsc.index.scan import ExactScan

PER_IDENTITY = 10
SAME_COSINE = 0.6  # expected between two vectors of one identity; 0 between two identities
QUERIES = 1024
JUDGED = 256  # queries with exact answers
K = 10
_BLOCK_ROWS = 16384
_FIGURES = ("qps", "p50_ms", "p99_ms")
_LEAST_SEARCHES = 3

Search = Callable[[Float32, int], Int64]  # queries (Q, D), k -> indices of rows (Q, k)


# Vectors, and exact answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchData:
    """Folder with the arrays of a measurement.

    ``rows`` (N, D) and ``queries`` (QUERIES, D) are float32, ``truth`` (JUDGED, min(K, N)) is int64.
    """

    folder: Path

    @property
    def rows(self) -> Float32:
        """The vectors searched, memory-mapped."""
        mapped: Float32 = np.load(self.folder / "rows.npy", mmap_mode="r", allow_pickle=False)
        return mapped

    @property
    def queries(self) -> Float32:
        """Further vectors of the same identities."""
        return np.asarray(np.load(self.folder / "queries.npy", allow_pickle=False), dtype=np.float32)

    @property
    def truth(self) -> Int64:
        """Indices of the rows with the largest float64 inner products, best first."""
        return np.asarray(np.load(self.folder / "truth.npy", allow_pickle=False), dtype=np.int64)


def make_search_data(folder: Path, count: int, dim: int, seed: int = 0) -> SearchData:
    """Draw ``count`` rows and the queries, find the exact answers, and save them in ``folder``."""
    random = np.random.default_rng(seed)
    centres = _unit(random.standard_normal((max(1, count // PER_IDENTITY), dim), dtype=np.float32))
    base = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float32, (count, dim))
    for start in range(0, count, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, count)
        base[start:stop] = _draw(centres, random.integers(0, len(centres), stop - start), random)
    base.flush()
    queries = _draw(centres, random.integers(0, len(centres), QUERIES), random)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "truth.npy", exact_neighbours(queries[:JUDGED], _blocks(base), min(K, count)))
    return SearchData(folder)


def exact_neighbours(queries: Float32, blocks: Iterator[Float32], k: int) -> Int64:
    """Return (Q, k) indices of the rows with the largest float64 inner products, best first.

    Args:
        queries: (Q, D).
        blocks: consecutive rows of the base, (n, D) each.
        k: neighbours of a query.
    """
    scores = np.empty((len(queries), 0))
    indices = np.empty((len(queries), 0), dtype=np.int64)
    start = 0
    for block in blocks:
        block_scores = queries.astype(np.float64) @ block.astype(np.float64).T
        block_indices = np.broadcast_to(np.arange(start, start + len(block)), block_scores.shape)
        scores, indices = np.hstack([scores, block_scores]), np.hstack([indices, block_indices])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, indices = np.take_along_axis(scores, order, axis=1), np.take_along_axis(indices, order, axis=1)
        start += len(block)
    return indices


def _draw(centres: Float32, labels: npt.NDArray[np.int64], random: np.random.Generator) -> Float32:
    """Draw unit vectors around the identities' centres, so that two of one identity have SAME_COSINE on average."""
    noise = random.standard_normal((len(labels), centres.shape[1]), dtype=np.float32)
    spread = math.sqrt((1 - SAME_COSINE) / centres.shape[1])
    return _unit(math.sqrt(SAME_COSINE) * centres[labels] + np.float32(spread) * noise)


def _unit(rows: Float32) -> Float32:
    unit: Float32 = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _blocks(base: Float32) -> Iterator[Float32]:
    for start in range(0, len(base), _BLOCK_ROWS):
        yield base[start : start + _BLOCK_ROWS]


# One turn, in a process of its own ----------------------------------------------------------------------------------


def _scan(precision: str, data: SearchData, threads: int) -> Search:
    scan = ExactScan(data.rows, precision=precision)
    return lambda queries, k: scan.search(queries, k)[1]


SEARCHES = {
    "plsc-int8": Contestant("plsc, int8 + float32 ranking", partial(_scan, "int8")),
    "plsc": Contestant("plsc, bf16 + float32 ranking", partial(_scan, "bf16")),
    "plsc-fp32": Contestant("plsc, float32", partial(_scan, "fp32")),
}


def measure_search(
    contestant: Contestant, data: SearchData, batches: Sequence[int], threads: int, seconds: float
) -> dict[str, Any]:
    """Measure one search in this process, ``seconds`` long for each batch size.

    Returns:
        ``memory_mib`` at the peak above the libraries, ``build_s``, ``recall`` at 10; and ``batches``: by batch size
        (a string, for JSON) ``qps``, ``p50_ms`` and ``p99_ms`` of a search, ``searches``, ``note``.
    """
    queries, k = data.queries, min(K, len(data.rows))
    peak = PeakMemory(torch.device("cpu"))
    start = time.perf_counter()
    search = contestant.build(data, threads)
    build_s = time.perf_counter() - start
    by_batch = {}
    for batch in batches:
        note = contestant.prepare(search, queries[:batch]) if contestant.prepare is not None else ""
        by_batch[str(batch)] = {**time_searches(search, queries, batch, k, seconds), "note": note}
    memory = peak.above()  # before recall is measured in batches of 32, which may not be among those asked for
    found = np.concatenate([search(queries[start : start + 32], k) for start in range(0, JUDGED, 32)])
    hits = [len(set(row) & set(true)) for row, true in zip(found.tolist(), data.truth.tolist(), strict=True)]
    return {"memory_mib": memory, "build_s": build_s, "recall": sum(hits) / (k * JUDGED), "batches": by_batch}


def time_searches(
    search: Callable[[Float32, int], object], queries: Float32, batch: int, k: int, seconds: float
) -> dict[str, Any]:
    """Search for ``batch`` queries at once, ``seconds`` long: ``qps``, ``p50_ms``, ``p99_ms`` and ``searches``."""
    batches = [queries[start : start + batch] for start in range(0, len(queries) - batch + 1, batch)]
    search(batches[0], k)  # a first search allocates buffers
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST_SEARCHES or time.perf_counter() < end:
        part = batches[len(times) % len(batches)]
        start = time.perf_counter()
        search(part, k)
        times.append(time.perf_counter() - start)
    return {"qps": batch * len(times) / sum(times), **percentiles(times), "searches": len(times)}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """``p50_ms`` and ``p99_ms``; 0 of no times."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000 if seconds else (0.0, 0.0)
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(task["threads"])
    contestant = all_contestants("search", SEARCHES, task["baselines"])[task["contestant"]]
    return measure_search(contestant, SearchData(Path(task["data"])), task["batches"], task["threads"], task["seconds"])


# The comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchComparison(VectorComparison):
    """Request of a comparison; ``seconds`` is the time of a batch size in a turn, ``limit`` that of a whole turn.

    ``names`` are contestants, ours alone if there are none; ``baselines`` is the file with those that are not ours.

    Raises:
        UsageError: an unknown contestant.
    """

    subject, ours = "search", SEARCHES
    names: Sequence[str] = ()
    rows: int = 200_000
    dim: int = 512
    batches: Sequence[int] = (1, 32, 256)
    threads: int = 2
    rounds: int = 3
    seconds: float = 1.0
    limit: float = 300.0
    baselines: str | None = None


def compare_searches(comparison: SearchComparison, *, quiet: bool = False) -> dict[str, Any]:
    """Measure all searches in turn, ``comparison.rounds`` times over.

    Returns:
        ``rows``, one per contestant and batch (see :func:`search_row`), and ``ratios`` (see :func:`search_ratios`).
    """
    with tempfile.TemporaryDirectory(prefix="plsc-search-") as name:
        folder = Path(name)
        make_search_data(folder, comparison.rows, comparison.dim)
        options = {"batches": list(comparison.batches), "seconds": comparison.seconds}
        rounds = comparison.measure(folder, quiet=quiet, **options)
    rows = [
        search_row(comparison, name, batch, results) for batch in comparison.batches for name, results in rounds.items()
    ]
    return {"rows": rows, "ratios": search_ratios(comparison.batches, rounds)}


def search_row(comparison: SearchComparison, name: str, batch: int, results: Sequence[Result]) -> dict[str, Any]:
    """Return a contestant's row at a batch: environment, sizes, medians over the rounds; None where it failed.

    ``qps`` are queries per second, ``qps_low`` and ``qps_high`` the extreme rounds; ``p50_ms`` and ``p99_ms`` are of a
    search of the batch; ``recall`` is the share of the ten true rows found; ``memory_mib`` the peak above the
    libraries.
    """
    row = comparison.about(name, "rows", "dim") | {"batch": batch}
    row |= {"threads": comparison.threads, "rounds": comparison.rounds}
    failed = failure(results)
    good = [] if failed is not None else list(results)
    at_batch = [result["batches"][str(batch)] for result in good]
    row |= summary(at_batch, _FIGURES, "qps")
    row |= {key: median([result[key] for result in good]) for key in ("recall", "memory_mib", "build_s")}
    return row | {"failed": failed is not None, "note": failed or (at_batch[-1]["note"] if at_batch else "")}


def search_ratios(batches: Sequence[int], rounds: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return, for each of our searches and batches, how many times the rate of the best baseline it reaches.

    ``times`` is the median of the rounds' quotients by the round's best baseline, ``best_other`` the baseline with the
    highest median.
    """
    good = {name: results for name, results in rounds.items() if failure(results) is None}
    baselines = [name for name in good if not is_ours(name)]
    ratios = []
    for batch in batches if baselines else ():
        rates = {name: [result["batches"][str(batch)]["qps"] for result in results] for name, results in good.items()}
        best = max(baselines, key=lambda name: statistics.median(rates[name]))
        for own in filter(is_ours, good):
            quotients = [rate / max(rates[name][n] for name in baselines) for n, rate in enumerate(rates[own])]
            ratios.append({"batch": batch, "ours": own, "best_other": best, "times": statistics.median(quotients)})
    return ratios


if __name__ == "__main__":
    be_rank(_measure)
