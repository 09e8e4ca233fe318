"""The rings of tests: which cases `make test` leaves to `make test-all`, by the patterns of tests/second_ring.txt."""

import re


class SecondRing:
    """Cases by the patterns of ``text``: a line each, where a later one with ``!`` takes cases back.

    ``*`` stands for any text, and everything else for itself. Empty lines and those that begin with ``#`` say nothing.
    """

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._patterns = [(line, _compiled(line.removeprefix("!"))) for line in lines if line and line[0] != "#"]
        self._used: set[str] = set()

    @property
    def unused(self) -> list[str]:
        """The patterns that no case has fitted so far."""
        return [line for line, _ in self._patterns if line not in self._used]

    def holds(self, name: str) -> bool:
        """Whether the case of this node id, below tests/, is of the second ring."""
        fitting = [line for line, pattern in self._patterns if pattern.fullmatch(name)]
        self._used.update(fitting)
        return bool(fitting) and not fitting[-1].startswith("!")


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
