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
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, IntegrityError, NotFoundError, StorageError, UsageError
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.milvus_client import (
    MAX_ROWS,
    MilvusRows,
    RegistryEntry,
    Row,
    encode_metadata,
    face_row,
    ids_expression,
    person_row,
    read_person,
    read_vectors,
    to_expression,
)
from plsc.gallery.person_search import Rows, group_by_person, num_candidates
from plsc.gallery.store import Collection, Float32, Match, Metadata, NewPerson, Person, PersonSummary
from plsc.gallery.transfer import write_copy
from plsc.gallery.validation import (
    MAX_ID,
    check_collection,
    check_contract,
    check_name,
    check_page,
    check_persons,
    check_search,
    is_id,
    now,
)
from plsc.index.rows import unit_vectors

_WRITER = "0"  # the registry's row that names the writing process; no collection's name begins with a digit
_PAGE_PERSONS = 500
_LENGTH_TOLERANCE = 1e-3  # of a stored vector


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
        self._rows = rows
        self._process_id = uuid.uuid4().hex
        self._is_writer = False
        self._write_lock = threading.RLock()  # one change at a time within this process; the lease is between processes

    # --- collections ---

    def collections(self) -> list[Collection]:
        """See :class:`plsc.gallery.store.Store`, as for all that follows."""
        return [entry.info for entry in self._entries()]

    def collection(self, name: str) -> Collection:
        """Return one collection."""
        return self._entry(name).info

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Create a collection."""
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

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        with self._changing(collection) as entry:
            check_contract(entry.info, contract_id)
            checked = check_persons(persons, entry.info.dim)
            created_persons, id, created = list[Person](), entry.next_id, now()
            for person in checked:
                faces = tuple(range(id + 1, id + 1 + len(person.vectors)))
                created_persons.append(Person(id, person.name, person.metadata, faces, created))
                id += 1 + len(faces)
            person_rows = [person_row(person) for person in created_persons]
            face_rows = [
                face_row(face, person.id, encode_metadata(person.metadata), vector)
                for person, new in zip(created_persons, checked, strict=True)
                for face, vector in zip(person.faces, new.vectors, strict=True)
            ]
            self._add_rows(entry, person_rows, face_rows)
            return created_persons

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        with self._changing(collection) as entry:
            check_contract(entry.info, contract_id)
            known = self._find_person(entry, person)
            new = unit_vectors(vectors, entry.info.dim)
            faces = list(range(entry.next_id, entry.next_id + len(new)))
            fits = encode_metadata(known.metadata)
            self._add_rows(entry, [], [face_row(face, person, fits, row) for face, row in zip(faces, new, strict=True)])
            return faces

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata of a person; None keeps the current value."""
        check_name(name)
        new_metadata = None if metadata is None else check_metadata(metadata)
        with self._changing(collection) as entry:
            known = self._find_person(entry, person)
            changed = replace(
                known,
                name=known.name if name is None else name,
                metadata=known.metadata if new_metadata is None else new_metadata,
            )
            person_row(changed)  # refuses what Milvus has no room for, before anything is written
            intent = {"do": "update", "person": known.id, "old": [known.name, known.metadata, known.created]}
            self._run(entry, intent, lambda: self._rewrite(entry, changed), entry)
            return changed

    def delete_person(self, collection: str, person: int) -> None:
        """Delete a person and all faces."""
        with self._changing(collection) as entry:
            faces = len(self._find_person(entry, person).faces)
            self._delete(entry.with_counts(-1, -faces), {"do": "delete", "person": person})

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Delete one face of a person."""
        with self._changing(collection) as entry:
            if face not in self._find_person(entry, person).faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            self._delete(entry.with_counts(0, -1), {"do": "unface", "face": face})

    # --- reading ---

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""
        return self._find_person(self._entry(collection), person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""
        check_page(after, limit, filter)
        return self._page(self._entry(collection), min(max(after, 0), MAX_ID), limit, filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id."""
        possible = sorted({int(id) for id in ids if is_id(id)})
        found = self._persons_of(self._entry(collection), possible)
        return {person.id: PersonSummary(person.id, person.name, person.metadata) for person in found}

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        entry = self._entry(collection)
        self._find_person(entry, person)
        return self._vectors_of(entry, [person])[person]

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
        entry = self._entry(collection)
        units = unit_vectors(queries, entry.info.dim)
        expression = to_expression(filter)
        if entry.updating is None or filter is None:
            return self._search(entry, units, k, threshold, [expression])
        # The rows of the person being updated may have old or new metadata; the old ones hold, and decide here.
        person, (_, metadata, _) = entry.updating
        found = self._search(entry, units, k, threshold, [expression, f"person != {person}"])
        if filter.matches(metadata):
            own = self._search(entry, units, 1, threshold, [f"person == {person}"])
            found = [sorted(some + more, key=_by_score)[:k] for some, more in zip(found, own, strict=True)]
        return found

    def _search(
        self, entry: RegistryEntry, queries: Float32, k: int, threshold: float, conditions: list[str]
    ) -> list[list[Match]]:
        """Ask for all queries' first candidates in one request, and for more where they are of too few persons."""

        def fetch(query: Float32, first: Rows, count: int, excluded: list[int]) -> Rows:
            if not excluded:
                return first
            others = entry.visible_faces(*conditions, f"person not in {ids_expression(excluded)}")
            return self._rows.search(entry.faces, query[None], count, others)[0]

        visible = entry.visible_faces(*conditions)
        candidates = self._rows.search(entry.faces, queries, num_candidates(k, limit=MAX_ROWS), visible)
        fetches = [partial(fetch, query, first) for query, first in zip(queries, candidates, strict=True)]
        return [group_by_person(one, k, threshold, limit=MAX_ROWS) for one in fetches]

    def _page(self, entry: RegistryEntry, after: int, limit: int, filter: Filter | None) -> list[Person]:
        conditions = [f"id > {after}", to_expression(filter)]
        updating = entry.updating
        if updating:
            conditions.append(f"id != {updating[0]}")
        found = list(self._rows.iterate(entry.persons, entry.visible_persons(*conditions), ["id", "body"], limit))
        if updating and updating[0] > after and (filter is None or filter.matches(updating[1][1])):
            found += self._rows.query(entry.persons, entry.visible_persons(f"id == {updating[0]}"), ["id", "body"])
        return self._with_faces(entry, sorted(found, key=_by_id)[:limit])

    def _persons_of(self, entry: RegistryEntry, ids: Sequence[int]) -> list[Person]:
        """Return those of ``ids`` that exist."""
        found: list[Row] = []
        for start in range(0, len(ids), _PAGE_PERSONS):
            visible = entry.visible_persons(f"id in {ids_expression(ids[start : start + _PAGE_PERSONS])}")
            found += self._rows.query(entry.persons, visible, ["id", "body"])
        return self._with_faces(entry, found)

    def _find_person(self, entry: RegistryEntry, person: int) -> Person:
        found = self._persons_of(entry, [person]) if is_id(person) else []
        if not found:
            raise NotFoundError(f"collection {entry.name} has no person {ascii(person)[:40]}")
        return found[0]

    def _with_faces(self, entry: RegistryEntry, rows: list[Row]) -> list[Person]:
        faces: dict[int, list[int]] = {row["id"]: [] for row in rows}
        ids = list(faces)
        for start in range(0, len(ids), _PAGE_PERSONS):
            visible = entry.visible_faces(f"person in {ids_expression(ids[start : start + _PAGE_PERSONS])}")
            for face in self._rows.query(entry.faces, visible, ["id", "person"]):
                faces[face["person"]].append(face["id"])
        return [entry.before_update(read_person(row, faces[row["id"]])) for row in rows]

    def _vectors_of(self, entry: RegistryEntry, persons: Sequence[int]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of the faces' ids}."""
        found: dict[int, list[Any]] = {person: [] for person in persons}
        visible = entry.visible_faces(f"person in {ids_expression(persons)}")
        for row in sorted(self._rows.iterate(entry.faces, visible, ["id", "person", "vector"]), key=_by_id):
            found[row["person"]].append(row["vector"])
        return {person: read_vectors(part, entry.info.dim) for person, part in found.items()}

    def _all_persons(self, entry: RegistryEntry) -> Iterator[tuple[Person, Float32]]:
        """Yield every person with the vectors, by id."""
        after = 0
        while persons := self._page(entry, after, _PAGE_PERSONS, None):
            vectors = self._vectors_of(entry, [person.id for person in persons])
            for person in persons:
                yield person, vectors[person.id]
            after = persons[-1].id

    # --- maintenance ---

    def compact(self, collection: str | None = None) -> None:
        """Complete what was cut short, and ask Milvus to rewrite its files without what was deleted."""
        with self._write_lock:
            self._acquire_writer_lease()
            for entry in [self._entry(collection)] if collection is not None else self._entries():
                with self._changing(entry.name):
                    self._rows.compact(entry.key)

    def snapshot(self, target: Path) -> None:
        """Write everything to the new folder ``target`` (see :mod:`plsc.gallery.transfer`).

        This process changes nothing meanwhile; the copy is of one moment unless another process writes.
        """
        with self._write_lock:
            write_copy(target, [(entry.info, self._all_persons(entry)) for entry in self._entries()])

    def check(self) -> dict[str, Any]:
        """Read every row: persons, faces, their counts, ids and lengths."""
        with self._write_lock:
            entries = self._entries()
            for entry in entries:
                self._check_rows(entry)
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

    def _check_rows(self, entry: RegistryEntry) -> None:
        persons = faces = 0
        for person, vectors in self._all_persons(entry):
            persons, faces = persons + 1, faces + len(vectors)
            is_unit = np.abs(np.linalg.norm(vectors, axis=1) - 1) < _LENGTH_TOLERANCE
            if len(vectors) != len(person.faces) or not is_unit.all():
                raise IntegrityError(f"the faces of person {person.id} of collection {entry.name} are damaged")
            if max([person.id, *person.faces]) >= entry.next_id:
                raise IntegrityError(f"person {person.id} of collection {entry.name} lies beyond the ids given")
        if (persons, faces) != (entry.info.persons, entry.info.faces):
            raise IntegrityError(
                f"collection {entry.name} holds {persons} persons and {faces} faces instead of {entry.info.persons} "
                f"and {entry.info.faces}; restore a snapshot"
            )

    # --- the registry, the writer lease and intents ---

    def _entries(self) -> list[RegistryEntry]:
        found = self._rows.registered()
        return [RegistryEntry.from_body(name, found[name]) for name in sorted(found) if name != _WRITER]

    def _entry(self, name: str) -> RegistryEntry:
        is_possible = isinstance(name, str) and name.isascii() and name.isprintable() and name != _WRITER
        body = self._rows.registered([name]).get(name) if is_possible else None
        if body is None:
            raise NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")
        return RegistryEntry.from_body(name, body)

    def _save(self, entry: RegistryEntry) -> None:
        self._rows.register(entry.name, entry.body())

    @contextmanager
    def _changing(self, name: str) -> Iterator[RegistryEntry]:
        """Yield a collection's entry without an intent, which nobody else changes meanwhile."""
        with self._write_lock:
            self._acquire_writer_lease()
            yield self._resolve_intent(self._entry(name))

    def _acquire_writer_lease(self) -> None:
        """Become the process that writes; :class:`StorageError` if another one has taken the lease since."""
        holder = self._rows.registered([_WRITER]).get(_WRITER, {}).get("process")
        if self._is_writer and holder != self._process_id:
            raise StorageError("another process writes to this Milvus store now: open it again to take over")
        if not self._is_writer:
            self._rows.register(_WRITER, {"process": self._process_id, "since": now()})
            self._is_writer = True
            for key in self._rows.keys() - {entry.key for entry in self._entries()}:
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
        vectors = self._vectors_of(entry, [person.id])[person.id]
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
            known = self._find_person(after, intent["person"])
            self._rewrite(after, replace(known, name=name, metadata=metadata, created=created))
        self._save(after)
        return after


def _by_id(row: Row) -> int:
    return int(row["id"])


def _by_score(match: Match) -> float:
    return -match.score
