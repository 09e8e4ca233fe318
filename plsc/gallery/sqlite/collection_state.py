"""A collection in memory: its growing segment, the view of both segments that searches read, its cached persons.

SQLite is the truth; this is what answers. Searches take ``state.view`` once, without a lock, and use that immutable
object to the end. A writer prepares a new view after its commit and publishes it by assigning the attribute, which
readers see whole or not at all.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plsc.gallery.sqlite.records import Faces, StoredCollection
from plsc.gallery.sqlite.segments import SealedSegment, max_count
from plsc.gallery.validation import is_expired
from plsc.gallery.values import Clock, Collection, Float32, Match, Migration, PersonSummary
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64, Mask, RowSource, rank

MIN_CHANGES = 4096  # rows added or deleted before compaction is considered: fewer cost a search next to nothing
COMPACTION_DIVISOR = 8  # compact when an eighth of the sealed segment was added or deleted
MAX_GROWING_BYTES = 1 << 30  # of vectors in the growing segment, which are in memory: compact when there are more
PERSON_CACHE_BYTES = 16 << 20  # per collection
_ENTRY_BYTES = 500  # of a cache entry, about
_METADATA_BYTES = 150  # of a metadata entry besides its text
_INITIAL_ROWS = 64  # of a growing segment
_BATCH_ROWS = 4096  # copied at once
_SCORES_IN_MEMORY = 1 << 22  # of a scan of the growing segment
_FLOAT32_ERROR = 2.0**-23  # twice the unit roundoff, per addition
_MAX_CACHED_FILTERS = 8
_GROWTH = 4  # of the number of faces asked for, if too few persons were among them


class GrowingSegment:
    """Faces newer than the sealed segment, in arrays that double when they are full.

    Rows are appended and never modified, so a reader that holds :attr:`rows` of an earlier moment may go on reading it
    without a lock: appending writes behind its end, and growing leaves it the former arrays. One thread appends at a
    time. Memory that was allocated and not yet written is not resident.
    """

    def __init__(self, dim: int) -> None:
        self._length, self._room = 0, Faces.empty(0, dim)

    def reserve(self, count: int) -> None:
        """Allocate room for ``count`` more rows: appending them cannot fail then."""
        needed, capacity = self._length + count, len(self._room.ids)
        if needed > capacity:
            former, dim = self.rows, self._room.vectors.shape[1]
            self._room = Faces.empty(max(needed, 2 * capacity, _INITIAL_ROWS), dim)
            self._room.put(0, former)

    def append(self, batch: Faces) -> None:
        """Append rows, whose ids are larger than all before."""
        self.reserve(len(batch.ids))
        self._room.put(self._length, batch)
        self._length += len(batch.ids)

    @property
    def rows(self) -> Faces:
        """All rows so far; later ones do not appear in it."""
        return self._room.take(slice(self._length))


@dataclass(frozen=True)
class RowMasks:
    """Masks of the rows that a search may return, of the sealed segment (N,) and of the growing one; None: all."""

    sealed: Mask | None
    growing: Mask | None


@dataclass(frozen=True, eq=False)
class SegmentView:
    """The faces that one search sees; immutable except for a cache of masks.

    Attributes:
        sealed: the sealed segment; None: the collection has none.
        alive: (N,) mask of the sealed rows that are not deleted; None: all.
        growing: the faces added since the sealed segment.
        growing_deleted: row numbers in ``growing`` that were deleted, ascending.
        masks: rows that recent filters match, by filter.
    """

    sealed: SealedSegment | None
    alive: Mask | None
    growing: Faces
    growing_deleted: Int64
    masks: dict[str, RowMasks] = field(default_factory=dict)

    @functools.cached_property
    def sealed_deleted(self) -> int:
        """Number of rows of the sealed segment that were deleted."""
        return 0 if self.alive is None else len(self.alive) - int(np.count_nonzero(self.alive))

    @functools.cached_property
    def max_faces(self) -> int:
        """Upper bound on the faces of one person."""
        return (0 if self.sealed is None else self.sealed.max_faces) + max_count(self.growing.persons)

    def remaining(self) -> Iterator[Faces]:
        """Yield the faces that are not deleted, in batches by ascending id."""
        parts = [(self.growing, self.masks_of(None).growing)]
        if self.sealed is not None:
            parts.insert(0, (Faces(self.sealed.faces, self.sealed.persons, self.sealed.vectors), self.alive))
        for faces, alive in parts:
            for start in range(0, len(faces.ids), _BATCH_ROWS):
                rows = slice(start, start + _BATCH_ROWS)
                yield faces.take(rows).take(slice(None) if alive is None else alive[rows])

    @property
    def remaining_count(self) -> int:
        """Number of faces that are not deleted."""
        sealed = 0 if self.sealed is None else len(self.sealed) - self.sealed_deleted
        return sealed + len(self.growing.ids) - len(self.growing_deleted)

    def without(self, faces: Sequence[int]) -> "SegmentView":
        """Return this view without ``faces``; ids that it does not have are ignored."""
        deleted = np.sort(np.asarray(faces, dtype=np.int64))
        alive = self.alive
        if self.sealed is not None:
            rows = _rows_of(deleted, self.sealed.faces)
            if len(rows):
                alive = np.ones(len(self.sealed), dtype=np.bool_) if alive is None else alive.copy()
                alive[rows] = False
        growing_deleted = np.union1d(self.growing_deleted, _rows_of(deleted, self.growing.ids))
        return replace(self, alive=alive, growing_deleted=growing_deleted, masks={})

    def cache_masks(self, key: str, masks: RowMasks) -> None:
        """Keep a filter's masks for as long as this view is current. Searches may race here: the dict is atomic."""
        if len(self.masks) < _MAX_CACHED_FILTERS:
            self.masks[key] = masks

    def masks_of(self, persons: Int64 | None) -> RowMasks:
        """Return masks of the rows of ``persons`` (None: of everybody) that are not deleted."""
        sealed, growing = self.alive, None
        if len(self.growing_deleted):
            growing = np.ones(len(self.growing.ids), dtype=np.bool_)
            growing[self.growing_deleted] = False
        if persons is None:
            return RowMasks(sealed, growing)
        matching = np.isin(self.growing.persons, persons)
        growing = matching if growing is None else growing & matching
        if self.sealed is not None:
            matching = np.isin(self.sealed.persons, persons)
            sealed = matching if sealed is None else sealed & matching
        return RowMasks(sealed, growing)

    def search(self, queries: Float32, k: int, threshold: float, masks: RowMasks) -> list[list[Match]]:
        """Find the ``k`` most similar persons, by their best faces, for each of ``queries`` (Q, dim), best first.

        A person with a thousand similar faces must hide nobody, so more faces are asked for until ``k`` persons are
        among them or no faces are left.

        Args:
            queries: of unit length.
            k: how many persons at most.
            threshold: the lowest score to return.
            masks: rows that may be found.
        """
        answers: list[list[Match]] = [[] for _ in queries]
        pending = np.arange(len(queries))
        count = min(2 * k + 16, (k - 1) * self.max_faces + 1)  # pigeonhole: so many faces belong to enough persons
        while len(pending):
            scores, faces, persons = self.knn(queries[pending], count, masks)
            exhausted = scores.shape[1] < count
            # Lists, for a loop over numpy scalars takes several times as long; a product in float32 may exceed 1.
            columns = zip(np.clip(scores, -1.0, 1.0).tolist(), faces.tolist(), persons.tolist(), strict=True)
            short = []
            for query, (query_scores, query_faces, query_persons) in zip(pending.tolist(), columns, strict=True):
                answers[query] = _best_faces(query_scores, query_faces, query_persons, k, threshold)
                if len(answers[query]) < k and not exhausted and query_scores[-1] >= threshold:
                    short.append(query)
            pending = np.array(short, dtype=np.int64)
            count *= _GROWTH
        return answers

    def knn(self, queries: Float32, k: int, masks: RowMasks) -> tuple[Float32, Int64, Int64]:
        """Find the ``k`` most similar faces for each of ``queries`` (Q, dim), best first, ties by id.

        Returns:
            scores, faces and persons, (Q, k') each; k' < k only if the masks leave fewer than k rows.
        """
        scores, rows = _knn_growing(self.growing.vectors, queries, k, masks.growing)
        faces, persons = self.growing.ids[rows], self.growing.persons[rows]
        if self.sealed is None:
            return scores, faces, persons
        search = self.sealed.scan if self.sealed.ann is None else self.sealed.ann
        sealed_scores, sealed_rows = search.search(queries, k, allowed=masks.sealed)
        sealed_faces, sealed_persons = self.sealed.faces[sealed_rows], self.sealed.persons[sealed_rows]
        if not faces.size:
            return sealed_scores, sealed_faces, sealed_persons
        scores = np.concatenate([sealed_scores, scores], axis=1)
        rows = np.concatenate([sealed_rows, len(self.sealed) + rows], axis=1)
        faces = np.concatenate([sealed_faces, faces], axis=1)
        persons = np.concatenate([sealed_persons, persons], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")
        # Rounding to float32 keeps the order of float64, but makes ties: those are ranked again.
        equal = np.diff(np.take_along_axis(scores, order, axis=1)) == 0
        for query in np.flatnonzero(equal.any(axis=1)):
            places = np.append(equal[query], False) | np.append(False, equal[query])
            tied = order[query, places]
            best = _order_of_rows(queries[query], self.sealed.vectors, self.growing.vectors, rows[query, tied])
            order[query, places] = tied[best]
        return tuple(np.take_along_axis(part, order[:, :k], axis=1) for part in (scores, faces, persons))  # type: ignore[return-value]


def _order_of_rows(query: Float32, sealed: Float32, growing: Float32, rows: Int64) -> Int64:
    """Return the order of ``rows`` (n,), those of ``growing`` counted on from ``sealed``, in float64, ties by row."""
    ascending = np.argsort(rows)
    vectors = [sealed[row] if row < len(sealed) else growing[row - len(sealed)] for row in rows[ascending].tolist()]
    return ascending[rank(query, RowSource(np.stack(vectors)), np.arange(len(rows)), len(rows))[1]]


def _best_faces(scores: list[float], faces: list[int], persons: list[int], k: int, threshold: float) -> list[Match]:
    """Return the first ``k`` persons with scores >= ``threshold`` among faces that are sorted best first."""
    best: dict[int, Match] = {}
    for score, face, person in zip(scores, faces, persons, strict=True):
        if score < threshold or len(best) == k:
            break
        if person not in best:
            best[person] = Match(person, face, score)
    return list(best.values())


def _rows_of(wanted: Int64, ascending: Int64) -> Int64:
    """Return the positions in ``ascending`` of those of ``wanted`` that occur in it."""
    if not len(ascending):
        return np.empty(0, dtype=np.int64)
    rows = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    found: Int64 = rows[ascending[rows] == wanted].astype(np.int64)
    return found


def _knn_growing(vectors: Float32, queries: Float32, k: int, allowed: Mask | None) -> tuple[Float32, Int64]:
    """Return scores and rows (Q, k'): candidates from a float32 product, ranked in float64.

    A float32 score is off by at most ``margin``/2, so every row within ``margin`` of the k-th best is a candidate, and
    the ranking is that of float64, as in a sealed segment.
    """
    rows_allowed = np.arange(len(vectors)) if allowed is None else np.flatnonzero(allowed)
    k = min(k, len(rows_allowed))
    scores, rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    if not k:
        return scores, rows
    source = RowSource(vectors)
    margin = 2 * _FLOAT32_ERROR * (vectors.shape[1] + 16)
    batch = max(1, _SCORES_IN_MEMORY // len(vectors))
    for start in range(0, len(queries), batch):
        products = queries[start : start + batch] @ vectors.T
        if allowed is not None:
            products = products[:, rows_allowed]
        for query, product in enumerate(products, start):
            kth = len(rows_allowed) - k
            candidates = rows_allowed[product >= np.partition(product, kth)[kth] - margin]
            scores[query], rows[query] = rank(queries[query], source, candidates, k)
    return scores, rows


class CollectionState:
    """One collection as searches and writes use it.

    ``view`` is read by searches without a lock; ``persons`` has a lock of its own. All other members belong to the
    thread that holds the store's write lock, and :meth:`publish` is called after the commit.

    Attributes:
        number, info: the collection; the counts in ``info`` are those at opening.
        space: of the searched vectors (plsc.gallery.sqlite.schema).
        migration: of the collection, None: it has no second space; its details are those at opening.
        segment: number of the current sealed segment.
        deleted: True once the collection was deleted, or its spaces were exchanged; a thread may still hold this object
            then.
        is_exchanging: True while another state is made, which searches the second space: no vector of that changes.
        is_damaged: True once a file of the sealed segment was found changed, until another one is made.
        deleted_at: when, by the clock's ``monotonic``, the first vector was deleted that may still be in a file.
        ann_considered: the sealed segment that approximate search was last considered for.
        next_expiry: no person expires before this time; None: none expires. Set before the view shows the person.
    """

    def __init__(
        self,
        stored: StoredCollection,
        sealed: SealedSegment | None,
        newer: Sequence[Faces],
        deleted: Sequence[int],
        migration: Migration | None,
        clock: Clock,
    ) -> None:
        """Begin with ``sealed``, ``newer`` faces that it does not hold, and ``deleted`` ones that it still does."""
        self._clock = clock
        self.number, self.space, self.migration = stored.number, stored.space, migration
        self.info: Collection = stored.info
        self.segment = stored.segment
        self.persons = PersonCache()
        self.deleted = self.is_exchanging = self.is_damaged = False
        self.deleted_at: float | None = clock.monotonic() if len(deleted) else None
        self.ann_considered: SealedSegment | None = None
        self.next_expiry: str | None = None
        self._growing = GrowingSegment(self.info.dim)
        self.view = self._new_view(sealed, newer, deleted)

    def prepare(self, added: Sequence[Faces], expiries: Sequence[str]) -> None:
        """Take into account what a change adds, before its commit, so that publishing it cannot fail.

        Args:
            added: faces for which memory is allocated.
            expiries: times at which persons expire.
        """
        self._growing.reserve(sum(len(faces.ids) for faces in added))
        known = () if self.next_expiry is None else (self.next_expiry,)
        self.next_expiry = min((*expiries, *known), default=None)

    def publish(self, added: Sequence[Faces], gone: Sequence[int]) -> None:
        """Let searches find ``added`` and not ``gone``, and filters see changed metadata: all of it in one view."""
        view = self.view
        if gone:
            if self.deleted_at is None:
                self.deleted_at = self._clock.monotonic()
            view = view.without(gone)
        for faces in added:
            self._growing.append(faces)
        self.view = replace(view, growing=self._growing.rows, masks={})

    @property
    def has_expired(self) -> bool:
        """True if a person may have expired that was not deleted yet."""
        return is_expired(self.next_expiry, self._clock)

    def publish_ann(self, sealed: SealedSegment, ann: ApproximateSearch) -> None:
        """Let searches of ``sealed`` use ``ann``, if it is still the current segment."""
        if self.view.sealed is sealed:
            self.ann_considered = replace(sealed, ann=ann)
            self.view = replace(self.view, sealed=self.ann_considered)

    def swap_segment(self, stored: StoredCollection, sealed: SealedSegment | None, deleted: Sequence[int]) -> None:
        """Search ``sealed``, which includes part of the growing segment; ``deleted`` of its faces went meanwhile."""
        rows, view = self._growing.rows, self.view
        newer = rows.ids > stored.watermark
        newer[view.growing_deleted] = False
        self.segment, self.is_damaged = stored.segment, False
        self._growing = GrowingSegment(self.info.dim)
        self.view = self._new_view(sealed, [rows.take(newer)], deleted)

    def note_damage(self, view: SegmentView) -> None:
        """Note that a file of the sealed segment of ``view`` was found changed; another one may be searched since."""
        found, current = view.sealed, self.view.sealed
        if found is not None and current is not None and found.scan is current.scan:
            self.is_damaged = True

    @property
    def ann(self) -> ApproximateSearch | None:
        """The approximate search in use; None: the sealed segment is searched exactly, or there is none."""
        sealed = self.view.sealed
        return None if sealed is None or self.deleted else sealed.ann

    def deleted_in_segment(self) -> list[int]:
        """Return the deleted faces whose vectors the sealed segment still holds."""
        view = self.view
        if view.sealed is None or view.alive is None:
            return []
        faces: list[int] = view.sealed.faces[~view.alive].tolist()
        return faces

    def is_due(self, age: float) -> bool:
        """True when compaction pays, the sealed segment is damaged, or a deletion is older than ``age`` seconds."""
        return (
            self.is_damaged
            or self.needs_compaction
            or (self.deleted_at is not None and self._clock.monotonic() - self.deleted_at >= age)
        )

    @property
    def needs_compaction(self) -> bool:
        """True when enough was added or deleted for a new sealed segment to pay."""
        view = self.view
        changed = max(len(view.growing.ids), view.sealed_deleted)
        return changed > compaction_threshold(view.sealed)

    @property
    def is_compacted(self) -> bool:
        """True when the sealed segment is whole, and holds every face and no deleted one."""
        return not self.is_damaged and not len(self.view.growing.ids) and not self.view.sealed_deleted

    def statistics(self) -> dict[str, float]:
        """Return the figures of :meth:`plsc.gallery.store.Store.statistics`."""
        view, ann = self.view, self.ann
        sealed, growing = 0 if view.sealed is None else len(view.sealed), len(view.growing.ids)
        recall = None if ann is None else ann.monitor.recall or ann.recall
        return {
            "rows": sealed - view.sealed_deleted + growing - len(view.growing_deleted),
            "sealed": sealed,
            "growing": growing,
            "tombstones": view.sealed_deleted + len(view.growing_deleted),
            "memory_bytes": (0 if view.sealed is None else view.sealed.memory_bytes) + view.growing.vectors.nbytes,
            "approximate": ann is not None,
            "recall": 1.0 if recall is None else min(recall.at_1, recall.at_10),
        }

    def _new_view(self, sealed: SealedSegment | None, newer: Sequence[Faces], deleted: Sequence[int]) -> SegmentView:
        for batch in newer:
            self._growing.append(batch)
        none: Int64 = np.empty(0, dtype=np.int64)
        return SegmentView(sealed, None, self._growing.rows, none).without(deleted)


def compaction_threshold(sealed: SealedSegment | None) -> int:
    """Return how many rows may be added or deleted before a new sealed segment pays."""
    if sealed is None:
        return MIN_CHANGES
    in_memory: int = MAX_GROWING_BYTES // (sealed.vectors.itemsize * sealed.vectors.shape[1])
    return max(MIN_CHANGES, min(len(sealed) // COMPACTION_DIVISOR, in_memory))


class PersonCache:
    """Names and metadata of recently found persons, up to about ``max_bytes``; thread-safe.

    Two generations stand in for an LRU list: a hit is in the young one or moves there, and when the young one is full
    it replaces the old one. So repeated hits change nothing, and cost a dict lookup.
    """

    def __init__(self, max_bytes: int = PERSON_CACHE_BYTES) -> None:
        self._max_young_bytes, self._young_bytes = max_bytes // 2, 0
        self._young: dict[int, PersonSummary] = {}
        self._old: dict[int, PersonSummary] = {}
        self._changes = 0
        self._lock = threading.Lock()

    def get(
        self, persons: Sequence[int], read: Callable[[list[int]], dict[int, PersonSummary]]
    ) -> dict[int, PersonSummary]:
        """Return those of ``persons`` that exist, in that order; ``read`` gets the missing ones, without the lock."""
        with self._lock:
            known = {person: self._young[person] for person in persons if person in self._young}
            if len(known) == len(persons):
                return known
            promoted = {person: self._old.pop(person) for person in persons if person in self._old}
            self._insert(promoted)
            changes = self._changes
        known.update(promoted)
        missing = [person for person in persons if person not in known]
        if missing:
            found = read(missing)
            with self._lock:
                if changes == self._changes:  # otherwise the rows may predate a change, and would stay stale
                    self._insert(found)
            known.update(found)
        return {person: known[person] for person in persons if person in known}

    def forget(self, persons: Iterable[int]) -> None:
        """Read ``persons`` again when they are found next: called after every change of them, however it ended."""
        with self._lock:
            self._changes += 1
            for person in persons:
                self._remove(person)

    def _insert(self, found: dict[int, PersonSummary]) -> None:
        for person, summary in found.items():
            self._remove(person)
            self._young[person] = summary
            self._young_bytes += _size(summary)
            if self._young_bytes > self._max_young_bytes:
                self._old, self._young, self._young_bytes = self._young, {}, 0

    def _remove(self, person: int) -> None:
        self._old.pop(person, None)
        summary = self._young.pop(person, None)
        if summary is not None:
            self._young_bytes -= _size(summary)


def _size(summary: PersonSummary) -> int:
    metadata = summary.metadata
    text = sum(len(key) + (len(value) if isinstance(value, str) else 8) for key, value in metadata.items())
    return _ENTRY_BYTES + len(summary.name or "") + text + _METADATA_BYTES * len(metadata)
