"""Who is measured at searching: our scan, and what one would use instead."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from plsc.bench.search_data import SearchData
from plsc.index.exact import Float32, Int64
from plsc.index.scan import ExactScan

BLOCKS = (1024, 4096, 16384, 65536)  # rows per matrix product that faiss is tried with; the first is its own

Search = Callable[[Float32, int], Int64]


@dataclass(frozen=True)
class Contestant:
    """``build`` makes a search of the rows: queries (Q, D), k -> rows (Q, k); ``prepare`` readies it for a batch and
    says with what."""

    label: str
    build: Callable[[SearchData, int], Search]
    ours: bool = False
    needs: str = "numpy"
    prepare: Callable[[Search, Float32], str] = lambda search, queries: ""


def missing(name: str) -> str | None:
    """Why a contestant cannot take part, or None."""
    needs = CONTESTANTS[name].needs
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
    for start in range(0, len(rows), 16384):
        flat.add(np.array(rows[start : start + 16384], subok=False))

    def search(queries: Float32, k: int) -> Int64:
        found: Int64 = flat.search(queries, k)[1]
        return found

    return search


def _tune_faiss(search: Search, queries: Float32) -> str:
    """Set the block size with which ``queries`` take least time."""
    import faiss

    times = {}
    for block in BLOCKS:
        faiss.cvar.distance_compute_blas_database_bs = block
        search(queries, 10)
        began = time.perf_counter()
        search(queries, 10)
        times[block] = time.perf_counter() - began
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


CONTESTANTS = {
    "plsc": Contestant("plsc, bf16 + float32 ranking", _scan("bf16"), ours=True),
    "plsc-fp32": Contestant("plsc, float32", _scan("fp32"), ours=True),
    "numpy": Contestant("numpy", _numpy),
    "faiss": Contestant("faiss flat, as shipped", _faiss, needs="faiss"),
    "faiss-tuned": Contestant("faiss flat, block size tuned", _faiss, needs="faiss", prepare=_tune_faiss),
    "usearch": Contestant("usearch, exact", _usearch, needs="usearch"),
}
