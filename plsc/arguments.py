"""Numbers among the arguments of public functions: Python's and numpy's alike, as Python's own."""

import numbers
import operator
from typing import Any

from plsc.errors import UsageError, quoted


def as_integer(value: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """Return ``value`` as an int; :class:`UsageError`, which says ``name``, unless it is an integer in the range."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be an integer, not {quoted(value)}") from None
    if least is not None and number < least:
        raise UsageError(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise UsageError(f"{name} must be at most {most}, not {number}")
    return number


def as_number(value: Any, name: str) -> float:
    """Return ``value`` as a float; :class:`UsageError`, which says ``name``, unless it is a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name} must be a number, not {quoted(value)}")
    return float(value)
