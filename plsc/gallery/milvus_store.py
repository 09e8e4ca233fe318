"""The gallery in Milvus, for galleries beyond one machine: Milvus keeps, spreads and scans the rows.

A gallery's collection is two of Milvus': ``plsc_faces_KEY`` (id, person, vector, and the person's metadata as
:mod:`plsc.gallery.milvus_filters` writes them, so that filters are decided where the vectors are) and
``plsc_persons_KEY``. ``plsc_registry`` holds a row for each collection: its key, contract, counts, the next id, and
what is being done to it. Milvus has no transactions, so a change is

    1. its intent, in the registry's row: one request, whole or not at all;
    2. the change itself, in as many requests as it takes;
    3. the row without the intent, with the new counts.

Readers take the row first, and look at no id beyond those it knows: what an unfinished enrolment has added lies there.
What an unfinished deletion names is gone for them already; a person whose update is unfinished is as before. The next
writer undoes an enrolment or an update that was cut short, and completes a deletion.

One process writes at a time: the registry names it. A process takes the place with its first change, and one whose
place was taken refuses to write, with a :class:`StorageError`. Any number may read.

The index is Milvus' FLAT: exact, a scan that Milvus spreads over its query nodes; recall 1. Deleted rows are found by
nobody at once, but Milvus' own compaction takes them out of its files, and its garbage collection deletes the former
files, when the server is set to do so: :meth:`MilvusStore.compact` asks for it, and a client can prove neither.

Tested against milvus-lite's server, which speaks Milvus' protocol in one process and scans in Python. That proves the
requests, the expressions and the order of writing; it does not prove replication, balancing over nodes, the speed at
scale, limits on the size of requests, nor that flushes, compaction and Strong consistency of a cluster keep their word.
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

from plsc.errors import ConflictError, NotFoundError, StorageError, UsageError
from plsc.gallery import milvus_reading as reading
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.milvus_filters import fits_of
from plsc.gallery.milvus_rows import MilvusRows, Row, face_row, person_row
from plsc.gallery.milvus_state import State
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


def open_milvus(uri: str, *, token: str = "", timeout: float = 30.0) -> "MilvusStore":
    """Open the gallery at ``uri``: ``http://HOST:PORT/DATABASE``, where the database is made if it is not there.

    ``token`` is Milvus' "user:password"; it may stand in the URI as well. A request may take ``timeout`` seconds.
    Raises :class:`UsageError` if pymilvus is not installed or the URI is none, and :class:`StorageError` if the server
    does not answer.
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
    """A :class:`plsc.gallery.store.Store` in Milvus; make one by :func:`open_milvus`."""

    def __init__(self, rows: MilvusRows) -> None:
        self._rows = rows
        self._me = uuid.uuid4().hex
        self._owner = False
        self._writing = threading.RLock()

    def collections(self) -> list[Collection]:
        """All collections by name."""
        return [state.about for state in self._states()]

    def collection(self, name: str) -> Collection:
        """One collection."""
        return self._state(name).about

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Make a collection."""
        check_collection(name, dim, contract_id)
        with self._writing:
            self._take_place()
            if name in self._rows.registered([name]):
                raise ConflictError(f"collection {name} exists already; name another one, or delete it")
            about = Collection(name, int(dim), contract_id, now(), 0, 0)
            state = State(name, uuid.uuid4().hex[:16], about, 1)
            self._rows.create(state.key, about.dim)
            self._save(state)
            return about

    def delete_collection(self, name: str) -> None:
        """Remove a collection with everything in it."""
        with self._changing(name) as state:
            self._rows.unregister(name)
            with suppress(StorageError):  # nobody knows its key any more; the next writer drops what is left
                self._rows.drop(state.key)

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none."""
        with self._changing(collection) as state:
            check_contract(state.about, contract_id)
            checked = check_persons(persons, state.about.dim)
            made, id, created = list[Person](), state.next_id, now()
            for person in checked:
                faces = tuple(range(id + 1, id + 1 + len(person.vectors)))
                made.append(Person(id, person.name, person.metadata, faces, created))
                id += 1 + len(faces)
            person_rows = [person_row(person) for person in made]
            face_rows = [
                face_row(face, one.id, fits_of(one.metadata), vector)
                for one, new in zip(made, checked, strict=True)
                for face, vector in zip(one.faces, new.vectors, strict=True)
            ]
            self._add(state, person_rows, face_rows)
            return made

    def person(self, collection: str, person: int) -> Person:
        """One person."""
        return reading.find_person(self._rows, self._state(collection), person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Up to ``limit`` persons with ids above ``after``, ascending."""
        check_page(after, limit, filter)
        return reading.page(self._rows, self._state(collection), min(max(after, 0), MAX_ID), limit, filter)

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """The persons of ``ids`` that exist."""
        possible = sorted({int(id) for id in ids if is_id(id)})
        found = reading.some(self._rows, self._state(collection), possible)
        return {one.id: PersonSummary(one.id, one.name, one.metadata) for one in found}

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata; None leaves it."""
        check_name(name)
        checked = None if metadata is None else check_metadata(metadata)
        with self._changing(collection) as state:
            known = reading.find_person(self._rows, state, person)
            changed = replace(
                known,
                name=known.name if name is None else name,
                metadata=known.metadata if checked is None else checked,
            )
            person_row(changed)
            intent = {"do": "update", "person": known.id, "old": [known.name, known.metadata, known.created]}
            self._do(state, intent, lambda: self._rewrite(state, changed), state)
            return changed

    def delete_person(self, collection: str, person: int) -> None:
        """Forget a person and the faces."""
        with self._changing(collection) as state:
            faces = len(reading.find_person(self._rows, state, person).faces)
            self._forget(state.counted(-1, -faces), {"do": "delete", "person": person})

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        with self._changing(collection) as state:
            check_contract(state.about, contract_id)
            known = reading.find_person(self._rows, state, person)
            new = unit_vectors(vectors, state.about.dim)
            faces = list(range(state.next_id, state.next_id + len(new)))
            fits = fits_of(known.metadata)
            self._add(state, [], [face_row(face, person, fits, row) for face, row in zip(faces, new, strict=True)])
            return faces

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Forget one face."""
        with self._changing(collection) as state:
            if face not in reading.find_person(self._rows, state, person).faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            self._forget(state.counted(0, -1), {"do": "unface", "face": face})

    def vectors(self, collection: str, person: int) -> Float32:
        """The stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        state = self._state(collection)
        reading.find_person(self._rows, state, person)
        return reading.vectors_of(self._rows, state, [person])[person]

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """For each of ``queries`` (Q, dim): the ``k`` most alike persons with a score >= ``threshold``."""
        check_search(k, threshold, filter)
        state = self._state(collection)
        units = unit_vectors(queries, state.about.dim)
        return reading.nearest(self._rows, state, units, k, threshold, filter)

    def compact(self, collection: str | None = None) -> None:
        """Complete what was cut short, and ask Milvus to rewrite its files without what was deleted."""
        with self._writing:
            self._take_place()
            for state in [self._state(collection)] if collection is not None else self._states():
                with self._changing(state.name):
                    self._rows.compact(state.key)

    def snapshot(self, target: Path) -> None:
        """Write everything into the new folder ``target`` (see :mod:`plsc.gallery.transfer`).

        This process changes nothing meanwhile; it is of one moment where no other process writes.
        """
        with self._writing:
            write_copy(target, [(state.about, reading.everyone(self._rows, state)) for state in self._states()])

    def check(self) -> dict[str, Any]:
        """Read every row: persons, faces, their counts, ids and lengths."""
        with self._writing:
            states = self._states()
            for state in states:
                reading.check_rows(self._rows, state)
        persons, faces = (sum(getattr(state.about, name) for state in states) for name in ("persons", "faces"))
        return {"collections": len(states), "persons": persons, "faces": faces}

    def statistics(self) -> dict[str, dict[str, float]]:
        """Rows and persons of each collection; the search is exact, so there is no delta and the recall is 1."""
        return {
            about.name: {"rows": about.faces, "persons": about.persons, "delta": 0, "tombstones": 0, "recall": 1.0}
            for about in self.collections()
        }

    def close(self) -> None:
        """Let go of the connection."""
        self._rows.close()

    def _states(self) -> list[State]:
        found = self._rows.registered()
        return [State.read(name, found[name]) for name in sorted(found) if name != _WRITER]

    def _state(self, name: str) -> State:
        plain = isinstance(name, str) and name.isascii() and name.isprintable() and name != _WRITER
        body = self._rows.registered([name]).get(name) if plain else None
        if body is None:
            raise NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")
        return State.read(name, body)

    @contextmanager
    def _changing(self, name: str) -> Iterator[State]:
        """A collection that nobody else changes meanwhile, with nothing unfinished in it."""
        with self._writing:
            self._take_place()
            yield self._finished(self._state(name))

    def _take_place(self) -> None:
        """Be the process that writes; :class:`StorageError` if another one has taken the place."""
        holder = self._rows.registered([_WRITER]).get(_WRITER, {}).get("process")
        if self._owner and holder != self._me:
            raise StorageError("another process writes to this Milvus store now; open it again to take the place back")
        if not self._owner:
            self._rows.register(_WRITER, {"process": self._me, "since": now()})
            self._owner = True
            for key in self._rows.keys() - {state.key for state in self._states()}:
                self._rows.drop(key)  # of a collection whose making or deletion was cut short

    def _save(self, state: State) -> None:
        self._rows.register(state.name, state.body())

    def _do(self, state: State, intent: dict[str, Any], change: Callable[[], None], after: State) -> None:
        """Declare ``intent``, make the change, declare it done; where that fails, undo it now or at the next change."""
        begun = replace(state, intent=intent, next_id=after.next_id)
        self._save(begun)
        try:
            change()
            self._save(after)
        except StorageError:
            with suppress(StorageError):
                self._finished(begun)
            raise

    def _add(self, state: State, persons: list[Row], faces: list[Row]) -> None:
        if not persons and not faces:
            return

        def change() -> None:
            self._rows.write(state.faces, faces)
            self._rows.write(state.persons, persons)

        count = len(persons) + len(faces)
        after = replace(state.counted(len(persons), len(faces)), next_id=state.next_id + count)
        self._do(state, {"do": "add", "first": state.next_id}, change, after)

    def _forget(self, after: State, intent: dict[str, Any]) -> None:
        """Delete; with the intent declared it is deleted for all readers, and the next change completes it."""
        begun = replace(after, intent=intent)
        self._save(begun)
        with suppress(StorageError):
            self._finished(begun)

    def _rewrite(self, state: State, person: Person) -> None:
        """Replace the rows of a person, who may have other metadata now."""
        fits = fits_of(person.metadata)
        vectors = reading.vectors_of(self._rows, state, [person.id])[person.id]
        rows = [face_row(face, person.id, fits, vector) for face, vector in zip(person.faces, vectors, strict=True)]
        self._rows.write(state.faces, rows)
        self._rows.write(state.persons, [person_row(person)])

    def _finished(self, state: State) -> State:
        """The state without an intent: what was cut short is undone, or, if a deletion, completed."""
        if state.intent is None:
            return state
        intent, after = state.intent, replace(state, intent=None)
        if intent["do"] == "add":
            self._rows.delete(state.faces, f"id >= {intent['first']}")
            self._rows.delete(state.persons, f"id >= {intent['first']}")
        elif intent["do"] == "delete":
            self._rows.delete(state.faces, f"person == {intent['person']}")
            self._rows.delete(state.persons, f"id == {intent['person']}")
        elif intent["do"] == "unface":
            self._rows.delete(state.faces, f"id == {intent['face']}")
        else:
            name, metadata, created = intent["old"]
            known = reading.find_person(self._rows, after, intent["person"])
            self._rewrite(after, replace(known, name=name, metadata=metadata, created=created))
        self._save(after)
        return after
