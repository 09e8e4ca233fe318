"""Names and metadata of the persons who were found last: who is found often is asked of SQLite once."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from plsc.gallery.store import PersonSummary
from plsc.gallery.validation import is_id

Read = Callable[[list[int]], dict[int, PersonSummary]]

MOST_BYTES = 16 << 20  # a collection
_OVERHEAD = 500  # bytes of an entry, about
_PER_ITEM = 150  # bytes of a metadata entry besides its text


class RememberedNames:
    """What was last read of a collection's persons, up to about ``most_bytes``; any thread may ask.

    Two generations: who is found is in the younger, or moves there. When that has half of the bytes, the older is
    let go and the younger is the older. So being found again changes nothing, and costs next to nothing.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_young, self._bytes = most_bytes // 2, 0  # of the younger
        self._young: dict[int, PersonSummary] = {}
        self._old: dict[int, PersonSummary] = {}
        self._changes = 0
        self._lock = threading.Lock()

    def of(self, persons: Sequence[int], read: Read) -> dict[int, PersonSummary]:
        """Those of ``persons`` that exist; ``read`` gets the ones that are not remembered."""
        with self._lock:
            known = {person: self._young[person] for person in persons if person in self._young}
            if len(known) == len(persons):
                return known
            renewed = {person: self._old.pop(person) for person in persons if person in self._old}
            self._keep(renewed)
            changes = self._changes
        known.update(renewed)
        missing = [person for person in persons if person not in known]
        if missing:
            found = read(missing)
            with self._lock:
                if changes == self._changes:  # else what was read may be of before a change, and would stay
                    self._keep(found)
            known.update(found)
        return {person: known[person] for person in persons if person in known}

    @contextmanager
    def changing(self, person: Any) -> Iterator[None]:
        """Around a change of ``person``, which may be no id: afterwards, however it ended, it is read again."""
        try:
            yield
        finally:
            with self._lock:
                self._changes += 1
                if is_id(person):
                    self._forget(int(person))

    def _keep(self, found: dict[int, PersonSummary]) -> None:
        for person, named in found.items():
            self._forget(person)
            self._young[person] = named
            self._bytes += _size(named)
            if self._bytes > self._most_young:
                self._old, self._young, self._bytes = self._young, {}, 0

    def _forget(self, person: int) -> None:
        self._old.pop(person, None)
        named = self._young.pop(person, None)
        if named is not None:
            self._bytes -= _size(named)


def _size(named: PersonSummary) -> int:
    text = sum(len(key) + (len(value) if isinstance(value, str) else 8) for key, value in named.metadata.items())
    return _OVERHEAD + len(named.name or "") + text + _PER_ITEM * len(named.metadata)
