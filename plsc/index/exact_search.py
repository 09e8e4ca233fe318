"""Exact search by whichever brute force is faster: faiss' for few rows or questions, else our own scan."""

from plsc.index.exact import Float32, Int64, nearest
from plsc.index.scan import ExactScan
from plsc.native.scan import has_scan

SCAN_FROM = 1 << 22  # numbers of the base
COPY_AFTER = 16  # queries that faiss answers before a copy is worth making


class ExactSearch:
    """Exact search of ``vectors`` (N, D) float32 of length 1, whose copy is made only once enough is asked.

    Milliseconds of a search for 10 rows on one thread, by :class:`ExactScan` in bfloat16 and by faiss 1.15 with its
    block size tuned, D = 512, a processor with AMX:

        rows         1 query         32 queries        256 queries
        1,000        0.23 / 0.09     0.5 / 1.2         3.4 / 12
        5,000        0.45 / 0.34     1.1 / 15          10 / 57
        20,000       1.0 / 1.2       2.7 / 58          18 / 201
        100,000      12 / 19         14 / 595          50 / 1,046

    The copy of 100,000 rows takes 0.2 s, as long as faiss needs for ten single queries. So faiss answers for up to
    8,192 rows of 512 numbers, and otherwise the first 16 queries, and all of them where no compiler is.
    """

    def __init__(self, vectors: Float32) -> None:
        self._vectors = vectors
        self._scan: ExactScan | None = None
        self._asked = 0

    def search(self, queries: Float32, k: int) -> tuple[Float32, Int64]:
        """Scores (Q, min(k, N)) float32, best first, and rows (Q, min(k, N)) int64, for queries (Q, D) of length 1."""
        if self._scan is None and self._worth_scanning(len(queries)):
            self._scan = ExactScan(self._vectors)
        return nearest(queries, self._vectors, k) if self._scan is None else self._scan.search(queries, k)

    def _worth_scanning(self, queries: int) -> bool:
        self._asked += queries
        return self._vectors.size >= SCAN_FROM and self._asked > COPY_AFTER and has_scan()
