"""A collection in memory: the view that searches read, its cached persons, and the search for a faster index.

SQLite is the truth; this is what answers. Searches take ``state.view`` once, without a lock, and use that immutable
object to the end. A writer prepares a new view after its commit and publishes it by assigning the attribute, which
readers see whole or not at all.
"""

import atexit
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from plsc.errors import PlscError, UsageError
from plsc.gallery.sqlite.records import Faces, StoredCollection
from plsc.gallery.sqlite.segments import GrowingSegment, SealedSegment, SegmentView
from plsc.gallery.validation import is_expired
from plsc.gallery.values import Collection, PersonSummary
from plsc.index.ann import ApproximateSearch
from plsc.index.rows import Int64
from plsc.index.tuning import PlanningStopped, plan_search
from plsc.progress import note

MIN_CHANGES = 4096  # rows added or deleted before compaction is considered: fewer cost a search next to nothing
COMPACTION_DIVISOR = 8  # compact when an eighth of the sealed segment was added or deleted
MIN_ANN_ROWS = 1000  # a smaller segment is searched exactly in no time
PERSON_CACHE_BYTES = 16 << 20  # per collection
_RECALL_INTERVAL_SECONDS = 5.0
_ENTRY_BYTES = 500  # of a cache entry, about
_METADATA_BYTES = 150  # of a metadata entry besides its text


class CollectionState:
    """One collection as searches and writes use it.

    ``view`` is read by searches without a lock; ``persons`` has a lock of its own. All other members belong to the
    thread that holds the store's write lock, and :meth:`publish` is called after the commit.

    Attributes:
        number, info: the collection; the counts in ``info`` are those at opening.
        segment: number of the current sealed segment.
        deleted: True once the collection was deleted; a thread may still hold this object then.
        deleted_at: ``time.monotonic()`` of the first deletion whose vectors may still be in a file, if there is one.
        ann_considered: the sealed segment that approximate search was last considered for.
        next_expiry: no person expires before this time; None: none expires. Set before the view shows the person.
    """

    def __init__(
        self, stored: StoredCollection, sealed: SealedSegment | None, newer: Sequence[Faces], deleted: Sequence[int]
    ) -> None:
        """Begin with ``sealed``, ``newer`` faces that it does not hold, and ``deleted`` ones that it still does."""
        self.number = stored.number
        self.info: Collection = stored.info
        self.segment = stored.segment
        self.persons = PersonCache()
        self.deleted = False
        self.deleted_at: float | None = time.monotonic() if len(deleted) else None
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
                self.deleted_at = time.monotonic()
            view = view.without(gone)
        for faces in added:
            self._growing.append(faces)
        self.view = replace(view, growing=self._growing.rows, masks={})

    @property
    def has_expired(self) -> bool:
        """True if a person may have expired that was not deleted yet."""
        return is_expired(self.next_expiry)

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
        self.segment = stored.segment
        self._growing = GrowingSegment(self.info.dim)
        remaining = Faces(rows.ids[newer], rows.persons[newer], rows.vectors[newer])
        self.view = self._new_view(sealed, [remaining], deleted)

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
        """True when compaction pays, or a deletion is older than ``age`` seconds."""
        return self.needs_compaction or (self.deleted_at is not None and time.monotonic() - self.deleted_at >= age)

    @property
    def needs_compaction(self) -> bool:
        """True when enough was added or deleted for a new sealed segment to pay."""
        view = self.view
        changed = max(len(view.growing.ids), view.sealed_deleted)
        return changed > compaction_threshold(view.sealed)

    @property
    def is_compacted(self) -> bool:
        """True when the sealed segment holds every face and no deleted one."""
        return not len(self.view.growing.ids) and not self.view.sealed_deleted

    def statistics(self) -> dict[str, float]:
        """Return the figures of :meth:`plsc.gallery.store.Store.statistics`."""
        view, ann = self.view, self.ann
        sealed, growing = 0 if view.sealed is None else len(view.sealed), len(view.growing.ids)
        recall = None if ann is None else ann.monitor.recall or ann.recall
        return {
            "rows": sealed - view.sealed_deleted + growing - len(view.growing_deleted),
            "base": sealed,
            "delta": growing,
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
    return max(MIN_CHANGES, (0 if sealed is None else len(sealed)) // COMPACTION_DIVISOR)


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


class AnnPlanner:
    """Looks for approximate search of segments whose exact search misses the latency target, on its own thread.

    The structure it finds lives in memory only, as long as its segment does: no file could be damaged, or would have
    to erase a deleted vector. Until it is found, searches are exact.
    """

    def __init__(
        self, latency_ms: float | None, publish: Callable[[CollectionState, SealedSegment, ApproximateSearch], None]
    ) -> None:
        """Plan for single queries within ``latency_ms`` (None: plan nothing; :class:`UsageError` unless above 0)."""
        if latency_ms is not None and not (math.isfinite(latency_ms) and latency_ms > 0):
            raise UsageError(f"a latency of {latency_ms} ms: it lies above 0")
        self._latency_ms, self._publish = latency_ms, publish
        self._waiting: queue.SimpleQueue[tuple[CollectionState, SealedSegment] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._published: list[tuple[CollectionState, ApproximateSearch]] = []

    def consider(self, state: CollectionState) -> None:
        """Queue the collection's sealed segment if it is large and was not considered yet."""
        sealed = state.view.sealed
        if self._latency_ms is None or sealed is None or len(sealed) < MIN_ANN_ROWS or state.ann_considered is sealed:
            return
        state.ann_considered = sealed
        self._waiting.put((state, sealed))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._latency_ms,), name="gallery ANN planner", daemon=True
            )
            atexit.register(self._end)
            self._thread.start()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it: faiss goes on until its next rows are read."""
        self._closing.set()
        self._waiting.put(None)

    def _end(self) -> None:
        """Wait for the thread at the process's end, which aborts where it finds a thread in faiss's C++."""
        self.close()
        assert self._thread is not None, "it was started"
        self._thread.join()

    def _work(self, latency_ms: float) -> None:
        try:
            self._run(latency_ms)
        finally:
            self._published.clear()
            atexit.unregister(self._end)

    def _run(self, latency_ms: float) -> None:
        while True:
            try:
                job = self._waiting.get(timeout=_RECALL_INTERVAL_SECONDS if self._published else None)
            except queue.Empty:
                self._measure_recall()
                continue
            if job is None or self._closing.is_set():
                return
            state, sealed = job
            if state.view.sealed is not sealed:
                continue  # replaced meanwhile; its successor is in the queue
            ann = self._plan(sealed, latency_ms)
            if ann is not None:
                self._publish(state, sealed, ann)
                self._published.append((state, ann))
            del job, state, sealed, ann  # waiting must not keep a replaced segment in memory

    def _measure_recall(self) -> None:
        """Measure the recall of the structures in use on queries they were asked."""
        self._published = [(state, ann) for state, ann in self._published if state.ann is ann]
        for _, ann in self._published:
            with contextlib.suppress(PlscError, MemoryError):  # if the segment became unreadable, searches report it
                ann.monitor_recall()

    def _plan(self, sealed: SealedSegment, latency_ms: float) -> ApproximateSearch | None:
        try:
            return plan_search(sealed.scan, sealed.vectors, sealed.persons, latency_ms, stopped=self._closing.is_set)
        except PlanningStopped:
            return None
        except (PlscError, MemoryError) as error:
            note(f"plsc gallery: searching stays exact: {error or type(error).__name__}")
            return None
