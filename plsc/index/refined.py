"""Compressed rows, and the best of them scored again from their float32 numbers: little memory, true scores."""

from typing import Any

import numpy as np

from plsc.index.exact import Float32, Int64

TIMES = 10  # as many rows are taken from the compressed ones as are asked for: what compression misorders is among them
_TOGETHER = 32  # queries whose rows are read at once


class Refined:
    """A faiss IVF index of compressed rows with the same rows in float32 behind it; searched as a faiss index is.

    Attributes: ``index`` (faiss), ``base`` (N, D) the rows, read by number where they are needed.
    """

    def __init__(self, index: Any, base: Any) -> None:
        self.index, self.base = index, base

    @property
    def ntotal(self) -> int:
        """N."""
        return int(self.index.ntotal)

    @property
    def nlist(self) -> int:
        """The number of cells."""
        return int(self.index.nlist)

    @property
    def nprobe(self) -> int:
        """How many of them a query reads."""
        return int(self.index.nprobe)

    @nprobe.setter
    def nprobe(self, value: int) -> None:
        self.index.nprobe = value

    def add(self, rows: Float32) -> None:
        """Compress ``rows`` (n, D) and add them."""
        self.index.add(rows)

    def search(self, queries: Float32, k: int, **more: Any) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), best first, by float32 products; row -1 where no more were found."""
        rows: Int64 = self.index.search(queries, min(TIMES * k, self.ntotal), **more)[1]
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        for start in range(0, len(queries), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            scores[part] = self._scores(queries[part], rows[part])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)

    def _scores(self, queries: Float32, rows: Int64) -> Float32:
        needed, places = np.unique(rows[rows >= 0], return_inverse=True)
        vectors = np.asarray(self.base[needed])
        query = np.nonzero(rows >= 0)[0]
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        scores[rows >= 0] = np.einsum("nd,nd->n", vectors[places], queries[query])
        return scores
