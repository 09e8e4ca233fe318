"""The words for what a gallery holds."""

import pytest

from plsc.errors import UsageError
from plsc.serve.settings import PEOPLE, Items


@pytest.mark.parametrize(
    ("given", "items"),
    [
        ("people", PEOPLE),
        ("products", Items("product", "products")),
        ("species/species", Items("species", "species")),
        ("varieties", Items("variety", "varieties")),
        ("mouse/mice", Items("mouse", "mice")),
    ],
)
def test_one_and_many(given: str, items: Items) -> None:
    assert Items.parse(given) == items


@pytest.mark.parametrize("given", ["", "cattle", "Products", "a b/c", "<b>/x", "s"])
def test_what_is_no_plural_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--items"):
        Items.parse(given)
