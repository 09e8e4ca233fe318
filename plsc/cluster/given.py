"""Centres from elsewhere, to which points are assigned as they are."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plsc.embedding.columns import Float32
from plsc.errors import DataError, UsageError
from plsc.regular_files import map_npy

_BLOCK = 4096  # rows normalised at once
# By so much the rounding to float32 changes a length: such rows are taken bit for bit, as a run's own centres.
_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class GivenCentres:
    """An assignment without iterations.

    Attributes:
        centres: a ``.npy`` (K, D) of floating point numbers.
    """

    centres: Path


def read_centres(path: Path, dim: int) -> Float32:
    """Read centres, normalised: (K, ``dim``) float32 of length 1.

    Raises:
        UsageError: there is no such file, or its centres have another dimension.
        DataError: it is no such array, or a row is zero or not finite.
    """
    if not path.exists():
        raise UsageError(f"there is no --centres {path}; give a .npy of centres (K, D)")
    mapped = map_npy(path, f"--centres {path}")
    if not isinstance(mapped, np.ndarray) or mapped.dtype.kind != "f" or mapped.ndim != 2 or not len(mapped):
        raise DataError(f"--centres {path} is no array (K, D) of floating point numbers")
    if mapped.shape[1] != dim:
        raise UsageError(f"--centres {path} has rows of {mapped.shape[1]} numbers, the set of {dim}; give such centres")
    centres = np.empty(mapped.shape, dtype=np.float32)
    for start in range(0, len(mapped), _BLOCK):
        rows = mapped[start : start + _BLOCK].astype(np.float64)
        lengths = np.sqrt(np.square(rows).sum(axis=1))
        wrong = np.flatnonzero(~((lengths > 0) & (lengths < np.inf)))
        if len(wrong):
            raise DataError(f"--centres {path}: row {start + int(wrong[0])} is zero or not finite; leave it out")
        lengths[np.abs(lengths - 1) <= _ROUNDING] = 1.0
        centres[start : start + _BLOCK] = rows / lengths[:, None]
    return centres
