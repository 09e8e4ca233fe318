"""Affine maps between embedding spaces by ridge regression towards the orthogonal Procrustes solution.

Of centred rows X and Y, W minimises |X W - Y|^2 + strength · t · |W - P|^2, where t is the mean eigenvalue of X'X. P is
the partial isometry that aligns X with Y best (Schönemann, "A generalized solution of the orthogonal Procrustes
problem", Psychometrika 1966), of the singular values of X'Y that the rows support alone: it maps what no row shows to
zero, and not anywhere. Two models of faces differ by little more than a rotation, so the prior is most of the map.
"""

import numpy as np
from numpy.typing import NDArray

from plsc.embedding.columns import Float64

STRENGTHS = tuple(float(10.0**power) for power in np.arange(-2.0, 3.5, 0.5))
_BLOCK = 512  # rows
_SUPPORTED = 1e-7  # of the largest singular value: below it is what float32 rounds


class RidgePath:
    """The maps for all strengths, of rows ``old`` (n, d) and ``new`` (n, e): one decomposition serves them.

    It is computed in float64, of blocks of rows, so that no float64 copy of all is made.
    """

    def __init__(self, old: NDArray[np.floating], new: NDArray[np.floating]) -> None:
        self._old_mean, self._new_mean = (rows.mean(axis=0, dtype=np.float64) for rows in (old, new))
        gram, self._product = (np.zeros((old.shape[1], rows.shape[1])) for rows in (old, new))
        for start in range(0, len(old), _BLOCK):
            centred = old[start : start + _BLOCK] - self._old_mean
            gram += centred.T @ centred
            self._product += centred.T @ (new[start : start + _BLOCK] - self._new_mean)
        self._values, self._vectors = np.linalg.eigh(gram)
        self._values = np.maximum(self._values, 0.0)
        self._prior = procrustes(self._product)

    def at(self, strength: float) -> tuple[Float64, Float64]:
        """Return the weight (d, e) and the bias (e,) for a strength of the prior above 0."""
        penalty = strength * max(float(self._values.mean()), np.finfo(np.float64).tiny)
        turned = self._vectors.T @ (self._product + penalty * self._prior)
        weight = self._vectors @ (turned / (self._values + penalty)[:, None])
        return weight, self._new_mean - self._old_mean @ weight


def procrustes(product: Float64) -> Float64:
    """Return the partial isometry (d, e) that aligns X with Y best, of ``product`` X'Y (d, e); either may be wider."""
    left, values, right = np.linalg.svd(product, full_matrices=False)
    kept = values > _SUPPORTED * values[0]
    isometry: NDArray[np.float64] = left[:, kept] @ right[kept]
    return isometry
