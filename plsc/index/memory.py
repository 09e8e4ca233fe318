"""Building within an amount of memory: what the steps take, what is left for the structure, searching without copies.

What counts is memory that the system cannot take back. Files are read through its cache, which it can, and written
without being mapped; the interpreter and its libraries (about 0.3 GB) come on top.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.errors import UsageError
from plsc.index import approximate
from plsc.index.exact import DATABASE_BLOCK, Float32, Int64, nearest

ROW_BYTES = 96  # ids, labels, places and their sorting, for each row of the sets
FIXED_BYTES = 14 << 20  # the chunks in which rows are read, normalised, compared and written
LEAST_BYTES = 12 << 20  # of the structure's part: below, training and adding take no reasonable steps
_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUERIES = 64  # compared at once with a block of rows
_TRAINED_AT_ONCE = 4096  # rows that faiss compares with all cells


def parse_memory(text: str, option: str = "--memory") -> int:
    """Bytes of ``4GB`` (4·10^9), ``4GiB`` (4·2^30) or a plain number; :class:`UsageError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise UsageError(f"{option} {text!r} is no amount of memory; write 4GB, 500MiB or 4e9 (bytes)")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Within:
    """A build of ``rows`` vectors of ``dim`` numbers that may allocate ``limit`` bytes; what is larger lies in
    ``folder``."""

    limit: int
    rows: int
    dim: int
    folder: Path

    def __post_init__(self) -> None:
        """Raises :class:`UsageError` where ``limit`` is too little whatever is done."""
        needed = self.rows * ROW_BYTES + FIXED_BYTES + LEAST_BYTES
        if self.limit < needed:
            raise UsageError(
                f"{_megabytes(self.limit)} of memory are too little for {self.rows:,} rows of {self.dim}: "
                f"at least {_megabytes(needed)} are needed"
            )

    @property
    def left(self) -> int:
        """Bytes for copies of the vectors and for the structure."""
        return self.limit - self.rows * ROW_BYTES - FIXED_BYTES

    def holds(self, kind: approximate.Kind) -> bool:
        """Whether the whole structure of ``kind`` can be built in memory."""
        sizes = {
            "exact": 0,
            "ivf": 2 * (4 * self.dim + 8),  # lists that grow have room to spare, up to as much again
            "pq": 2 * (approximate.code_bytes(self.dim) + 8),
            "hnsw": 2 * (4 * self.dim + 8 * approximate.HNSW_LINKS + 40),
        }
        sample = approximate.cell_count(self.rows) * approximate.ROWS_PER_CELL * 4 * self.dim if kind != "hnsw" else 0
        return self.rows * sizes[kind] + sample <= self.left

    @property
    def sample_rows(self) -> int:
        """How many rows k-means may learn from."""
        return int(0.4 * self.left) // (4 * self.dim)

    def part_rows(self, bytes_of_row: int, cells: int) -> int:
        """How many rows of ``bytes_of_row`` are added to a part before it is written to disk."""
        compared = 4 * _TRAINED_AT_ONCE * min(cells, DATABASE_BLOCK)
        rows = int(0.8 * self.left - compared) // (2 * (bytes_of_row + 8))
        if rows < cells // 8 + 1:
            raise UsageError(f"{_megabytes(self.limit)} of memory are too little for {cells:,} cells; allow more")
        return rows


class UncopiedSearch:
    """Exact search of ``vectors`` (N, D) as they lie in their file, a few queries at a time."""

    def __init__(self, vectors: Float32) -> None:
        self._vectors = vectors

    def search(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        """Scores and rows (Q, min(k, N)), best first."""
        parts = [
            nearest(queries[start : start + _QUERIES], self._vectors, k)
            for start in range(0, max(1, len(queries)), _QUERIES)
        ]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
