"""Upserts by external ids and enrolments under idempotency keys, for benchmarks/gallery_durability.py.

A child puts and deletes persons by a few external ids, and enrols under keys, until it is killed. The parent then holds
the store against what was acknowledged: a person put is as the last acknowledged or a later tried change left it,
whole; an enrolment under a key was done once or not at all, and its answer is stored if and only if it was done. The
parent sends every enrolment again, as a client does whose answer was lost, and some of former rounds; the child sends
some again while it lives. What was put last without an answer is put again, which makes nobody twice.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import IdempotentRequest, NewPerson, Person

EXTERNAL_IDS = 12
FORMER, REMEMBERED = 20, 500  # enrolments of former rounds that are sent again, out of so many
SAME = 0.9999  # a cosine that only the vector itself has
TOKEN, FINGERPRINT = "a token", b"of the request"

Float32 = npt.NDArray[np.float32]
Vectors = Callable[[Sequence[int]], Float32]


def once(key: str) -> IdempotentRequest:
    """The request that enrols under ``key``."""
    return IdempotentRequest(TOKEN, key, FINGERPRINT, _answer)


def _answer(persons: Sequence[Person]) -> tuple[int, bytes]:
    return 201, json.dumps([person.id for person in persons]).encode()


def keyed_persons(keys: Sequence[Sequence[int]], lot: int, key: str, vectors: Vectors) -> list[NewPerson]:
    """The persons of an enrolment under ``key``: one for each of ``keys``, with the vectors of those."""
    return [
        NewPerson(vectors(of), None, {"keys": json.dumps(list(of)), "lot": lot, "of": len(keys), "once": key})
        for of in keys
    ]


def send_once_more(store: SqliteStore, gallery: str, contract: str, persons: Sequence[NewPerson], key: str) -> None:
    """Send an enrolment again whose answer was lost: nobody is enrolled, and the answer is told."""
    stored = store.stored_answer(TOKEN, key)
    assert stored is not None, f"the answer of {key} was lost"
    assert len(json.loads(stored.body)) == len(persons), f"the answer of {key} is another"
    try:
        store.add_persons(gallery, persons, contract, idempotent=once(key))
    except ConflictError:
        return
    raise AssertionError(f"{key} was done again")


class Putter:
    """The child's job that puts and deletes persons by external ids, one after another."""

    def __init__(self, store: SqliteStore, gallery: str, contract: str, vectors: Vectors) -> None:
        self._store, self._gallery, self._contract, self._vectors = store, gallery, contract, vectors

    def run(self, chance: random.Random, keys: list[int], send: Callable[..., None]) -> None:
        """Make one change, told of before and after."""
        external_id = f"id/{chance.randrange(EXTERNAL_IDS)}"
        if chance.random() < 0.2:
            send("tries", "put", external_id, None)
            person = self._store.find_person(self._gallery, external_id)
            self._store.delete_person(self._gallery, person.id)
            send("did", "put", external_id, None)
            return
        send("tries", "put", external_id, keys)
        new = NewPerson(self._vectors(keys), None, {"keys": json.dumps(keys)}, external_id)
        self._store.put_person(self._gallery, new, self._contract)
        send("did", "put", external_id, keys)


@dataclass
class Puts:
    """What is known of the persons with external ids: their vectors' keys; None: there is no such person."""

    acknowledged: dict[str, list[int] | None] = field(default_factory=dict)
    tried: dict[str, list[list[int] | None]] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)  # keys of vectors that nobody has any more
    repeated: int = 0

    def note(self, done: bool, external_id: str, keys: list[int] | None) -> None:
        """Take the child's word of a change."""
        if not done:
            self.tried.setdefault(external_id, []).append(keys)
            return
        self.replaced += self.acknowledged.get(external_id) or []
        self.acknowledged[external_id] = keys
        self.tried[external_id] = []

    def verify(
        self, store: SqliteStore, gallery: str, contract: str, persons: Sequence[Person], vectors: Vectors
    ) -> None:
        """Compare ``persons``, all that have external ids, with what was acknowledged or tried, and put some again."""
        found = {str(person.external_id): person for person in persons}
        assert len(found) == len(persons), "two persons have one external id"
        for external_id in self.acknowledged.keys() | self.tried.keys() | found.keys():
            person = found.get(external_id)
            keys: list[int] | None = None if person is None else json.loads(str(person.metadata["keys"]))
            possible = [self.acknowledged.get(external_id), *self.tried.get(external_id, [])]
            assert keys in possible, f"{external_id} is {keys}, which is none of {possible}"
            if person is not None:
                self._verify_faces(store, gallery, person, vectors(keys or []))
            self.replaced += [key for other in possible if other != keys for key in other or []]
            lost = [other for other in self.tried.get(external_id, []) if other is not None]
            self.acknowledged[external_id], self.tried[external_id] = keys, []
            if lost:
                self._put_again(store, gallery, contract, external_id, lost[-1], person, vectors)
            elif person is None:
                _verify_absent(store, gallery, external_id)
        self._verify_replaced(store, gallery, vectors)
        there = [person.external_id for person in everyone_named(store, gallery)]
        assert len(set(there)) == len(there), "two persons have one external id"

    def _put_again(
        self,
        store: SqliteStore,
        gallery: str,
        contract: str,
        external_id: str,
        keys: list[int],
        former: Person | None,
        vectors: Vectors,
    ) -> None:
        """Put what was tried last without an answer twice: the first may replace, the second changes nobody's id."""
        new = NewPerson(vectors(keys), None, {"keys": json.dumps(keys)}, external_id)
        put, is_new = store.put_person(gallery, new, contract)
        assert is_new == (former is None), f"{external_id} was put again, and is another person"
        again, is_new = store.put_person(gallery, new, contract)
        assert (again.id, is_new) == (put.id, False), f"{external_id} was put twice, and is two persons"
        assert former is None or former.id == put.id, f"{external_id} was put again, and is another person"
        self.replaced = [key for key in [*self.replaced, *(self.acknowledged[external_id] or [])] if key not in keys]
        self.acknowledged[external_id] = keys
        self.repeated += 1

    def _verify_faces(self, store: SqliteStore, gallery: str, person: Person, expected: Float32) -> None:
        stored = store.vectors(gallery, person.id)
        assert len(stored) == len(expected), f"{person.external_id} was put by half"
        for face, row, query in zip(person.faces, stored, expected, strict=True):
            assert float(row @ query) > SAME * float(np.linalg.norm(query)), f"{person.external_id} has another vector"
            (best,) = store.search(gallery, query[None], k=1)[0]
            assert (best.person, best.face) == (person.id, face), f"{person.external_id} is not found"

    def _verify_replaced(self, store: SqliteStore, gallery: str, vectors: Vectors) -> None:
        latest = self.replaced[-500:]
        for key, answer in zip(latest, store.search(gallery, vectors(latest), k=1) if latest else [], strict=True):
            assert not answer or answer[0].score < SAME, f"a vector of key {key} was replaced and is found"


@dataclass
class Onces:
    """The enrolments that the child tried under idempotency keys: key, and what its persons are made of."""

    tried: dict[str, tuple[list[list[int]], int]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    done: dict[str, list[NewPerson]] = field(default_factory=dict)  # in former rounds
    replayed: int = 0
    repeated: int = 0

    def note(self, done: bool, key: str, *rest: Any) -> None:
        """Take the child's word of an enrolment."""
        if done:
            self.acknowledged.add(key)
        else:
            self.tried[key] = rest[0], rest[1]

    def send_again(
        self, store: SqliteStore, gallery: str, contract: str, persons: Sequence[Person], vectors: Vectors
    ) -> list[Person]:
        """Send every enrolment of the round again; returns the persons that were enrolled by that."""
        there: dict[str, set[int]] = {}
        for person in persons:
            there.setdefault(str(person.metadata.get("once", "")), set()).add(person.id)
        for key in random.Random(self.replayed).sample(list(self.done), min(len(self.done), FORMER)):
            send_once_more(store, gallery, contract, self.done[key], key)
        enrolled: list[Person] = []
        for key, (keys, lot) in self.tried.items():
            new = keyed_persons(keys, lot, key, vectors)
            enrolled += self._send(store, gallery, contract, key, new, there.get(key, set()))
            self.done[key] = new
        self.tried, self.acknowledged = {}, set()
        self.done = dict(list(self.done.items())[-REMEMBERED:])
        return enrolled

    def _send(
        self, store: SqliteStore, gallery: str, contract: str, key: str, new: list[NewPerson], there: set[int]
    ) -> list[Person]:
        stored, enrolled = store.stored_answer(TOKEN, key), list[Person]()
        if stored is None:
            assert key not in self.acknowledged, f"the answer of the acknowledged {key} was lost"
            assert not there, f"{key} was done, and its answer is not stored"
            self.repeated += 1
            enrolled = store.add_persons(gallery, new, contract, idempotent=once(key))
        else:
            assert (stored.status, stored.fingerprint) == (201, FINGERPRINT), f"the answer of {key} is another"
            assert there == set(json.loads(stored.body)), f"{key} was done twice, or not as its answer says"
            self.replayed += 1
        send_once_more(store, gallery, contract, new, key)
        return enrolled


def everyone_named(store: SqliteStore, gallery: str) -> list[Person]:
    """All persons with external ids."""
    found, after = list[Person](), 0
    while page := store.persons(gallery, after=after, limit=1000):
        found += [person for person in page if person.external_id is not None]
        after = page[-1].id
    return found


def _verify_absent(store: SqliteStore, gallery: str, external_id: str) -> None:
    try:
        store.find_person(gallery, external_id)
    except NotFoundError:
        return
    raise AssertionError(f"{external_id} was deleted and is found")


def has_gallery(store: SqliteStore, gallery: str) -> bool:
    """Return True if the collection was made."""
    try:
        store.collection(gallery)
    except NotFoundError:
        return False
    return True
