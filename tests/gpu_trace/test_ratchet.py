"""The comparison of counts, on counts that are written out."""

from typing import Any

import pytest

from gpu_trace import ratchet

STAYS = "a.py:read synchronize of an event"
REMOVABLE = "b.py:ask item"


def content(**measures: dict[str, float]) -> dict[str, Any]:
    """One scenario's counts: nothing but ``measures``."""
    return {measure: measures.get(measure.split()[0], {}) for measure in ratchet.TOLERANCE}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, bool]]:
    """What differs, and whether it is worse."""
    old = {"torch": ratchet.torch_version(), ratchet.MUST_STAY: {STAYS: "why"}, "scenarios": {"step": before}}
    return [(change.text, change.worse) for change in ratchet.compare(old, {"step": after})]


@pytest.mark.parametrize("measure", ["host", "asynchronous"])
def test_a_wait_that_must_stay_is_no_improvement_when_it_is_gone(measure: str) -> None:
    before = content(**{measure: {STAYS: 2, REMOVABLE: 1}})
    (gone, *rest) = sorted(changes(before, content(**{measure: {REMOVABLE: 1}})), key=lambda change: not change[1])
    assert gone == (f"step: a wait that must stay 2 -> 0: {STAYS}: why", True)
    assert [worse for _, worse in rest] == [False]
    assert any(worse for _, worse in changes(before, content(**{measure: {STAYS: 1, REMOVABLE: 1}})))


def test_another_wait_less_is_an_improvement_and_one_more_is_worse() -> None:
    before, after = content(host={STAYS: 2, REMOVABLE: 1}), content(host={STAYS: 2})
    assert [worse for _, worse in changes(before, after)] == [False]
    assert [worse for _, worse in changes(after, before)] == [True]
    assert changes(before, before) == []


def test_the_committed_waits_that_must_stay_are_counted() -> None:
    """A renamed function would leave its old name behind, which guards nothing."""
    committed = ratchet.committed()
    counted = {
        place
        for scenario in committed["scenarios"].values()
        for measure in ("host waits", "asynchronous copies, bytes")
        for place in scenario[measure]
    }
    assert set(committed[ratchet.MUST_STAY]) <= counted
