"""A clock for stores, which tests set forward in place of waiting."""

import time

from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.gallery.sqlite.store import SqliteStore


class MovedClock:
    """The machine's clock, and what it was set forward by."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Set the clock forward."""
        self._seconds += seconds

    def time(self) -> float:
        """As :func:`time.time`."""
        return time.time() + self._seconds

    def monotonic(self) -> float:
        """As :func:`time.monotonic`."""
        return time.monotonic() + self._seconds


def compact_in_time(store: SqliteStore, clock: MovedClock | None = None) -> None:
    """Do now what the thread of ``store`` does once everything is due by ``clock``, which is set forward."""
    if clock is not None:
        clock.advance(COMPACT_WITHIN)
    store._maintenance._compact_due()
