"""Forgetting by time: a thread that deletes persons who expired, and answers that were kept for a day."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from plsc.errors import PlscError
from plsc.gallery.store import Store, collect_changes
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.gallery.validation import now
from plsc.progress import note

ANSWERS_KEPT = timedelta(days=1)
MAX_ANSWERS = 100_000  # of one token; of more the oldest are forgotten
_EXPIRY_SECONDS = 1.0  # between two looks for persons who expired
_ANSWERS_SECONDS = 60.0
_RETRY_SECONDS = 30.0


class Retention:
    """Deletes what has been kept long enough, with the thumbnails, until it is closed.

    Nobody finds an expired person from the moment on that was given; this thread takes out the rows.

    Args:
        deleted: called with a collection and the ids of persons after they were deleted.
    """

    def __init__(self, store: Store, thumbnails: ThumbnailStore, deleted: Callable[[str, Sequence[int]], None]) -> None:
        self._store, self._thumbnails, self._deleted = store, thumbnails, deleted
        self._closing = threading.Event()
        self._answers_due = time.monotonic()
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
            except (PlscError, MemoryError) as error:
                line = str(error) or type(error).__name__
                note(f"plsc gallery: what expired is hidden, and not deleted yet: {line}")
                pause = _RETRY_SECONDS

    def _forget(self) -> None:
        while not self._closing.is_set() and self._thumbnails.delete_expired(self._deleted):
            pass
        if time.monotonic() >= self._answers_due:
            self._store.forget_answers(now(-ANSWERS_KEPT), MAX_ANSWERS)
            self._answers_due = time.monotonic() + _ANSWERS_SECONDS
