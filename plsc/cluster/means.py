"""The means of clusters, exact: the same bits in whatever order, and on however many ranks, points are added up.

A coordinate of a point, at most 1, is taken as a multiple of 2^-36: exactly where it is above 2^-13, else to 7e-12,
which is far below the rounding of float32 points. Sums of such numbers are whole numbers of 64 bits: they have no
rounding, so that a point that moves is subtracted from one cluster and added to another. A cluster may have 2^26
points.
"""

import numpy as np
import torch

from plsc.cluster.assignment import Points
from plsc.embedding.columns import Float32, Float64, Int64
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh

_UNIT = 2.0**36
_COSINE_UNIT = 2.0**32  # of the inertia, over up to 2^30 points
_BLOCK = 16384  # points added at once


class Sums:
    """Sums of the points of ``k`` clusters.

    Attributes:
        sums: (k, D) int64, multiples of 2^-36, over all ranks.
        counts: (k,) int64 points.
    """

    def __init__(self, k: int, dim: int) -> None:
        self.sums: Int64 = np.zeros((k, dim), dtype=np.int64)
        self.counts: Int64 = np.zeros(k, dtype=np.int64)

    def move(self, points: Points, changed: Int64, former: Int64, labels: Int64, mesh: Mesh | None = None) -> None:
        """Move the points at ``changed`` (m,) from clusters ``former`` (m,), -1 for none, to ``labels`` (n,) of theirs.

        Where there are several ranks, each gives its own points, and all get the same sums.
        """
        several = mesh is not None and mesh.world_size > 1
        sums, counts = (np.zeros_like(self.sums), np.zeros_like(self.counts)) if several else (self.sums, self.counts)
        for start in range(0, len(changed), _BLOCK):
            at, old = changed[start : start + _BLOCK], former[start : start + _BLOCK]
            whole = np.rint(points.take(at).astype(np.float64) * _UNIT).astype(np.int64)
            _add(sums, counts, whole, labels[at], 1)
            _add(sums, counts, whole[old >= 0], old[old >= 0], -1)
        if several and mesh is not None:
            self.sums += all_reduce_sum(torch.from_numpy(sums), mesh).numpy()
            self.counts += all_reduce_sum(torch.from_numpy(counts), mesh).numpy()

    def centres(self, former: Float32) -> Float32:
        """The normalised means (k, D) float32; of a cluster without points or without a direction the ``former``."""
        means = self.sums.astype(np.float64)
        lengths = np.sqrt(np.square(means).sum(axis=1))
        centres = (means / np.maximum(lengths, 1.0)[:, None]).astype(np.float32)
        return np.where(((lengths > 0) & (self.counts > 0))[:, None], centres, former)


def _add(sums: Int64, counts: Int64, whole: Int64, labels: Int64, sign: int) -> None:
    """Add the rows of ``whole`` (m, D), times ``sign``, to the ``sums`` of their ``labels`` (m,)."""
    if not len(labels):
        return
    order = np.argsort(labels, kind="stable")
    clusters, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    sums[clusters] += sign * np.add.reduceat(whole[order], starts, axis=0)
    counts[clusters] += sign * sizes


def inertia(cosines: Float64, mesh: Mesh) -> float:
    """The sum over all ranks of the points' squared distances from their centres, 2 - 2 cos, the same bits on any."""
    whole = np.rint((1.0 - cosines) * _COSINE_UNIT).astype(np.int64).sum(keepdims=True)
    return float(2.0 * all_reduce_sum(torch.from_numpy(whole), mesh)[0].item() / _COSINE_UNIT)
