"""The store of :mod:`plsc.gallery.milvus`."""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from plsc.errors import StorageError, UsageError, masked
from plsc.gallery.milvus.answers import Answers
from plsc.gallery.milvus.registry import GRACE, Entry, Registry
from plsc.gallery.milvus.requests import FACES, PERSONS, MilvusServer
from plsc.gallery.milvus.rows import MilvusRows
from plsc.gallery.rows import Change
from plsc.gallery.store import Query, Store
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import now
from plsc.gallery.values import Clock, Collection, IdempotentRequest, Match, StoredAnswer, totals

_T = TypeVar("_T")


def open_milvus(uri: str, *, token: str = "", timeout: float = 30.0) -> "MilvusStore":
    """Open the gallery at ``uri``, ``http://HOST:PORT/DATABASE``; creates the database if it is missing.

    Args:
        token: Milvus' "user:password"; the URI may hold it as well.
        timeout: seconds that a request may take.

    Raises:
        UsageError: pymilvus is not installed, or ``uri`` is no address.
        StorageError: the server does not answer.
    """
    try:
        import pymilvus  # noqa: F401
    except ImportError:
        raise UsageError("a store in Milvus needs pymilvus: pip install 'plsc-torch[milvus]'") from None
    try:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        address = f"{parts.scheme}://{parts.hostname}:{parts.port or 19530}"
    except ValueError:  # also of a port that is no number
        what = ascii(masked(uri))[:200]
        raise UsageError(f"{what} is no address of a Milvus server; it looks like http://HOST:19530/DATABASE") from None
    token = token or (f"{parts.username}:{parts.password}" if parts.username else "")
    return MilvusStore(MilvusServer(address, token, parts.path.strip("/"), timeout))


class MilvusStore(Store):
    """A :class:`plsc.gallery.store.Store` in Milvus; made by :func:`open_milvus`."""

    def __init__(self, server: MilvusServer, clock: Clock = time) -> None:
        self._server, self.clock = server, clock
        self._registry = Registry(server)
        self._answers = Answers(server, self._registry)
        self._write_lock = threading.RLock()  # one change at a time within this process; the lease is between processes

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        return [entry.info for entry in self._registry.entries().values()]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        return self._registry.entry(name).info

    def _create(self, name: str, dim: int, contract_id: str, idempotent: IdempotentRequest | None) -> Collection | None:
        with self._writing():
            if name in self._registry.entries([name]):
                return None
            info = Collection(name, dim, contract_id, now(self.clock), 0, 0)
            row = self._registry.first_row
            entry = Entry(uuid.uuid4().hex[:16], info, 1, row + 1)
            answer = [] if idempotent is None else self._answers.rows(idempotent, info, self.clock, entry.key, row)
            with self._committing():
                self._server.create(entry.persons, PERSONS)
                self._server.create(entry.faces(0), FACES, dim)
                self._answers.write(answer)
                self._registry.save(entry)
            self._settle(answer)
            return info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._writing():
            entry = self._registry.entry(name)
            self._answers.settle_all(entry)
            with self._committing():
                self._registry.delete(name)
            with suppress(StorageError):  # nobody knows them any more; the next writer drops what is left
                for each in entry.names:
                    self._server.drop(each)

    # --- changes and reads of one collection ---

    def _change(self, collection: str, change: Change[_T]) -> _T:
        with self._writing():
            rows = self._rows_of(collection)
            result = change.work(rows, change.check(rows.info, rows.migration))
            if not rows.has_changed and change.idempotent is None:
                return result
            self._purge(rows, now(self.clock, -GRACE))
            if rows.is_crowded:
                self._purge(rows, now(self.clock))  # sooner than readers can be sure of
            answer = []
            if change.idempotent is not None:
                answer = self._answers.rows(change.idempotent, result, self.clock, rows.entry.key, rows.take_row())
            with self._committing():
                self._answers.write(answer)
                rows.write(self._registry.save)
            self._settle(answer)
            return result

    @contextmanager
    def _reading(self, collection: str) -> Iterator[MilvusRows]:
        yield self._rows_of(collection)

    def _search(self, collection: str, query: Query) -> list[list[Match]]:
        rows = self._rows_of(collection)
        return rows.search(query.units(rows), query.k, query.threshold, query.filter)

    def _rows_of(self, name: str) -> MilvusRows:
        return MilvusRows(self._server, self._registry.entry(name), self.clock)

    def _all(self) -> list[MilvusRows]:
        return [MilvusRows(self._server, entry, self.clock) for entry in self._registry.entries().values()]

    # --- writing ---

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._write_lock:
            self._registry.hold(self.clock)
            yield

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Run requests up to a commit; if one fails, nothing that this epoch has sent counts any more, or ever will."""
        try:
            yield
        except BaseException:
            self._registry.distrust()
            raise

    def _settle(self, answer: list[dict[str, Any]]) -> None:
        with suppress(StorageError):  # it counts with its change
            self._answers.settle(answer)

    def _purge(self, rows: MilvusRows, before: str) -> None:
        for gone in rows.purge(before):
            if gone.rows:
                self._answers.forget_uncommitted(rows.entry, gone._replace(persons=[]).condition())

    # --- what expires, and answers ---

    def _names_with_expired(self) -> list[str]:
        if not self._registry.may_tidy(self.clock):
            return []
        return [rows.info.name for rows in self._all() if rows.has_expired()]

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""
        return self._answers.find(token, key)

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""
        with self._writing():
            self._answers.write(self._answers.rows(idempotent, result, self.clock))

    def forget_answers(self, before: str, most: int) -> int:
        """See :class:`plsc.gallery.store.Store`; of a process that only reads, nothing is forgotten."""
        if not self._registry.may_tidy(self.clock):
            return 0
        with self._writing():
            return self._answers.forget(before, most)

    # --- maintenance ---

    def compact(self, collection: str | None = None) -> None:
        """Delete what is gone now, and ask Milvus to rewrite its files without it; readers should not be slow."""
        for name in [collection] if collection is not None else [info.name for info in self.collections()]:
            with self._writing():
                rows = self._rows_of(name)
                self._purge(rows, now(self.clock))
                with self._committing():
                    rows.write(self._registry.save)
                for each in rows.entry.names:
                    self._server.compact(each)

    def snapshot(self, target: Path) -> None:
        """Write everything to the new folder ``target`` (see :mod:`plsc.gallery.transfer`).

        Each collection is as of one moment, and all are as of the same one unless another process writes meanwhile.
        """
        with self._write_lock:
            write_copy(target, [(rows.info, rows.everyone()) for rows in self._all()])

    def check(self) -> dict[str, Any]:
        """Read every row: persons, faces, their counts, ids and lengths."""
        with self._write_lock:
            found = self._all()
            for rows in found:
                rows.check()
        return totals([rows.info for rows in found])

    def close(self) -> None:
        """Give the writer lease back and close the connection."""
        with self._write_lock, suppress(StorageError):
            self._registry.release(self.clock)
        self._server.close()
