"""Quotas that an operator sets: persons of a collection, metadata of a person, bytes of the store."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import orjson

from plsc.errors import NotFoundError
from plsc.gallery.sqlite import COLLECTIONS, SQLITE
from plsc.gallery.store import Store
from plsc.serve.errors import ApiError
from plsc.serve.settings import Limits


def with_quotas(store: Store, limits: Limits) -> Store:
    """``store`` with the quotas of ``limits`` in force; ``store`` itself where there are none."""
    if limits.persons is None and limits.store_bytes is None and limits.metadata_bytes is None:
        return store
    return cast("Store", QuotaStore(store, limits))


class QuotaStore:
    """A store that refuses, with :class:`ApiError`, what would go beyond quotas; everything else is passed on.

    Changes that add wait for each other, so that together they keep to a quota too. Deletions are never refused.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store: Any = store
        self._limits = limits
        self._adding_lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_collection(self, *args: Any, **options: Any) -> Any:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        with self._adding():
            return self._store.create_collection(*args, **options)

    def add_persons(self, collection: str, persons: Any, *args: Any, **options: Any) -> Any:
        """Enrol all of ``persons`` or none."""
        for person in persons:
            self._check_metadata(person.metadata)
        with self._adding():
            self._check_persons(collection, len(persons))
            return self._store.add_persons(collection, persons, *args, **options)

    def put_person(self, collection: str, person: Any, *args: Any, **options: Any) -> Any:
        """Enrol ``person``, or replace the one with its external id."""
        self._check_metadata(person.metadata)
        with self._adding():
            self._check_persons(collection, 0 if self._is_there(collection, person.external_id) else 1)
            return self._store.put_person(collection, person, *args, **options)

    def update_person(self, *args: Any, **options: Any) -> Any:
        """Change the name or replace the metadata of a person."""
        self._check_metadata(options.get("metadata"))
        with self._adding():
            return self._store.update_person(*args, **options)

    def add_faces(self, *args: Any, **options: Any) -> Any:
        """Add faces to a person."""
        with self._adding():
            return self._store.add_faces(*args, **options)

    def _is_there(self, collection: str, external_id: str) -> bool:
        try:
            self._store.find_person(collection, external_id)
        except NotFoundError:
            return False
        return True

    @contextmanager
    def _adding(self) -> Iterator[None]:
        with self._adding_lock:
            if self._limits.store_bytes is not None:
                self._check_bytes(self._limits.store_bytes)
            yield

    def _check_persons(self, collection: str, more: int) -> None:
        limit = self._limits.persons
        if limit is not None and (there := self._store.collection(collection).persons) + more > limit:
            raise ApiError(
                507,
                f"{collection} holds {there:,} people and takes {limit:,} at most; delete some, or ask for a higher "
                "limit (plsc serve --max-persons)",
            )

    def _check_bytes(self, limit: int) -> None:
        size = store_bytes(self._store.folder)
        if size >= limit:
            raise ApiError(
                507,
                f"the store has {size:,} bytes of the {limit:,} that it may have; delete and compact, or ask for a "
                "higher limit (plsc serve --max-store-mib)",
            )

    def _check_metadata(self, metadata: Any) -> None:
        limit = self._limits.metadata_bytes
        if limit is not None and metadata is not None and (size := len(orjson.dumps(dict(metadata)))) > limit:
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
