"""A store whose collection moves between two models, for benchmarks/gallery_durability.py --migrate.

The second model's vector of a face is the first one's with its numbers in another order, some with the other sign, and
zeros behind them: all cosines are the same in both spaces. So callers give and get vectors of the first model alone,
whichever is searched, and what held for a store with one model has to hold here.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from plsc.errors import ConflictError, NotFoundError
from plsc.gallery.sqlite.store import SqliteStore
from plsc.gallery.values import Match, NewPerson, Person

SECOND_MODEL, PADDING = "another model", 8
_FILLED_AT_ONCE = 64  # persons

Float32 = npt.NDArray[np.float32]


def in_second_space(vectors: npt.ArrayLike) -> Float32:
    """The second model's vectors (n, dim + 8) of the first one's (n, dim)."""
    rows = np.asarray(vectors, dtype=np.float32)
    order, signs = _shuffled(rows.shape[-1])
    return np.concatenate([rows[..., order] * signs, np.zeros((*rows.shape[:-1], PADDING), np.float32)], axis=-1)


def in_first_space(vectors: Float32) -> Float32:
    """The inverse of :func:`in_second_space`."""
    order, signs = _shuffled(vectors.shape[-1] - PADDING)
    rows = np.empty((*vectors.shape[:-1], len(order)), np.float32)
    rows[..., order] = vectors[..., : len(order)] * signs
    return rows


def _shuffled(dim: int) -> tuple[npt.NDArray[np.int64], Float32]:
    chance = np.random.default_rng(dim)
    return chance.permutation(dim), chance.choice(np.array([-1, 1], np.float32), dim)


class MovingStore(SqliteStore):
    """Stores vectors of both models, and searches with that of the collection."""

    def add_persons(
        self, collection: str, persons: Sequence[NewPerson], contract_id: str, **options: Any
    ) -> list[Person]:
        """Enrol with vectors of both models."""
        return super().add_persons(collection, [_with_both(one) for one in persons], contract_id, **options)

    def put_person(self, collection: str, person: NewPerson, contract_id: str, **options: Any) -> tuple[Person, bool]:
        """Put a person with vectors of both models."""
        return super().put_person(collection, _with_both(person), contract_id, **options)

    def add_faces(
        self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str, **options: Any
    ) -> list[int]:
        """Add faces with vectors of both models."""
        others = {SECOND_MODEL: in_second_space(vectors)}
        return super().add_faces(collection, person, vectors, contract_id, others=others, **options)

    def vectors(self, collection: str, person: int, contract_id: str | None = None) -> Float32:
        """The first model's vectors of a person."""
        found = super().vectors(collection, person)
        first = self.collection(collection).dim
        if found.shape[1] != first:  # it was exchanged meanwhile
            return self.vectors(collection, person)
        return in_first_space(found) if self.collection(collection).contract_id == SECOND_MODEL else found

    def search(self, collection: str, queries: npt.ArrayLike, **options: Any) -> list[list[Match]]:
        """Search with vectors of the collection's model."""
        while True:
            contract_id = self.collection(collection).contract_id
            rows = in_second_space(queries) if contract_id == SECOND_MODEL else np.asarray(queries, np.float32)
            try:
                return super().search(collection, rows, contract_id=contract_id, **options)
            except ConflictError:  # it was exchanged meanwhile
                continue

    def move(self, collection: str, chance: random.Random) -> str:
        """Take a random step of a migration; returns which."""
        info, migration = self.collection(collection), self.migration(collection)
        is_first = info.contract_id != SECOND_MODEL
        if migration is None:
            dim = info.dim + PADDING if is_first else info.dim - PADDING
            self.begin_migration(collection, dim, SECOND_MODEL if is_first else "a model")
            return "begin"
        if self.fill(collection, migration.contract_id, chance.choice([1, 4, 400])):
            return "fill"
        if chance.random() < 0.3:
            self.end_migration(collection, migration.contract_id)
            return "end"
        try:
            self.exchange_spaces(collection, migration.contract_id)
        except ConflictError:  # somebody was enrolled by who did not know of the migration yet
            return "incomplete"
        return "exchange"

    def fill(self, collection: str, contract_id: str, batches: int) -> bool:
        """Fill part of the second space; returns False if nothing lacks a vector."""
        for _ in range(batches):
            page = self.lacking(collection, limit=_FILLED_AT_ONCE)
            if not page:
                return False
            rows: dict[int, dict[int, Float32]] = {}
            for person, faces in page:
                try:
                    both = self.face_vectors(collection, person.id)
                except NotFoundError:  # deleted meanwhile
                    continue
                convert = in_second_space if contract_id == SECOND_MODEL else in_first_space
                rows[person.id] = {face: convert(both[face].searched) for face in faces if face in both}
            self.put_second_vectors(collection, rows, contract_id)
        return True


def _with_both(person: NewPerson) -> NewPerson:
    return replace(person, others={SECOND_MODEL: in_second_space(person.vectors)})
