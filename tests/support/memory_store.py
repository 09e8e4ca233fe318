"""The gallery's oracle: plain dicts and float64 numpy, slow and plain, with checks of its own."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, UsageError
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.store import Collection, Match, Metadata, NewPerson, Person, PersonSummary

Float64 = npt.NDArray[np.float64]


@dataclass
class _Rows:
    about: Collection
    persons: dict[int, Person] = field(default_factory=dict)
    vectors: dict[int, Float64] = field(default_factory=dict)
    next_id: int = 1

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def held(self: "MemoryStore", *args: Any, **more: Any) -> Any:
        with self._lock:
            return method(self, *args, **more)

    return held


def directions(vectors: npt.ArrayLike, dim: int) -> Float64:
    """(n, dim) float64 of length 1; UsageError for whatever has none."""
    try:
        rows = np.array(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if np.asarray(vectors).dtype.kind not in "fiu" and np.asarray(vectors).size:
        raise UsageError("no numbers")
    if rows.shape == (0,):
        return np.empty((0, dim))
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise UsageError(f"shape {rows.shape}")
    if not all(math.isfinite(x) for x in rows.ravel()) or not rows.any(axis=1).all():
        raise UsageError("no direction")
    rows /= np.abs(rows).max(axis=1, initial=0.0, keepdims=True)
    return rows / np.array([[math.hypot(*row)] for row in rows]).reshape(-1, 1)


class MemoryStore:
    """A store that keeps the contract and forgets everything when it is dropped."""

    def __init__(self) -> None:
        self._rows: dict[str, _Rows] = {}
        self._created = 0
        self._lock = threading.RLock()

    def _rows_of(self, collection: str) -> _Rows:
        if collection not in self._rows:
            raise NotFoundError(f"no collection {collection!r}")
        return self._rows[collection]

    def _person(self, collection: str, person: int) -> Person:
        if person not in self._rows_of(collection).persons:
            raise NotFoundError(f"no person {person}")
        return self._rows_of(collection).persons[person]

    @_alone
    def collections(self) -> list[Collection]:
        return [self.collection(name) for name in sorted(self._rows)]

    @_alone
    def collection(self, name: str) -> Collection:
        rows = self._rows_of(name)
        return replace(rows.about, persons=len(rows.persons), faces=len(rows.vectors))

    @_alone
    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        if not isinstance(name, str) or not 1 <= len(name) <= 64 or name[0] not in allowed:
            raise UsageError("name")
        if any(letter not in allowed + "0123456789_-." for letter in name):
            raise UsageError("name")
        if type(dim) is not int or not 1 <= dim <= 10**5 or _name(contract_id) in (None, ""):
            raise UsageError("dim")
        if name in self._rows:
            raise ConflictError("exists")
        self._created += 1  # no two collections are of one moment
        created = f"2026-01-01T00:00:00.{self._created:03}Z"
        self._rows[name] = _Rows(Collection(name, dim, contract_id, created, 0, 0))
        return self.collection(name)

    @_alone
    def delete_collection(self, name: str) -> None:
        self._rows_of(name)
        del self._rows[name]

    @_alone
    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        rows = self._rows_of(collection)
        self._same(rows, contract_id)
        ready = [
            (_name(new.name), check_metadata(new.metadata), directions(new.vectors, rows.about.dim)) for new in persons
        ]
        made = []
        for name, metadata, vectors in ready:
            person = Person(rows.new_id(), name, metadata, (), "2026-01-01T00:00:00Z")
            rows.persons[person.id] = person
            self._add(rows, person.id, vectors)
            made.append(rows.persons[person.id])
        return made

    def _same(self, rows: _Rows, contract_id: str) -> None:
        if contract_id != rows.about.contract_id:
            raise ConflictError("another contract")

    def _add(self, rows: _Rows, person: int, vectors: Float64) -> list[int]:
        faces = [rows.new_id() for _ in vectors]
        rows.vectors |= dict(zip(faces, vectors, strict=True))
        known = rows.persons[person]
        rows.persons[person] = replace(known, faces=(*known.faces, *faces))
        return faces

    @_alone
    def person(self, collection: str, person: int) -> Person:
        return self._person(collection, person)

    @_alone
    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        if type(limit) is not int or limit < 1:
            raise UsageError("limit")
        known = self._rows_of(collection).persons
        fit = [known[id] for id in sorted(known) if id > after and (not filter or filter.matches(known[id].metadata))]
        return fit[:limit]

    @_alone
    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        known = self._rows_of(collection).persons
        return {id: PersonSummary(id, known[id].name, known[id].metadata) for id in ids if id in known}

    @_alone
    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        known = self._person(collection, person)
        changed = replace(
            known,
            name=known.name if name is None else _name(name),
            metadata=known.metadata if metadata is None else check_metadata(metadata),
        )
        self._rows_of(collection).persons[person] = changed
        return changed

    @_alone
    def delete_person(self, collection: str, person: int) -> None:
        for face in self._person(collection, person).faces:
            del self._rows_of(collection).vectors[face]
        del self._rows_of(collection).persons[person]

    @_alone
    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        rows = self._rows_of(collection)
        self._person(collection, person)
        self._same(rows, contract_id)
        return self._add(rows, person, directions(vectors, rows.about.dim))

    @_alone
    def delete_face(self, collection: str, person: int, face: int) -> None:
        known = self._person(collection, person)
        if face not in known.faces:
            raise NotFoundError("no face")
        rows = self._rows_of(collection)
        rows.persons[person] = replace(known, faces=tuple(one for one in known.faces if one != face))
        del rows.vectors[face]

    @_alone
    def vectors(self, collection: str, person: int) -> npt.NDArray[np.float32]:
        rows = self._rows_of(collection)
        faces = self._person(collection, person).faces
        return np.array([rows.vectors[face] for face in faces], dtype=np.float32).reshape(-1, rows.about.dim)

    @_alone
    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        rows = self._rows_of(collection)
        if type(k) is not int or k < 1 or not isinstance(threshold, float) or math.isnan(threshold):
            raise UsageError("k")
        if filter is not None and not isinstance(filter, Filter):
            raise UsageError("filter")
        return [
            [match for match in self._nearest(rows, query, filter)[:k] if match.score >= threshold]
            for query in directions(queries, rows.about.dim)
        ]

    def _nearest(self, rows: _Rows, query: Float64, filter: Filter | None) -> list[Match]:
        best = []
        for person in rows.persons.values():
            if person.faces and (filter is None or filter.matches(person.metadata)):
                scores = [float(np.clip(np.float32(rows.vectors[face] @ query), -1, 1)) for face in person.faces]
                best_face = int(np.argmax(scores))
                best.append(Match(person.id, person.faces[best_face], scores[best_face]))
        return sorted(best, key=lambda match: -match.score)

    def compact(self, collection: str | None = None) -> None:
        if collection is not None:
            self._rows_of(collection)

    def snapshot(self, target: Path) -> None:
        if target.exists():
            raise ConflictError("exists")
        target.mkdir()
        (target / "note").write_text("kept in memory alone")

    def check(self) -> dict[str, Any]:
        return {"collections": len(self._rows)}

    def statistics(self) -> dict[str, dict[str, float]]:
        return {
            name: {"rows": len(rows.vectors), "delta": 0, "tombstones": 0, "recall": 1}
            for name, rows in self._rows.items()
        }

    def close(self) -> None:
        pass


def _name(name: Any) -> str | None:
    if name is not None and (not isinstance(name, str) or len(name) > 1024 or "\0" in name):
        raise UsageError("name")
    if name is not None and any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise UsageError("name")
    return name
