"""When a store is compacted: by its own thread when that pays or is due, and by whoever asks."""

import threading
from collections.abc import Callable, Iterable

from plsc.errors import PlscError
from plsc.gallery.sqlite.collection_state import AnnPlanner, CollectionState
from plsc.gallery.sqlite.compaction import Compactor
from plsc.progress import note

_INTERVAL_SECONDS = 60.0  # at most, between two looks at what is due
_RETRY_SECONDS = 30.0  # at most, after a compaction that failed (on a full disk)


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

    def compact(self, states: Iterable[CollectionState]) -> None:
        """Compact ``states``, and erase what deleted collections left.

        Raises:
            StorageError: the disk is full; another time will go on from there.
        """
        with self.lock:
            self._log_holds_erased = True
            for state in states:
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
                self.failures += 1
                note(f"plsc gallery: compaction put off: {error or type(error).__name__}")
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
