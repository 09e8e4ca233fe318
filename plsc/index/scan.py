"""Exact search by scanning every row: candidates in low precision, the answer in high.

A row's bfloat16 copy has half the bytes of float32 and is multiplied many times as fast; its score is off by no more
than a bound that the rounding errors themselves give. Whatever lies within twice that bound of the k-th best score
is a candidate, and candidates are scored again from the float32 rows in float64. So the answer is the true one,
however close rows lie together; where very many do, all of them are scored again.
"""

import numpy as np
import numpy.typing as npt
import torch

from plsc.errors import UsageError
from plsc.index.exact import Float32, Int64
from plsc.index.kept_rows import KeptRows
from plsc.index.native_scan import NativeScan
from plsc.index.torch_scan import TorchScan
from plsc.native.scan import has_scan

PRECISIONS = ("bf16", "fp32")
_ANSWERS = 1 << 20  # rows asked for at once, of all queries together
Allowed = npt.NDArray[np.bool_]


class ExactScan:
    """The rows of ``vectors`` (N, D) float32, ready to be searched; nothing of it changes after construction.

    Args:
        vectors: in C order, of length 1 or less, usually a memory map. Kept; candidates are read for every answer,
            from the map's file where there is one, so that its pages do not fill this process's memory.
        precision: "bf16" keeps a copy of 2 bytes a number and scans that; "fp32" scans ``vectors``.
        device: where torch scans: "cpu", or "cuda", which holds the copy in the GPU's memory.

    Raises :class:`UsageError` for another shape, type or precision, :class:`DataError` for a row that is not finite.
    """

    def __init__(self, vectors: Float32, *, precision: str = "bf16", device: str = "cpu") -> None:
        if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.flags.c_contiguous:
            raise UsageError(f"a scan takes float32 rows in C order, not {vectors.dtype}{list(vectors.shape)}")
        if precision not in PRECISIONS:
            raise UsageError(f"no precision {precision!r}; it is one of {', '.join(PRECISIONS)}")
        self._vectors = vectors
        self._kept = KeptRows(vectors, precision, torch.device(device))
        compiled = has_scan() and self._kept.device.type == "cpu"
        self._scan: NativeScan | TorchScan = NativeScan(self._kept) if compiled else TorchScan(self._kept)
        self.precision = precision

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def memory_bytes(self) -> int:
        """What a scan reads: the copy, or the float32 rows themselves."""
        return self._kept.memory_bytes

    def search(self, queries: Float32, k: int, *, allowed: Allowed | None = None) -> tuple[Float32, Int64]:
        """The ``k`` rows with the largest inner products with each of ``queries`` (Q, D), best first, ties by number.

        allowed: (N,) bool, the rows that may be found; all where None. Returns scores (Q, k') float32 and rows
        (Q, k') int64 with k' = min(k, rows allowed): the ranking of a float64 scan. Raises :class:`UsageError` for
        k < 0 or arguments that do not fit the rows; queries have to be finite.
        """
        self._check(queries, k, allowed)
        if allowed is not None and allowed.all():
            allowed = None
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        k = min(k, count)
        scores = np.empty((len(queries), k), dtype=np.float32)
        rows = np.empty((len(queries), k), dtype=np.int64)
        together = max(1, _ANSWERS // max(1, k))
        for start in range(0, len(queries) if k else 0, together):
            part = slice(start, start + together)
            scores[part], rows[part] = self._scan.search(queries[part], k, allowed, count)
        return scores, rows

    def _check(self, queries: Float32, k: int, allowed: Allowed | None) -> None:
        dim = self._vectors.shape[1]
        if queries.ndim != 2 or queries.shape[1] != dim or queries.dtype != np.float32:
            raise UsageError(f"queries are {queries.dtype}{list(queries.shape)}; the scan takes float32 [Q, {dim}]")
        if k < 0:
            raise UsageError(f"k is {k}; it counts neighbours")
        if allowed is not None and (allowed.shape != (len(self),) or allowed.dtype != np.bool_):
            raise UsageError(f"allowed is {allowed.dtype}{list(allowed.shape)}; it takes bool [{len(self)}]")
