"""What every store of a gallery does, wherever it keeps its rows: one contract, one suite of tests.

A *collection* holds *persons*; a person has a name, metadata and *faces*; a face is one embedding. Persons and faces
have int64 ids, unique in their collection, given once and never again. Vectors are stored normalised, float32.
Every call that changes something returns only when the change is durable and found by searches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plsc.gallery.filters import Filter

Float32 = npt.NDArray[np.float32]
Scalar = str | int | float | bool
Metadata = Mapping[str, Scalar]


@dataclass(frozen=True)
class Collection:
    """Vectors of ``dim`` numbers made under one embedding contract; ``created`` is ISO 8601, UTC."""

    name: str
    dim: int
    contract_id: str
    created: str
    persons: int
    faces: int


@dataclass(frozen=True)
class NewPerson:
    """A person to enrol with the embeddings of ``vectors`` (n, dim), n >= 0, of any length but zero."""

    vectors: npt.ArrayLike
    name: str | None = None
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Person:
    """A person as stored; ``faces`` are the ids of the faces, ascending."""

    id: int
    name: str | None
    metadata: Metadata
    faces: tuple[int, ...]
    created: str


@dataclass(frozen=True)
class Named:
    """What a match is shown with."""

    id: int
    name: str | None
    metadata: Metadata


class Match(NamedTuple):
    """A person who is like the query: ``score`` is the cosine of the best face, ``face`` its id."""

    person: int
    face: int
    score: float


class Store(Protocol):
    """A gallery. Methods may be called from several threads at once.

    Raises, everywhere: :class:`NotFoundError` for a collection, person or face that is not there;
    :class:`UsageError` for vectors that are not finite numbers (n, dim) with a direction, a wrong name, metadata,
    filter or k; :class:`ConflictError` for a collection that exists already, or another embedding contract;
    :class:`StorageError` when the store cannot write. After any of them nothing has changed.
    """

    def collections(self) -> list[Collection]:
        """All collections by name."""

    def collection(self, name: str) -> Collection:
        """One collection."""

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Make a collection. A name is 1 to 64 letters, digits, ``_``, ``-`` or ``.``, beginning with a letter."""

    def delete_collection(self, name: str) -> None:
        """Remove a collection with everything in it."""

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none; the vectors were made under ``contract_id``."""

    def person(self, collection: str, person: int) -> Person:
        """One person."""

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, where: Filter | None = None
    ) -> list[Person]:
        """Up to ``limit`` persons with ids above ``after``, ascending."""

    def names_of(self, collection: str, ids: Sequence[int]) -> dict[int, Named]:
        """The persons of ``ids`` that exist, in one go; the store may give the same metadata again, so leave it be."""

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata; None leaves it."""

    def delete_person(self, collection: str, person: int) -> None:
        """Forget a person and the faces: no search finds them from now on."""

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Forget one face."""

    def vectors(self, collection: str, person: int) -> Float32:
        """The stored vectors (n, dim) of a person, unit length, in the order of ``Person.faces``."""

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        where: Filter | None = None,
    ) -> list[list[Match]]:
        """For each of ``queries`` (Q, dim): the ``k`` most alike persons with a score >= ``threshold``, best first.

        A person is there once, by the best face. With ``where`` only persons whose metadata fit are looked at, so
        that k of them are found where k fit. Where fewer than k persons qualify, all of them.
        """

    def compact(self, collection: str | None = None) -> None:
        """Bring what was added and deleted into the searched files now; deleted embeddings are then in none."""

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything into the new folder ``target``; :class:`ConflictError` if it exists."""

    def check(self) -> dict[str, Any]:
        """Verify what is stored; returns figures. Raises :class:`IntegrityError` naming what is damaged."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """``{collection: {"rows", "delta", "tombstones", "recall", …}}`` for metrics and health; cheap."""

    def close(self) -> None:
        """Finish running work and let go of the store."""
