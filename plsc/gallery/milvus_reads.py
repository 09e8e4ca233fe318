"""Reads of a gallery in Milvus: the registry's entries, and the rows that readers may see (plsc.gallery.milvus)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from plsc.errors import IntegrityError, NotFoundError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus_client import (
    MAX_ROWS,
    MilvusRows,
    RegistryEntry,
    Row,
    ids_expression,
    read_person,
    read_vectors,
    to_expression,
)
from plsc.gallery.person_search import Rows, group_by_person, num_candidates
from plsc.gallery.store import Float32, Match, Person
from plsc.gallery.validation import is_id

WRITER = "0"  # the registry's row that names the writing process; no collection's name begins with a digit
_PAGE_PERSONS = 500
_LENGTH_TOLERANCE = 1e-3  # of a stored vector


class MilvusReads:
    """Reads over the rows of one server. Each takes the entry first: it says which rows readers may see."""

    def __init__(self, rows: MilvusRows) -> None:
        self._rows = rows

    # --- the registry ---

    def entries(self) -> list[RegistryEntry]:
        """Return the entries of all collections by name."""
        found = self._rows.registered()
        return [RegistryEntry.from_body(name, found[name]) for name in sorted(found) if name != WRITER]

    def entry(self, name: str) -> RegistryEntry:
        """Return a collection's entry; :class:`NotFoundError` if there is none."""
        is_possible = isinstance(name, str) and name.isascii() and name.isprintable() and name != WRITER
        body = self._rows.registered([name]).get(name) if is_possible else None
        if body is None:
            raise NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")
        return RegistryEntry.from_body(name, body)

    # --- persons and vectors ---

    def page(self, entry: RegistryEntry, after: int, limit: int, filter: Filter | None) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match, by id."""
        conditions = [f"id > {after}", to_expression(filter)]
        updating = entry.updating
        if updating:
            conditions.append(f"id != {updating[0]}")
        found = list(self._rows.iterate(entry.persons, entry.visible_persons(*conditions), ["id", "body"], limit))
        if updating and updating[0] > after and (filter is None or filter.matches(updating[1][1])):
            found += self._rows.query(entry.persons, entry.visible_persons(f"id == {updating[0]}"), ["id", "body"])
        return self._with_faces(entry, sorted(found, key=_by_id)[:limit])

    def persons_of(self, entry: RegistryEntry, ids: Sequence[int]) -> list[Person]:
        """Return those of ``ids`` that exist."""
        found: list[Row] = []
        for start in range(0, len(ids), _PAGE_PERSONS):
            visible = entry.visible_persons(f"id in {ids_expression(ids[start : start + _PAGE_PERSONS])}")
            found += self._rows.query(entry.persons, visible, ["id", "body"])
        return self._with_faces(entry, found)

    def find_person(self, entry: RegistryEntry, person: int) -> Person:
        """Return a person; :class:`NotFoundError` if there is none."""
        found = self.persons_of(entry, [person]) if is_id(person) else []
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

    def vectors_of(self, entry: RegistryEntry, persons: Sequence[int]) -> dict[int, Float32]:
        """Return {person: vectors (n, dim) in the order of the faces' ids}."""
        found: dict[int, list[Any]] = {person: [] for person in persons}
        visible = entry.visible_faces(f"person in {ids_expression(persons)}")
        for row in sorted(self._rows.iterate(entry.faces, visible, ["id", "person", "vector"]), key=_by_id):
            found[row["person"]].append(row["vector"])
        return {person: read_vectors(part, entry.info.dim) for person, part in found.items()}

    def all_persons(self, entry: RegistryEntry) -> Iterator[tuple[Person, Float32]]:
        """Yield every person with the vectors, by id."""
        after = 0
        while persons := self.page(entry, after, _PAGE_PERSONS, None):
            vectors = self.vectors_of(entry, [person.id for person in persons])
            for person in persons:
                yield person, vectors[person.id]
            after = persons[-1].id

    # --- searches and checks ---

    def search(
        self, entry: RegistryEntry, queries: Float32, k: int, threshold: float, filter: Filter | None
    ) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim) of unit length, the ``k`` most similar persons."""
        expression = to_expression(filter)
        if entry.updating is None or filter is None:
            return self._search(entry, queries, k, threshold, [expression])
        # The rows of the person being updated may have old or new metadata; the old ones hold, and decide here.
        person, (_, metadata, _) = entry.updating
        found = self._search(entry, queries, k, threshold, [expression, f"person != {person}"])
        if filter.matches(metadata):
            own = self._search(entry, queries, 1, threshold, [f"person == {person}"])
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

    def check_rows(self, entry: RegistryEntry) -> None:
        """Read every row of a collection; :class:`IntegrityError` names what is damaged or miscounted."""
        persons = faces = 0
        for person, vectors in self.all_persons(entry):
            persons, faces = persons + 1, faces + len(vectors)
            is_unit = np.abs(np.linalg.norm(vectors, axis=1) - 1) < _LENGTH_TOLERANCE
            if len(vectors) != len(person.faces) or not is_unit.all():
                raise IntegrityError(f"the faces of person {person.id} of collection {entry.name} are damaged")
            if max([person.id, *person.faces]) >= entry.next_id:
                raise IntegrityError(f"person {person.id} of collection {entry.name} lies beyond the ids given")
        if (persons, faces) != (entry.info.persons, entry.info.faces):
            raise IntegrityError(
                f"collection {entry.name} holds {persons} people and {faces} faces instead of {entry.info.persons} "
                f"and {entry.info.faces}; restore a snapshot"
            )


def _by_id(row: Row) -> int:
    return int(row["id"])


def _by_score(match: Match) -> float:
    return -match.score
