"""Approximate search that never comes back with too few: a faiss structure, the rows beside it, an exact search behind.

Some real rows are kept out of the structure for good and searched by brute force beside it. They are the queries that
the structure's effort was tuned with, and its recall can be measured on them again at any time.
"""

from typing import Any

import numpy as np

from plsc.errors import UsageError
from plsc.index import approximate
from plsc.index.exact import Allowed, Exact, Float32, Int64, best_of, nearest
from plsc.index.recall import Recall, recall_of
from plsc.index.row_source import RowSource
from plsc.index.watched_recall import WatchedRecall

FEW = 4  # where at most one row in so many is allowed, those alone are scanned, which takes as much less


class ApproximateSearch:
    """Searches ``vectors`` (N, D) by a structure over all of them but ``held_out``.

    Attributes: ``structure`` (faiss), ``kind``, ``held_out`` (H,) rows outside it, ascending, ``recall`` as it was
    measured at the tuning, ``watched`` as it is for those who ask, once :meth:`watch` is called from time to time.
    """

    def __init__(
        self,
        structure: Any,
        kind: approximate.Kind,
        vectors: Float32,
        held_out: Int64,
        exact: Exact,
        recall: Recall,
    ) -> None:
        """structure: its id i is the i-th row of ``vectors`` that is not held out, its effort is set."""
        if structure.ntotal + len(held_out) != len(vectors):
            raise UsageError(
                f"the structure has {structure.ntotal} rows and {len(held_out)} are held out, of {len(vectors)}"
            )
        self.structure, self.kind, self.held_out, self.recall = structure, kind, held_out, recall
        self.watched = WatchedRecall()
        self._vectors, self._exact = vectors, exact
        self._inside = np.delete(np.arange(len(vectors), dtype=np.int64), held_out)
        self._beside = RowSource(vectors).take(held_out)

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: Float32, k: int, *, allowed: Allowed | None = None) -> tuple[Float32, Int64]:
        """Scores (Q, k') float32, best first, and rows (Q, k') int64, k' = min(k, rows allowed).

        queries (Q, D) float32 of length 1; allowed (N,) bool: the rows that may be found. A query for which the
        structure came up with fewer is searched exactly, and so are all where few rows are allowed.
        """
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        k = min(k, count)
        if count * FEW <= len(self) or not k:
            return self._exact.search(queries, k, allowed=allowed)
        scores, rows = self._found(queries, k, allowed)
        short = (rows < 0).any(axis=1) if rows.shape[1] == k else np.ones(len(queries), dtype=bool)
        if short.any():
            whole = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
            whole[0][~short], whole[1][~short] = scores[~short], rows[~short]
            whole[0][short], whole[1][short] = self._exact.search(queries[short], k, allowed=allowed)
            scores, rows = whole
        self.watched.note(queries, scores, allowed)
        return scores, rows

    def watch(self) -> None:
        """Ask some of the queries since the last time again, exactly."""
        self.watched.judge(self._exact)

    def measure_recall(self) -> Recall:
        """Recall now, on the rows held out, against the exact search of the rows in the structure."""
        inside = np.ones(len(self), dtype=bool)
        inside[self.held_out] = False
        truth = self._exact.search(self._beside, 10, allowed=inside)[0]
        return recall_of(approximate.found(self.structure, self._beside, truth.shape[1])[0], truth)

    def _found(self, queries: Float32, k: int, allowed: Allowed | None) -> tuple[Float32, Int64]:
        within = None if allowed is None else allowed[self._inside]
        scores, rows = approximate.found(self.structure, queries, min(k, len(self._inside)), allowed=within)
        rows = np.where(rows >= 0, self._inside[rows], -1)
        beside = self.held_out if allowed is None else self.held_out[allowed[self.held_out]]
        vectors = self._beside if allowed is None else self._beside[allowed[self.held_out]]
        more = nearest(queries, vectors, k)
        return best_of((scores, rows), (more[0], beside[more[1]]), k)
