"""The scan in PyTorch: on a GPU, and on a CPU where no compiled kernel runs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plsc.index.bounds import query_error
from plsc.index.exact import Float32, Int64
from plsc.index.kept_rows import KeptRows
from plsc.index.ranking import rank

_SCORES = 1 << 22  # scores of a chunk of rows
_MOST = 1 << 22  # candidates kept for all queries together
_BF16_ROUNDING = 2.0**-8  # relative, of a score that a bfloat16 product returns


class TorchScan:
    """Searches ``kept``; see :class:`plsc.index.scan.ExactScan`."""

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept

    def search(
        self, queries: Float32, k: int, allowed: npt.NDArray[np.bool_] | None, count: int
    ) -> tuple[Float32, Int64]:
        """Scores and rows (Q, k), k <= ``count``, the number of rows ``allowed``."""
        everyone = np.arange(len(self._kept.vectors)) if allowed is None else np.flatnonzero(allowed)
        shortlists: Sequence[Int64 | None] = [None] * len(queries)
        if 4 * k < count:  # otherwise too many are asked for to be chosen first
            shortlists = self._shortlists(queries, k, allowed)
        scores = np.empty((len(queries), k), dtype=np.float32)
        rows = np.empty((len(queries), k), dtype=np.int64)
        for place, found in enumerate(shortlists):
            candidates = everyone if found is None else found
            scores[place], rows[place] = rank(queries[place], self._kept.source, candidates, k)
        return scores, rows

    def _shortlists(self, queries: Float32, k: int, allowed: npt.NDArray[np.bool_] | None) -> list[Int64 | None]:
        """For each query the rows (n,), ascending, that may be among its best ``k``; None where too many may."""
        device, copy = self._kept.device, self._kept.copy
        exact = torch.from_numpy(np.array(queries)).to(device)
        rounded = exact if copy is None else exact.to(copy.dtype)
        error = query_error(exact, rounded, self._kept.bounds)
        if rounded.dtype == torch.bfloat16:
            error = error + _BF16_ROUNDING * self._kept.bounds.longest * exact.norm(dim=1)
        pool = _Pool(k, 2 * error)
        mask = None if allowed is None else torch.from_numpy(np.array(allowed)).to(device)
        rows = max(1, _SCORES // max(1, len(queries)))
        for start in range(0, len(self._kept.vectors), rows):
            scores = (rounded @ self._part(start, start + rows).T).float()
            if mask is not None:
                scores.masked_fill_(~mask[start : start + rows], -torch.inf)
            pool.take(start, scores)
        return pool.finish()

    def _part(self, start: int, stop: int) -> Tensor:
        if self._kept.copy is not None:
            return self._kept.copy[start:stop, : self._kept.vectors.shape[1]]
        return torch.from_numpy(np.array(self._kept.vectors[start:stop], subok=False))


class _Pool:
    """The rows that may still be among the best ``k`` (of more than k) of each query, as scores come in."""

    def __init__(self, k: int, margin: Tensor) -> None:
        """margin: (Q,) how far below the k-th best score a row may lie and be one of the best all the same."""
        self._k, self._margin = k, margin
        self._best = torch.full((len(margin), k), -torch.inf, device=margin.device)
        self._queries: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._crowded = torch.zeros(len(margin), dtype=torch.bool, device=margin.device)

    def take(self, start: int, scores: Tensor) -> None:
        """scores: (Q, n) of the rows from ``start`` on, −inf for those that are not allowed."""
        top = scores.topk(min(self._k, scores.shape[1]), dim=1).values
        self._best = torch.cat([self._best, top], dim=1).topk(self._k, dim=1).values
        keep = (scores >= self._least()[:, None]) & (scores > -torch.inf)
        queries, rows = keep.nonzero(as_tuple=True)
        self._queries.append(queries)
        self._rows.append(rows + start)
        self._scores.append(scores[queries, rows])
        if sum(map(len, self._rows)) > _MOST:
            self._prune()

    def finish(self) -> list[Int64 | None]:
        """Rows (n,) ascending for each query; None for one that has too many."""
        self._prune()
        queries, rows = self._queries[0].cpu().numpy(), self._rows[0].cpu().numpy()
        order = np.lexsort((rows, queries))
        parts = np.split(rows[order], np.cumsum(np.bincount(queries, minlength=len(self._margin)))[:-1])
        crowded = self._crowded.tolist()
        return [None if many else part for many, part in zip(crowded, parts, strict=True)]

    def _least(self) -> Tensor:
        least = self._best[:, -1] - self._margin
        return torch.where(self._crowded, torch.inf, least)

    def _prune(self) -> None:
        queries, rows, scores = map(torch.cat, (self._queries, self._rows, self._scores))
        keep = scores >= self._least()[queries]
        if int(keep.sum()) > _MOST // 2:
            counts = torch.bincount(queries[keep], minlength=len(self._margin))
            self._crowded |= counts > max(4 * self._k, _MOST // (2 * len(self._margin)))
            keep &= ~self._crowded[queries]
        self._queries, self._rows, self._scores = [queries[keep]], [rows[keep]], [scores[keep]]
