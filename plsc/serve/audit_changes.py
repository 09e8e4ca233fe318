"""Which changes of a store have a line in its audit log.

A store numbers its changes from 1 on, and the line of a request names those that it made as ``changes``. A process that
is killed between a commit and the line leaves a number that no line has. The next start finds it, and says so in an
entry of its own: ``gap``, with ``missing``, a list of [first, last]. The first line of a file that follows another says
what is known by then: all up to ``changes_to``, and of later ones ``changes``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plsc.serve.audit_chain import parse_line

MAX_BEYOND = 10_000  # changes in flight at the same time are far fewer: what is missing then does not come any more
_MAX_RANGES = 256  # in a line


class ChangesSeen:
    """The changes with lines: all up to ``to``, and those in ``beyond``."""

    def __init__(self) -> None:
        self.to = 0
        self.beyond = set[int]()

    def take(self, entry: dict[str, Any]) -> None:
        """Note what a line says."""
        if type(entry.get("changes_to")) is int:
            self.to, self.beyond = entry["changes_to"], set()
        changes = entry.get("changes")
        if isinstance(changes, list):
            self.beyond |= {number for number in changes if type(number) is int and number > self.to}
        while self.to + 1 in self.beyond:
            self.to += 1
            self.beyond.remove(self.to)

    @property
    def last(self) -> int:
        """The largest number that a line has."""
        return max(self.beyond, default=self.to)

    def known(self) -> dict[str, Any]:
        """What the first line of a new file says."""
        return {"changes_to": self.to, "changes": sorted(self.beyond)}

    def gap(self, last: int) -> dict[str, Any] | None:
        """The entry for changes up to ``last``, the store's, that no line has; None: there are none.

        ``undone`` are changes with lines that the store does not know of: an older state of it was brought back.
        """
        if last < self.last:
            return {"event": "gap", "missing": [], "undone": [last + 1, self.last], "changes_to": last}
        missing = _ranges(self.to, self.beyond, last)
        if not missing:
            return None
        count = sum(end - first + 1 for first, end in missing)
        return {"event": "gap", "missing": missing[:_MAX_RANGES], "count": count, "changes_to": last}


def read_changes(path: Path) -> ChangesSeen:
    """What the lines of a log's newest file say."""
    seen = ChangesSeen()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                entry = parse_line(line.rstrip(b"\n"))
                if entry is not None:
                    seen.take(entry)
    return seen


def _ranges(to: int, beyond: Iterable[int], last: int) -> list[list[int]]:
    """The runs [first, last] of numbers above ``to`` and up to ``last`` that are not in ``beyond``."""
    found = []
    for number in [*sorted(beyond), last + 1]:
        if number > to + 1:
            found.append([to + 1, number - 1])
        to = number
    return found
