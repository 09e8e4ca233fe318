"""Exact search over an index: by faiss' brute force for few rows or queries, else by our own scan."""

from typing import Any, Protocol

import numpy as np

from plsc.index.rows import Float32, Int64, Mask
from plsc.index.scan import ExactScan
from plsc.native.scan import load_scan

# Rows per matrix product of faiss: with its own 1,024 the products are too small for several threads, and 65,536 is no
# faster than this but holds a gigabyte of scores at once (faiss multiplies 4,096 queries by a block).
DATABASE_BLOCK = 16384
SCAN_FROM = 1 << 22  # numbers in the rows
COPY_AFTER = 16  # queries that faiss answers before a copy is worth making
_UNCOPIED_QUERIES = 64  # compared at once with a block of rows


class ExactSearcher(Protocol):
    """Exact search over all rows; :class:`plsc.index.scan.ExactScan` is one."""

    def search(self, queries: Float32, k: int, *, allowed: Mask | None = None) -> tuple[Float32, Int64]:
        """Scores and rows (Q, min(k, rows allowed)), best first."""


def load_faiss() -> Any:
    """Import faiss, set up for large matrix products."""
    import faiss

    faiss.cvar.distance_compute_blas_database_bs = DATABASE_BLOCK
    return faiss


def knn(queries: Float32, base: Float32, k: int) -> tuple[Float32, Int64]:
    """Find the rows of ``base`` (N, D) with the largest inner products with each of ``queries`` (Q, D), by faiss.

    Returns:
        Scores (Q, min(k, N)) float32, best first, and rows (Q, min(k, N)) int64.
    """
    k = min(k, len(base))
    if not k or not len(queries):
        return np.empty((len(queries), k), dtype=np.float32), np.empty((len(queries), k), dtype=np.int64)
    faiss = load_faiss()
    scores, rows = faiss.knn(np.ascontiguousarray(queries), np.asarray(base), k, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, rows


def merge_topk(first: tuple[Float32, Int64], second: tuple[Float32, Int64], k: int) -> tuple[Float32, Int64]:
    """Merge two results (scores, rows) of the same queries into the best ``k``; row -1 (score −inf) stands for none."""
    scores = np.concatenate([first[0], second[0]], axis=1)
    rows = np.concatenate([first[1], second[1]], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


class ExactSearch:
    """Exact search of ``vectors`` (N, D) float32 of length 1; the scan's copy is made once enough queries came.

    Milliseconds of a search for 10 rows on one thread, by :class:`ExactScan` in bfloat16 and by faiss 1.15 with its
    block size tuned, D = 512, a processor with AMX:

        rows         1 query         32 queries        256 queries
        1,000        0.23 / 0.09     0.5 / 1.2         3.4 / 12
        5,000        0.45 / 0.34     1.1 / 15          10 / 57
        20,000       1.0 / 1.2       2.7 / 58          18 / 201
        100,000      12 / 19         14 / 595          50 / 1,046

    The copy of 100,000 rows takes 0.2 s, as long as faiss needs for ten single queries. So faiss answers all queries
    for up to 8,192 rows of 512 numbers and where no compiler is installed, and otherwise the first 16.
    """

    def __init__(self, vectors: Float32) -> None:
        self._vectors = vectors
        self._scan: ExactScan | None = None
        self._queries = 0

    def search(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        """Scores (Q, min(k, N)) float32, best first, and rows (Q, min(k, N)) int64, for queries (Q, D) of length 1."""
        if self._scan is None and self._is_worth_a_copy(len(queries)):
            self._scan = ExactScan(self._vectors)
        return knn(queries, self._vectors, k) if self._scan is None else self._scan.search(queries, k)

    def _is_worth_a_copy(self, queries: int) -> bool:
        self._queries += queries
        return self._vectors.size >= SCAN_FROM and self._queries > COPY_AFTER and load_scan() is not None


class UncopiedSearch:
    """Exact search of ``vectors`` (N, D) as they lie in their file, a few queries at a time: in little memory."""

    def __init__(self, vectors: Float32) -> None:
        self._vectors = vectors

    def search(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        """Scores and rows (Q, min(k, N)), best first."""
        parts = [
            knn(queries[start : start + _UNCOPIED_QUERIES], self._vectors, k)
            for start in range(0, max(1, len(queries)), _UNCOPIED_QUERIES)
        ]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])
