"""Moving collections to the service's next model: a thread that fills their second spaces beside all other work."""

import threading
from collections.abc import Callable
from contextlib import suppress

from plsc.embedding.embedder import Embedder
from plsc.errors import ConflictError, NotFoundError, PlscError
from plsc.gallery.migration.filling import embed_with, fill_from_pictures
from plsc.gallery.store import Store, collect_changes
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.progress import note

SHARE = 0.25  # of the time, what embedding kept pictures takes
_LOOK_SECONDS = 600.0  # for what other services that share the store have begun
_RETRY_SECONDS = 30.0


class Migrations:
    """Embeds the kept pictures of collections that are moved to ``embedder``, until it is closed.

    Args:
        store: holds the collections.
        thumbnails: the kept pictures.
        embedder: the next model.
        contract_id: of its vectors.
        flip: average over each picture and its mirror image.
        stored: called with a collection after every change.
    """

    def __init__(
        self,
        store: Store,
        thumbnails: ThumbnailStore,
        embedder: Embedder,
        contract_id: str,
        *,
        flip: bool,
        stored: Callable[[str], None],
    ) -> None:
        self._store, self._thumbnails, self._contract_id, self._stored = store, thumbnails, contract_id, stored
        self._embed = embed_with(embedder, flip, lambda took: self._closing.wait(took * (1 / SHARE - 1)))
        self._closing, self._due = threading.Event(), threading.Event()
        self._due.set()
        self._thread = threading.Thread(target=self._run, name="gallery migration", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at what there is to do."""
        self._due.set()

    def close(self) -> None:
        """Wait for the current batch and end the thread."""
        self._closing.set()
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        collect_changes()
        pause = _LOOK_SECONDS
        while True:
            self._due.wait(pause)
            if self._closing.is_set():
                return
            self._due.clear()
            try:
                for info in self._store.collections():
                    with suppress(NotFoundError, ConflictError):  # it was deleted, finished or cut over meanwhile
                        self._fill(info.name)
                pause = _LOOK_SECONDS
            except (PlscError, MemoryError) as error:
                note(f"plsc serve: a migration is put off: {str(error) or type(error).__name__}")
                pause = _RETRY_SECONDS

    def _fill(self, collection: str) -> None:
        if self._goes_on(collection):
            fill_from_pictures(
                self._store,
                collection,
                self._embed,
                self._thumbnails.contents,
                go_on=lambda: self._goes_on(collection),
                quiet=True,
            )
            self._stored(collection)

    def _goes_on(self, collection: str) -> bool:
        self._stored(collection)
        found = None if self._closing.is_set() else self._store.migration(collection)
        return (
            found is not None
            and not found.is_cut_over
            and not found.details.get("paused", False)
            and found.contract_id == self._contract_id
        )
