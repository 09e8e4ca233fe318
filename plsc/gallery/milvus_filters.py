"""Metadata as Milvus compares them, and filters as Milvus expressions.

Each value becomes a string that sorts as the value does, with a letter for its kind in front, under a key of plain
letters: ``{"age": 36}`` is stored as ``{"k4a…": "n40…"}``. So one comparison of strings decides, whatever a server's
version thinks of numbers beyond 2^53, of kinds mixed or of quotation marks, and no text of a user is ever part of an
expression.
"""

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

from plsc.gallery.filters import Condition, Filter

_NOTHING = "id < 0"
_PAST = {"n": "o", "s": "t"}  # the letter behind a kind's


def fits_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What the JSON field ``fits`` holds for ``metadata``."""
    return {_key(key): _sortable(value) for key, value in metadata.items()}


def expression(where: Filter | None) -> str:
    """The Milvus expression that is true where ``where`` holds; empty where everything fits."""
    return " and ".join(f"({_condition(condition)})" for condition in (where.conditions if where else ()))


def _condition(condition: Condition) -> str:
    found = f'fits["{_key(condition.key)}"]'
    if condition.operator == "exists":
        return f"exists {found}" if condition.value else f"not exists {found}"
    if condition.operator == "in":
        return _any([f'{found} == "{_sortable(value)}"' for value in condition.value])
    value = _sortable(condition.value)
    if condition.operator == "eq":
        return f'{found} == "{value}"'
    if condition.operator == "ne":
        return f'not exists {found} or {found} != "{value}"'
    kind = value[0]
    if condition.operator in ("lt", "lte"):
        return f'{found} >= "{kind}" and {found} {"<" if condition.operator == "lt" else "<="} "{value}"'
    return f'{found} {">" if condition.operator == "gt" else ">="} "{value}" and {found} < "{_PAST[kind]}"'


def _any(parts: list[str]) -> str:
    """One of ``parts``, halved again and again: parsers nest as deep as a row of ``or`` is long."""
    if len(parts) <= 2:
        return " or ".join(parts) or _NOTHING
    half = len(parts) // 2
    return f"({_any(parts[:half])}) or ({_any(parts[half:])})"


def _key(key: str) -> str:
    return "k" + hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _sortable(value: Any) -> str:
    if isinstance(value, bool):
        return f"b{value:d}"
    if isinstance(value, str):
        return "s" + value.encode().hex()
    # The nearest double, and how far an integer lies from it: together exact, and in the numbers' order.
    nearest = float(value) + 0.0  # -0.0 is 0.0
    (bits,) = struct.unpack(">Q", struct.pack(">d", nearest))
    bits = bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63
    beside = value - int(nearest) if isinstance(value, int) else 0
    return f"n{bits:016x}{beside + 0x8000:04x}"
