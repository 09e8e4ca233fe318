"""A gallery's meaning in dicts and float64 numpy, which shares no code with plsc: the oracle of random operations."""

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
GONE, LATER = "2001-01-01T00:00:00.000Z", "2990-01-01T00:00:00.000Z"  # times that have come, and that have not


@dataclass
class Row:
    """A person; ``faces`` are unit vectors by id. ``key`` stands for what an encrypted store decrypts them with."""

    name: str | None
    metadata: dict[str, Any]
    external_id: str | None
    expires: str | None
    faces: dict[int, Float64]
    revision: int = 1
    key: int | None = None

    def content(self) -> tuple[Any, ...]:
        """What a store tells of the person; the types of values count."""
        return self.name, repr(sorted(self.metadata.items())), self.external_id, self.expires, list(self.faces)


@dataclass
class Model:
    """Collections: {name: {person: row}}."""

    collections: dict[str, dict[int, Row]] = field(default_factory=dict)
    keys: "itertools.count[int]" = field(default_factory=itertools.count)

    def living(self, name: str, test: Any = None) -> dict[int, Row]:
        """The persons of a collection whose time has not come, and whose metadata pass the filter ``test`` (JSON)."""
        rows = sorted(self.collections[name].items())
        return {id: row for id, row in rows if row.expires != GONE and matches(test or {}, row.metadata)}

    def holder(self, name: str, external_id: str | None) -> int | None:
        """The living person that has an external id."""
        living = self.living(name)
        return next((id for id in living if external_id is not None and living[id].external_id == external_id), None)

    def enrol(self, name: str, id: int, row: Row) -> None:
        """Add a person; whoever expired gives up the external id."""
        assert id not in self.collections[name], "an id is given once"
        assert not set(row.faces) & self.face_ids(name), "an id is given once"
        for other in self.collections[name].values():
            if other.external_id == row.external_id:
                other.external_id = None
        self.collections[name][id] = row
        self.renew_key(row)

    def face_ids(self, name: str) -> set[int]:
        """Ids of all faces."""
        return {face for row in self.collections[name].values() for face in row.faces}

    def renew_key(self, row: Row) -> None:
        """Give a person another key, as who gets all other faces has."""
        row.key = next(self.keys) if row.faces else None

    def surviving(self, snapshot: "Model") -> "Model":
        """What can be restored of an encrypted store's ``snapshot``, while this is what the store holds."""
        alive = {row.key for rows in self.collections.values() for row in rows.values()}
        restored = copy.deepcopy(snapshot)
        for name, rows in restored.collections.items():
            restored.collections[name] = {id: row for id, row in rows.items() if not row.faces or row.key in alive}
        return restored

    def scores(self, name: str, query: Float64, test: Any = None) -> dict[int, float]:
        """The cosine of the best face of each person that may be found."""
        living = self.living(name, test)
        return {id: max(float(face @ query) for face in row.faces.values()) for id, row in living.items() if row.faces}


def matches(test: dict[str, Any], metadata: dict[str, Any]) -> bool:
    """Whether all conditions of a filter in JSON hold."""
    return all(
        _holds(operator, value, key in metadata, metadata.get(key))
        for key, asked in test.items()
        for operator, value in (asked.items() if isinstance(asked, dict) else [("eq", asked)])
    )


def _holds(operator: str, value: Any, present: bool, found: Any) -> bool:
    if operator == "exists":
        return present is value
    if operator == "ne":
        return not _holds("eq", value, present, found)
    if operator == "in":
        return any(_holds("eq", one, present, found) for one in value)
    if not present or _kind(found) != _kind(value):
        return False
    if operator == "eq":
        return bool(found == value)
    return _kind(found) != "flag" and bool(
        {"lt": found < value, "lte": found <= value, "gt": found > value, "gte": found >= value}[operator]
    )


def _kind(value: Any) -> str:
    return "flag" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
