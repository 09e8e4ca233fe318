"""The nearest centre of every point, exactly, by a scan; and which points need no scan.

An assignment depends on the points and the centres alone: it is the ranking of a float64 scan, ties by the centre's
number, whatever was assigned before, on whatever rank, by however many threads, on a CPU or a GPU.

From the second assignment on, most points are not compared with most centres. Each point keeps a bound: no centre but
its own is nearer than this angle. A centre that turned by δ lowers it by at most δ (the triangle inequality on the
sphere: Hamerly, "Making k-means even faster", 2010; Schubert et al., "Accelerating Spherical k-Means", 2021). One
centre that turned far would spoil all bounds. So centres that turned by more than a threshold τ are compared with every
point, as Kaukoranta et al. ("A fast exact GLA based on code vector activity detection", 2000) do with all that moved;
bounds are lowered by τ, and only points whose own centre is farther than that are compared with all. τ is the one that
costs least.
"""

from collections.abc import Iterator

import numpy as np
import torch

from plsc.cluster.scan import Scan, SearchDevice
from plsc.embedding.columns import Float32, Float64, Int64
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.errors import DataError
from plsc.index.codes import LARGEST_DIM, ZERO, encode_into, stride_of
from plsc.native.scan import CodedVectors, load_scan
from plsc.sizes import available_bytes

_BLOCK = 4096  # points whose products are made in float64 at once
_THRESHOLDS = 64  # that are tried for τ
# Of a cosine: the float32 rounding of points, centres and scores. What lies closer is decided by a scan.
_SLACK = 1e-6


class Points:
    """Rows of an embedding set as points on the sphere: those of one rank, without rows that have an error.

    They are kept in memory where they take at most a quarter of what is free; else they are read again each time.

    Args:
        source: the set.
        rank, world: this rank's part of the points, which are cut into ``world`` equal ones.
        where: this process searches for them; None: on the CPU.

    Attributes:
        where: as given.
        rows: (n,) ascending, the rows of the set that these points are.
        start: the number of points that lie on ranks before.
        total: points on all ranks.

    Raises:
        DataError: a row has no error and no direction either.
    """

    def __init__(self, source: EmbeddingSet, rank: int = 0, world: int = 1, where: SearchDevice | None = None) -> None:
        rows = usable_rows(source)
        self.where = where or SearchDevice()
        self._source, self.dim, self.total = source, source.dim, len(rows)
        self.start = self.total * rank // world
        self.rows = rows[self.start : self.total * (rank + 1) // world]
        self._vectors: Float32 | None = None
        if 4 * len(self.rows) * source.dim <= (available_bytes() or 0) // 4:
            parts = [vectors for _, vectors in self.blocks()]
            self._vectors = np.concatenate([np.empty((0, source.dim), np.float32), *parts])

    @classmethod
    def of(cls, vectors: Float32, where: SearchDevice | None = None) -> "Points":
        """Points of an array (n, D) float32 of length 1."""
        points = cls.__new__(cls)
        points.where = where or SearchDevice()
        points._vectors, points.dim, points.total, points.start = vectors, vectors.shape[1], len(vectors), 0
        points.rows = np.arange(len(vectors))
        return points

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, positions: Int64) -> Float32:
        """The points at ``positions`` (m,), ascending: (m, D) float32 of length 1."""
        if self._vectors is not None:
            return self._vectors[positions]
        return unit_rows(self._source, self.rows[positions])

    def blocks(self, positions: Int64 | None = None, size: int = _BLOCK) -> Iterator[tuple[Int64, Float32]]:
        """Yield (positions, their vectors) block by block, of ``positions`` (all where they are None)."""
        chosen = np.arange(len(self)) if positions is None else positions
        for start in range(0, len(chosen), size):
            yield chosen[start : start + size], self.take(chosen[start : start + size])


def usable_rows(source: EmbeddingSet) -> Int64:
    """The rows (n,) of a set, ascending, that have no error."""
    usable = np.ones(len(source), dtype=bool)
    usable[list(source.errors)] = False
    return np.flatnonzero(usable).astype(np.int64)


def unit_rows(source: EmbeddingSet, rows: Int64) -> Float32:
    """Read ``rows`` (n,), ascending, as (n, D) float32 of length 1; :class:`DataError` for one without a direction."""
    vectors = np.empty((len(rows), source.dim))
    for shard in source:
        first, last = np.searchsorted(rows, [shard.start, shard.start + len(shard)]).tolist()
        if first < last:
            vectors[first:last] = shard.embeddings[rows[first:last] - shard.start]
    lengths = np.sqrt(np.square(vectors).sum(axis=1))
    wrong = np.flatnonzero(~((lengths > 0) & (lengths < np.inf)))
    if len(wrong):
        row = int(rows[wrong[0]])
        raise DataError(f"{source.path}: row {row} ({source.keys[row]}) is zero or not finite; embed the set again")
    unit: Float32 = (vectors / lengths[:, None]).astype(np.float32)
    return unit


def nearest(points: Points, centres: Float32, k: int) -> tuple[Float32, Int64]:
    """Cosines (n, k) float32, best first, and centres (n, k) int64: the ``k`` nearest to every point."""
    scan = Scan(centres, k, len(points), points.where)
    cosines = np.empty((len(points), k), dtype=np.float32)
    labels = np.empty((len(points), k), dtype=np.int64)
    for at, vectors in points.blocks(size=scan.block):
        cosines[at], labels[at] = scan.search(vectors, k)
    return cosines, labels


class Nearest:
    """The nearest of some centres, exactly, and how near all others may be.

    The exact scan finds the two nearest, but on a CPU that adds products of bytes: there 8-bit codes of points and
    centres tell which few centres to compare in float64 (plsc/native/nearest_row.h). Matrix tiles multiply bfloat16
    numbers faster than that, and any other processor float32 ones.

    Args:
        centres: (k, D) of length 1; kept, not copied.
        queries: points that there will be, about.
        where: they are searched for; None: on the CPU.

    Attributes:
        block: points that are best searched for at once.
    """

    def __init__(self, centres: Float32, queries: int = 0, where: SearchDevice | None = None) -> None:
        self._kernel, self._coded = load_scan(), None
        self._scan = Scan(centres, min(2, len(centres)), queries, where or SearchDevice())
        self.block, is_on_cpu = self._scan.block, not self._scan.is_on_gpu
        if self._kernel is not None and self._kernel.finds_nearest and centres.shape[1] <= LARGEST_DIM and is_on_cpu:
            self._coded, self.block = _coded(centres), _BLOCK

    def find(self, vectors: Float32, least: Float64 | None = None) -> tuple[Float32, Int64, Float32]:
        """Find the nearest centre of each of ``vectors`` (m, D) of length 1.

        Args:
            vectors: the points.
            least: (m,) cosines that count; None: any does.

        Returns:
            Cosines (m,), centres (m,) with ties by number, and upper bounds (m,) of the cosines with all others. Where
            no centre reaches ``least``, the centre may be -1; the bound is of all centres then.
        """
        if self._kernel is not None and self._coded is not None:
            low = None if least is None else (least - _SLACK).astype(np.float32)
            return self._kernel.nearest(self._coded, _coded(vectors), low, torch.get_num_threads())
        cosines, centres = self._scan.search(vectors, 2)
        others = cosines[:, 1] if cosines.shape[1] > 1 else np.full(len(vectors), -1, np.float32)
        return cosines[:, 0], centres[:, 0], others


def _coded(vectors: Float32) -> CodedVectors:
    codes = np.full((len(vectors), stride_of(vectors.shape[1])), ZERO, dtype=np.uint8)
    bounds = np.empty((3, len(vectors)), dtype=np.float32)
    encode_into(codes, bounds, 0, vectors)
    return CodedVectors(vectors, codes, bounds)


class Assigner:
    """Nearest centres of ``points``, of one set of centres after another.

    Attributes:
        labels: (n,) int64, of the last assignment; -1 before the first.
        cosines: (n,) float64, with the centre of the label.
        compared: pairs of point and centre that the last assignment multiplied.
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self.labels: Int64 = np.full(len(points), -1, dtype=np.int64)
        self.cosines: Float64 = np.zeros(len(points))
        self.compared = 0
        self._bounds: Float64 = np.zeros(len(points))  # radians: no centre but the own one is nearer
        self._centres: Float32 | None = None

    def assign(self, centres: Float32) -> tuple[Int64, Int64]:
        """Find the nearest of ``centres`` (k, D), which are kept, not copied.

        Returns:
            The positions (m,) of the points that got another label, and their former labels.
        """
        before, former = self.labels.copy(), self._centres
        self._centres, self.compared = centres, 0
        if former is None or former.shape != centres.shape:
            self._scan_all(np.arange(len(self.points)))
        else:
            self._scan_what_may_change(angles(former, centres))
        changed = np.flatnonzero(self.labels != before)
        self._multiply_own(changed if former is not None else None)
        return changed, before[changed]

    def adopt(self, centres: Float32, labels: Int64) -> tuple[Int64, Int64]:
        """Take ``labels`` that others chose, as :meth:`assign` takes its own."""
        before, self._centres, self.labels = self.labels, centres, labels
        self._multiply_own(None)
        self._centres = None  # there are no bounds
        changed = np.flatnonzero(labels != before)
        return changed, before[changed]

    def _multiply_own(self, positions: Int64 | None) -> None:
        """Multiply points with their own centres in float64; a row's sum depends on its numbers alone."""
        assert self._centres is not None
        for at, vectors in self.points.blocks(positions):
            own = self._centres[self.labels[at]].astype(np.float64)
            self.cosines[at] = (vectors.astype(np.float64) * own).sum(axis=1)

    def _scan_all(self, positions: Int64, *, is_known: bool = False) -> None:
        """Compare the points at ``positions`` with all centres; ``is_known``: their cosines are with one of these."""
        assert self._centres is not None
        if not len(positions):
            return
        nearest = Nearest(self._centres, len(positions), self.points.where)
        self.compared += len(positions) * len(self._centres)
        for at, vectors in self.points.blocks(positions, nearest.block):
            known = self.cosines[at] if is_known else None
            _, self.labels[at], others = nearest.find(vectors, known)
            self._bounds[at] = _least_angle(others)

    def _scan_what_may_change(self, turned: Float64) -> None:
        """Assign anew after each centre turned by ``turned`` (k,) radians."""
        self._multiply_own(None)
        margin = self._bounds - _largest_angle(self.cosines)
        threshold = _cheapest_threshold(turned, margin)
        movers = np.flatnonzero(turned > threshold)
        is_safe = margin >= threshold
        self._bounds -= threshold
        doubtful = self._scan_some(np.flatnonzero(is_safe), movers) if len(movers) else np.empty(0, np.int64)
        self._scan_all(np.sort(np.concatenate([np.flatnonzero(~is_safe), doubtful])), is_known=True)

    def _scan_some(self, positions: Int64, movers: Int64) -> Int64:
        """Compare points, to which their own centre is nearer than any other that is no mover, with the ``movers``.

        Returns:
            The positions where two cosines are too close for this comparison.
        """
        assert self._centres is not None
        nearest = Nearest(np.ascontiguousarray(self._centres[movers]), len(positions), self.points.where)
        self.compared += len(positions) * len(movers)
        doubtful = []
        for at, vectors in self.points.blocks(positions, nearest.block):
            own = self.cosines[at]
            cosines, found, others = nearest.find(vectors, own)
            centres = np.where(found < 0, -1, movers[found])
            best = np.where((found < 0) | (centres == self.labels[at]), -np.inf, cosines.astype(np.float64))
            doubtful.append(at[np.abs(best - own) <= _SLACK])
            wins = best - own > _SLACK
            # Where one of the movers wins, the former centre is among the others.
            next_best = np.maximum(np.where(wins, own, best), others)
            self._bounds[at] = np.minimum(self._bounds[at], _least_angle(next_best))
            self.labels[at[wins]] = centres[wins]
        return np.concatenate(doubtful) if doubtful else np.empty(0, np.int64)


def angles(first: Float32, second: Float32) -> Float64:
    """The angles (k,) in radians between rows of two (k, D) of length 1, 0 only where they are the same bits."""
    chords = np.sqrt(np.square(first.astype(np.float64) - second.astype(np.float64)).sum(axis=1))
    turned: Float64 = 2 * np.arcsin(np.minimum(chords / 2, 1.0))
    return np.where(chords > 0, turned + _SLACK, 0.0)


def _cheapest_threshold(turned: Float64, margin: Float64) -> float:
    """The τ by which fewest pairs are compared: (centres beyond τ) · safe points + all centres · the other points."""
    ordered, margins = np.sort(turned), np.sort(margin)
    tried = np.unique(ordered[np.linspace(0, len(ordered) - 1, _THRESHOLDS).astype(np.int64)])
    tried = np.unique(np.append(tried, 0.0))
    unsafe = np.searchsorted(margins, tried, side="left")
    movers = len(ordered) - np.searchsorted(ordered, tried, side="right")
    pairs = movers * (len(margins) - unsafe) + len(ordered) * unsafe
    return float(tried[np.argmin(pairs)])


def _least_angle(cosines: Float64 | Float32) -> Float64:
    return np.arccos(np.clip(cosines.astype(np.float64) + _SLACK, -1, 1))


def _largest_angle(cosines: Float64) -> Float64:
    return np.arccos(np.clip(cosines - _SLACK, -1, 1))
