"""The rings of tests: which cases `make test` takes of a test that `make test-all` runs with further options.

A test, case or module of the second ring has the mark ``exhaustive``. Of a test with many cases,
``@pytest.mark.first_ring("case", ...)`` names those of the first ring; the others get ``exhaustive``.
"""

from collections.abc import Iterable

import pytest


def mark_second_ring(item: pytest.Item) -> None:
    """Mark a case that its test's ``first_ring`` does not name; before ``-m`` chooses."""
    mark = item.get_closest_marker("first_ring")
    if mark is not None and _case(item) not in mark.args:
        item.add_marker("exhaustive")


def unknown_cases(items: Iterable[pytest.Item]) -> list[str]:
    """The names in marks ``first_ring`` that no case of their test has, where all cases were collected."""
    named, known = set(), set()
    for item in items:
        mark = item.get_closest_marker("first_ring")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            named.update(f"{test}[{case}]" for case in mark.args)
            known.add(item.nodeid)
    return sorted(named - known)


def _case(item: pytest.Item) -> str | None:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
