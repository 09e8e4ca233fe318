"""Quicker searching where the exact search of a base misses the latency asked for: looked for beside everything else.

What is found lives in memory alone, as long as its base does: it is in no file that could be damaged, or that would
have to forget. Until it is found, searches are exact.
"""

import contextlib
import math
import queue
import sys
import threading
from collections.abc import Callable

from plsc.errors import PlscError, UsageError
from plsc.gallery.base import Base
from plsc.gallery.searched import SearchedCollection
from plsc.index.ann import ApproximateSearch
from plsc.index.tuning import plan_search

FEWEST = 1000  # rows; fewer take no time
_WATCH_SECONDS = 5.0
Show = Callable[[SearchedCollection, Base, ApproximateSearch], None]


class Planning:
    """Plans for one base at a time, in a thread that nobody waits for; ``show`` is told what it found."""

    def __init__(self, latency_ms: float | None, show: Show) -> None:
        """latency_ms: of a single query; None: nothing is planned. :class:`UsageError` unless it lies above 0."""
        if latency_ms is not None and not (math.isfinite(latency_ms) and latency_ms > 0):
            raise UsageError(f"a latency of {latency_ms} ms: it lies above 0")
        self._latency_ms, self._show = latency_ms, show
        self._waiting: queue.SimpleQueue[tuple[SearchedCollection, Base] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._shown: list[tuple[SearchedCollection, ApproximateSearch]] = []

    def consider(self, searched: SearchedCollection) -> None:
        """The collection may have a new base."""
        base = searched.view.base
        if self._latency_ms is None or base is None or len(base) < FEWEST or searched.considered is base:
            return
        searched.considered = base
        self._waiting.put((searched, base))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._latency_ms,), name="gallery planning", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Let the thread end when its plan is done; nobody waits for that."""
        self._waiting.put(None)

    def _run(self, latency_ms: float) -> None:
        while True:
            try:
                wanted = self._waiting.get(timeout=_WATCH_SECONDS if self._shown else None)
            except queue.Empty:
                self._watch()
                continue
            if wanted is None:
                return
            searched, base = wanted
            if searched.view.base is not base:
                continue  # a newer one is waiting
            found = self._planned(base, latency_ms)
            if found is not None:
                self._show(searched, base, found)
                self._shown.append((searched, found))
            del wanted, searched, base, found  # memory that is waited for no longer

    def _watch(self) -> None:
        """Measure the recall of what is in use on what was asked of it."""
        self._shown = [(searched, quick) for searched, quick in self._shown if searched.quick is quick]
        for _, quick in self._shown:
            with contextlib.suppress(PlscError, MemoryError):  # where the base can no longer be read, searches say so
                quick.monitor_recall()

    def _planned(self, base: Base, latency_ms: float) -> ApproximateSearch | None:
        try:
            return plan_search(base.scan, base.vectors, base.persons, latency_ms)
        except (PlscError, MemoryError) as error:
            print(f"plsc gallery: searching stays exact: {error or type(error).__name__}", file=sys.stderr, flush=True)
            return None
