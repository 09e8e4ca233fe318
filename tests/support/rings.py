"""The rings of tests: which tests `make test` takes, and which are left to `make test-all`.

A test, case or module of the second ring has the mark ``exhaustive``. It gets it here where it is ``live``, where it is
``slow``, and where its case or file is of another engine of galleries than plain SQLite. Of a test with many cases,
``@pytest.mark.first_ring("case", ...)`` names those of the first ring, slow ones too; the others get ``exhaustive``.
"""

from collections.abc import Iterable

import pytest

OTHER_ENGINES = {"encrypted", "postgres", "milvus"}


def mark_second_ring(item: pytest.Item) -> None:
    """Mark what is of the second ring; before ``-m`` chooses. It stays hermetic unless its own marks say otherwise."""
    mark, case = item.get_closest_marker("first_ring"), _case(item) or ""
    is_slow = case not in mark.args if mark is not None else item.get_closest_marker("slow") is not None
    words = {*case.split("-"), *item.path.stem.split("_")}
    if is_slow or item.get_closest_marker("live") or OTHER_ENGINES & words:
        item.add_marker(pytest.mark.exhaustive(hermetic=True))


def keeps_to_its_process(item: pytest.Item) -> bool:
    """Whether a test may start no process, open no socket, and neither sleep nor kill."""
    if any(item.get_closest_marker(name) for name in ("live", "gpu")):
        return False
    return all("hermetic" in mark.kwargs for mark in item.iter_markers("exhaustive"))


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
