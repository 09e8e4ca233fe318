"""What searches are measured on: unit vectors gathered by identity, as a gallery of faces is, and the true answers.

Random vectors would not do: all of them are about as far from one another as from the answer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plsc.index.exact import Float32, Int64

PER_IDENTITY = 10
SAME_COSINE = 0.6  # of two vectors of one identity, about; of two identities about 0
QUERIES = 1024
JUDGED = 256  # queries whose answers are compared with the true ones
K = 10
_ROWS = 16384


@dataclass(frozen=True)
class SearchData:
    """Files of a measurement: ``rows`` (N, D) and ``queries`` (QUERIES, D) float32, ``truth`` (JUDGED, 10) int64."""

    folder: Path

    @property
    def rows(self) -> Float32:
        """The base, memory-mapped."""
        mapped: Float32 = np.load(self.folder / "rows.npy", mmap_mode="r", allow_pickle=False)
        return mapped

    @property
    def queries(self) -> Float32:
        """More images of the base's identities."""
        return np.asarray(np.load(self.folder / "queries.npy", allow_pickle=False), dtype=np.float32)

    @property
    def truth(self) -> Int64:
        """The rows of the largest float64 products, best first, fewer than 10 where there are fewer."""
        return np.asarray(np.load(self.folder / "truth.npy", allow_pickle=False), dtype=np.int64)


def make_search_data(folder: Path, count: int, dim: int, seed: int = 0) -> SearchData:
    """Draw ``count`` rows and the queries, and find the true answers, in ``folder``."""
    random = np.random.default_rng(seed)
    centres = _unit(random.standard_normal((max(1, count // PER_IDENTITY), dim), dtype=np.float32))
    base = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float32, (count, dim))
    for start in range(0, count, _ROWS):
        stop = min(start + _ROWS, count)
        base[start:stop] = _images(centres, random.integers(0, len(centres), stop - start), random)
    base.flush()
    queries = _images(centres, random.integers(0, len(centres), QUERIES), random)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "truth.npy", true_rows(queries[:JUDGED], _parts(base), min(K, count)))
    return SearchData(folder)


def true_rows(queries: Float32, parts: Iterator[Float32], k: int) -> Int64:
    """(Q, k) numbers of the rows with the largest float64 products, best first, over all ``parts`` of the base."""
    scores = np.empty((len(queries), 0))
    rows = np.empty((len(queries), 0), dtype=np.int64)
    start = 0
    for part in parts:
        more = queries.astype(np.float64) @ part.astype(np.float64).T
        numbers = np.broadcast_to(np.arange(start, start + len(part)), more.shape)
        scores, rows = np.concatenate([scores, more], axis=1), np.concatenate([rows, numbers], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
        start += len(part)
    return rows


def _images(centres: Float32, labels: npt.NDArray[np.int64], random: np.random.Generator) -> Float32:
    noise = random.standard_normal((len(labels), centres.shape[1]), dtype=np.float32)
    spread = math.sqrt((1 - SAME_COSINE) / centres.shape[1])
    return _unit(math.sqrt(SAME_COSINE) * centres[labels] + np.float32(spread) * noise)


def _unit(rows: Float32) -> Float32:
    unit: Float32 = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _parts(base: Float32) -> Iterator[Float32]:
    for start in range(0, len(base), _ROWS):
        yield base[start : start + _ROWS]
