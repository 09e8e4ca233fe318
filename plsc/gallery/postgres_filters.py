"""Filters as SQL on a jsonb column, and metadata as jsonb: values are parameters, never part of the text."""

import json
from collections.abc import Mapping
from typing import Any

from plsc.gallery.filters import Condition, Filter

_SIGNS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """``metadata`` as JSON for jsonb, whose numbers are decimals: fractions are written so that they stay exact."""
    return "{" + ", ".join(f"{json.dumps(key)}: {_json(value)}" for key, value in metadata.items()) + "}"


def conditions(where: Filter | None, column: str) -> tuple[str, list[Any]]:
    """SQL that begins with AND (empty without a filter), and its parameters: true where ``where`` holds."""
    parts = [_condition(condition, column) for condition in (where.conditions if where else ())]
    return "".join(f" AND {text}" for text, _ in parts), [value for _, values in parts for value in values]


def _condition(condition: Condition, column: str) -> tuple[str, list[Any]]:
    key, value, found = condition.key, condition.value, f"({column} -> %s)"
    if condition.operator == "exists":
        return f"({found} IS NOT NULL) = %s", [key, bool(value)]
    if condition.operator == "in":
        return f"coalesce({found} = ANY(%s::jsonb[]), false)", [key, [_json(one) for one in value]]
    if condition.operator in ("eq", "ne"):
        sign = "" if condition.operator == "eq" else "NOT "
        return f"{sign}coalesce({found} = %s::jsonb, false)", [key, _json(value)]
    text = isinstance(value, str)
    ordered = f'({column} ->> %s) COLLATE "C"' if text else f"({column} ->> %s)::numeric"
    compared = f"{ordered} {_SIGNS[condition.operator]} %s" + ("" if text else "::numeric")
    kind = "string" if text else "number"
    # CASE, for AND may be evaluated in any order, and a cast of what is no number fails.
    return (
        f"CASE WHEN jsonb_typeof({found}) = '{kind}' THEN {compared} ELSE false END",
        [key, key, value if text else _json(value)],
    )


def _json(value: Any) -> str:
    """JSON of a scalar; a float of 2^53 and more with all its digits, for its shortest form is another decimal."""
    if isinstance(value, float) and abs(value) >= 2**53:
        return f"{value:.1f}"
    return json.dumps(value)
