"""The gallery in Milvus, for galleries beyond one machine: Milvus keeps, spreads and scans the rows.

A gallery's collection is two of Milvus': ``plsc_faces_KEY`` (id, person, vector, and the person's metadata as
:mod:`plsc.gallery.milvus_filters` writes them, so that filters are decided where the vectors are) and
``plsc_persons_KEY``. ``plsc_registry`` holds a row for each collection: its key, contract, counts, the next id, and
what is being done to it. Milvus has no transactions, so a change is

    1. its intent, in the registry's row: one request, whole or not at all;
    2. the change itself, in as many requests as it takes;
    3. the row without the intent, with the new counts.

Readers take the row first, and look at no id beyond those it knows: what an unfinished enrolment has added lies there.
What an unfinished deletion names is gone for them already. The next writer undoes an enrolment or an update that was
cut short, and completes a deletion.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, IntegrityError, NotFoundError, StorageError, UsageError
from plsc.gallery.checks import (
    LARGEST_ID,
    check_collection,
    check_contract,
    check_name,
    check_page,
    check_persons,
    check_search,
    is_id,
    now,
    unit_vectors,
)
from plsc.gallery.contract import Collection, Float32, Match, Metadata, NewPerson, Person
from plsc.gallery.copies import write_copy
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.grouping import Rows, best_persons, faces_asked
from plsc.gallery.milvus_filters import expression, fits_of
from plsc.gallery.milvus_rows import MOST, MilvusRows, as_array, face_row, ids_text, person_row, read_person

_WRITER = "0"  # the registry's row that names the writing process; no collection's name begins with a digit
_PAGE = 500  # persons read at once


def open_milvus(uri: str, *, token: str = "") -> "MilvusStore":
    """Open the gallery at ``uri``: ``http://HOST:PORT/DATABASE``, where the database is made if it is not there.

    ``token`` is Milvus' "user:password"; it may stand in the URI as well. Raises :class:`UsageError` if pymilvus is not
    installed or the URI is none, and :class:`StorageError` if the server does not answer.
    """
    try:
        import pymilvus  # noqa: F401
    except ImportError:
        raise UsageError("a store in Milvus needs pymilvus: pip install 'plsc-torch[milvus]'") from None
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{ascii(uri)[:200]} is no address of a Milvus server; it looks like http://HOST:19530/DATABASE")
    token = token or (f"{parts.username}:{parts.password}" if parts.username else "")
    address = f"{parts.scheme}://{parts.hostname}:{parts.port or 19530}"
    return MilvusStore(MilvusRows(address, token, parts.path.strip("/")))


@dataclass(frozen=True)
class _State:
    """A collection as the registry has it; ``intent`` is what is being done to it, or was when a process ended."""

    name: str
    key: str
    about: Collection
    next_id: int
    intent: dict[str, Any] | None = None

    @property
    def faces(self) -> str:
        return f"plsc_faces_{self.key}"

    @property
    def persons(self) -> str:
        return f"plsc_persons_{self.key}"

    def visible(self, *more: str, person: str = "id") -> str:
        """The expression of what readers may see; ``person`` is the field that holds a person's id."""
        intent = self.intent or {}
        parts = [f"id < {intent.get('first', self.next_id)}", *filter(None, more)]
        if intent.get("do") == "delete":
            parts += [f"{person} != {intent['person']}"]
        if intent.get("do") == "unface" and person != "id":
            parts += [f"id != {intent['face']}"]
        return " and ".join(f"({part})" for part in parts)

    def body(self) -> dict[str, Any]:
        about = self.about
        figures = [about.dim, about.contract_id, about.created, about.persons, about.faces]
        return {"key": self.key, "about": figures, "next": self.next_id, "intent": self.intent}

    @classmethod
    def read(cls, name: str, body: dict[str, Any]) -> "_State":
        return cls(name, body["key"], Collection(name, *body["about"]), body["next"], body["intent"])

    def counted(self, persons: int, faces: int) -> "_State":
        about = replace(self.about, persons=self.about.persons + persons, faces=self.about.faces + faces)
        return replace(self, about=about)


class MilvusStore:
    """A :class:`plsc.gallery.contract.Store` in Milvus; make one by :func:`open_milvus`."""

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
            state = _State(name, uuid.uuid4().hex[:16], about, 1)
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
        return self._person(self._state(collection), person)

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, where: Filter | None = None
    ) -> list[Person]:
        """Up to ``limit`` persons with ids above ``after``, ascending."""
        check_page(after, limit, where)
        state = self._state(collection)
        return self._page(state, f"id > {min(max(after, 0), LARGEST_ID)}", expression(where), limit=limit)

    def persons_of(self, collection: str, ids: Sequence[int]) -> dict[int, Person]:
        """Those of ``ids`` that exist."""
        state, possible = self._state(collection), sorted({int(id) for id in ids if is_id(id)})
        parts = [possible[start : start + _PAGE] for start in range(0, len(possible), _PAGE)]
        found = [person for part in parts for person in self._some(state, part)]
        return {person.id: person for person in found}

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata; None leaves it."""
        check_name(name)
        checked = None if metadata is None else check_metadata(metadata)
        with self._changing(collection) as state:
            known = self._person(state, person)
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
            faces = len(self._person(state, person).faces)
            self._forget(state.counted(-1, -faces), {"do": "delete", "person": person})

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""
        with self._changing(collection) as state:
            check_contract(state.about, contract_id)
            known = self._person(state, person)
            new = unit_vectors(vectors, state.about.dim)
            faces = list(range(state.next_id, state.next_id + len(new)))
            fits = fits_of(known.metadata)
            self._add(state, [], [face_row(face, person, fits, row) for face, row in zip(faces, new, strict=True)])
            return faces

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Forget one face."""
        with self._changing(collection) as state:
            if face not in self._person(state, person).faces:
                raise NotFoundError(f"person {person} of collection {collection} has no face {ascii(face)[:40]}")
            self._forget(state.counted(0, -1), {"do": "unface", "face": face})

    def vectors(self, collection: str, person: int) -> Float32:
        """The stored vectors (n, dim) of a person, in the order of ``Person.faces``."""
        state = self._state(collection)
        self._person(state, person)
        return self._vectors(state, [person])[person]

    def search(
        self, collection: str, queries: npt.ArrayLike, *, k: int = 10, threshold: float = -1.0,
        where: Filter | None = None,
    ) -> list[list[Match]]:
        """For each of ``queries`` (Q, dim): the ``k`` most alike persons with a score >= ``threshold``."""
        check_search(k, threshold, where)
        state = self._state(collection)
        units, fits = unit_vectors(queries, state.about.dim), expression(where)
        everybody = state.visible(fits, person="person")
        first = self._rows.search(state.faces, units, faces_asked(k, MOST), everybody)

        fetches = [partial(self._fetch, state, fits, *pair) for pair in zip(units, first, strict=True)]
        return [best_persons(fetch, k, threshold, most=MOST) for fetch in fetches]

    def compact(self, collection: str | None = None) -> None:
        """Complete what was cut short, and ask Milvus to rewrite its files without what was deleted."""
        with self._writing:
            self._take_place()
            for state in [self._state(collection)] if collection is not None else self._states():
                with self._changing(state.name):
                    self._rows.compact(state.key)

    def snapshot(self, target: Path) -> None:
        """Write everything into the new folder ``target`` (see :mod:`plsc.gallery.copies`).

        This process changes nothing meanwhile; it is of one moment where no other process writes.
        """
        with self._writing:
            write_copy(target, [(state.about, self._everyone(state)) for state in self._states()])

    def check(self) -> dict[str, Any]:
        """Read every row: persons, faces, their counts, ids and lengths."""
        with self._writing:
            states = self._states()
            for state in states:
                self._check(state)
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

    # Reading

    def _fetch(self, state: _State, fits: str, query: Float32, begun: Rows, count: int, without: list[int]) -> Rows:
        """What :func:`best_persons` asks for; ``begun`` is the first answer, which all queries got in one request."""
        if not without:
            return begun
        others = state.visible(fits, f"person not in {ids_text(without)}", person="person")
        return self._rows.search(state.faces, query[None], count, others)[0]

    def _states(self) -> list[_State]:
        found = self._rows.registered()
        return [_State.read(name, found[name]) for name in sorted(found) if name != _WRITER]

    def _state(self, name: str) -> _State:
        plain = isinstance(name, str) and name.isascii() and name.isprintable() and name != _WRITER
        body = self._rows.registered([name]).get(name) if plain else None
        if body is None:
            raise NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")
        return _State.read(name, body)

    def _person(self, state: _State, person: int) -> Person:
        found = self._some(state, [person]) if is_id(person) else []
        if not found:
            raise NotFoundError(f"collection {state.name} has no person {ascii(person)[:40]}")
        return found[0]

    def _some(self, state: _State, ids: Sequence[int]) -> list[Person]:
        rows = self._rows.find(state.persons, state.visible(f"id in {ids_text(ids)}"), ["id", "body"])
        return self._with_faces(state, rows)

    def _page(self, state: _State, *wanted: str, limit: int) -> list[Person]:
        rows = self._rows.read(state.persons, state.visible(*wanted), ["id", "body"], limit)
        return self._with_faces(state, list(rows))

    def _with_faces(self, state: _State, rows: list[dict[str, Any]]) -> list[Person]:
        faces: dict[int, list[int]] = {row["id"]: [] for row in rows}
        ids = list(faces)
        for start in range(0, len(ids), _PAGE):
            of = state.visible(f"person in {ids_text(ids[start : start + _PAGE])}", person="person")
            for face in self._rows.find(state.faces, of, ["id", "person"]):
                faces[face["person"]].append(face["id"])
        return [read_person(row, faces[row["id"]]) for row in rows]

    def _vectors(self, state: _State, persons: Sequence[int]) -> dict[int, Float32]:
        found: dict[int, list[tuple[int, Any]]] = {person: [] for person in persons}
        of = state.visible(f"person in {ids_text(persons)}", person="person")
        for row in self._rows.read(state.faces, of, ["id", "person", "vector"]):
            found[row["person"]].append((row["id"], row["vector"]))
        dim = state.about.dim
        return {id: as_array([vector for _, vector in sorted(part, key=_first)], dim) for id, part in found.items()}

    def _everyone(self, state: _State) -> Iterator[tuple[Person, Float32]]:
        after = 0
        while persons := self._page(state, f"id > {after}", limit=_PAGE):
            vectors = self._vectors(state, [person.id for person in persons])
            for person in persons:
                yield person, vectors[person.id]
            after = persons[-1].id

    def _check(self, state: _State) -> None:
        persons = faces = 0
        for person, vectors in self._everyone(state):
            persons, faces = persons + 1, faces + len(vectors)
            if len(vectors) != len(person.faces) or not (np.abs(np.linalg.norm(vectors, axis=1) - 1) < 1e-3).all():
                raise IntegrityError(f"the faces of person {person.id} of collection {state.name} are damaged")
            if max([person.id, *person.faces]) >= state.next_id:
                raise IntegrityError(f"person {person.id} of collection {state.name} lies beyond the ids given")
        if (persons, faces) != (state.about.persons, state.about.faces):
            raise IntegrityError(
                f"collection {state.name} holds {persons} persons and {faces} faces instead of {state.about.persons} "
                f"and {state.about.faces}; restore a snapshot"
            )

    # Writing

    @contextmanager
    def _changing(self, name: str) -> Iterator[_State]:
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

    def _save(self, state: _State) -> None:
        self._rows.register(state.name, state.body())

    def _do(self, state: _State, intent: dict[str, Any], change: Any, after: _State) -> None:
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

    def _add(self, state: _State, persons: list[dict[str, Any]], faces: list[dict[str, Any]]) -> None:
        if not persons and not faces:
            return

        def change() -> None:
            self._rows.write(state.faces, faces)
            self._rows.write(state.persons, persons)

        count = len(persons) + len(faces)
        after = replace(state.counted(len(persons), len(faces)), next_id=state.next_id + count)
        self._do(state, {"do": "add", "first": state.next_id}, change, after)

    def _forget(self, after: _State, intent: dict[str, Any]) -> None:
        """Delete; with the intent declared it is deleted for all readers, and the next change completes it."""
        begun = replace(after, intent=intent)
        self._save(begun)
        with suppress(StorageError):
            self._finished(begun)

    def _rewrite(self, state: _State, person: Person) -> None:
        """Replace the rows of a person, who may have other metadata now."""
        fits = fits_of(person.metadata)
        vectors = self._vectors(state, [person.id])[person.id]
        rows = [face_row(face, person.id, fits, vector) for face, vector in zip(person.faces, vectors, strict=True)]
        self._rows.write(state.faces, rows)
        self._rows.write(state.persons, [person_row(person)])

    def _finished(self, state: _State) -> _State:
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
            known = self._person(after, intent["person"])
            self._rewrite(after, replace(known, name=name, metadata=metadata, created=created))
        self._save(after)
        return after


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]
