"""Building within a memory budget: IVF structures trained on a sample, added part by part and merged on disk.

The cells of the merged structure lie in a file of their own, ``index.ivfdata``, which searching maps: it takes the
memory that the system has to spare, and reads from the disk where there is none.

What a budget counts is memory that the system cannot take back. Files are read through its cache, which it can, and
written without being mapped; the interpreter and its libraries (about 0.3 GB) come on top.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.errors import UsageError
from plsc.index import ann
from plsc.index.scan import DATABASE_BLOCK, load_faiss
from plsc.progress import Progress

LISTS_FILE = "index.ivfdata"
ROW_BYTES = 96  # ids, labels, positions and their sorting, for each row of the sets
FIXED_BYTES = 14 << 20  # the chunks in which rows are read, normalised, compared and written
LEAST_BYTES = 12 << 20  # of the structure's part: below, training and adding take no reasonable steps
_TRAINED_AT_ONCE = 4096  # rows that faiss compares with all cells
_ADDED_BYTES = 1 << 20  # of the rows that are added at once


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a build of ``rows`` vectors of ``dim`` numbers.

    Attributes:
        limit: bytes that may be allocated.
        folder: where parts of a structure that does not fit are written.

    Raises:
        UsageError: ``limit`` is too little for any kind.
    """

    limit: int
    rows: int
    dim: int
    folder: Path

    def __post_init__(self) -> None:
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

    def holds(self, kind: ann.Kind) -> bool:
        """True if the whole structure of ``kind`` can be built in memory."""
        sizes = {
            "exact": 0,
            "ivf": 2 * (4 * self.dim + 8),  # growing lists reserve up to as much again
            "pq": 2 * (ann.code_bytes(self.dim) + 8),
            "hnsw": 2 * (4 * self.dim + 8 * ann.HNSW_LINKS + 40),
        }
        sample = ann.cell_count(self.rows) * ann.ROWS_PER_CELL * 4 * self.dim if kind != "hnsw" else 0
        return self.rows * sizes[kind] + sample <= self.left

    @property
    def sample_rows(self) -> int:
        """Rows that k-means may learn from."""
        return int(0.4 * self.left) // (4 * self.dim)

    def part_rows(self, bytes_of_row: int, cells: int) -> int:
        """Rows of ``bytes_of_row`` that are added to a part before it is written to disk."""
        compared = 4 * _TRAINED_AT_ONCE * min(cells, DATABASE_BLOCK)
        rows = int(0.8 * self.left - compared) // (2 * (bytes_of_row + 8))
        if rows < cells // 8 + 1:
            raise UsageError(f"{_megabytes(self.limit)} of memory are too little for {cells:,} cells; allow more")
        return rows


def build_structure(kind: ann.Kind, base: ann.RowArray, seed: int, budget: MemoryBudget | None, *, quiet: bool) -> Any:
    """Build the structure of ``kind`` over ``base`` (N, D): in memory where the budget allows, else on disk.

    Raises:
        UsageError: the kind has to be in memory and does not fit.
    """
    if budget is None or budget.holds(kind):
        return ann.train_and_add(kind, base, seed, quiet=quiet)
    if kind == "hnsw":
        raise UsageError(f"hnsw keeps all {len(base):,} rows in memory, and --max-memory allows less; use --kind ivf")
    return _build_in_parts(kind, base, seed, budget, quiet=quiet)


def _build_in_parts(kind: ann.Kind, base: ann.RowArray, seed: int, budget: MemoryBudget, *, quiet: bool) -> Any:
    from faiss.contrib.ondisk import merge_ondisk

    structure = ann.train_ivf(kind, base, seed, max_rows=budget.sample_rows)
    index = ann.faiss_index(structure)
    part_rows, step = budget.part_rows(index.code_size, index.nlist), max(1, _ADDED_BYTES // (4 * base.shape[1]))
    progress = Progress(f"index ({kind})", len(base), "rows", quiet=quiet)
    with tempfile.TemporaryDirectory(prefix=".parts-", dir=budget.folder) as folder:
        written: list[str] = []
        for start in range(0, len(base), part_rows):
            part = load_faiss().clone_index(index)
            ann.add_rows(part, base, range(start, min(start + part_rows, len(base)), step), progress)
            written.append(f"{folder}/{len(written):05d}.faiss")
            load_faiss().write_index(part, written[-1])
            del part  # before the next one is made: two do not fit
        progress.finish()
        with ann.stdout_to_stderr():
            merge_ondisk(index, written, str(budget.folder / LISTS_FILE))
    ann.disable_prefetch(structure)
    return structure


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
