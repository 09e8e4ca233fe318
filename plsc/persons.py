"""Collections and persons as both a gallery's stores and the client of their service describe them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Scalar = str | int | float | bool
Metadata = Mapping[str, Scalar]


class Unchanged(enum.Enum):
    """The type of :data:`KEEP`."""

    KEEP = "keep"


KEEP: Final = Unchanged.KEEP  # a field that an update leaves as it is, where None would remove it


@dataclass(frozen=True)
class Collection:
    """A named set of persons whose vectors have ``dim`` numbers and come from one model.

    Attributes:
        contract_id: fingerprint of the model and preprocessing that made the vectors; of several models that are
            compatible, theirs with commas between (:mod:`plsc.embedding.contracts`).
        created: ISO 8601, UTC.
    """

    name: str
    dim: int
    contract_id: str
    created: str
    persons: int
    faces: int


@dataclass(frozen=True)
class PersonSummary:
    """The part of a person that is shown with a match; ``external_id`` is the caller's own id."""

    id: int
    name: str | None
    metadata: Metadata
    external_id: str | None = None
