"""The order of collectives, on sequences that are written out."""

import pytest

from gpu_trace import order
from gpu_trace.tracer import Collective

Sequences = dict[int, list[Collective]]


def between(one: int, other: int, name: str, size: int = 8, batch: int = 0) -> Collective:
    """A send or recv of a rank, from or to the other."""
    first, last = sorted([one, other])
    return Collective(first, last + 1, last - first, name, "float32", size, "here", batch)


def reduced(*ranks: int) -> Collective:
    """An all-reduce."""
    return Collective(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0], "allreduce", "float32", 8, "here")


HANGS: dict[str, Sequences] = {
    "both send first": {
        0: [between(0, 1, "send"), between(0, 1, "recv")],
        1: [between(0, 1, "send"), between(0, 1, "recv")],
    },
    "a send that none receives": {0: [between(0, 1, "send")], 1: []},
    "other sizes": {0: [between(0, 1, "send", size=16)], 1: [between(0, 1, "recv")]},
    "a ring": {
        rank: [between(rank, (rank + 1) % 3, "send"), between(rank, (rank - 1) % 3, "recv")] for rank in range(3)
    },
    "an all-reduce before the recv": {
        0: [between(0, 1, "send"), reduced(0, 1)],
        1: [reduced(0, 1), between(0, 1, "recv")],
    },
    "two groups in other orders": {0: [reduced(0, 1), reduced(0, 2)], 1: [reduced(0, 1)], 2: [reduced(0, 2)] * 2},
}
ENDS: dict[str, Sequences] = {
    "one after another": {
        0: [between(0, 1, "send"), between(0, 1, "recv"), reduced(0, 1)],
        1: [between(0, 1, "recv"), between(0, 1, "send"), reduced(0, 1)],
    },
    "together": {
        0: [between(0, 1, "send", batch=1), between(0, 1, "recv", batch=1)],
        1: [between(0, 1, "send", batch=4), between(0, 1, "recv", batch=4)],
    },
    "a peer that was not traced": {0: [between(0, 5, "send"), reduced(0, 4, 8)], 4: [reduced(0, 4, 8)]},
}


@pytest.mark.parametrize("name", HANGS)
def test_ranks_that_wait_for_ever_are_named(name: str) -> None:
    lines = order.stuck(HANGS[name])
    assert lines
    assert all(line.startswith("rank ") and "waits in" in line for line in lines)


@pytest.mark.parametrize("name", ENDS)
def test_ranks_that_do_not_are_not(name: str) -> None:
    assert order.stuck(ENDS[name]) == []
    assert order.differences(ENDS[name]) == []
