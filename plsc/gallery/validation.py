"""Validation of names, vectors, metadata and searches, which every store applies before it touches a row."""

import enum
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from plsc.embedding.contracts import may_search
from plsc.errors import ConflictError, IntegrityError, NotFoundError, UsageError, quoted
from plsc.gallery.values import KEEP, Clock, Collection, Float32, Migration, NewPerson, Person
from plsc.index.rows import unit_vectors

LENGTH_TOLERANCE = 1e-3  # of a vector that a server gives back
MAX_DIM = 16_384
MAX_ID = 2**63 - 1
MAX_NAME = 1024  # characters of a person's name
MAX_EXTERNAL_ID = 128  # characters
FACE_KEY = r"^[\x21-\x7e]{1,64}$"
MAX_ENTRIES = 64  # of a metadata object
MAX_CHARACTERS = 1024  # of a metadata key or a string value
COLLECTION_NAME = r"^[A-Za-z][A-Za-z0-9_.\-]{0,63}$"
COLLECTION_NAME_RULE = "a collection's name begins with a letter and has letters, digits, _ . - only, 64 at most"
_COLLECTION = re.compile(COLLECTION_NAME)
_FACE_KEY = re.compile(FACE_KEY)
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d))?", re.ASCII)


@dataclass(frozen=True)
class ValidPerson:
    """A person ready to be stored: ``vectors`` (n, dim) float32 of unit length, ``metadata`` a plain dict.

    ``second`` are the vectors (n, other dim) of the same faces in the second space, None where it has none; ``keys`` of
    n faces, or empty.
    """

    vectors: Float32
    name: str | None
    metadata: dict[str, Any]
    external_id: str | None = None
    expires: str | None = None
    second: Float32 | None = None
    keys: tuple[str | None, ...] = ()


class Kind(enum.IntEnum):
    """The types that a metadata value may have. Values of two kinds are never equal or ordered; stored as integers."""

    BOOL = 0
    NUMBER = 1
    TEXT = 2


def kind_of(value: Any) -> Kind:
    """Return the kind of a metadata value."""
    if isinstance(value, bool):  # first: to Python, True is an int
        return Kind.BOOL
    return Kind.TEXT if isinstance(value, str) else Kind.NUMBER


def now(clock: Clock = time, later: timedelta = timedelta()) -> str:
    """Return the time, or a later one, as ISO 8601, UTC, to the millisecond: such texts sort as their times do."""
    return _utc(datetime.fromtimestamp(clock.time(), UTC) + later)


def is_expired(expires: str | None, clock: Clock) -> bool:
    """Return True if the time at which something expires (None: never) has come."""
    return expires is not None and expires <= now(clock)


def check_collection(name: str, dim: int, contract_id: str) -> None:
    """Raise :class:`UsageError` unless a collection may have this name, dimension and contract id."""
    if not is_collection_name(name):
        raise UsageError(f"no collection can be named {quoted(name)}: {COLLECTION_NAME_RULE}")
    if not _is_integer(dim) or not 1 <= dim <= MAX_DIM:
        raise UsageError(f"a collection's dim is 1 to {MAX_DIM}, not {ascii(dim)[:80]}")
    if not isinstance(contract_id, str) or not 0 < len(contract_id) <= 256 or not _is_storable(contract_id):
        raise UsageError(f"a contract id is a string of 1 to 256 characters, not {ascii(contract_id)[:80]}")


def no_collection(name: Any) -> NotFoundError:
    """Return the error for a collection that does not exist."""
    return NotFoundError(f"there is no collection {ascii(name)[:80]}; make it first")


def is_collection_name(name: Any) -> bool:
    """Return True if a collection could have this name."""
    return isinstance(name, str) and _COLLECTION.fullmatch(name) is not None


def check_new(target: Path) -> None:
    """Raise :class:`ConflictError` if there is something where a new folder is to be."""
    if target.exists():
        raise ConflictError(f"{target} exists already; name a new folder")


def check_contract(collection: Collection, contract_id: str, compatible_with: Sequence[str] = ()) -> None:
    """Raise :class:`ConflictError` unless vectors of ``contract_id`` may be beside those of the collection."""
    space = collection.contract_id
    if contract_id != space and not may_search(contract_id, compatible_with, space):
        raise ConflictError(
            f"collection {collection.name} holds embeddings of the contract {space}, not of "
            f"{ascii(contract_id)[:80]}; vectors of two models cannot be compared: use one model, or another collection"
        )


class Searched(Protocol):
    """A collection as a store searches it."""

    @property
    def info(self) -> Collection:
        """The collection."""

    @property
    def migration(self) -> Migration | None:
        """Its migration."""


def check_query(found: Searched, contract_id: str | None) -> None:
    """Raise :class:`ConflictError` if queries are of a model, ``contract_id``, that is not the collection's.

    While it is moved, one model may have vectors in both spaces: then the id has to be the searched space's own.
    """
    if contract_id is None or contract_id == found.info.contract_id:
        return
    check_contract(found.info, contract_id)
    if found.migration is not None:
        raise ConflictError(
            f"collection {found.info.name} is being moved, and its contract is {found.info.contract_id} now; search it "
            "by that"
        )


def check_name(name: Any) -> str | None:
    """Return a person's name; :class:`UsageError` unless it is None or a string of at most 1,024 characters."""
    if name is None or (isinstance(name, str) and len(name) <= MAX_NAME and _is_storable(name)):
        return name
    raise UsageError(f"a person's name is a string of at most {MAX_NAME} characters, not {quoted(name)}")


def check_metadata(metadata: Any) -> dict[str, Any]:
    """Return ``metadata`` as a dict; :class:`UsageError` unless it is an object with few short keys, finite scalars."""
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a JSON object, not {quoted(metadata)}")
    if len(metadata) > MAX_ENTRIES:
        raise UsageError(f"metadata of {len(metadata)} entries; at most {MAX_ENTRIES} are taken")
    for key, value in metadata.items():
        check_key(key)
        check_scalar(key, value)
    return dict(metadata)


def check_key(key: Any) -> None:
    """Raise :class:`UsageError` unless ``key`` may be one of metadata."""
    if not isinstance(key, str) or not 0 < len(key) <= MAX_CHARACTERS or not _is_storable(key):
        raise UsageError(f"a metadata key is a string of 1 to {MAX_CHARACTERS} characters, not {quoted(key)}")


def check_scalar(key: str, value: Any) -> None:
    """Raise :class:`UsageError` unless ``value`` may stand under ``key``, in metadata or in a filter."""
    if isinstance(value, str) and len(value) <= MAX_CHARACTERS and _is_storable(value):
        return
    if isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    raise UsageError(
        f"{quoted(key)} is {quoted(value)}; it takes a string of at most {MAX_CHARACTERS} characters, "
        "a finite number (integers of 64 bits), true or false"
    )


def _is_storable(text: str) -> bool:
    """Return True if databases can hold ``text``: JSON may carry NUL, and half a surrogate pair, which is not UTF-8."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def check_external_id(external_id: Any) -> str:
    """Return an external id; :class:`UsageError` unless it is a string of 1 to 128 printable characters.

    "." and ".." are refused: they are no segments of a URL.
    """
    is_printable = isinstance(external_id, str) and external_id.isprintable()
    if is_printable and 0 < len(external_id) <= MAX_EXTERNAL_ID and external_id not in (".", ".."):
        return str(external_id)
    raise UsageError(
        f"an external id is a string of 1 to {MAX_EXTERNAL_ID} printable characters, neither . nor .., "
        f"not {quoted(external_id)}"
    )


def check_expires(expires: Any) -> str | None:
    """Return the time at which a person expires as :func:`now` writes times; None: never.

    A date is the beginning of that day in UTC. Fractions of a millisecond are dropped.

    Raises:
        UsageError: it is neither a date nor a date-time of RFC 3339.
    """
    if expires is None:
        return None
    try:
        if not isinstance(expires, str) or not _RFC_3339.fullmatch(expires):
            raise ValueError
        moment = datetime.fromisoformat(expires.upper())
        return _utc(moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC))
    except (ValueError, OverflowError):
        raise UsageError(
            "expires is a date or a date-time with its offset (2030-01-31, 2030-01-31T12:00:00Z), "
            f"not {quoted(expires)}"
        ) from None


def _utc(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_vectors(
    vectors: npt.ArrayLike,
    contract_id: str,
    others: Mapping[str, npt.ArrayLike],
    collection: Collection,
    migration: Migration | None,
    compatible_with: Sequence[str] = (),
) -> tuple[Float32, Float32 | None]:
    """Return what a collection stores of vectors of the same faces by one or several models.

    Args:
        vectors, contract_id: of the first model.
        others: vectors by other models, by contract id.
        collection, migration: the models that are wanted.
        compatible_with: whose vectors those of the first model may be beside.

    Returns:
        The searched vectors (n, dim) and those in the second space, (n, other dim) or None, of unit length.
    """
    given = {**others, contract_id: vectors}
    searched = collection.contract_id if collection.contract_id in given else contract_id
    check_contract(collection, searched, compatible_with)
    own = unit_vectors(given[searched], collection.dim)
    if migration is None or migration.contract_id not in given:
        return own, None
    second = unit_vectors(given[migration.contract_id], migration.dim)
    if len(second) != len(own):
        raise UsageError(f"{len(own)} faces have {len(second)} vectors by the other model; give one for each")
    return own, second


def check_persons(
    persons: Sequence[NewPerson],
    contract_id: str,
    collection: Collection,
    migration: Migration | None,
    compatible_with: Sequence[str] = (),
) -> list[ValidPerson]:
    """Return ``persons`` ready to be stored; :class:`UsageError` names the first invalid one by its index."""
    if not persons:
        check_contract(collection, contract_id, compatible_with)
    checked = []
    external_ids = set[str]()
    for index, person in enumerate(persons):
        try:
            found = check_vectors(person.vectors, contract_id, person.others, collection, migration, compatible_with)
            checked.append(_check_person(person, *found))
            external_id = checked[-1].external_id
            if external_id in external_ids:
                raise UsageError(f"its external id {external_id!a} is given twice; it names one person")
            if external_id is not None:
                external_ids.add(external_id)
        except ConflictError:  # of the collection, and no single person
            raise
        except UsageError as error:
            raise UsageError(f"person {index} of {len(persons)}: {error}" if len(persons) > 1 else str(error)) from None
    return checked


def _check_person(person: NewPerson, vectors: Float32, second: Float32 | None) -> ValidPerson:
    return ValidPerson(
        vectors,
        check_name(person.name),
        check_metadata(person.metadata),
        None if person.external_id is None else check_external_id(person.external_id),
        check_expires(person.expires),
        second,
        check_keys(person.keys, len(vectors)),
    )


def check_face_key(key: Any) -> str:
    """Return the key of a face; :class:`UsageError` unless it is a string of 1 to 64 printable ASCII characters."""
    if isinstance(key, str) and _FACE_KEY.fullmatch(key):
        return key
    raise UsageError(f"a face's key is 1 to 64 printable ASCII characters without spaces, not {quoted(key)}")


def check_keys(keys: Sequence[str | None], faces: int) -> tuple[str | None, ...]:
    """Return the keys of new faces of a person, none at all where each is None.

    Raises:
        UsageError: there are more or fewer than faces; one is not 1 to 64 printable ASCII characters, or comes twice.
    """
    given = [key for key in keys if key is not None]
    if not given:
        return ()
    if len(keys) != faces:
        raise UsageError(f"{faces} faces have {len(keys)} keys; give one for each, or None")
    for key in given:
        check_face_key(key)
        if given.count(key) > 1:
            raise UsageError(f"the key {key} is given twice; it names one face of a person")
    return tuple(keys)


def number_persons(persons: Sequence[ValidPerson], first: int, clock: Clock) -> list[Person]:
    """Return ``persons`` as they are to be stored under ids from ``first`` on, each followed by those of its faces."""
    made, created = list[Person](), now(clock)
    for person in persons:
        faces = tuple(range(first + 1, first + 1 + len(person.vectors)))
        about = (person.name, person.metadata, person.external_id)
        made.append(Person(first, *about, faces=faces, created=created, expires=person.expires))
        first += 1 + len(faces)
    return made


def miscounted(info: Collection, persons: int, faces: int) -> IntegrityError:
    """Return the error for a collection on a server that holds others than it counted."""
    return IntegrityError(
        f"collection {info.name} holds {persons} people and {faces} faces instead of {info.persons} and {info.faces}; "
        "restore a snapshot"
    )


def check_fields(**fields: Any) -> dict[str, Any]:
    """Return the fields of an update but for those to :data:`~plsc.gallery.values.KEEP`, ready to be stored."""
    checks = {"name": check_name, "metadata": check_metadata, "expires": check_expires}
    return {name: checks[name](value) for name, value in fields.items() if value is not KEEP}


def same_content(one: Person, other: Person) -> bool:
    """Return True if two persons have the same name, expiry and metadata: to Python alone, 1 equals True and 1.0."""
    first, second = (json.dumps([person.name, person.expires, dict(person.metadata)]) for person in (one, other))
    return first == second


def check_search(k: int, threshold: float) -> None:
    """Raise :class:`UsageError` unless ``k`` is an integer >= 1 and ``threshold`` a number."""
    if not _is_integer(k) or k < 1:
        raise UsageError(f"k is {ascii(k)[:80]}; at least one match must be asked for")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | np.number) or math.isnan(threshold):
        raise UsageError(f"the threshold is {ascii(threshold)[:80]}; it is a cosine from -1 to 1")


def check_page(after: int, limit: int) -> None:
    """Raise :class:`UsageError` unless ``after`` and ``limit`` are integers, ``limit`` >= 1."""
    if not _is_integer(limit) or limit < 1:
        raise UsageError(f"limit is {ascii(limit)[:80]}; at least one person must be asked for")
    if not _is_integer(after):
        raise UsageError(f"after is {ascii(after)[:80]}; it is the id of a person, or 0")


def is_id(value: Any) -> bool:
    """Return True if ``value`` could be the id of a person or a face."""
    return _is_integer(value) and 0 < value <= MAX_ID


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
