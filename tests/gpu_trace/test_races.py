"""What happens before what, on operations that are written out."""

from collections.abc import Callable

import pytest
import torch

from gpu_trace.races import Races

COMPUTE, COPY = 0, 16


def raced(actions: Callable[[Races, torch.UntypedStorage], None]) -> list[str]:
    """The lines that are reported."""
    lines: list[str] = []
    actions(Races(lines.append), torch.empty(1).untyped_storage())
    return lines


def copied_behind(races: Races, storage: torch.UntypedStorage, *, waits: bool) -> None:
    """A copy of what a kernel wrote, on another stream, behind the kernel's event."""
    races.use(COMPUTE, [], [storage], "kernel")
    event = races.knowledge(COMPUTE)
    if waits:
        races.learn(event, COPY)
    races.use(COPY, [storage], [], "copy")


def read_by_host(races: Races, storage: torch.UntypedStorage, *, waits: bool) -> None:
    """A number that the host reads after its copy's event."""
    races.use(COMPUTE, [], [storage], "copy")
    if waits:
        races.learn(races.knowledge(COMPUTE))
    races.use(None, [storage], [], "tolist")


def buffer_reused(races: Races, storage: torch.UntypedStorage, *, waits: bool) -> None:
    """A buffer that the host fills while a stream may still copy from it."""
    races.use(None, [], [storage], "first rows")
    races.use(COPY, [storage], [], "copy")
    if waits:
        races.wait_for(COPY)
    races.use(None, [], [storage], "next rows")


def overwritten(races: Races, storage: torch.UntypedStorage, *, waits: bool) -> None:
    """Rows that a stream still copies while the next update overwrites them."""
    races.use(COPY, [storage], [], "copy")
    if waits:
        races.learn(races.knowledge(COPY), COMPUTE)
    races.use(COMPUTE, [], [storage], "update")


def in_background(races: Races, storage: torch.UntypedStorage, *, waits: bool) -> None:
    """A thread's task does not know what its giver learned after it gave the task."""
    races.use(COMPUTE, [], [storage], "kernel")
    early = races.knowledge()
    races.wait_for(COMPUTE)
    with races.on_thread("lane", races.knowledge() if waits else early):
        races.use(COPY, [storage], [], "copy")


@pytest.mark.parametrize("actions", [copied_behind, read_by_host, buffer_reused, overwritten, in_background])
def test_a_use_that_nothing_puts_in_order_is_named(actions: Callable[..., None]) -> None:
    assert raced(lambda races, storage: actions(races, storage, waits=True)) == []
    (line,) = raced(lambda races, storage: actions(races, storage, waits=False))
    assert line.endswith("and nothing puts them in order")


def test_what_a_task_waited_for_lies_before_what_follows_its_result() -> None:
    def actions(races: Races, storage: torch.UntypedStorage) -> None:
        with races.on_thread("lane", races.knowledge()):
            races.use(COPY, [], [storage], "copy")
            races.wait_for(COPY)
        races.use(COMPUTE, [storage], [], "kernel")

    assert raced(actions) == []


def test_readers_need_no_order_among_each_other() -> None:
    def actions(races: Races, storage: torch.UntypedStorage) -> None:
        races.use(COMPUTE, [storage], [], "kernel")
        races.use(COPY, [storage], [], "copy")
        races.wait_for_all()
        races.use(None, [], [storage], "host")

    assert raced(actions) == []
