"""The Store protocol that every gallery backend implements, its value types, and :func:`open_store`.

A *collection* holds *persons*; a person has a name, metadata and *faces*; a face is one embedding. Persons and faces
have int64 ids, unique within their collection and never reused. Vectors are stored normalised, float32. Every method
that changes something returns only after the change is durable and visible to searches.

To add a backend, write a module with a class that implements :class:`Store` and a function that opens it by its
address, and add a line to :data:`SERVERS`. The tests in tests/gallery run against every backend.
"""

import enum
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plsc.errors import PreconditionError, UsageError
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
COMPACT_WITHIN = 3600.0  # seconds
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
    """A person to enrol.

    Attributes:
        vectors: (n, dim), n >= 0, of any length but zero.
        external_id: the caller's own id, 1 to 128 printable characters, unique within a collection.
        expires: an ISO 8601 date or date-time, from which on the person is not found and will be deleted.
    """

    vectors: npt.ArrayLike
    name: str | None = None
    metadata: Metadata = field(default_factory=dict)
    external_id: str | None = None
    expires: str | None = None


@dataclass(frozen=True)
class Person:
    """A stored person.

    Attributes:
        faces: ids of the faces, ascending.
        created, expires: ISO 8601, UTC.
        revision: 1 for a new person, and one more after every change of the person or its faces; 0 where the store
            counts none.
    """

    id: int
    name: str | None
    metadata: Metadata
    faces: tuple[int, ...]
    created: str
    external_id: str | None = None
    revision: int = 1
    expires: str | None = None


@dataclass(frozen=True)
class PersonSummary:
    """The part of a person that is shown with a match."""

    id: int
    name: str | None
    metadata: Metadata
    external_id: str | None = None


class Unchanged(enum.Enum):
    """The type of :data:`KEEP`."""

    KEEP = "keep"


KEEP: Final = Unchanged.KEEP  # a field that an update leaves as it is, where None would remove it


@dataclass(frozen=True)
class Precondition:
    """What a change requires of its person, checked in the change's own transaction.

    Attributes:
        exists: whether there has to be such a person.
        revisions: (id, revision) of the persons that will do; None: any.
    """

    exists: bool = True
    revisions: frozenset[tuple[int, int]] | None = None

    def check(self, person: Person | None) -> None:
        """Raise :class:`PreconditionError` unless ``person`` (None: there is none) is as required."""
        if not self.exists and person is not None:
            raise PreconditionError(f"there is such a person already: {person.id}; read it, and change that")
        if self.exists and person is None:
            raise PreconditionError("there is no such person; leave the condition out to make it")
        if person is not None and self.revisions is not None and (person.id, person.revision) not in self.revisions:
            raise PreconditionError(
                f"person {person.id} was changed since it was read; read it again, and then change it"
            )


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that may be sent again: its answer is stored in the transaction of its write.

    Attributes:
        token, key: who sent it, and the key that it was sent with.
        fingerprint: hash of the request, by which another one under the same key is known.
        answer: HTTP status and body of the answer, from what the store's method returns.
    """

    token: str
    key: str
    fingerprint: bytes
    answer: Callable[[Any], tuple[int, bytes]]


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to an :class:`IdempotentRequest` that was done."""

    fingerprint: bytes
    status: int
    body: bytes


class Match(NamedTuple):
    """A search hit: ``score`` is the cosine of the person's best face, ``face`` the id of that face."""

    person: int
    face: int
    score: float


class Store(Protocol):
    """A durable gallery. Its methods may be called from several threads at once.

    Raises, from every method: :class:`NotFoundError` for an unknown collection, person or face;
    :class:`UsageError` for vectors that are not finite numbers (n, dim) with a direction, and for an invalid name,
    metadata, filter or k; :class:`ConflictError` for a collection or external id that already exists or vectors of
    another contract id; :class:`PreconditionError` where a ``precondition`` does not hold; :class:`StorageError` if the
    store cannot write; :class:`UnsupportedError` for what the backend lacks. After any of them nothing has changed.

    A person whose time has come (``expires``) is found by no method but :meth:`expired`, and is deleted by
    :meth:`delete_expired`. With ``idempotent`` a method stores the request's answer in the transaction of its change,
    and raises :class:`ConflictError` if there is one for the key already.
    """

    def collections(self) -> list[Collection]:
        """List all collections by name."""

    def collection(self, name: str) -> Collection:
        """Return one collection."""

    def create_collection(
        self, name: str, dim: int, contract_id: str, *, idempotent: IdempotentRequest | None = None
    ) -> Collection:
        """Create a collection. A name is 1 to 64 letters, digits, ``_``, ``-`` or ``.``, beginning with a letter."""

    def delete_collection(self, name: str) -> None:
        """Delete a collection and everything in it."""

    def add_persons(
        self,
        collection: str,
        persons: Sequence[NewPerson],
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[Person]:
        """Enrol all of ``persons`` or none; ``contract_id`` is the one their vectors were made under."""

    def put_person(
        self, collection: str, person: NewPerson, contract_id: str, *, precondition: Precondition | None = None
    ) -> tuple[Person, bool]:
        """Enrol ``person``, or replace all of the one with its external id; returns True beside a new one."""

    def person(self, collection: str, person: int) -> Person:
        """Return one person."""

    def find_person(self, collection: str, external_id: str) -> Person:
        """Return the person with an external id."""

    def persons(
        self, collection: str, *, after: int = 0, limit: int = 100, filter: Filter | None = None
    ) -> list[Person]:
        """Return up to ``limit`` persons with ids above ``after`` that match ``filter``, by ascending id."""

    def person_summaries(self, collection: str, ids: Sequence[int]) -> dict[int, PersonSummary]:
        """Return the persons among ``ids`` that exist, by id. The metadata may be shared: do not modify it."""

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
        """Change the name or the expiry, or replace the metadata of a person; None removes a name or an expiry."""

    def delete_person(self, collection: str, person: int, *, precondition: Precondition | None = None) -> None:
        """Delete a person and all faces: no later search finds them."""

    def add_faces(
        self,
        collection: str,
        person: int,
        vectors: npt.ArrayLike,
        contract_id: str,
        *,
        idempotent: IdempotentRequest | None = None,
    ) -> list[int]:
        """Add faces (n, dim) to a person; returns their ids."""

    def delete_face(self, collection: str, person: int, face: int, *, precondition: Precondition | None = None) -> None:
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

    def expired(self, limit: int) -> dict[str, list[Person]]:
        """Return up to ``limit`` persons whose time has come, by collection."""

    def delete_expired(self, collection: str, persons: Sequence[int]) -> list[int]:
        """Delete those of ``persons`` whose time has come; returns their ids."""

    def stored_answer(self, token: str, key: str) -> StoredAnswer | None:
        """Return the answer to the request that was done under a key."""

    def store_answer(self, idempotent: IdempotentRequest, result: Any) -> None:
        """Store the answer to a request that changed nothing in the store."""

    def forget_answers(self, before: str, most: int) -> int:
        """Forget answers stored before a time, and all but the ``most`` newest of each token; returns how many."""

    def compact(self, collection: str | None = None) -> None:
        """Merge additions and deletions into the searched files now; no file then holds what was deleted."""

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy of everything to the new folder ``target``; :class:`ConflictError` if it exists."""

    def check(self) -> dict[str, Any]:
        """Verify everything stored and return counts. Raises :class:`IntegrityError` naming what is damaged."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """Cheap figures for metrics and health: ``{collection: {"rows", "delta", "tombstones", "recall", …}}``."""

    def close(self) -> None:
        """Finish running work and release the store."""


def open_store(
    spec: str | Path,
    *,
    precision: str = "bf16",
    latency_ms: float | None = None,
    compact_within: float = COMPACT_WITHIN,
    key_file: str | Path | None = None,
) -> Store:
    """Open the store that ``spec`` names; creates it if there is none.

    Args:
        spec: a folder (SQLite and files), or the address of a server with its scheme: "milvus:URI", "postgres:DSN".
        precision: "bf16" or "fp32", of the copy of the vectors that a folder's store scans; ignored by servers.
        latency_ms: target for a single query in a folder's store, beyond which approximate search is tried; None:
            always exact. Ignored by servers.
        compact_within: seconds after which no file of a folder's store holds a deleted face's vector, or texts of a
            person who was deleted, or which were changed. Ignored by servers.
        key_file: with the master key of a folder's store whose vectors are encrypted, as ``openssl rand -base64 32``
            writes it; None: they are not.

    Raises:
        UsageError: ``spec`` or an argument is invalid, or the backend's packages are not installed.
        PlscError: the store cannot be opened; see the backend.
    """
    server = _server(spec)
    if server is not None and key_file is not None:
        raise UsageError(f"--encrypt: {display_name(spec)} keeps its own files; encrypt the disk of that server")
    if server is not None:
        module, _, function = server.opener.partition(":")
        opener: Callable[[str], Store] = getattr(importlib.import_module(module), function)
        return opener(str(spec).partition(":")[2])
    if not str(spec):
        raise UsageError(f"no store is named: give a folder, {SPEC_FORMS}")
    from plsc.gallery.sqlite.store import SqliteStore

    return SqliteStore(
        spec, precision=precision, latency_ms=latency_ms, compact_within=compact_within, key_file=key_file
    )


def store_folder(spec: str | Path) -> Path | None:
    """Return the folder of the store that ``spec`` names; None if a server keeps it."""
    return Path(spec) if _server(spec) is None else None


def display_name(spec: str | Path) -> str:
    """Return ``spec`` without a server's address, which may contain a password."""
    return str(spec) if _server(spec) is None else str(spec).partition(":")[0]


def _server(spec: str | Path) -> Server | None:
    scheme, colon, _ = str(spec).partition(":")
    return SERVERS.get(scheme) if colon else None
