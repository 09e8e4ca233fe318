"""Exact search: inner products of unit vectors, by faiss' brute force over a (memory-mapped) matrix."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from plsc.errors import UsageError

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
    scores, rows = faiss.knn(
        np.ascontiguousarray(queries), np.asarray(base), k, metric=faiss.METRIC_INNER_PRODUCT
    )
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


def unit_rows(vectors: npt.ArrayLike, dim: int) -> Float32:
    """``vectors`` (Q, dim) as float32 of length 1; :class:`UsageError` names the first row that has no
    direction."""
    array = np.asarray(vectors)
    if array.ndim != 2 or array.shape[1] != dim or array.dtype.kind not in "fiu":
        raise UsageError(
            f"queries are {array.dtype}{list(array.shape)}; this index takes numbers of shape [Q, {dim}]"
        )
    wide = array.astype(np.float64)
    if not np.isfinite(wide).all():
        raise UsageError(
            f"query {int(np.flatnonzero(~np.isfinite(wide).all(axis=1))[0])} holds NaN or infinity"
        )
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    if not norms.all():
        raise UsageError(
            f"query {int(np.flatnonzero(norms[:, 0] == 0)[0])} is the zero vector, which has no direction"
        )
    return np.ascontiguousarray((wide / norms).astype(np.float32))
