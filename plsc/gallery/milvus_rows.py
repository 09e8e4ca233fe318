"""A gallery's collection in Milvus: what readers may see of its rows, and changes by intents (plsc.gallery.milvus)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from plsc.errors import IntegrityError, StorageError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus_client import (
    MAX_ROWS,
    MilvusServer,
    RegistryEntry,
    Row,
    encode_metadata,
    face_row,
    ids_expression,
    person_row,
    read_person,
    to_expression,
)
from plsc.gallery.person_search import Neighbours, group_by_person, num_candidates
from plsc.gallery.rows import Rows
from plsc.gallery.validation import LENGTH_TOLERANCE, ValidPerson, miscounted, number_persons, same_content
from plsc.gallery.values import Float32, Match, Person

_PAGE_PERSONS = 500  # whose ids stand in an expression


class MilvusRows(Rows):
    """A collection as its registry entry, which was read first, lets readers see it; one change is made of it at most.

    Attributes:
        entry: says which rows readers may see.
    """

    def __init__(self, server: MilvusServer, entry: RegistryEntry) -> None:
        self._server, self.entry, self.info = server, entry, entry.info

    # --- persons and vectors ---

    def find_all(self, ids: Sequence[int]) -> list[Person]:
        """See :class:`plsc.gallery.rows.Rows`, as for all that follows."""
        parts = [ids[start : start + _PAGE_PERSONS] for start in range(0, len(ids), _PAGE_PERSONS)]
        return self._with_faces([row for part in parts for row in self._persons(f"id in {ids_expression(part)}")])

    def find_external(self, external_id: str) -> Person | None:
        """Nobody has an external id."""
        return None

    def page(self, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match, by ascending id."""
        conditions = [f"id > {after}", to_expression(filter)]
        updating = self.entry.updating
        if updating:
            conditions.append(f"id != {updating[0]}")
        visible = self.entry.visible_persons(*conditions)
        found = list(self._server.iterate(self.entry.persons, visible, ["id", "body"], limit))
        if updating and updating[0] > after and (filter is None or filter.matches(updating[1][1])):
            found += self._persons(f"id == {updating[0]}")
        return self._with_faces(found)[:limit]

    def expired(self, limit: int) -> list[Person]:
        """Nobody expires."""
        return []

    def _persons(self, condition: str) -> list[Row]:
        return self._server.query(self.entry.persons, self.entry.visible_persons(condition), ["id", "body"])

    def _with_faces(self, rows: list[Row]) -> list[Person]:
        """Return the persons of rows by ascending id."""
        faces: dict[int, list[int]] = {row["id"]: [] for row in rows}
        ids = list(faces)
        for start in range(0, len(ids), _PAGE_PERSONS):
            visible = self.entry.visible_faces(f"person in {ids_expression(ids[start : start + _PAGE_PERSONS])}")
            for face in self._server.query(self.entry.faces, visible, ["id", "person"]):
                faces[face["person"]].append(face["id"])
        return [self.entry.before_update(read_person(row, faces[row["id"]])) for row in sorted(rows, key=_by_id)]

    def vectors_of(self, persons: Sequence[Person]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of the faces' ids}."""
        found: dict[int, list[Any]] = {person.id: [] for person in persons}
        visible = self.entry.visible_faces(f"person in {ids_expression(list(found))}")
        for row in sorted(self._server.iterate(self.entry.faces, visible, ["id", "person", "vector"]), key=_by_id):
            found[row["person"]].append(row["vector"])
        return {id: np.array(part, dtype=np.float32).reshape(-1, self.info.dim) for id, part in found.items()}

    # --- searches and checks ---

    def search(self, queries: Float32, k: int, threshold: float, filter: Filter | None) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim) of unit length, the ``k`` most similar persons."""
        expression = to_expression(filter)
        if self.entry.updating is None or filter is None:
            return self._search(queries, k, threshold, [expression])
        # The rows of the person being updated may have old or new metadata; the old ones hold, and decide here.
        person, (_, metadata, _) = self.entry.updating
        found = self._search(queries, k, threshold, [expression, f"person != {person}"])
        if filter.matches(metadata):
            own = self._search(queries, 1, threshold, [f"person == {person}"])
            found = [sorted(some + more, key=_by_score)[:k] for some, more in zip(found, own, strict=True)]
        return found

    def _search(self, queries: Float32, k: int, threshold: float, conditions: list[str]) -> list[list[Match]]:
        """Ask for all queries' first candidates in one request, and for more where they are of too few persons."""

        def fetch(query: Float32, first: Neighbours, count: int, excluded: list[int]) -> Neighbours:
            if not excluded:
                return first
            others = self.entry.visible_faces(*conditions, f"person not in {ids_expression(excluded)}")
            return self._server.search(self.entry.faces, query[None], count, others)[0]

        visible = self.entry.visible_faces(*conditions)
        candidates = self._server.search(self.entry.faces, queries, num_candidates(k, MAX_ROWS), visible)
        fetches = [partial(fetch, query, first) for query, first in zip(queries, candidates, strict=True)]
        return [group_by_person(one, k, threshold, limit=MAX_ROWS) for one in fetches]

    def check(self) -> None:
        """Read every row; :class:`IntegrityError` names what is damaged or miscounted."""
        persons = faces = 0
        for person, vectors in self.everyone():
            persons, faces = persons + 1, faces + len(vectors)
            is_unit = np.abs(np.linalg.norm(vectors, axis=1) - 1) < LENGTH_TOLERANCE
            if len(vectors) != len(person.faces) or not is_unit.all():
                raise IntegrityError(f"the faces of person {person.id} of collection {self.info.name} are damaged")
            if max([person.id, *person.faces]) >= self.entry.next_id:
                raise IntegrityError(f"person {person.id} of collection {self.info.name} lies beyond the ids given")
        if (persons, faces) != (self.info.persons, self.info.faces):
            raise miscounted(self.info, persons, faces)

    # --- changes ---

    def insert(self, persons: Sequence[ValidPerson]) -> list[Person]:
        """Insert persons with their faces under the next ids."""
        made = number_persons(persons, self.entry.next_id, self.clock, revision=0)
        faces = [
            face_row(face, person.id, encode_metadata(person.metadata), vector)
            for person, valid in zip(made, persons, strict=True)
            for face, vector in zip(person.faces, valid.vectors, strict=True)
        ]
        self._add([person_row(person) for person in made], faces)
        return made

    def insert_faces(self, owner: Person, vectors: Float32, second: Float32 | None) -> list[int]:
        """Insert faces of a person under the next ids, which are returned."""
        faces = list(range(self.entry.next_id, self.entry.next_id + len(vectors)))
        fits = encode_metadata(owner.metadata)
        self._add([], [face_row(face, owner.id, fits, vector) for face, vector in zip(faces, vectors, strict=True)])
        return faces

    def update(self, former: Person, changed: Person) -> None:
        """Store the name and metadata of ``changed``."""
        if same_content(former, changed):
            return
        person_row(changed)  # refuses what Milvus has no room for, before anything is written
        intent = {"do": "update", "person": former.id, "old": [former.name, former.metadata, former.created]}
        self._run(intent, lambda: self._rewrite(changed), self.entry)

    def delete(self, person: Person) -> None:
        """Delete a person with all faces."""
        self._delete(self.entry.with_counts(-1, -len(person.faces)), {"do": "delete", "person": person.id})

    def delete_faces(self, owner: Person, faces: Sequence[int]) -> None:
        """Delete a face of a person."""
        (face,) = faces
        self._delete(self.entry.with_counts(0, -1), {"do": "unface", "face": face})

    def _add(self, persons: list[Row], faces: list[Row]) -> None:
        if not persons and not faces:
            return

        def change() -> None:
            self._server.write(self.entry.faces, faces)
            self._server.write(self.entry.persons, persons)

        after = self.entry.with_counts(len(persons), len(faces))
        info = replace(after.info, contract_id=self.info.contract_id)
        after = replace(after, info=info, next_id=after.next_id + len(persons) + len(faces))
        self._run({"do": "add", "first": self.entry.next_id}, change, after)

    def _delete(self, after: RegistryEntry, intent: dict[str, Any]) -> None:
        """Delete: once the intent is declared it is deleted for all readers, and the next change completes it."""
        begun = MilvusRows(self._server, replace(after, intent=intent))
        begun.save()
        with suppress(StorageError):
            begun.resolved()

    def _run(self, intent: dict[str, Any], change: Callable[[], None], after: RegistryEntry) -> None:
        """Declare ``intent``, make the change, declare it done; on failure undo it now or before the next change."""
        begun = MilvusRows(self._server, replace(self.entry, intent=intent, next_id=after.next_id))
        begun.save()
        try:
            change()
            self.entry = after
            self.save()
        except StorageError:
            with suppress(StorageError):
                begun.resolved()
            raise

    def _rewrite(self, person: Person) -> None:
        """Replace the rows of a person, whose metadata may have changed."""
        fits = encode_metadata(person.metadata)
        vectors = self.vectors_of([person])[person.id]
        rows = [face_row(face, person.id, fits, vector) for face, vector in zip(person.faces, vectors, strict=True)]
        self._server.write(self.entry.faces, rows)
        self._server.write(self.entry.persons, [person_row(person)])

    def put_keys(self, owner: Person, keys: Mapping[int, str]) -> None:
        """Never called: the store refuses keys of faces."""
        raise AssertionError("a store in Milvus has no keys of faces")

    def set_contract(self, contract_id: str) -> None:
        """Have the next insertion's entry, or that of :meth:`save_contract`, hold ``contract_id``."""
        self.info = replace(self.info, contract_id=contract_id)

    def save_contract(self) -> None:
        """Write a contract id that came without an insertion: one that fails must not leave it behind."""
        if self.info.contract_id != self.entry.info.contract_id:
            self.entry = replace(self.entry, info=self.info)
            self.save()

    def save(self) -> None:
        """Write the entry to the registry."""
        self._server.register(self.entry.name, self.entry.body())

    def resolved(self) -> "MilvusRows":
        """Return these rows without an intent: what was cut short is undone, or, if a deletion, completed."""
        if self.entry.intent is None:
            return self
        intent, after = self.entry.intent, MilvusRows(self._server, replace(self.entry, intent=None))
        if intent["do"] == "add":
            self._server.delete(self.entry.faces, f"id >= {intent['first']}")
            self._server.delete(self.entry.persons, f"id >= {intent['first']}")
        elif intent["do"] == "delete":
            self._server.delete(self.entry.faces, f"person == {intent['person']}")
            self._server.delete(self.entry.persons, f"id == {intent['person']}")
        elif intent["do"] == "unface":
            self._server.delete(self.entry.faces, f"id == {intent['face']}")
        else:
            name, metadata, created = intent["old"]
            known = after.require(intent["person"])
            after._rewrite(replace(known, name=name, metadata=metadata, created=created))
        after.save()
        return after


def _by_id(row: Row) -> int:
    return int(row["id"])


def _by_score(match: Match) -> float:
    return -match.score
