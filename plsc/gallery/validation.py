"""Validation of names, vectors, metadata and searches, which every store applies before it touches a row."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from plsc.errors import ConflictError, UsageError
from plsc.gallery.filters import Filter, check_metadata, is_storable
from plsc.gallery.store import Collection, Float32, NewPerson
from plsc.index.rows import unit_vectors

MAX_DIM = 16_384
MAX_ID = 2**63 - 1
MAX_NAME = 1024  # characters of a person's name
COLLECTION_NAME = r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$"
COLLECTION_NAME_RULE = "a collection's name begins with a letter and has letters, digits, _ . - only, 64 at most"
_COLLECTION = re.compile(COLLECTION_NAME)


@dataclass(frozen=True)
class ValidPerson:
    """A person ready to be stored: ``vectors`` (n, dim) float32 of unit length, ``metadata`` a plain dict."""

    vectors: Float32
    name: str | None
    metadata: dict[str, Any]


def now() -> str:
    """Return the time as ISO 8601, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_collection(name: str, dim: int, contract_id: str) -> None:
    """Raise :class:`UsageError` unless a collection may have this name, dimension and contract id."""
    if not isinstance(name, str) or not _COLLECTION.fullmatch(name):
        raise UsageError(f"no collection can be named {ascii(name)[:80]}: {COLLECTION_NAME_RULE}")
    if not _is_integer(dim) or not 1 <= dim <= MAX_DIM:
        raise UsageError(f"a collection's dim is 1 to {MAX_DIM}, not {ascii(dim)[:80]}")
    if not isinstance(contract_id, str) or not 0 < len(contract_id) <= 256 or not is_storable(contract_id):
        raise UsageError(f"a contract id is a string of 1 to 256 characters, not {ascii(contract_id)[:80]}")


def check_contract(collection: Collection, contract_id: str) -> None:
    """Raise :class:`ConflictError` unless vectors of ``contract_id`` are comparable with the collection's."""
    if contract_id != collection.contract_id:
        raise ConflictError(
            f"collection {collection.name} holds embeddings of the contract {collection.contract_id}, not of "
            f"{ascii(contract_id)[:80]}; vectors of two models cannot be compared: use one model, or another collection"
        )


def check_name(name: Any) -> str | None:
    """Return a person's name; :class:`UsageError` unless it is None or a string of at most 1,024 characters."""
    if name is None or (isinstance(name, str) and len(name) <= MAX_NAME and is_storable(name)):
        return name
    raise UsageError(f"a person's name is a string of at most {MAX_NAME} characters, not {ascii(name)[:80]}")


def check_persons(persons: Sequence[NewPerson], dim: int) -> list[ValidPerson]:
    """Return ``persons`` ready to be stored; :class:`UsageError` names the first invalid one by its index."""
    checked = []
    for index, person in enumerate(persons):
        try:
            vectors = unit_vectors(person.vectors, dim)
            checked.append(ValidPerson(vectors, check_name(person.name), check_metadata(person.metadata)))
        except UsageError as error:
            raise UsageError(f"person {index} of {len(persons)}: {error}" if len(persons) > 1 else str(error)) from None
    return checked


def check_search(k: int, threshold: float, filter: Filter | None) -> None:
    """Raise :class:`UsageError` unless ``k`` is an integer >= 1, ``threshold`` a number and ``filter`` a filter."""
    if not _is_integer(k) or k < 1:
        raise UsageError(f"k is {ascii(k)[:80]}; at least one match must be asked for")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | np.number) or math.isnan(threshold):
        raise UsageError(f"the threshold is {ascii(threshold)[:80]}; it is a cosine from -1 to 1")
    _check_filter(filter)


def check_page(after: int, limit: int, filter: Filter | None) -> None:
    """Raise :class:`UsageError` unless ``after`` and ``limit`` are integers, ``limit`` >= 1, ``filter`` a filter."""
    if not _is_integer(limit) or limit < 1:
        raise UsageError(f"limit is {ascii(limit)[:80]}; at least one person must be asked for")
    if not _is_integer(after):
        raise UsageError(f"after is {ascii(after)[:80]}; it is the id of a person, or 0")
    _check_filter(filter)


def is_id(value: Any) -> bool:
    """Return True if ``value`` could be the id of a person or a face."""
    return _is_integer(value) and 0 < value <= MAX_ID


def _check_filter(filter: Filter | None) -> None:
    if filter is not None and not isinstance(filter, Filter):
        raise UsageError(f"a filter is made by Filter.parse, and not a {type(filter).__name__}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
