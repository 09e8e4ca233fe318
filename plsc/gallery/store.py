"""The Store protocol that every gallery backend implements, its value types, and :func:`open_store`.

A *collection* holds *persons*; a person has a name, metadata and *faces*; a face is one embedding. Persons and faces
have int64 ids, unique within their collection and never reused. Vectors are stored normalised, float32. Every method
that changes something returns only after the change is durable and visible to searches.

To add a backend, write a module with a class that implements :class:`Store` and a function that opens it by its
address, and add a line to :data:`SERVERS`. The tests in tests/gallery run against every backend.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plsc.errors import UsageError
from plsc.gallery.filters import Filter

Float32 = npt.NDArray[np.float32]
Scalar = str | int | float | bool
Metadata = Mapping[str, Scalar]


class Server(NamedTuple):
    """A backend that keeps its rows on a server: how its address is written, and "module:function" that opens it."""

    address: str
    opener: str


# URI scheme -> backend. A spec without one of these schemes is a folder.
SERVERS: Mapping[str, Server] = {
    "milvus": Server("URI", "plsc.gallery.milvus:open_milvus"),
    "postgres": Server("DSN", "plsc.gallery.postgres:open_postgres"),
}
SPEC_FORMS = " or ".join(f"{scheme}:{server.address}" for scheme, server in SERVERS.items())


@dataclass(frozen=True)
class Collection:
    """A named set of persons whose vectors have ``dim`` numbers and come from one model.

    Attributes:
        contract_id: fingerprint of the model and preprocessing that made the vectors.
        created: ISO 8601, UTC.
    """

    name: str
    dim: int
    contract_id: str
    created: str
    persons: int
    faces: int


@dataclass(frozen=True)
class NewPerson:
    """A person to enrol; ``vectors`` (n, dim), n >= 0, of any length but zero."""

    vectors: npt.ArrayLike
    name: str | None = None
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Person:
    """A stored person; ``faces`` holds the ids of the faces, ascending."""

    id: int
    name: str | None
    metadata: Metadata
    faces: tuple[int, ...]
    created: str


@dataclass(frozen=True)
class PersonSummary:
    """The part of a person that is shown with a match."""

    id: int
    name: str | None
    metadata: Metadata


class Match(NamedTuple):
    """A search hit: ``score`` is the cosine of the person's best face, ``face`` the id of that face."""

    person: int
    face: int
    score: float


class Store(Protocol):
    """A durable gallery. Its methods may be called from several threads at once.

    Raises, from every method: :class:`NotFoundError` for an unknown collection, person or face;
    :class:`UsageError` for vectors that are not finite numbers (n, dim) with a direction, and for an invalid name,
    metadata, filter or k; :class:`ConflictError` for a collection that already exists or vectors of another contract
    id; :class:`StorageError` if the store cannot write. After any of them nothing has changed.
    """

    def collections(self) -> list[Collection]:
        """List all collections by name."""

    def collection(self, name: str) -> Collection:
        """Return one collection."""

    def create_collection(self, name: str, dim: int, contract_id: str) -> Collection:
        """Create a collection. A name is 1 to 64 letters, digits, ``_``, ``-`` or ``.``, beginning with a letter."""

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""

    def add_persons(self, collection: str, persons: Sequence[NewPerson], contract_id: str) -> list[Person]:
        """Enrol all of ``persons`` or none; ``contract_id`` is the one their vectors were made under."""

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id. The metadata may be shared: do not modify it."""

    def update_person(
        self, collection: str, person: int, *, name: str | None = None, metadata: Metadata | None = None
    ) -> Person:
        """Change the name or replace the metadata of a person; None keeps the current value."""

    def delete_person(self, collection: str, person: int) -> None:
        """Delete a person and all faces: no later search finds them."""

    def add_faces(self, collection: str, person: int, vectors: npt.ArrayLike, contract_id: str) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""

    def delete_face(self, collection: str, person: int, face: int) -> None:
        """Delete one face of a person."""

    def vectors(self, collection: str, person: int) -> Float32:
        """Return the stored vectors (n, dim) of a person, unit length, in the order of ``Person.faces``."""

    def search(
        self,
        collection: str,
        queries: npt.ArrayLike,
        *,
        k: int = 10,
        threshold: float = -1.0,
        filter: Filter | None = None,
    ) -> list[list[Match]]:
        """Find, for each of ``queries`` (Q, dim), the ``k`` most similar persons with a score >= ``threshold``.

        Matches are sorted best first. A person appears once, with the best face. ``filter`` is applied before
        ranking, so k persons are returned whenever k match it. Fewer than k qualifying persons are all returned.
        """

    def compact(self, collection: str | None = None) -> None:
        """Merge additions and deletions into the searched files now; afterwards no file holds a deleted vector."""

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything to the new folder ``target``; :class:`ConflictError` if it exists."""

    def check(self) -> dict[str, Any]:
        """Verify everything stored and return counts. Raises :class:`IntegrityError` naming what is damaged."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """Cheap figures for metrics and health: ``{collection: {"rows", "delta", "tombstones", "recall", …}}``."""

    def close(self) -> None:
        """Finish running work and release the store."""


def open_store(spec: str | Path, *, precision: str = "bf16", latency_ms: float | None = None) -> Store:
    """Open the store that ``spec`` names; creates it if there is none.

    Args:
        spec: a folder (SQLite and files), or the address of a server with its scheme: "milvus:URI", "postgres:DSN".
        precision: "bf16" or "fp32", of the copy of the vectors that a folder's store scans; ignored by servers.
        latency_ms: target for a single query in a folder's store, beyond which approximate search is tried; None:
            always exact. Ignored by servers.

    Raises:
        UsageError: ``spec`` or an argument is invalid, or the backend's packages are not installed.
        PlscError: the store cannot be opened; see the backend.
    """
    server = _server(spec)
    if server is not None:
        module, _, function = server.opener.partition(":")
        opener: Callable[[str], Store] = getattr(importlib.import_module(module), function)
        return opener(str(spec).partition(":")[2])
    if not str(spec):
        raise UsageError(f"no store is named: give a folder, {SPEC_FORMS}")
    from plsc.gallery.sqlite.store import SqliteStore

    return SqliteStore(spec, precision=precision, latency_ms=latency_ms)


def store_folder(spec: str | Path) -> Path | None:
    """Return the folder of the store that ``spec`` names; None if a server keeps it."""
    return Path(spec) if _server(spec) is None else None


def display_name(spec: str | Path) -> str:
    """Return ``spec`` without a server's address, which may contain a password."""
    return str(spec) if _server(spec) is None else str(spec).partition(":")[0]


def _server(spec: str | Path) -> Server | None:
    scheme, colon, _ = str(spec).partition(":")
    return SERVERS.get(scheme) if colon else None
