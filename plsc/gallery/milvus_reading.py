"""Reading a gallery out of Milvus: persons, vectors and matches, as of the moment that a :class:`State` knows."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from plsc.errors import IntegrityError, NotFoundError
from plsc.gallery.filters import Filter
from plsc.gallery.milvus_filters import expression
from plsc.gallery.milvus_rows import MOST, MilvusRows, as_array, ids_text, read_person
from plsc.gallery.milvus_state import State
from plsc.gallery.person_search import Rows, group_by_person, num_candidates
from plsc.gallery.store import Float32, Match, Person
from plsc.gallery.validation import is_id

PAGE = 500  # persons read at once
_TOLERANCE = 1e-3  # of a stored vector's length


def some(rows: MilvusRows, state: State, ids: Sequence[int]) -> list[Person]:
    """Those of ``ids`` that exist."""
    parts = [ids[start : start + PAGE] for start in range(0, len(ids), PAGE)]
    found = [rows.find(state.persons, state.seen_persons(f"id in {ids_text(part)}"), ["id", "body"]) for part in parts]
    return _with_faces(rows, state, [row for part in found for row in part])


def find_person(rows: MilvusRows, state: State, person: int) -> Person:
    """One person; :class:`NotFoundError`."""
    found = some(rows, state, [person]) if is_id(person) else []
    if not found:
        raise NotFoundError(f"collection {state.name} has no person {ascii(person)[:40]}")
    return found[0]


def page(rows: MilvusRows, state: State, after: int, limit: int, where: Filter | None) -> list[Person]:
    """Up to ``limit`` persons above ``after`` that fit, by id."""
    parts = [f"id > {after}", expression(where)]
    if state.changing:
        parts.append(f"id != {state.changing[0]}")
    found = list(rows.read(state.persons, state.seen_persons(*parts), ["id", "body"], limit))
    if state.changing and state.changing[0] > after and (where is None or where.matches(state.changing[1][1])):
        found += rows.find(state.persons, state.seen_persons(f"id == {state.changing[0]}"), ["id", "body"])
    return _with_faces(rows, state, sorted(found, key=_id)[:limit])


def _with_faces(rows: MilvusRows, state: State, found: list[dict[str, Any]]) -> list[Person]:
    faces: dict[int, list[int]] = {row["id"]: [] for row in found}
    ids = list(faces)
    for start in range(0, len(ids), PAGE):
        of = state.seen_faces(f"person in {ids_text(ids[start : start + PAGE])}")
        for face in rows.find(state.faces, of, ["id", "person"]):
            faces[face["person"]].append(face["id"])
    return [state.as_known(read_person(row, faces[row["id"]])) for row in found]


def vectors_of(rows: MilvusRows, state: State, persons: Sequence[int]) -> dict[int, Float32]:
    """{person: vectors (n, dim) in the order of the faces' ids}."""
    found: dict[int, list[Any]] = {person: [] for person in persons}
    of = state.seen_faces(f"person in {ids_text(persons)}")
    for row in sorted(rows.read(state.faces, of, ["id", "person", "vector"]), key=_id):
        found[row["person"]].append(row["vector"])
    return {person: as_array(part, state.about.dim) for person, part in found.items()}


def everyone(rows: MilvusRows, state: State) -> Iterator[tuple[Person, Float32]]:
    """Every person with the vectors, by id."""
    after = 0
    while persons := page(rows, state, after, PAGE, None):
        vectors = vectors_of(rows, state, [person.id for person in persons])
        for person in persons:
            yield person, vectors[person.id]
        after = persons[-1].id


def nearest(
    rows: MilvusRows, state: State, queries: Float32, k: int, threshold: float, where: Filter | None
) -> list[list[Match]]:
    """For each of ``queries`` (Q, dim), of length 1: the matches, best first."""
    fits = expression(where)
    if state.changing is None or where is None:
        return _nearest(rows, state, queries, k, threshold, [fits])
    person, (_, metadata, _) = state.changing  # the rows' metadata may be old or new: who they fit is told here
    found = _nearest(rows, state, queries, k, threshold, [fits, f"person != {person}"])
    if where.matches(metadata):
        beside = _nearest(rows, state, queries, 1, threshold, [f"person == {person}"])
        found = [sorted(one + other, key=_score)[:k] for one, other in zip(found, beside, strict=True)]
    return found


def _nearest(
    rows: MilvusRows, state: State, queries: Float32, k: int, threshold: float, parts: list[str]
) -> list[list[Match]]:
    """All queries' first faces in one request; more for those whose faces are of too few persons."""

    def fetch(query: Float32, first: Rows, count: int, without: list[int]) -> Rows:
        if not without:
            return first
        others = state.seen_faces(*parts, f"person not in {ids_text(without)}")
        return rows.search(state.faces, query[None], count, others)[0]

    begun = rows.search(state.faces, queries, num_candidates(k, limit=MOST), state.seen_faces(*parts))
    fetches = [partial(fetch, query, first) for query, first in zip(queries, begun, strict=True)]
    return [group_by_person(one, k, threshold, limit=MOST) for one in fetches]


def check_rows(rows: MilvusRows, state: State) -> None:
    """Read everything; :class:`IntegrityError` unless counts, ids and vectors are what they have to be."""
    persons = faces = 0
    for person, vectors in everyone(rows, state):
        persons, faces = persons + 1, faces + len(vectors)
        if len(vectors) != len(person.faces) or not (np.abs(np.linalg.norm(vectors, axis=1) - 1) < _TOLERANCE).all():
            raise IntegrityError(f"the faces of person {person.id} of collection {state.name} are damaged")
        if max([person.id, *person.faces]) >= state.next_id:
            raise IntegrityError(f"person {person.id} of collection {state.name} lies beyond the ids given")
    if (persons, faces) != (state.about.persons, state.about.faces):
        raise IntegrityError(
            f"collection {state.name} holds {persons} persons and {faces} faces instead of {state.about.persons} "
            f"and {state.about.faces}; restore a snapshot"
        )


def _id(row: dict[str, Any]) -> int:
    return int(row["id"])


def _score(match: Match) -> float:
    return -match.score
