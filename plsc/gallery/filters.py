"""Filters on persons' metadata, as JSON: ``{"city": "Bern", "age": {"gte": 30, "lt": 40}}`` (all must hold).

:meth:`Filter.matches` defines the meaning. Each store translates a filter into its own language with the parts below:
:data:`COMPARISONS` and :func:`plsc.gallery.validation.kind_of`.
"""

import operator as operators
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plsc.errors import UsageError, quoted
from plsc.gallery.validation import Kind, check_key, check_scalar, kind_of

OPERATORS = ("eq", "ne", "in", "gt", "gte", "lt", "lte", "exists")
COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}  # the ordering operators in SQL and Milvus expressions
MAX_CONDITIONS = 16  # of a filter: each costs a look at all persons who have the key
MAX_IN_VALUES = 10_000  # of all lists of a filter: each is a parameter of SQL
_ORDERINGS: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operators.gt,
    "gte": operators.ge,
    "lt": operators.lt,
    "lte": operators.le,
}


@dataclass(frozen=True)
class Condition:
    """``key operator value``; value is a scalar, a tuple of scalars for "in", a bool for "exists".

    Numbers and strings are never equal or ordered to one another; true and false are not numbers, and have no order;
    integers and fractions compare by their exact values, strings by code points. A missing key matches only "ne" and
    {"exists": false}.
    """

    key: str
    operator: str
    value: Any

    def matches(self, metadata: Mapping[str, Any]) -> bool:
        """Evaluate the condition; every store's translation must agree with this."""
        present = self.key in metadata
        found = metadata.get(self.key)
        if self.operator == "exists":
            return present == bool(self.value)
        if self.operator in ("eq", "ne"):
            equal = present and kind_of(found) == kind_of(self.value) and bool(found == self.value)
            return equal == (self.operator == "eq")
        if self.operator == "in":
            return present and (kind_of(found), found) in self._members
        if not present or kind_of(found) != kind_of(self.value) or isinstance(found, bool):
            return False
        return bool(_ORDERINGS[self.operator](found, self.value))

    @property
    def excludes(self) -> bool:
        """True for conditions that a missing key matches: "ne" and {"exists": false}."""
        return self.operator == "ne" or (self.operator == "exists" and not self.value)

    @cached_property
    def _members(self) -> frozenset[tuple[Kind, Any]]:
        """The values after "in" with their kinds: Python takes 1 and True for equal."""
        return frozenset((kind_of(value), value) for value in self.value)


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold; without any, everything matches."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, value: Any) -> "Filter":
        """Parse the JSON form; :class:`UsageError` names what is wrong in it."""
        if not isinstance(value, dict):
            raise UsageError(f"a filter is a JSON object, not {quoted(value)}")
        conditions = [condition for key, test in value.items() for condition in _parse_key(key, test)]
        if sum(len(one.value) for one in conditions if one.operator == "in") > MAX_IN_VALUES:
            raise UsageError(f'the lists after "in" of a filter have at most {MAX_IN_VALUES} values together')
        if len(conditions) > MAX_CONDITIONS:
            raise UsageError(f"a filter of {len(conditions)} conditions; at most {MAX_CONDITIONS} are taken")
        return cls(tuple(conditions))

    def matches(self, metadata: Mapping[str, Any]) -> bool:
        """Return True if all conditions hold for a person's metadata."""
        return all(condition.matches(metadata) for condition in self.conditions)


@dataclass(frozen=True, eq=False)
class PreparedFilter(Filter):
    """A filter whose matches a store has looked up already, for one search soon after.

    Attributes:
        found: what the store keeps of them.
        key: equal for filters with the same matches.
    """

    found: Any
    key: tuple[int, str]


@dataclass(frozen=True, eq=False)
class UnfinishedFilter(Filter):
    """A filter that a store has looked up in part; it is given back to be looked up further.

    Attributes:
        found: what the store keeps of who matches the first conditions.
        looked_up: how many conditions those are.
        change: number of the store's last change when it began.
    """

    found: Any
    looked_up: int
    change: int


def _parse_key(key: Any, test: Any) -> list[Condition]:
    check_key(key)
    if not isinstance(test, dict):
        check_scalar(key, test)
        return [Condition(key, "eq", test)]
    if not test:
        raise UsageError(f"the filter on {quoted(key)} is empty; give one of {', '.join(OPERATORS)}")
    return [_parse_condition(key, operator, value) for operator, value in test.items()]


def _parse_condition(key: str, operator: Any, value: Any) -> Condition:
    if operator not in OPERATORS:
        raise UsageError(f"the filter on {quoted(key)} knows no {quoted(operator)}; it takes {', '.join(OPERATORS)}")
    if operator == "in":
        if not isinstance(value, list) or len(value) > MAX_IN_VALUES:
            raise UsageError(f'"in" of the filter on {quoted(key)} takes a list of at most {MAX_IN_VALUES} values')
        for member in value:
            check_scalar(key, member)
        return Condition(key, operator, tuple(value))
    if operator == "exists":
        if not isinstance(value, bool):
            raise UsageError(f'"exists" of the filter on {quoted(key)} is true or false, not {quoted(value)}')
        return Condition(key, operator, value)
    check_scalar(key, value)
    if operator in COMPARISONS and isinstance(value, bool):
        raise UsageError(f'"{operator}" of the filter on {quoted(key)} takes a number or a string, not {quoted(value)}')
    return Condition(key, operator, value)
