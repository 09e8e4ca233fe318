"""Forgetting by time: a thread that deletes persons who expired, answers that were kept for a day, and pictures.

These are pictures of faces that another service deleted from a store that both share: each has its own folder of them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from plsc.errors import PlscError
from plsc.gallery.sqlite import COMPACT_WITHIN
from plsc.gallery.store import Store, collect_changes
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.validation import now
from plsc.gallery.values import FORGOTTEN_AT_ONCE
from plsc.progress import note

ANSWERS_KEPT = timedelta(days=1)
MAX_ANSWERS = 100_000  # of one token; of more the oldest are forgotten
_EXPIRY_SECONDS = 1.0  # between two looks for persons who expired
_ANSWERS_SECONDS = 60.0
_PIECE_PAUSE = 0.05
_RETRY_SECONDS = 30.0
_SWEEP_PART = 0.2  # of the time within which deleted people's pictures have to go, between two sweeps
_SWEPT_AT_ONCE = 0.5  # seconds, between which others are looked for who expired


class Retention:
    """Deletes what has been kept long enough, with the thumbnails, until it is closed.

    Nobody finds an expired person from the moment on that was given; this thread takes out the rows.

    Args:
        deleted: called with a collection and the ids of persons after they were deleted.
        within: seconds in which pictures go of whom another service deleted from the store.
    """

    def __init__(
        self,
        store: Store,
        thumbnails: ThumbnailStore,
        deleted: Callable[[str, Sequence[int]], None],
        within: float = COMPACT_WITHIN,
    ) -> None:
        self._store, self._thumbnails, self._deleted = store, thumbnails, deleted
        self._clock = store.clock
        self._pause = within * _SWEEP_PART
        self._sweep: Iterator[None] | None = None
        self._sweep_due = self._clock.monotonic()
        self._closing = threading.Event()
        self._answers_due = self._clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="gallery retention", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the current deletion and end the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        collect_changes()  # for what is called with who was deleted
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._forget()
                pause = _EXPIRY_SECONDS
            except (PlscError, OSError, MemoryError) as error:
                line = str(error) or type(error).__name__
                note(f"plsc gallery: what expired is hidden, and not all is deleted yet: {line}")
                pause = _RETRY_SECONDS

    def _forget(self) -> None:
        while not self._closing.is_set() and self._thumbnails.delete_expired(self._deleted):
            pass
        self._sweep_for_a_while()
        if self._clock.monotonic() >= self._answers_due:
            while self._store.forget_answers(now(self._clock, -ANSWERS_KEPT), MAX_ANSWERS) >= FORGOTTEN_AT_ONCE:
                if self._closing.wait(_PIECE_PAUSE):  # for changes that waited
                    return
            self._answers_due = self._clock.monotonic() + _ANSWERS_SECONDS

    def _sweep_for_a_while(self) -> None:
        """Go on with the sweep of pictures, or begin one that is due."""
        if self._store.folder is not None:  # no other process deletes from it
            return
        if self._sweep is None:
            if self._clock.monotonic() < self._sweep_due:
                return
            self._sweep = self._thumbnails.sweep()
        pause_at = self._clock.monotonic() + _SWEPT_AT_ONCE
        for _ in self._sweep:
            if self._clock.monotonic() >= pause_at or self._closing.is_set():
                return
        self._sweep, self._sweep_due = None, self._clock.monotonic() + self._pause
