"""Filters: what parses, what is refused by name, and what holds, against a table written out by hand."""

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.errors import UsageError
from plsc.gallery.filters import Filter
from plsc.gallery.validation import check_metadata

ADA = {"city": "Bern", "age": 36, "height": 1.75, "member": True, "note": ""}

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 2)
scalars = text | numbers | st.booleans()


HOLD: list[dict[str, Any]] = [
    {}, {"city": "Bern"}, {"city": {"eq": "Bern"}, "age": 36}, {"age": 36.0}, {"member": True}, {"member": {"ne": 1}},
    {"member": {"in": [False, True]}}, {"age": {"gte": 36}}, {"age": {"lte": 36}}, {"age": {"gte": 30, "lt": 40}},
    {"age": {"gt": 35.999999}}, {"city": {"lt": "C", "gt": "B"}}, {"age": {"ne": "36"}}, {"age": {"in": [1, 36.0]}},
    {"age": {"exists": True}}, {"note": {"exists": True}}, {"note": ""}, {"away": {"exists": False}},
    {"away": {"ne": 1}},
]  # fmt: skip
HOLD_NOT: list[dict[str, Any]] = [
    {"city": "bern"}, {"city": "Bern", "age": 37}, {"age": "36"}, {"member": 1}, {"member": {"in": [1, 1.0, "true"]}},
    {"age": {"gt": 36}}, {"age": {"lt": 36}}, {"age": {"gte": 30, "lt": 36}}, {"age": {"gt": ""}}, {"city": {"gt": 0}},
    {"city": {"lt": 0}}, {"member": {"gte": 0}}, {"age": {"ne": 36.0}}, {"age": {"in": []}}, {"age": {"exists": False}},
    {"away": {"exists": True}}, {"away": {"in": [1]}},
    *({"away": {operator: 0}} for operator in ("eq", "gt", "gte", "lt", "lte")),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "holds"), [(one, True) for one in HOLD] + [(one, False) for one in HOLD_NOT])
def test_what_holds(asked: dict[str, Any], holds: bool) -> None:
    assert Filter.parse(asked).matches(ADA) is holds
    assert Filter.parse(json.loads(json.dumps(asked))).matches(ADA) is holds


@settings(max_examples=200, deadline=None)
@given(found=scalars, value=scalars)
def test_operators_agree_with_exact_arithmetic(found: Any, value: Any) -> None:
    def comes_before(one: Any, other: Any) -> bool:
        if isinstance(one, str):
            return list(map(ord, one)) < list(map(ord, other))
        return Fraction(one) < Fraction(other)

    kinds = [bool if isinstance(x, bool) else str if isinstance(x, str) else int for x in (found, value)]
    equal = kinds[0] is kinds[1] and (found == value if kinds[0] is not int else Fraction(found) == Fraction(value))
    ordered = kinds[0] is kinds[1] and kinds[0] is not bool
    before = ordered and comes_before(found, value)
    expected = {
        "eq": equal,
        "ne": not equal,
        "in": equal,
        "lt": before,
        "lte": ordered and (before or equal),
        "gt": ordered and not (before or equal),
        "gte": ordered and not before,
    }
    for operator, truth in expected.items():
        if operator in ("lt", "lte", "gt", "gte") and kinds[1] is bool:
            continue
        asked = [value] if operator == "in" else value
        assert Filter.parse({"k": {operator: asked}}).matches({"k": found}) is truth, operator


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (None, "a filter is a JSON object, not None"),
        ([], "a filter is a JSON object"),
        ("city", "a filter is a JSON object"),
        ({"age": None}, "'age' is None; it takes a string"),
        ({"age": [1]}, r"'age' is \[1\]"),
        ({"age": {}}, "the filter on 'age' is empty; give one of eq, ne"),
        ({"age": {"like": "x"}}, "knows no 'like'; it takes eq"),
        ({"age": {"eq": float("nan")}}, "'age' is nan"),
        ({"age": float("inf")}, "'age' is inf"),
        ({"age": 2**63}, "integers of 64 bits"),
        ({"age": -(2**63) - 1}, "integers of 64 bits"),
        ({"age": {"in": 3}}, "\"in\" of the filter on 'age' takes a list"),
        ({"age": {"in": list(range(10_001))}}, "at most 10000 values"),
        ({"age": {"in": list(range(6000))}, "size": {"in": list(range(6000))}}, "at most 10000 values together"),
        ({"age": {"in": [1, None]}}, "'age' is None"),
        ({"age": {"exists": 1}}, "is true or false, not 1"),
        ({"age": {"gt": True}}, "takes a number or a string, not True"),
        ({"age": {"gt": {"lt": 1}}}, "'age' is {'lt': 1}"),
        ({"": 1}, "a metadata key is a string of 1 to 1024 characters, not ''"),
        ({"x" * 1025: 1}, "a metadata key is a string"),
        ({"a\0b": 1}, "a metadata key"),
        ({"\ud800": 1}, "a metadata key"),
        ({1: 1}, "a metadata key"),
        ({"city": "x" * 1025}, "a string of at most 1024 characters"),
        ({"city": "\udfff"}, "'city' is"),
        ({"city": "a\0"}, "'city' is"),
        ({str(n): n for n in range(17)}, "a filter of 17 conditions; at most 16"),
    ],
)
def test_wrong_filters_are_refused_by_name(asked: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Filter.parse(asked)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


WRONG_METADATA: list[Any] = [
    None, [], "x", {"": 1}, {1: 2}, {"a": None}, {"a": []}, {"a": {}}, {"a": float("nan")}, {"a": -float("inf")},
    {"a": 2**63}, {"a": b"x"}, {"a": 1j}, {"a": "x" * 1025}, {"a\0": 1}, {"a": "\ud800"},
    {str(n): n for n in range(65)},
]  # fmt: skip


@pytest.mark.parametrize("metadata", WRONG_METADATA)
def test_wrong_metadata_is_refused(metadata: Any) -> None:
    with pytest.raises(UsageError):
        check_metadata(metadata)


@settings(max_examples=50, deadline=None)
@given(metadata=st.dictionaries(text.filter(bool), scalars, max_size=5))
def test_good_metadata_passes_and_fits_itself(metadata: dict[str, Any]) -> None:
    checked = check_metadata(metadata)
    assert checked == metadata
    assert checked is not metadata
    assert Filter.parse(metadata).matches(checked)
    assert Filter.parse({key: {"exists": True} for key in metadata}).matches(checked)
