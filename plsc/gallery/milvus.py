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

External ids, expiry dates, revisions and idempotency keys need a unique index or a transaction, which Milvus lacks:
they are refused (:class:`UnsupportedError`).
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, StorageError, UnsupportedError, UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus_client import (
    MilvusRows,
    RegistryEntry,
    Row,
    encode_metadata,
    face_row,
    person_row,
)
from plsc.gallery.milvus_reads import WRITER, MilvusReads
from plsc.gallery.store import (
    KEEP,
    Collection,
    Float32,
    IdempotentRequest,
    Match,
    Metadata,
    NewPerson,
    Person,
    PersonSummary,
    Precondition,
    StoredAnswer,
    Unchanged,
)
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import (
    MAX_ID,
    check_collection,
    check_contract,
    check_fields,
    check_page,
    check_persons,
    check_search,
    is_id,
    now,
)
from plsc.index.rows import unit_vectors


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
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{ascii(uri)[:200]} is no address of a Milvus server; it looks like http://HOST:19530/DATABASE"
        )
    token = token or (f"{parts.username}:{parts.password}" if parts.username else "")
    address = f"{parts.scheme}://{parts.hostname}:{parts.port or 19530}"
    return MilvusStore(MilvusRows(address, token, parts.path.strip("/"), timeout))


class MilvusStore:
    """A :class:`plsc.gallery.store.Store` in Milvus; made by :func:`open_milvus`."""

    def __init__(self, rows: MilvusRows) -> None:
        self._rows, self._reads = rows, MilvusReads(rows)
        self._process_id = uuid.uuid4().hex
        self._is_writer = False
        self._write_lock = threading.RLock()  # one change at a time within this process; the lease is between processes

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        return [entry.info for entry in self._reads.entries()]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        return self._reads.entry(name).info

    def create_collection(
        self, name: str, dim: int, contract_id: str, *, idempotent: IdempotentRequest | None = None
    ) -> Collection:
        """Create a collection."""
        _refuse("idempotency keys", idempotent)
        check_collection(name, dim, contract_id)
        with self._write_lock:
            self._acquire_writer_lease()
            if name in self._rows.registered([name]):
                raise ConflictError(f"collection {name} exists already; name another one, or delete it")
            info = Collection(name, int(dim), contract_id, now(), 0, 0)
            entry = RegistryEntry(name, uuid.uuid4().hex[:16], info, 1)
            self._rows.create(entry.key, info.dim)
            self._save(entry)
            return info

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""
        with self._changing(name) as entry:
            self._rows.unregister(name)
            with suppress(StorageError):  # nobody knows its key any more; the next writer drops what is left
                self._rows.drop(entry.key)

    # --- persons and faces ---

    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        _refuse("idempotency keys", idempotent)
        for new in persons:
            _refuse("external ids", new.external_id)
            _refuse("expiry dates", new.expires)
        with self._changing(collection) as entry:
            check_contract(entry.info, contract_id)
            checked = check_persons(persons, entry.info.dim)
            created_persons, id, created = list[Person](), entry.next_id, now()
            for person in checked:
                faces = tuple(range(id + 1, id + 1 + len(person.vectors)))
                created_persons.append(Person(id, person.name, person.metadata, faces, created, revision=0))
                id += 1 + len(faces)
            person_rows = [person_row(person) for person in created_persons]
            face_rows = [
                face_row(face, person.id, encode_metadata(person.metadata), vector)
                for person, valid in zip(created_persons, checked, strict=True)
                for face, vector in zip(person.faces, valid.vectors, strict=True)
            ]
            self._add_rows(entry, person_rows, face_rows)
            return created_persons

    def put_person(
        self, collection: str, person: NewPerson, contract_id: str, *, precondition: Precondition | None = None
    ) -> tuple[Person, bool]:
        """Refused: there are no external ids."""
        raise _unsupported("external ids")

    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        _refuse("idempotency keys", idempotent)
        with self._changing(collection) as entry:
            check_contract(entry.info, contract_id)
            known = self._reads.find_person(entry, person)
            new = unit_vectors(vectors, entry.info.dim)
            faces = list(range(entry.next_id, entry.next_id + len(new)))
            fits = encode_metadata(known.metadata)
            self._add_rows(entry, [], [face_row(face, person, fits, row) for face, row in zip(faces, new, strict=True)])
            return faces

    def update_person(
        self,
        collection: str,
        person: int,
        *,
        name: str | Unchanged | None = KEEP,
        metadata: Metadata | Unchanged = KEEP,
        expires: str | Unchanged | None = KEEP,
        precondition: Precondition | None = None,
    ) -> Person:
        """Change the name or replace the metadata of a person."""
        _refuse("revisions", precondition)
        _refuse("expiry dates", None if expires is KEEP else expires)
        fields = check_fields(name=name, metadata=metadata)
        with self._changing(collection) as entry:
            known = self._reads.find_person(entry, person)
            changed = replace(known, **fields)
            person_row(changed)  # refuses what Milvus has no room for, before anything is written
            intent = {"do": "update", "person": known.id, "old": [known.name, known.metadata, known.created]}
            self._run(entry, intent, lambda: self._rewrite(entry, changed), entry)
            return changed

    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        """Delete a person and all faces."""
        _refuse("revisions", precondition)
        with self._changing(collection) as entry:
            faces = len(self._reads.find_person(entry, person).faces)
            self._delete(entry.with_counts(-1, -faces), {"do": "delete", "person": person})

    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
        """Delete one face of a person."""
        _refuse("revisions", precondition)
        with self._changing(collection) as entry:
            if face not in self._reads.find_person(entry, person).faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            self._delete(entry.with_counts(0, -1), {"do": "unface", "face": face})

    # --- reading ---

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        return self._reads.find_person(self._reads.entry(collection), person)

    def find_person(self, collection: str, external_id: str) -> Person:
        """Refused: there are no external ids."""
        raise _unsupported("external ids")

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        check_page(after, limit, filter)
        return self._reads.page(self._reads.entry(collection), min(max(after, 0), MAX_ID), limit, filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id."""
        possible = sorted({int(id) for id in ids if is_id(id)})
        found = self._reads.persons_of(self._reads.entry(collection), possible)
        return {person.id: PersonSummary(person.id, person.name, person.metadata) for person in found}

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        entry = self._reads.entry(collection)
        self._reads.find_person(entry, person)
        return self._reads.vectors_of(entry, [person])[person]

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim), the ``k`` most similar persons with a score >= ``threshold``."""
        check_search(k, threshold, filter)
        entry = self._reads.entry(collection)
        return self._reads.search(entry, unit_vectors(queries, entry.info.dim), k, threshold, filter)

    # --- maintenance ---

    def expired(self, limit: int) -> dict[str, list[Person]]:
        """Nobody expires."""
        return {}

    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        """Nobody expires."""
        return []

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Refused: no answers are stored."""
        raise _unsupported("idempotency keys")

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Refused: no answers are stored."""
        raise _unsupported("idempotency keys")

    def forget_answers(self, before: str, most: int) -> int:
        """No answers are stored."""
        return 0

    def compact(self, collection: str | None = None) -> None:
        """Complete what was cut short, and ask Milvus to rewrite its files without what was deleted."""
        with self._write_lock:
            self._acquire_writer_lease()
            for entry in [self._reads.entry(collection)] if collection is not None else self._reads.entries():
                with self._changing(entry.name):
                    self._rows.compact(entry.key)

    def snapshot(self, target: Path) -> None:
        """Write everything to the new folder ``target`` (see :mod:`plsc.gallery.transfer`).

        This process changes nothing meanwhile; the copy is of one moment unless another process writes.
        """
        with self._write_lock:
            write_copy(target, [(entry.info, self._reads.all_persons(entry)) for entry in self._reads.entries()])

    def check(self) -> dict[str, Any]:
        """Read every row: persons, faces, their counts, ids and lengths."""
        with self._write_lock:
            entries = self._reads.entries()
            for entry in entries:
                self._reads.check_rows(entry)
        persons, faces = (sum(getattr(entry.info, name) for entry in entries) for name in ("persons", "faces"))
        return {"collections": len(entries), "persons": persons, "faces": faces}

    def statistics(self) -> dict[str, dict[str, float]]:
        """Rows and persons of each collection; the search is exact, so there is no delta and the recall is 1."""
        return {
            info.name: {"rows": info.faces, "persons": info.persons, "delta": 0, "tombstones": 0, "recall": 1.0}
            for info in self.collections()
        }

    def close(self) -> None:
        """Close the connection."""
        self._rows.close()

    # --- the registry, the writer lease and intents ---

    def _save(self, entry: RegistryEntry) -> None:
        self._rows.register(entry.name, entry.body())

    @contextmanager
    def _changing(self, name: str) -> Iterator[RegistryEntry]:
        """Yield a collection's entry without an intent, which nobody else changes meanwhile."""
        with self._write_lock:
            self._acquire_writer_lease()
            yield self._resolve_intent(self._reads.entry(name))

    def _acquire_writer_lease(self) -> None:
        """Become the process that writes; :class:`StorageError` if another one has taken the lease since."""
        holder = self._rows.registered([WRITER]).get(WRITER, {}).get("process")
        if self._is_writer and holder != self._process_id:
            raise StorageError("another process writes to this Milvus store now: open it again to take over")
        if not self._is_writer:
            self._rows.register(WRITER, {"process": self._process_id, "since": now()})
            self._is_writer = True
            for key in self._rows.keys() - {entry.key for entry in self._reads.entries()}:
                self._rows.drop(key)  # of a collection whose creation or deletion was cut short

    def _run(
        self, entry: RegistryEntry, intent: dict[str, Any], change: Callable[[], None], after: RegistryEntry
    ) -> None:
        """Declare ``intent``, make the change, declare it done; on failure undo it now or before the next change."""
        begun = replace(entry, intent=intent, next_id=after.next_id)
        self._save(begun)
        try:
            change()
            self._save(after)
        except StorageError:
            with suppress(StorageError):
                self._resolve_intent(begun)
            raise

    def _add_rows(self, entry: RegistryEntry, persons: list[Row], faces: list[Row]) -> None:
        if not persons and not faces:
            return

        def change() -> None:
            self._rows.write(entry.faces, faces)
            self._rows.write(entry.persons, persons)

        count = len(persons) + len(faces)
        after = replace(entry.with_counts(len(persons), len(faces)), next_id=entry.next_id + count)
        self._run(entry, {"do": "add", "first": entry.next_id}, change, after)

    def _delete(self, after: RegistryEntry, intent: dict[str, Any]) -> None:
        """Delete: once the intent is declared it is deleted for all readers, and the next change completes it."""
        begun = replace(after, intent=intent)
        self._save(begun)
        with suppress(StorageError):
            self._resolve_intent(begun)

    def _rewrite(self, entry: RegistryEntry, person: Person) -> None:
        """Replace the rows of a person, whose metadata may have changed."""
        fits = encode_metadata(person.metadata)
        vectors = self._reads.vectors_of(entry, [person.id])[person.id]
        rows = [face_row(face, person.id, fits, vector) for face, vector in zip(person.faces, vectors, strict=True)]
        self._rows.write(entry.faces, rows)
        self._rows.write(entry.persons, [person_row(person)])

    def _resolve_intent(self, entry: RegistryEntry) -> RegistryEntry:
        """Return the entry without an intent: what was cut short is undone, or, if a deletion, completed."""
        if entry.intent is None:
            return entry
        intent, after = entry.intent, replace(entry, intent=None)
        if intent["do"] == "add":
            self._rows.delete(entry.faces, f"id >= {intent['first']}")
            self._rows.delete(entry.persons, f"id >= {intent['first']}")
        elif intent["do"] == "delete":
            self._rows.delete(entry.faces, f"person == {intent['person']}")
            self._rows.delete(entry.persons, f"id == {intent['person']}")
        elif intent["do"] == "unface":
            self._rows.delete(entry.faces, f"id == {intent['face']}")
        else:
            name, metadata, created = intent["old"]
            known = self._reads.find_person(after, intent["person"])
            self._rewrite(after, replace(known, name=name, metadata=metadata, created=created))
        self._save(after)
        return after


def _refuse(what: str, given: object) -> None:
    """Raise :class:`UnsupportedError` if something was given that needs ``what``."""
    if given is not None:
        raise _unsupported(what)


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(f"a store in Milvus has no {what}; leave them out, or use a folder or Postgres")
