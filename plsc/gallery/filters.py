"""Filters on persons' metadata, as JSON: ``{"city": "Bern", "age": {"gte": 30, "lt": 40}}`` (all must hold)."""

import math
import operator as operators
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plsc.errors import UsageError

OPERATORS = ("eq", "ne", "in", "gt", "gte", "lt", "lte", "exists")
_LARGEST = 64  # conditions in a filter, and entries of a metadata object
_LONGEST = 1024  # characters of a key or a value
_MANY = 10_000  # values after "in"
_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operators.gt,
    "gte": operators.ge,
    "lt": operators.lt,
    "lte": operators.le,
}


@dataclass(frozen=True)
class Condition:
    """``key operator value``; value is a scalar, a tuple of scalars for "in", a bool for "exists".

    Numbers and strings are never equal or ordered to one another; true and false are not numbers, and have no order;
    integers and fractions are compared by their exact values, strings by their code points. A key that is absent fits
    "ne" and {"exists": false} alone.
    """

    key: str
    operator: str
    value: Any

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a person's metadata fit: the meaning that every store's own translation must have."""
        present = self.key in metadata
        found = metadata.get(self.key)
        if self.operator == "exists":
            return present == bool(self.value)
        if self.operator in ("eq", "ne"):
            return (present and _same(found, self.value)) == (self.operator == "eq")
        if self.operator == "in":
            return present and (_kind(found), found) in self._members
        if not present or _kind(found) != _kind(self.value) or isinstance(found, bool):
            return False
        return bool(_ORDERS[self.operator](found, self.value))

    @cached_property
    def _members(self) -> frozenset[tuple[str, Any]]:
        """The values after "in", with their kinds: 1 and true are equal to Python, and here they are not."""
        return frozenset((_kind(value), value) for value in self.value)


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold; without any, everything fits."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, value: Any) -> "Filter":
        """Read the JSON form; :class:`UsageError` names what is wrong in it."""
        if not isinstance(value, dict):
            raise UsageError(f"a filter is a JSON object, not {_shown(value)}")
        conditions = [condition for key, asked in value.items() for condition in _conditions(key, asked)]
        if len(conditions) > _LARGEST:
            raise UsageError(f"a filter of {len(conditions)} conditions; at most {_LARGEST} are taken")
        return cls(tuple(conditions))

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        """Whether all conditions hold."""
        return all(condition.holds(metadata) for condition in self.conditions)


def check_metadata(metadata: Any) -> dict[str, Any]:
    """``metadata`` itself where it is an object of few short keys and finite scalars; else :class:`UsageError`."""
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a JSON object, not {_shown(metadata)}")
    if len(metadata) > _LARGEST:
        raise UsageError(f"metadata of {len(metadata)} entries; at most {_LARGEST} are taken")
    for key, value in metadata.items():
        _check_key(key)
        _check_scalar(key, value)
    return dict(metadata)


def _conditions(key: Any, asked: Any) -> list[Condition]:
    _check_key(key)
    if not isinstance(asked, dict):
        _check_scalar(key, asked)
        return [Condition(key, "eq", asked)]
    if not asked:
        raise UsageError(f"the filter on {_shown(key)} is empty; give one of {', '.join(OPERATORS)}")
    return [_condition(key, operator, value) for operator, value in asked.items()]


def _condition(key: str, operator: Any, value: Any) -> Condition:
    if operator not in OPERATORS:
        raise UsageError(f"the filter on {_shown(key)} knows no {_shown(operator)}; it takes {', '.join(OPERATORS)}")
    if operator == "in":
        if not isinstance(value, list) or len(value) > _MANY:
            raise UsageError(f'"in" of the filter on {_shown(key)} takes a list of at most {_MANY} values')
        for one in value:
            _check_scalar(key, one)
        return Condition(key, operator, tuple(value))
    if operator == "exists":
        if not isinstance(value, bool):
            raise UsageError(f'"exists" of the filter on {_shown(key)} is true or false, not {_shown(value)}')
        return Condition(key, operator, value)
    _check_scalar(key, value)
    if operator in _ORDERS and isinstance(value, bool):
        raise UsageError(f'"{operator}" of the filter on {_shown(key)} takes a number or a string, not {_shown(value)}')
    return Condition(key, operator, value)


def _check_key(key: Any) -> None:
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST or "\0" in key or not _encodes(key):
        raise UsageError(f"a metadata key is a string of 1 to {_LONGEST} characters, not {_shown(key)}")


def _check_scalar(key: str, value: Any) -> None:
    if isinstance(value, str) and len(value) <= _LONGEST and "\0" not in value and _encodes(value):
        return
    if isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    raise UsageError(
        f"{_shown(key)} is {_shown(value)}; it takes a string of at most {_LONGEST} characters, "
        "a finite number (integers of 64 bits), true or false"
    )


def _encodes(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON may carry half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _same(one: Any, other: Any) -> bool:
    return _kind(one) == _kind(other) and bool(one == other)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    return "text" if isinstance(value, str) else "number"


def _shown(value: Any) -> str:
    return ascii(value)[:80]
