"""The gallery in Milvus, for galleries beyond one machine: Milvus keeps, distributes and scans the rows.

A gallery's collection is two of Milvus': ``plsc_faces_KEY`` (id, person, vector, and the person's encoded metadata, so
that filters are decided where the vectors are) and ``plsc_persons_KEY``. ``plsc_registry`` holds an entry for each
collection: its key, contract id, counts, the next id, and what is being done to it. Milvus has no transactions, so a
change is

    1. its intent, in the registry's row: one request, whole or not at all;
    2. the change itself, in as many requests as it takes;
    3. the row without the intent, with the new counts.

Readers take the entry first, and look at no id beyond those it knows: what an unfinished enrolment has added lies
there. What an unfinished deletion names is gone for them already; a person whose update is unfinished is as before. The
next writer undoes an enrolment or an update that was cut short, and completes a deletion.

One process writes at a time, the holder of the *writer lease*: the registry names it. A process takes the lease with
its first change, and one whose lease was taken refuses to write, with a :class:`StorageError`. Any number may read.

The index is Milvus' FLAT: exact, a scan that Milvus spreads over its query nodes; recall 1. Deleted rows are found by
nobody at once, but Milvus' own compaction takes them out of its files, and its garbage collection deletes the former
files, if the server is configured to: :meth:`MilvusStore.compact` asks for it, and a client can prove neither.

Tested against milvus-lite's server, which speaks Milvus' protocol in one process and scans in Python. That proves the
requests, the expressions and the order of writing; it does not prove replication, balancing over nodes, the speed at
scale, limits on the size of requests, nor that flushes, compaction and Strong consistency of a cluster keep their word.

What else a store may support (:data:`plsc.gallery.store.FEATURES`) needs a unique index or a transaction, which Milvus
lacks: it is refused (:class:`UnsupportedError`).
"""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from plsc.errors import StorageError, UsageError, masked
from plsc.gallery.milvus_client import MilvusServer, RegistryEntry
from plsc.gallery.milvus_rows import MilvusRows
from plsc.gallery.rows import Change
from plsc.gallery.store import Query, Store
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import is_collection_name, no_collection, now
from plsc.gallery.values import Collection, IdempotentRequest, Match, StoredAnswer, totals

WRITER = "0"  # the registry's row that names the writing process; no collection's name begins with a digit
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

    supports: frozenset[str] = frozenset()

    def __init__(self, server: MilvusServer) -> None:
        self._server = server
        self._process_id = uuid.uuid4().hex
        self._is_writer = False
        self._write_lock = threading.RLock()  # one change at a time within this process; the lease is between processes

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        return [rows.info for rows in self._all()]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        return self._rows_of(name).info

    def _create(self, name: str, dim: int, contract_id: str, idempotent: IdempotentRequest | None) -> Collection | None:
        with self._write_lock:
            self._acquire_writer_lease()
            if name in self._server.registered([name]):
                return None
            info = Collection(name, dim, contract_id, now(self.clock), 0, 0)
            entry = RegistryEntry(name, uuid.uuid4().hex[:16], info, 1)
            self._server.create(entry.key, dim)
            MilvusRows(self._server, entry).save()
            return info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._changing(name) as rows:
            self._server.unregister(name)
            with suppress(StorageError):  # nobody knows its key any more; the next writer drops what is left
                self._server.drop(rows.entry.key)

    # --- changes and reads of one collection ---

    def _change(self, collection: str, change: Change[_T]) -> _T:
        with self._changing(collection) as rows:
            result = change.work(rows, change.check(rows.info, None))
            rows.save_contract()
            return result

    @contextmanager
    def _changing(self, name: str) -> Iterator[MilvusRows]:
        """Yield a collection's rows without an intent, which nobody else changes meanwhile."""
        with self._write_lock:
            self._acquire_writer_lease()
            yield self._rows_of(name).resolved()

    @contextmanager
    def _reading(self, collection: str) -> Iterator[MilvusRows]:
        yield self._rows_of(collection)

    def _search(self, collection: str, query: Query) -> list[list[Match]]:
        rows = self._rows_of(collection)
        return rows.search(query.units(rows), query.k, query.threshold, query.filter)

    # --- maintenance ---

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Refused: no answers are stored."""
        self._require(idempotency_keys=key)
        return None

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Refused: no answers are stored."""
        self._require(idempotency_keys=idempotent)

    def forget_answers(self, before: str, most: int) -> int:
        """No answers are stored."""
        return 0

    def compact(self, collection: str | None = None) -> None:
        """Complete what was cut short, and ask Milvus to rewrite its files without what was deleted."""
        with self._write_lock:
            for name in [collection] if collection is not None else [info.name for info in self.collections()]:
                with self._changing(name) as rows:
                    self._server.compact(rows.entry.key)

    def snapshot(self, target: Path) -> None:
        """Write everything to the new folder ``target`` (see :mod:`plsc.gallery.transfer`).

        This process changes nothing meanwhile; the copy is of one moment unless another process writes.
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
        """Close the connection."""
        self._server.close()

    # --- the registry and the writer lease ---

    def _all(self) -> list[MilvusRows]:
        """Return all collections by name."""
        found = self._server.registered()
        entries = [RegistryEntry.from_body(name, found[name]) for name in sorted(found) if name != WRITER]
        return [MilvusRows(self._server, entry) for entry in entries]

    def _rows_of(self, name: str) -> MilvusRows:
        body = self._server.registered([name]).get(name) if is_collection_name(name) else None
        if body is None:
            raise no_collection(name)
        return MilvusRows(self._server, RegistryEntry.from_body(name, body))

    def _acquire_writer_lease(self) -> None:
        """Become the process that writes; :class:`StorageError` if another one has taken the lease since."""
        holder = self._server.registered([WRITER]).get(WRITER, {}).get("process")
        if self._is_writer and holder != self._process_id:
            raise StorageError("another process writes to this Milvus store now: open it again to take over")
        if not self._is_writer:
            self._server.register(WRITER, {"process": self._process_id, "since": now(self.clock)})
            self._is_writer = True
            for key in self._server.keys() - {rows.entry.key for rows in self._all()}:
                self._server.drop(key)  # of a collection whose creation or deletion was cut short
