"""Vectors as searches take them, of length 1, whatever their numbers were."""

import numpy as np
import numpy.typing as npt

from plsc.errors import UsageError
from plsc.index.exact import Float32

_SMALLEST, _LARGEST = 1e-250, 1e250  # squares of lengths that are exact enough as they are


def unit_vectors(vectors: npt.ArrayLike, dim: int) -> Float32:
    """``vectors`` (n, dim) as float32 of length 1, n >= 0; an empty list is n = 0.

    :class:`UsageError` names the first row that has no direction.
    """
    try:
        array = np.asarray(vectors)
    except ValueError:
        raise UsageError(f"vectors are rows of different lengths; they are numbers of shape [n, {dim}]") from None
    if array.size == 0 and array.ndim == 1:
        return np.empty((0, dim), dtype=np.float32)
    if array.ndim != 2 or array.shape[1] != dim or array.dtype.kind not in "fiu":
        raise UsageError(f"vectors are {array.dtype}{list(array.shape)}; they are numbers of shape [n, {dim}]")
    wide = array.astype(np.float64, order="C")
    squares = np.einsum("nd,nd->n", wide, wide)
    if not ((squares > _SMALLEST) & (squares < _LARGEST)).all():
        wide = _within_reach(wide)
        squares = np.einsum("nd,nd->n", wide, wide)
    unit: Float32 = (wide / np.sqrt(squares)[:, None]).astype(np.float32)
    return unit


def _within_reach(wide: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rows divided by their largest number: 1e-300 and 1e300 squared are neither nothing nor infinite then."""
    finite = np.isfinite(wide).all(axis=1)
    if not finite.all():
        raise UsageError(f"vector {int(np.flatnonzero(~finite)[0])} holds NaN or infinity")
    largest = np.abs(wide).max(axis=1, initial=0.0, keepdims=True)
    if not largest.all():
        raise UsageError(f"vector {int(np.flatnonzero(largest[:, 0] == 0)[0])} is zero, which has no direction")
    scaled: npt.NDArray[np.float64] = wide / largest
    return scaled
