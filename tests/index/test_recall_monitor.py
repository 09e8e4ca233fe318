"""The recall of an approximate search, measured on what callers ask of it."""

import numpy as np
import pytest

from plsc.index.recall import MIN_SAMPLES, SAMPLE_EVERY, RecallMonitor
from plsc.index.scan import ExactScan

N, D, K = 300, 16, 10


def units(count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


ROWS = units(N, 0)
EXACT = ExactScan(ROWS)


def ask(monitor: RecallMonitor, times: int, missed: int, allowed: np.ndarray | None = None, seed: int = 1) -> None:
    """Searches of SAMPLE_EVERY queries, whose answers lack the ``missed`` best rows; compared a few at a time."""
    for number in range(times):
        queries = units(SAMPLE_EVERY, seed + number)
        scores = EXACT.search(queries, K + missed, allowed=allowed)[0][:, missed:]
        monitor.record(queries, scores, allowed)
        if number % 5 == 4:
            monitor.compare(EXACT)
    monitor.compare(EXACT)


@pytest.mark.parametrize("allowed", [None, np.arange(N) % 2 == 0])
@pytest.mark.parametrize(("missed", "at_1", "at_10"), [(0, 1.0, 1.0), (1, 0.0, 0.9), (4, 0.0, 0.6)])
def test_recall_is_what_callers_got(allowed: np.ndarray | None, missed: int, at_1: float, at_10: float) -> None:
    monitor = RecallMonitor()
    ask(monitor, MIN_SAMPLES, missed, allowed)
    recall = monitor.recall
    assert recall is not None
    assert (recall.at_1, recall.at_10, recall.queries) == (at_1, pytest.approx(at_10), MIN_SAMPLES)


def test_too_few_say_nothing_and_the_newest_count() -> None:
    monitor = RecallMonitor()
    ask(monitor, MIN_SAMPLES - 1, 0)
    assert monitor.recall is None
    ask(monitor, 1000, 4)
    assert monitor.recall is not None
    assert (monitor.recall.at_1, monitor.recall.queries) == (0.0, 1000)


def test_one_query_in_many_is_asked_again_and_a_flood_is_not_kept() -> None:
    class Counting:
        asked = 0

        def search(self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None):
            self.asked += len(queries)
            return EXACT.search(queries, k, allowed=allowed)

    monitor, counting = RecallMonitor(), Counting()
    queries = units(1, 5)
    for _ in range(10 * SAMPLE_EVERY):
        monitor.record(queries, EXACT.search(queries, K)[0], None)
    monitor.compare(counting)
    assert counting.asked == 10
    for _ in range(100):
        monitor.record(units(SAMPLE_EVERY, 6), EXACT.search(units(SAMPLE_EVERY, 6), K)[0], None)
    monitor.compare(counting)
    assert 10 < counting.asked <= 10 + 20
