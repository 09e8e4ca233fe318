"""Recall in use: now and then a query that was answered approximately is asked again exactly, while nobody waits."""

import threading
from collections import deque

import numpy as np

from plsc.index.exact import Allowed, Exact, Float32
from plsc.index.recall import Recall, recall_of

EVERY = 64  # queries, of which the last is asked again
FEWEST = 20  # judged queries; fewer say nothing
_NEWEST = 1000  # judged queries that count
_PENDING = 16  # noted queries; more replace the oldest


class WatchedRecall:
    """:meth:`note` is called by searches, on any thread; :meth:`judge` by one that has time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed = 0
        self._noted: deque[tuple[Float32, Float32, Allowed | None]] = deque(maxlen=_PENDING)
        self._judged: deque[tuple[float, float]] = deque(maxlen=_NEWEST)

    def note(self, queries: Float32, scores: Float32, allowed: Allowed | None) -> None:
        """Queries (Q, D) among the rows ``allowed`` were answered with ``scores`` (Q, k), best first."""
        with self._lock:
            self._passed += len(queries)
            if self._passed >= EVERY:
                self._passed = 0
                self._noted.append((queries[-1].copy(), scores[-1].copy(), allowed))

    def judge(self, exact: Exact) -> None:
        """Compare what was noted with ``exact``."""
        with self._lock:
            noted = list(self._noted)
            self._noted.clear()
        for query, scores, allowed in noted:
            recall = recall_of(scores[None], exact.search(query[None], len(scores), allowed=allowed)[0])
            self._judged.append((recall.at_1, recall.at_10))

    @property
    def recall(self) -> Recall | None:
        """Over the newest queries judged; None before there are enough."""
        judged = list(self._judged)
        if len(judged) < FEWEST:
            return None
        at_1, at_10 = np.mean(judged, axis=0).tolist()
        return Recall(at_1, at_10, len(judged))
