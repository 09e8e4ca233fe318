"""Metadata in Milvus' rows, and filters as its expressions.

Each value becomes a string that sorts as the value does, with a letter for its kind in front, under a key of plain
letters: {"age": 36} is stored in the JSON field "fits" as {"k4a…": "n40…"}. So one comparison of strings decides,
whatever a server's version makes of integers beyond 2^53, mixed kinds or quotation marks, and no text of a user is
ever part of an expression.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from plsc.gallery.filters import COMPARISONS, Condition, Filter

_NOTHING = "row < 0"
_NEXT_KIND = {"n": "o", "s": "t"}  # the letter behind a kind's own: the end of its range


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the JSON field ``fits`` for ``metadata``."""
    return {_encode_key(key): _encode_value(value) for key, value in metadata.items()}


def to_expression(filter: Filter | None) -> str:
    """Return the expression that is true for the rows that match; empty without a filter."""
    return all_of([_condition(condition) for condition in (filter.conditions if filter else ())])


def all_of(parts: Iterable[str]) -> str:
    """Join conditions by "and", but for empty ones."""
    return " and ".join(f"({part})" for part in parts if part)


def any_of(parts: list[str]) -> str:
    """Join ``parts`` by "or" as a balanced tree: parsers nest as deep as a plain row of them is long."""
    if len(parts) <= 2:
        return " or ".join(f"({part})" for part in parts) or _NOTHING
    half = len(parts) // 2
    return f"({any_of(parts[:half])}) or ({any_of(parts[half:])})"


def one_of(field: str, values: Iterable[int]) -> str:
    """Return the condition that a field of integers has one of ``values``."""
    return f"{field} in [{', '.join(map(str, values))}]"


def digest(*texts: str) -> str:
    """Return plain letters that stand for texts of users, 32 of them."""
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        found.update(f"{len(text)} {text}".encode())
    return found.hexdigest()


def _condition(condition: Condition) -> str:
    found = f'fits["{_encode_key(condition.key)}"]'
    if condition.operator == "exists":
        return f"exists {found}" if condition.value else f"not (exists {found})"
    if condition.operator == "in":
        return any_of([f'{found} == "{_encode_value(value)}"' for value in condition.value])
    value = _encode_value(condition.value)
    if condition.operator == "eq":
        return f'{found} == "{value}"'
    if condition.operator == "ne":
        # In parentheses: Milvus 2.3 binds "exists" looser than "or", milvus-lite tighter.
        return any_of([f"not (exists {found})", f'{found} != "{value}"'])
    kind, sign = value[0], COMPARISONS[condition.operator]
    if condition.operator in ("lt", "lte"):
        return f'{found} >= "{kind}" and {found} {sign} "{value}"'
    return f'{found} {sign} "{value}" and {found} < "{_NEXT_KIND[kind]}"'


def _encode_key(key: str) -> str:
    return "k" + hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _encode_value(value: Any) -> str:
    if isinstance(value, bool):
        return f"b{value:d}"
    if isinstance(value, str):
        return "s" + value.encode().hex()
    # The nearest double, and an integer's distance from it: together exact, and in the order of the numbers.
    nearest = float(value) + 0.0  # turns -0.0 into 0.0
    (bits,) = struct.unpack(">Q", struct.pack(">d", nearest))
    bits = bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63  # IEEE bits, made to sort as unsigned integers
    distance = value - int(nearest) if isinstance(value, int) else 0
    return f"n{bits:016x}{distance + 0x8000:04x}"
