"""Synthetic embeddings for the benchmarks of search and service: vectors clustered by identity, with exact answers.

Uniformly random vectors would not do: all of them are about as far from one another as from the answer, so that
neither the ranking nor an approximate index is put to the test.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plsc.index.rows import Float32, Int64

PER_IDENTITY = 10
SAME_COSINE = 0.6  # expected between two vectors of one identity; 0 between two identities
QUERIES = 1024
JUDGED = 256  # queries with exact answers
K = 10
_BLOCK_ROWS = 16384


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
