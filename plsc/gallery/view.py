"""What one search sees of a collection: a base, the faces added since, and which of both are still there."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from plsc.gallery.base import Base, most_of_one
from plsc.gallery.records import Faces
from plsc.gallery.store import Float32
from plsc.index.rows import Int64, RowSource, rank

Mask = npt.NDArray[np.bool_]
_SCORES = 1 << 22  # of delta rows held at once
_ROUNDING = 2.0**-23  # twice float32's, of each addition
_KEPT_MASKS = 8


@dataclass(frozen=True)
class Allowed:
    """The rows of a view that may be found; None: all that are there."""

    base: Mask | None
    delta: Mask | None


@dataclass(frozen=True, eq=False)
class View:
    """Nothing in it changes, except that it remembers what filters fit.

    Attributes:
        base_left: (N,) which rows of the base are still there; None: all.
        delta: the faces added since; delta_gone: places in it that were deleted, ascending.
    """

    base: Base | None
    base_left: Mask | None
    delta: Faces
    delta_gone: Int64
    masks: dict[str, Allowed] = field(default_factory=dict)

    @property
    def base_gone(self) -> int:
        """How many rows of the base were deleted."""
        return 0 if self.base_left is None else len(self.base_left) - int(np.count_nonzero(self.base_left))

    @functools.cached_property
    def most_faces(self) -> int:
        """How many faces one person has at most, or more."""
        return (0 if self.base is None else self.base.most_faces) + most_of_one(self.delta.persons)

    def with_delta(self, delta: Faces) -> "View":
        """This view with more rows."""
        return replace(self, delta=delta, masks={})

    def unfiltered(self) -> "View":
        """This view without what it remembers of filters: metadata changed."""
        return replace(self, masks={})

    def without(self, faces: Sequence[int]) -> "View":
        """This view without ``faces``, where it has them."""
        gone = np.sort(np.asarray(faces, dtype=np.int64))
        left = self.base_left
        if self.base is not None:
            rows = places_of(gone, self.base.faces)
            if len(rows):
                left = np.ones(len(self.base), dtype=np.bool_) if left is None else left.copy()
                left[rows] = False
        places = np.union1d(self.delta_gone, places_of(gone, self.delta.ids))
        return replace(self, base_left=left, delta_gone=places, masks={})

    def remember(self, key: str, allowed: Allowed) -> None:
        """Keep what a filter fits, for as long as this view is searched."""
        if len(self.masks) < _KEPT_MASKS:
            self.masks[key] = allowed

    def allowed(self, persons: Int64 | None) -> Allowed:
        """The rows of ``persons`` (all where None) that are still there."""
        base, delta = self.base_left, None
        if len(self.delta_gone):
            delta = np.ones(len(self.delta.ids), dtype=np.bool_)
            delta[self.delta_gone] = False
        if persons is None:
            return Allowed(base, delta)
        fits = np.isin(self.delta.persons, persons)
        delta = fits if delta is None else delta & fits
        if self.base is not None:
            fits = np.isin(self.base.persons, persons)
            base = fits if base is None else base & fits
        return Allowed(base, delta)

    def nearest(self, queries: Float32, count: int, allowed: Allowed) -> tuple[Float32, Int64, Int64]:
        """The ``count`` best faces for each of ``queries`` (Q, D), best first, ties by id; fewer where there are fewer.

        Returns scores, faces and persons, (Q, count') each, for every query the same count'.
        """
        scores, rows = _nearest_in_delta(self.delta.vectors, queries, count, allowed.delta)
        faces, persons = self.delta.ids[rows], self.delta.persons[rows]
        if self.base is None:
            return scores, faces, persons
        search = self.base.scan if self.base.quick is None else self.base.quick
        base_scores, base_rows = search.search(queries, count, allowed=allowed.base)
        base_faces, base_persons = self.base.faces[base_rows], self.base.persons[base_rows]
        if not faces.size:
            return base_scores, base_faces, base_persons
        scores = np.concatenate([base_scores, scores], axis=1)  # the base first: its ids are smaller
        faces = np.concatenate([base_faces, faces], axis=1)
        persons = np.concatenate([base_persons, persons], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return tuple(np.take_along_axis(part, order, axis=1) for part in (scores, faces, persons))  # type: ignore[return-value]


def places_of(wanted: Int64, ascending: Int64) -> Int64:
    """Where those of ``wanted`` that occur in ``ascending`` stand in it."""
    if not len(ascending):
        return np.empty(0, dtype=np.int64)
    places = np.searchsorted(ascending, wanted)
    places = np.minimum(places, len(ascending) - 1)
    found: Int64 = places[ascending[places] == wanted].astype(np.int64)
    return found


def _nearest_in_delta(vectors: Float32, queries: Float32, count: int, allowed: Mask | None) -> tuple[Float32, Int64]:
    """Scores and rows (Q, count'): candidates by a product in float32, ranked in float64."""
    everyone = np.arange(len(vectors)) if allowed is None else np.flatnonzero(allowed)
    count = min(count, len(everyone))
    scores, rows = np.empty((len(queries), count), np.float32), np.empty((len(queries), count), np.int64)
    if not count:
        return scores, rows
    source = RowSource(vectors)
    margin = 2 * _ROUNDING * (vectors.shape[1] + 16)
    together = max(1, _SCORES // len(vectors))
    for start in range(0, len(queries), together):
        products = queries[start : start + together] @ vectors.T
        if allowed is not None:
            products = products[:, everyone]
        for place, product in enumerate(products, start):
            last = len(everyone) - count
            candidates = everyone[product >= np.partition(product, last)[last] - margin]
            scores[place], rows[place] = rank(queries[place], source, candidates, count)
    return scores, rows
