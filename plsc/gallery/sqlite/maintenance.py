"""Compacts collections in a thread: after many changes, when a deletion is due, or on request.

Another thread looks for an approximate search of large segments.
"""

import atexit
import math
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from plsc.errors import PlscError, UsageError
from plsc.gallery.sqlite.collection_state import CollectionState
from plsc.gallery.sqlite.compaction import Compactor
from plsc.gallery.sqlite.segments import SealedSegment
from plsc.index.ann import ApproximateSearch
from plsc.index.tuning import PlanningStopped, plan_search
from plsc.progress import note

_INTERVAL_SECONDS = 60.0  # at most, between two looks at what is due
_RETRY_SECONDS = 30.0  # at most, after a compaction that failed (on a full disk)
_MIN_ANN_ROWS = 1000  # a smaller segment is searched exactly in no time
_RECALL_INTERVAL_SECONDS = 5.0


class AnnPlanner:
    """Looks for approximate search of segments whose exact search misses the latency target, on its own thread.

    The structure it finds lives in memory only, as long as its segment does: no file could be damaged, or would have
    to erase a deleted vector. Until it is found, searches are exact.
    """

    def __init__(self, latency_ms: float | None, write_lock: threading.RLock) -> None:
        """Plan for single queries within ``latency_ms`` (None: plan nothing; :class:`UsageError` unless above 0)."""
        if latency_ms is not None and not (math.isfinite(latency_ms) and latency_ms > 0):
            raise UsageError(f"a latency of {latency_ms} ms: it lies above 0")
        self._latency_ms, self._write_lock = latency_ms, write_lock
        self._waiting: queue.SimpleQueue[tuple[CollectionState, SealedSegment] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._published: list[tuple[CollectionState, ApproximateSearch]] = []

    def consider(self, state: CollectionState) -> None:
        """Queue the collection's sealed segment if it is large and was not considered yet."""
        sealed = state.view.sealed
        if self._latency_ms is None or sealed is None or len(sealed) < _MIN_ANN_ROWS or state.ann_considered is sealed:
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
                with self._write_lock:
                    state.publish_ann(sealed, ann)
                self._published.append((state, ann))
            del job, state, sealed, ann  # waiting must not keep a replaced segment in memory

    def _measure_recall(self) -> None:
        """Measure the recall of the structures in use on queries they were asked."""
        self._published = [(state, ann) for state, ann in self._published if state.ann is ann]
        for _, ann in self._published:
            with suppress(PlscError, MemoryError):  # if the segment became unreadable, searches report it
                ann.monitor_recall()

    def _plan(self, sealed: SealedSegment, latency_ms: float) -> ApproximateSearch | None:
        try:
            return plan_search(sealed.scan, sealed.vectors, sealed.persons, latency_ms, stopped=self._closing.is_set)
        except PlanningStopped:
            return None
        except (PlscError, MemoryError) as error:
            note(f"plsc gallery: searching stays exact: {error or type(error).__name__}")
            return None


class Maintenance:
    """Compacts the collections of a store, one thing at a time.

    Args:
        compactor: of the store.
        planner: is asked for an approximate search of every new segment.
        states: returns the collections.
        write_lock: the store's lock of all writes.
        compact_within: seconds after which no file may hold a deleted face's vector, or texts of who was deleted.

    Attributes:
        lock: held by one compaction, snapshot or check at a time; taken before ``write_lock``.
        failures: compactions that failed since the store was opened.
    """

    def __init__(
        self,
        compactor: Compactor,
        planner: AnnPlanner,
        states: Callable[[], Iterable[CollectionState]],
        write_lock: threading.RLock,
        compact_within: float,
    ) -> None:
        self._compactor, self._planner, self._states, self._write_lock = compactor, planner, states, write_lock
        self._age = compact_within / 2  # the other half is for the compaction, and for trying again
        self._interval = min(compact_within / 8, _INTERVAL_SECONDS)
        self.lock = threading.Lock()
        self.failures = 0
        self._log_holds_erased = False  # what was erased is in the write-ahead log until that is truncated
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gallery maintenance", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at what is due."""
        self._due.set()

    def close(self) -> None:
        """Wait for the current compaction and end the thread."""
        self._closing.set()
        self._due.set()
        self._thread.join()

    def compact(self, states: Callable[[], Iterable[CollectionState]]) -> None:
        """Compact what ``states`` returns once nothing else is compacted, and erase what deleted collections left.

        Raises:
            StorageError: the disk is full; another time will go on from there.
        """
        with self.lock:
            self._log_holds_erased = True
            for state in states():  # not those that a cut-over has just replaced
                self._compact(state)
            self._compactor.erase_orphans()
            self._reclaim_space(0.0)

    def _run(self) -> None:
        while True:
            self._due.wait(self._interval)
            if self._closing.is_set():
                return
            self._due.clear()  # before the work: a wake during it leads to another run
            try:
                self._compact_due()
            except (PlscError, MemoryError) as error:
                if self._closing.is_set():  # which stops what would take long
                    return
                note(f"plsc gallery: compaction put off: {error or type(error).__name__}")
                self.failures += 1
                self._closing.wait(min(_RETRY_SECONDS, self._interval))
                self._due.set()

    def _compact_due(self) -> None:
        with self.lock:
            due = [state for state in self._states() if state.is_due(self._age)]
            self._log_holds_erased |= bool(due)
            for state in due:
                self._compact(state)
            self._log_holds_erased |= self._compactor.erase_orphans()
            if self._log_holds_erased or self._compactor.is_rewriting_due(self._age):
                self._reclaim_space(self._age)

    def _reclaim_space(self, age: float) -> None:
        """Reclaim space; where that fails, as during a long read, the thread tries again."""
        self._compactor.reclaim_space(age, self._closing.is_set)
        self._log_holds_erased = False

    def _compact(self, state: CollectionState) -> None:
        with self._write_lock:
            since, state.deleted_at = state.deleted_at, None
        try:
            self._compactor.compact(state)
        except BaseException:
            state.deleted_at = since if since is not None else state.deleted_at  # of a deletion meanwhile
            raise
        if not state.deleted:
            self._planner.consider(state)
