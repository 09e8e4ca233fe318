"""The values that a gallery's stores take and give.

A *collection* holds *persons*; a person has a name, metadata and *faces*; a face is one embedding. Persons and faces
have int64 ids, unique within their collection and never reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from plsc.errors import PreconditionError
from plsc.persons import KEEP as KEEP
from plsc.persons import Collection as Collection
from plsc.persons import Metadata as Metadata
from plsc.persons import PersonSummary as PersonSummary
from plsc.persons import Unchanged as Unchanged

Float32 = npt.NDArray[np.float32]


class Clock(Protocol):
    """What a store reads times from, by default the module :mod:`time`."""

    def time(self) -> float:
        """Seconds since 1970, as the machine's clock is set."""

    def monotonic(self) -> float:
        """Seconds since some moment; setting the machine's clock changes nothing."""


@dataclass(frozen=True)
class Migration:
    """A collection's move to another model: its faces have vectors in a second space, which no search reads.

    Before the cut-over the second space is the new model's, after it the former one's, which is kept up to date so that
    the collection can be rolled back to it.

    Attributes:
        dim, contract_id: of the second space.
        began: ISO 8601, UTC.
        is_cut_over: searches read the new model's space.
        details: what the migration knows besides, as JSON.
    """

    dim: int
    contract_id: str
    began: str
    is_cut_over: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


class SecondVector(NamedTuple):
    """A face's vector (dim,) in the second space; ``is_estimated``: an adapter made it of the other one."""

    vector: Float32
    is_estimated: bool


class FaceVectors(NamedTuple):
    """A face's searched vector (dim,), that in the second space if any, and whether the searched one is estimated."""

    searched: Float32
    second: SecondVector | None
    is_estimated: bool = False


def totals(collections: Sequence[Collection]) -> dict[str, int]:
    """Return how many collections these are, and how many persons and faces they have together."""
    return {
        "collections": len(collections),
        "persons": sum(info.persons for info in collections),
        "faces": sum(info.faces for info in collections),
    }


@dataclass(frozen=True)
class NewPerson:
    """A person to enrol.

    Attributes:
        vectors: (n, dim), n >= 0, of any length but zero.
        others: vectors of the same faces by other models, by contract id: those of a collection's second space are
            stored with the person, the others are not.
        external_id: the caller's own id, 1 to 128 printable characters, unique within a collection.
        expires: an ISO 8601 date or date-time, from which on the person is not found and will be deleted.
        keys: the caller's own names of the faces, each unique among the person's, None for one without; empty: none.
    """

    vectors: npt.ArrayLike
    name: str | None = None
    metadata: Metadata = field(default_factory=dict)
    external_id: str | None = None
    expires: str | None = None
    others: Mapping[str, npt.ArrayLike] = field(default_factory=dict)
    keys: Sequence[str | None] = ()


@dataclass(frozen=True, kw_only=True)
class Person(PersonSummary):
    """A stored person.

    Attributes:
        faces: ids of the faces, ascending.
        created, expires: ISO 8601, UTC.
        revision: 1 for a new person, and one more after every change of the person or its faces.
        keys: the callers' own names of faces, by face, of those that have one.
    """

    faces: tuple[int, ...]
    created: str
    revision: int = 1
    expires: str | None = None
    keys: Mapping[int, str] = field(default_factory=dict)


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


FORGOTTEN_AT_ONCE = 2_000  # answers; changes wait some 50 ms


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
