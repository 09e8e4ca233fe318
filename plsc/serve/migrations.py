"""Moving collections to the service's next model: a thread that fills their second spaces beside all other work."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from plsc.embedding.embedder import EmbeddingModel
from plsc.errors import ConflictError, NotFoundError, first_line
from plsc.gallery.migration.filling import embed_with, fill_from_pictures
from plsc.gallery.store import Store, collect_changes
from plsc.gallery.thumbnails import ThumbnailStore
from plsc.progress import note

SHARE = 0.25  # of the time, what embedding kept pictures takes
_LOOK_SECONDS = 600.0  # for what other services that share the store have begun
_RETRY_SECONDS = 30.0


class Migrations:
    """Embeds the kept pictures of collections whose second space is of one of the service's models, until it is closed.

    Args:
        store: holds the collections.
        thumbnails: the kept pictures.
        embedders: the models by contract id: the next one, and for those who are enrolled without it after a cut-over
            the service's own.
        flip: average over each picture and its mirror image.
        stored: called with a collection after every change.
    """

    def __init__(
        self,
        store: Store,
        thumbnails: ThumbnailStore,
        embedders: Mapping[str, EmbeddingModel],
        *,
        flip: bool,
        stored: Callable[[str], None],
    ) -> None:
        self._store, self._thumbnails, self._stored = store, thumbnails, stored
        self._embed = {
            contract_id: embed_with(embedder, flip, lambda took: self._closing.wait(took * (1 / SHARE - 1)))
            for contract_id, embedder in embedders.items()
        }
        self._closing, self._due = threading.Event(), threading.Event()
        self._due.set()
        self._thread = threading.Thread(target=self._run, name="gallery migration", daemon=True)
        self._thread.start()

    def wake(self, _: object = None) -> None:
        """Let the thread look at what there is to do; also the callback of what brought it about."""
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
            except Exception as error:  # an engine raises every kind: torch.OutOfMemoryError is a RuntimeError
                note(f"plsc serve: a migration is put off: {first_line(error)}")
                pause = _RETRY_SECONDS

    def _fill(self, collection: str) -> None:
        contract_id = self._filled_contract(collection)
        if contract_id is not None:
            fill_from_pictures(
                self._store,
                collection,
                self._embed[contract_id],
                self._thumbnails.contents,
                go_on=lambda: self._filled_contract(collection) == contract_id,
                quiet=True,
            )
            self._stored(collection)

    def _filled_contract(self, collection: str) -> str | None:
        """The contract of the second space that is to be filled here; None: it is not, or not now."""
        self._stored(collection)
        found = None if self._closing.is_set() else self._store.migration(collection)
        if found is None or found.details.get("paused", False) or found.contract_id not in self._embed:
            return None
        return found.contract_id
