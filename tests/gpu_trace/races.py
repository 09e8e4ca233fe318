"""What happens before what, on streams and on the host's threads, and storages that are used out of that order.

Every stream and every thread of the host has a clock of its own that counts what it does, and knows of the others' what
lies before its next operation (vector clocks; Fidge, 1988). A stream knows what the host knew when it launched; the
host learns from a stream where it waits, a stream from another by an event. An operation that writes a storage must
come after all that read or wrote it, one that reads it after what wrote it: else nothing but luck puts them in order.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Clock = dict[object, int]
MAIN = "the main thread"


class Use(NamedTuple):
    """The number of an operation on a stream or thread, and the place of the project that it came from."""

    owner: object
    tick: int
    place: str


class Races:
    """Clocks, and the last uses of each storage.

    Args:
        report: is given a line for each use that is out of order.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._clocks: dict[object, Clock] = {}
        self._thread: object = MAIN
        self._written: weakref.WeakKeyDictionary[torch.UntypedStorage, Use] = weakref.WeakKeyDictionary()
        self._read: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[object, Use]] = weakref.WeakKeyDictionary()

    def knowledge(self, stream: object = None) -> Clock:
        """What lies before the next operation of a stream, or of the present thread (None)."""
        own = self._clock(self._thread)
        return {**own} if stream is None else _joined(self._clock(stream), own)

    def learn(self, clock: Clock, stream: object = None) -> None:
        """Put what ``clock`` knows before the next operation of a stream, or of the present thread (None)."""
        owner = self._thread if stream is None else stream
        self._clocks[owner] = _joined(self._clock(owner), clock)

    def wait_for(self, stream: object) -> None:
        """The present thread waits for all that a stream was given."""
        self.learn(self._clock(stream))

    def wait_for_all(self) -> None:
        """The present thread waits for every stream."""
        for clock in list(self._clocks.values()):
            self.learn(clock)

    @contextmanager
    def on_thread(self, thread: object, since: Clock) -> Iterator[None]:
        """Be another thread, on a task that was handed to it with what its giver knew; who asks waits for it."""
        before, self._thread = self._thread, thread
        self.learn(since)
        try:
            yield
        finally:
            done, self._thread = self.knowledge(), before
            self.learn(done)

    def use(
        self,
        stream: object,
        read: Iterable[torch.UntypedStorage],
        written: Iterable[torch.UntypedStorage],
        place: str,
    ) -> None:
        """Note an operation on a stream, or of the present thread (None), and report what it comes too early for."""
        owner = self._thread if stream is None else stream
        clock = self._clocks[owner] = self.knowledge(stream)
        clock[owner] = clock.get(owner, 0) + 1
        use = Use(owner, clock[owner], place)
        for storage in read:
            self._check(clock, self._written.get(storage), f"{place} reads what {{}} writes")
            self._read.setdefault(storage, {})[owner] = use
        for storage in written:
            self._check(clock, self._written.get(storage), f"{place} writes what {{}} writes")
            for reader in self._read.pop(storage, {}).values():
                self._check(clock, reader, f"{place} writes what {{}} reads")
            self._written[storage] = use

    def _check(self, clock: Clock, before: Use | None, text: str) -> None:
        if before is not None and clock.get(before.owner, 0) < before.tick:
            self._report(f"{text.format(before.place)}, and nothing puts them in order")

    def _clock(self, owner: object) -> Clock:
        return self._clocks.setdefault(owner, {})


def _joined(one: Clock, other: Clock) -> Clock:
    return {owner: max(one.get(owner, 0), other.get(owner, 0)) for owner in {**one, **other}}


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes, by its schema."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found
