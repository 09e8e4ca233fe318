"""Exact search: inner products of unit vectors, by faiss' brute force over a (memory-mapped) matrix."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Allowed = npt.NDArray[np.bool_]

# Rows per matrix product: with faiss' own 1,024 the products are too small for several threads, and 65,536 is no
# faster than this but takes a gigabyte of scores at once (faiss puts 4,096 queries against a block).
DATABASE_BLOCK = 16384


class Exact(Protocol):
    """Exact search over all rows; :class:`plsc.index.scan.ExactScan` is one."""

    def search(self, queries: Float32, k: int, *, allowed: Allowed | None = None) -> tuple[Float32, Int64]:
        """Scores and rows (Q, min(k, rows allowed)), best first."""


def load_faiss() -> Any:
    """The module faiss, set up for large matrix products."""
    import faiss

    faiss.cvar.distance_compute_blas_database_bs = DATABASE_BLOCK
    return faiss


def nearest(queries: Float32, base: Float32, k: int) -> tuple[Float32, Int64]:
    """The ``k`` rows of ``base`` (N, D) with the largest inner product with each of ``queries`` (Q, D), best
    first.

    Returns scores (Q, min(k, N)) float32 and rows (Q, min(k, N)) int64.
    """
    k = min(k, len(base))
    if not k or not len(queries):
        return np.empty((len(queries), k), dtype=np.float32), np.empty((len(queries), k), dtype=np.int64)
    faiss = load_faiss()
    scores, rows = faiss.knn(np.ascontiguousarray(queries), np.asarray(base), k, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, rows


def best_of(first: tuple[Float32, Int64], second: tuple[Float32, Int64], k: int) -> tuple[Float32, Int64]:
    """The best ``k`` of two answers to the same queries, each (scores, rows); row -1 stands for none (score
    −inf)."""
    scores, rows = (
        np.concatenate([first[0], second[0]], axis=1),
        np.concatenate([first[1], second[1]], axis=1),
    )
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
