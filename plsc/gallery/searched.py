"""A collection as searches see it: the current view, which writes replace."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plsc.gallery.base import Base
from plsc.gallery.delta import Delta
from plsc.gallery.records import Faces, StoredCollection
from plsc.gallery.remembered_names import RememberedNames
from plsc.gallery.store import Collection
from plsc.gallery.view import View
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64

LEAST_DELTA = 4096  # rows: fewer cost a search next to nothing
DELTA_SHARE = 8  # the base is made anew when an eighth of it was added, or deleted


class SearchedCollection:
    """``number`` and ``about`` (whose counts are those at opening); ``view`` is read by searches without a lock, and
    ``names`` has its own.

    Everything else is called by one thread at a time, after the change was committed.
    """

    def __init__(
        self, stored: StoredCollection, base: Base | None, newer: Sequence[Faces], gone: Sequence[int]
    ) -> None:
        """``newer``: the faces that ``base`` does not cover; ``gone``: faces that it has and that were deleted."""
        self.number = stored.number
        self.about: Collection = stored.about
        self.names = RememberedNames()
        self.covered, self.base_number = stored.covered, stored.base
        self.deleted = False
        self.considered: Base | None = None  # for which a quicker search was looked for
        self._delta = Delta(self.about.dim)
        self.view = self._fresh_view(base, newer, gone)

    def reserve(self, count: int) -> None:
        """Before a commit: so that showing its ``count`` faces cannot fail."""
        self._delta.reserve(count)

    def show_added(self, faces: Faces) -> None:
        """From now on searches find ``faces``."""
        self._delta.append(faces)
        self.view = self.view.with_delta(self._delta.rows)

    def show_deleted(self, faces: Sequence[int]) -> None:
        """From now on no search finds ``faces``."""
        self.view = self.view.without(faces)

    def show_changed(self) -> None:
        """From now on filters see the changed metadata."""
        self.view = self.view.unfiltered()

    def adopt(self, stored: StoredCollection, base: Base | None, gone: Sequence[int]) -> None:
        """Search ``base``, which covers more of the delta; ``gone`` of its faces were deleted meanwhile."""
        rows, view = self._delta.rows, self.view
        newer = rows.ids > stored.covered
        newer[view.delta_gone] = False
        self.covered, self.base_number = stored.covered, stored.base
        self._delta = Delta(self.about.dim)
        left = Faces(rows.ids[newer], rows.persons[newer], rows.vectors[newer])
        self.view = self._fresh_view(base, [left], gone)

    def show_quick(self, base: Base, quick: ApproximateSearch) -> None:
        """From now on searches use ``quick`` on ``base``, if it is still the base."""
        if self.view.base is base:
            self.considered = replace(base, quick=quick)
            self.view = replace(self.view, base=self.considered)

    @property
    def quick(self) -> ApproximateSearch | None:
        """What searches the base approximately; None: it is searched exactly, or there is none."""
        base = self.view.base
        return None if base is None or self.deleted else base.quick

    def kept(self) -> list[int]:
        """Deleted faces that the base still holds."""
        view = self.view
        if view.base is None or view.base_left is None:
            return []
        faces: list[int] = view.base.faces[~view.base_left].tolist()
        return faces

    @property
    def is_due(self) -> bool:
        """Whether enough was added or deleted for a new base to pay."""
        view = self.view
        changed = max(len(view.delta.ids), view.base_gone)
        return changed > max(LEAST_DELTA, (0 if view.base is None else len(view.base)) // DELTA_SHARE)

    @property
    def is_clean(self) -> bool:
        """Whether the base holds all there is, and nothing else."""
        return not len(self.view.delta.ids) and not self.view.base_gone

    def figures(self) -> dict[str, float]:
        """For :meth:`plsc.gallery.store.Store.statistics`."""
        view = self.view
        base = 0 if view.base is None else len(view.base)
        gone, delta = view.base_gone, len(view.delta.ids)
        quick = self.quick
        recall = None if quick is None else quick.monitor.recall or quick.recall
        return {
            "rows": base - gone + delta - len(view.delta_gone),
            "base": base,
            "delta": delta,
            "tombstones": gone + len(view.delta_gone),
            "memory_bytes": _memory(view.base) + view.delta.vectors.nbytes,
            "approximate": quick is not None,
            "recall": 1.0 if recall is None else min(recall.at_1, recall.at_10),
        }

    def _fresh_view(self, base: Base | None, newer: Sequence[Faces], gone: Sequence[int]) -> View:
        for part in newer:
            self._delta.append(part)
        nothing: Int64 = np.empty(0, dtype=np.int64)
        return View(base, None, self._delta.rows, nothing).without(gone)


def _memory(base: Base | None) -> int:
    """Bytes that searching keeps in memory; an approximate structure has the vectors once more."""
    if base is None:
        return 0
    return base.scan.memory_bytes + (0 if base.quick is None else base.vectors.nbytes)
