"""The scan by compiled kernels, on a CPU with a compiler."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from plsc.index.bounds import query_error
from plsc.index.exact import Float32, Int64
from plsc.index.kept_rows import KeptRows
from plsc.native.scan import Rows, has_tiles, scan

_MOST = 1 << 22  # candidates that a thread keeps for all queries together
_ALONE = 1 << 21  # products below which one thread is faster than two


class NativeScan:
    """Searches ``kept``; see :class:`plsc.index.scan.ExactScan`."""

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        copy = kept.copy
        base = kept.vectors if copy is None else copy.view(torch.uint16).numpy()
        self._rows = Rows(np.asarray(kept.vectors), np.asarray(base), kept.source.descriptor, kept.source.offset)

    def search(
        self, queries: Float32, k: int, allowed: npt.NDArray[np.bool_] | None, count: int
    ) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), k <= ``count``, the number of rows ``allowed``."""
        index = None
        if allowed is not None and 2 * count < len(allowed):
            index, allowed = np.flatnonzero(allowed).astype(np.int64), None
        exact = torch.from_numpy(np.array(queries))
        rounded = exact.bfloat16() if self._kept.copy is not None and has_tiles() else exact
        error = query_error(exact, rounded, self._kept.bounds)
        low = rounded.view(torch.uint16).numpy() if rounded.dtype == torch.bfloat16 else None
        every = 4 * k >= count  # too many are asked for to be chosen first
        work = count * len(queries) * exact.shape[1]
        scores, rows, _ = scan(
            replace(self._rows, base=None) if every else self._rows,
            queries,
            None if every else low,
            (2 * error).numpy(),
            k,
            index=index,
            allowed=allowed,
            most=max(4 * k, _MOST // len(queries)),
            threads=1 if work < _ALONE else torch.get_num_threads(),
        )
        return scores, rows
