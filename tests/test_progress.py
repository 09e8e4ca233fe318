"""Counts with their nouns."""

import pytest

from plsc.progress import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (4324, "image", "4,324 images"),
        (2, "identity", "2 identities"),
        (2, "query", "2 queries"),
        (2, "key", "2 keys"),
        (2, "empty class", "2 empty classes"),
        (2, "match", "2 matches"),
    ],
)
def test_a_count_has_the_number_of_its_noun(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_an_irregular_plural_is_given() -> None:
    assert counted(2, "person", "people") == "2 people"
