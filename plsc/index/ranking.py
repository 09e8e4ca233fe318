"""The exact order of chosen rows: inner products in float64, ties by row number."""

import numpy as np
import numpy.typing as npt

from plsc.index.exact import Float32, Int64
from plsc.index.row_source import RowSource

_ROWS = 4096  # read and multiplied at a time


def rank(query: Float32, source: RowSource, rows: Int64, k: int) -> tuple[Float32, Int64]:
    """The best ``k`` of ``rows`` (n,), ascending numbers of rows of ``source``, for ``query`` (D,).

    Returns scores (k,) float32, best first, and their rows. Equal rows get equal scores: each row's products are
    added up in the same order, which a matrix product does not promise.
    """
    scores = np.empty(len(rows))
    wide = query.astype(np.float64)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        scores[part] = (source.take(rows[part]).astype(np.float64) * wide).sum(axis=1)
    order = best(scores, k)
    return scores[order].astype(np.float32), rows[order]


def best(scores: npt.NDArray[np.float64], k: int) -> Int64:
    """Places of the ``k`` largest of ``scores`` (n,), largest first, equal ones by place."""
    places = np.arange(len(scores))
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        places = np.flatnonzero(scores >= least)
    return places[np.argsort(-scores[places], kind="stable")][:k].astype(np.int64)
