"""The gallery's oracle: plain dicts and float64 numpy, slow and plain, with checks of its own."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError, UsageError
from plsc.gallery.filters import Filter, check_metadata
from plsc.gallery.store import (
    KEEP,
    Collection,
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
        self._answers: dict[tuple[str, str], tuple[str, StoredAnswer]] = {}
        self._lock = threading.RLock()

    def _rows_of(self, collection: str) -> _Rows:
        if collection not in self._rows:
            raise NotFoundError(f"no collection {collection!r}")
        return self._rows[collection]

    def _person(self, collection: str, person: int) -> Person:
        found = self._rows_of(collection).persons.get(person)
        if found is None or _is_over(found):
            raise NotFoundError(f"no person {person}")
        return found

    def _named(self, collection: str, external_id: str | None) -> Person | None:
        for person in list(self._rows_of(collection).persons.values()):
            if person.external_id is not None and person.external_id == external_id:
                return person
        return None

    def _drop(self, collection: str, person: Person) -> None:
        for face in person.faces:
            del self._rows_of(collection).vectors[face]
        del self._rows_of(collection).persons[person.id]

    def _changed(self, collection: str, person: Person, **fields: Any) -> Person:
        changed = replace(person, **fields, revision=person.revision + 1)
        self._rows_of(collection).persons[person.id] = changed
        return changed

    def _note(self, idempotent: IdempotentRequest | None, result: Any) -> Any:
        if idempotent is not None:
            if (idempotent.token, idempotent.key) in self._answers:
                raise ConflictError("done already")
            answer = StoredAnswer(idempotent.fingerprint, *idempotent.answer(result))
            self._answers[idempotent.token, idempotent.key] = _now(), answer
        return result

    @_alone
    def collections(self) -> list[Collection]:
        return [self.collection(name) for name in sorted(self._rows)]

    @_alone
    def collection(self, name: str) -> Collection:
        rows = self._rows_of(name)
        return replace(rows.about, persons=len(rows.persons), faces=len(rows.vectors))

    @_alone
    def create_collection(
        self, name: str, dim: int, contract_id: str, *, idempotent: IdempotentRequest | None = None
    ) -> Collection:
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
        about = Collection(name, dim, contract_id, created, 0, 0)
        self._note(idempotent, about)
        self._rows[name] = _Rows(about)
        return about

    @_alone
    def delete_collection(self, name: str) -> None:
        self._rows_of(name)
        del self._rows[name]

    @_alone
    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        rows = self._rows_of(collection)
        self._same(rows, contract_id)
        ready = [(self._ready(new), directions(new.vectors, rows.about.dim)) for new in persons]
        names = [new.external_id for new in persons if new.external_id is not None]
        if len(set(names)) < len(names):
            raise UsageError("twice")
        former = [known for known in (self._named(collection, name) for name in names) if known is not None]
        if not all(_is_over(known) for known in former):
            raise ConflictError("external id")
        for known in former:
            rows.persons[known.id] = replace(known, external_id=None)
        made = list[int]()
        for person, vectors in ready:
            rows.persons[rows.next_id] = replace(person, id=rows.next_id)
            made.append(rows.new_id())
            self._add(rows, made[-1], vectors)
        try:
            persons_made: list[Person] = self._note(idempotent, [rows.persons[id] for id in made])
        except ConflictError:
            for id in made:
                self._drop(collection, rows.persons[id])
            raise
        return persons_made

    def _ready(self, new: NewPerson) -> Person:
        about = _name(new.name), check_metadata(new.metadata), (), "2026-01-01T00:00:00Z"
        external_id = None if new.external_id is None else _external_id(new.external_id)
        return Person(0, *about, external_id, expires=_expires(new.expires))

    @_alone
    def put_person(
        self, collection: str, person: NewPerson, contract_id: str, *, precondition: Precondition | None = None
    ) -> tuple[Person, bool]:
        rows = self._rows_of(collection)
        self._same(rows, contract_id)
        external_id, ready = _external_id(person.external_id), self._ready(person)
        vectors = directions(person.vectors, rows.about.dim)
        known = self._named(collection, external_id)
        if known is not None and _is_over(known):
            known = None
        if precondition is not None:
            precondition.check(known)
        if known is None:
            return self.add_persons(collection, [person], contract_id)[0], True
        for face in known.faces:
            del rows.vectors[face]
        about = {"name": ready.name, "metadata": ready.metadata, "expires": ready.expires, "faces": ()}
        self._changed(collection, known, **about)
        self._add(rows, known.id, vectors)
        return rows.persons[known.id], False

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
    def find_person(self, collection: str, external_id: str) -> Person:
        found = self._named(collection, _external_id(external_id))
        if found is None or _is_over(found):
            raise NotFoundError("no such external id")
        return found

    @_alone
    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        if type(limit) is not int or limit < 1:
            raise UsageError("limit")
        known = self._rows_of(collection).persons
        there = [known[id] for id in sorted(known) if id > after and not _is_over(known[id])]
        return [one for one in there if not filter or filter.matches(one.metadata)][:limit]

    @_alone
    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        known = self._rows_of(collection).persons
        there = [known[id] for id in ids if id in known and not _is_over(known[id])]
        return {one.id: PersonSummary(one.id, one.name, one.metadata, one.external_id) for one in there}

    @_alone
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
        known = self._person(collection, person)
        if precondition is not None:
            precondition.check(known)
        changed = replace(
            known,
            name=known.name if name is KEEP else _name(name),
            metadata=known.metadata if metadata is KEEP else check_metadata(metadata),
            expires=known.expires if expires is KEEP else _expires(expires),
        )
        if repr(changed) == repr(known):
            return known
        about = {"name": changed.name, "metadata": changed.metadata, "expires": changed.expires}
        return self._changed(collection, known, **about)

    @_alone
    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        known = self._person(collection, person)
        if precondition is not None:
            precondition.check(known)
        self._drop(collection, known)

    @_alone
    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        rows = self._rows_of(collection)
        known = self._person(collection, person)
        self._same(rows, contract_id)
        ready = directions(vectors, rows.about.dim)
        if len(ready):
            self._changed(collection, known)
        added: list[int] = self._note(idempotent, self._add(rows, person, ready))
        return added

    @_alone
    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
        known = self._person(collection, person)
        if face not in known.faces:
            raise NotFoundError("no face")
        if precondition is not None:
            precondition.check(known)
        self._changed(collection, known, faces=tuple(one for one in known.faces if one != face))
        del self._rows_of(collection).vectors[face]

    @_alone
    def expired(self, limit: int) -> dict[str, list[Person]]:
        over = [(name, one) for name, rows in self._rows.items() for one in rows.persons.values() if _is_over(one)]
        found: dict[str, list[Person]] = {}
        for name, one in over[:limit]:
            found.setdefault(name, []).append(one)
        return found

    @_alone
    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        known = self._rows_of(collection).persons
        gone = [known[id] for id in persons if id in known and _is_over(known[id])]
        for one in gone:
            self._drop(collection, one)
        return [one.id for one in gone]

    @_alone
    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        return self._answers.get((token, key), (None, None))[1]

    @_alone
    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        self._note(idempotent, result)

    @_alone
    def forget_answers(self, before: str, most: int) -> int:
        count = len(self._answers)
        kept: dict[tuple[str, str], tuple[str, StoredAnswer]] = {}
        for (token, key), (moment, answer) in reversed(self._answers.items()):
            if moment >= before and sum(other == token for other, _ in kept) < most:
                kept[token, key] = moment, answer
        self._answers = dict(reversed(kept.items()))
        return count - len(kept)

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
            if person.faces and not _is_over(person) and (filter is None or filter.matches(person.metadata)):
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


def _external_id(text: Any) -> str:
    if not isinstance(text, str) or not 1 <= len(text) <= 128 or not text.isprintable() or text in (".", ".."):
        raise UsageError("external id")
    return text


def _expires(text: Any) -> str | None:
    if text is None:
        return None
    try:
        if not isinstance(text, str) or len(text) < 10 or text[4] + text[7] != "--" or not text.isascii():
            raise ValueError
        moment = datetime.fromisoformat(text if len(text) == 10 else text.upper())
        if len(text) > 10 and moment.tzinfo is None:
            raise ValueError
        moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise UsageError("expires") from None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_over(person: Person) -> bool:
    return person.expires is not None and person.expires <= _now()
