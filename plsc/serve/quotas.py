"""Quotas that an operator sets: persons of a collection, metadata of a person, bytes of the store."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from plsc.errors import NotFoundError
from plsc.gallery.sqlite import COLLECTIONS, SQLITE
from plsc.gallery.store import Store
from plsc.gallery.values import Metadata
from plsc.serve.errors import ApiError
from plsc.serve.settings import Limits

Result = TypeVar("Result")


class Quotas:
    """Refuses, with :class:`ApiError`, changes of ``store`` that would go beyond the quotas of ``limits``.

    Changes that add wait for each other, so that together they keep to a quota too. Deletions are never refused.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._are_set = (limits.persons, limits.store_bytes, limits.metadata_bytes) != (None, None, None)
        self._adding = threading.Lock()

    def add(
        self,
        change: Callable[..., Result],
        collection: str,
        *args: Any,
        adds: int | str = 0,
        metadata: Sequence[Metadata] = (),
        **options: Any,
    ) -> Result:
        """Call ``change``, which adds to ``collection``, with the rest.

        Args:
            adds: how many persons it adds; or an external id, whose person it adds where there is none.
            metadata: of the persons that it adds or changes.
        """
        if not self._are_set:
            return change(collection, *args, **options)
        for each in metadata:
            self._check_metadata(each)
        with self._adding:
            self._check_bytes()
            self._check_persons(collection, adds)
            return change(collection, *args, **options)

    def _check_persons(self, collection: str, adds: int | str) -> None:
        limit = self._limits.persons
        if limit is None or not adds:
            return
        more = adds if isinstance(adds, int) else 1 - self._is_there(collection, adds)
        if (there := self._store.collection(collection).persons) + more > limit:
            raise ApiError(
                507,
                f"{collection} holds {there:,} people and takes {limit:,} at most; delete some, or ask for a higher "
                "limit (plsc serve --max-persons)",
            )

    def _is_there(self, collection: str, external_id: str) -> bool:
        try:
            self._store.find_person(collection, external_id)
        except NotFoundError:
            return False
        return True

    def _check_bytes(self) -> None:
        limit, folder = self._limits.store_bytes, self._store.folder
        if limit is not None and folder is not None and (size := store_bytes(folder)) >= limit:
            raise ApiError(
                507,
                f"the store has {size:,} bytes of the {limit:,} that it may have; delete and compact, or ask for a "
                "higher limit (plsc serve --max-store-mib)",
            )

    def _check_metadata(self, metadata: Metadata) -> None:
        limit = self._limits.metadata_bytes
        if limit is not None and (size := len(orjson.dumps(dict(metadata)))) > limit:
            raise ApiError(413, f"the metadata of a person have {size:,} bytes as JSON; at most {limit:,} are taken")


def store_bytes(folder: Path) -> int:
    """Bytes of the files that hold a store in ``folder``: its database and its segments, without snapshots."""
    files = [*folder.glob(f"{SQLITE}*"), *(folder / COLLECTIONS).rglob("*")]
    return sum(_size(path) for path in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # a compaction has just removed it
        return 0
