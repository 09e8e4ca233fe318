"""Quicker searching where the exact search of a base misses the latency asked for: looked for beside everything else.

What is found lives in memory alone, as long as its base does: it is in no file that could be damaged, or that would
have to forget. Until it is found, searches are exact.
"""

import math
import queue
import threading
from collections.abc import Callable

from plsc.errors import UsageError
from plsc.gallery.base import Base
from plsc.gallery.searched import SearchedCollection
from plsc.index.approximate_search import ApproximateSearch
from plsc.index.planner import plan_search

FEWEST = 1000  # rows; fewer take no time
Show = Callable[[SearchedCollection, Base, ApproximateSearch], None]


class Planning:
    """Plans for one base at a time, in a thread that nobody waits for; ``show`` is told what it found."""

    def __init__(self, latency_ms: float | None, show: Show) -> None:
        """latency_ms: of a single query; None: nothing is planned. :class:`UsageError` unless it lies above 0."""
        if latency_ms is not None and not (math.isfinite(latency_ms) and latency_ms > 0):
            raise UsageError(f"a latency of {latency_ms} ms: it lies above 0")
        self._latency_ms, self._show = latency_ms, show
        self._waiting: queue.SimpleQueue[tuple[SearchedCollection, Base]] = queue.SimpleQueue()
        if latency_ms is not None:
            threading.Thread(target=self._run, args=(latency_ms,), name="gallery planning", daemon=True).start()

    def consider(self, searched: SearchedCollection) -> None:
        """The collection may have a new base."""
        base = searched.view.base
        if self._latency_ms is None or base is None or len(base) < FEWEST or searched.considered is base:
            return
        searched.considered = base
        self._waiting.put((searched, base))

    def _run(self, latency_ms: float) -> None:
        while True:
            searched, base = self._waiting.get()
            if searched.view.base is not base:
                continue  # a newer one is waiting
            found = plan_search(base.scan, base.vectors, base.persons, latency_ms)
            if found is not None:
                self._show(searched, base, found)
            del searched, base, found  # memory that is waited for no longer
