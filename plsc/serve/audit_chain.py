"""The audit log's lines: each carries a number and the SHA-256 of the line before, so that what was changed shows.

{"sequence": 7, "time": "…", "event": "write", "token": "desk", …, "previous": "64 hexadecimal digits"}

The log is FILE.1, FILE.2 and so on, oldest first, and last FILE itself, in which lines are written. The first line of
all is a ``genesis``; every file that follows begins with a ``rotated``, whose ``kept_from`` is the number of the first
line that was meant to be kept. What a crash left of a line stands in the ``recovered`` that follows it.

A store numbers its changes from 1 on, and the line of a request names those that it made as ``changes``. A process that
is killed between a commit and the line leaves a number that no line has. The next start finds it, and says so in an
entry of its own: ``gap``, with ``missing``, a list of [first, last]. The first line of a file that follows another says
what is known by then: all up to ``changes_to``, and of later ones ``changes``.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from plsc.errors import IntegrityError, UsageError

MAX_BEYOND = 10_000  # changes in flight at the same time are far fewer: what is missing then does not come any more
_MAX_RANGES = 256  # in a line
FIRST_PREVIOUS = "0" * 64
_HEAD = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})", re.ASCII)


class Head(NamedTuple):
    """A line by its number and the SHA-256 of its bytes; written as NUMBER:SHA256."""

    sequence: int
    sha256: str

    def __str__(self) -> str:
        """The form that :func:`parse_head` reads."""
        return f"{self.sequence}:{self.sha256}"

    @classmethod
    def of(cls, line: bytes, entry: dict[str, Any]) -> "Head":
        """The head of a line and its entry."""
        return cls(entry["sequence"], hashlib.sha256(line.removesuffix(b"\n")).hexdigest())

    def line(self, entry: dict[str, Any]) -> tuple[bytes, "Head"]:
        """The line after this one, and its head."""
        numbered = {"sequence": self.sequence + 1, **entry, "previous": self.sha256}
        line = orjson.dumps(numbered) + b"\n"
        return line, Head.of(line, numbered)


BEGINNING = Head(-1, FIRST_PREVIOUS)


@dataclass(frozen=True)
class Verified:
    """A log whose chain holds: its files, the number of lines and of the first, and its head.

    Attributes:
        unfinished: bytes after the last whole line: one is being written, or a crash or a cut has left it.
    """

    files: int
    lines: int
    first: int
    head: Head
    unfinished: int


def parse_head(text: str) -> Head:
    """A head as :class:`Head` writes it; :class:`UsageError` for anything else."""
    found = _HEAD.fullmatch(text)
    if found is None:
        shown = ascii(text)[:90]
        raise UsageError(f"{shown} is no head; it is written NUMBER:SHA256, as GET /v1/info shows it to admins")
    return Head(int(found[1]), found[2])


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The entry of a line, with its end or without; None if it is none of a chain."""
    try:
        entry = orjson.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or type(entry.get("sequence")) is not int or entry["sequence"] < 0:
        return None
    return entry if isinstance(entry.get("previous"), str) else None


def numbered_files(path: Path) -> list[tuple[int, Path]]:
    """The files that the log at ``path`` was rotated to, oldest first."""
    name = re.compile(re.escape(path.name) + r"\.([1-9][0-9]*)", re.ASCII)
    found = ((name.fullmatch(other.name), other) for other in path.parent.iterdir())
    return sorted((int(match[1]), other) for match, other in found if match is not None)


def log_files(path: Path) -> list[Path]:
    """All files of a log, oldest first; :class:`UsageError` if there are none."""
    files = [other for _, other in numbered_files(path)] if path.parent.is_dir() else []
    files += [path] if path.is_file() else []
    if not files:
        raise UsageError(f"there is no audit log {path}")
    return files


def read_lines(files: list[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """The lines of files, each with its file and number; the end of a line is left on."""
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield path, number, line


def verify(path: Path, head: Head | None = None) -> Verified:
    """Check the chain of the log at ``path``.

    Args:
        head: a head noted earlier, which the log still has to hold.

    Raises:
        IntegrityError: names the first line that is missing, altered or out of order.
    """
    files = log_files(path)
    last: tuple[str, Head] | None = None
    first = lines = kept_from = unfinished = 0
    for file, number, line in read_lines(files):
        if not line.endswith(b"\n"):
            if file != files[-1]:
                raise IntegrityError(f"{file}:{number} ends within a line; the log is damaged from there on")
            unfinished = len(line)
            break
        place, entry = f"{file}:{number}", parse_line(line)
        if entry is None:
            raise IntegrityError(f"{place} is altered: it is no line of an audit log")
        if last is None:
            first = entry["sequence"]
            if first == 0 and (entry.get("event") != "genesis" or entry["previous"] != FIRST_PREVIOUS):
                raise IntegrityError(f"{place} is altered: the first line of a log is its genesis")
        else:
            _check_follows(place, entry, *last)
        last = place, Head.of(line, entry)
        if head is not None and last[1].sequence == head.sequence and last[1] != head:
            raise IntegrityError(f"{place} (line {head.sequence}) is not as noted; it, or one before it, is altered")
        if entry.get("event") == "rotated" and type(entry.get("kept_from")) is int:
            kept_from = max(kept_from, entry["kept_from"])
        lines += 1
    if last is None:
        raise IntegrityError(f"{path} is empty: its lines, from 0 on, are missing")
    if first > kept_from:
        raise IntegrityError(f"{path}: {_range(0, first - 1)} missing; the log begins with line {first}")
    if head is not None and last[1].sequence < head.sequence:
        missing = _range(last[1].sequence + 1, head.sequence)
        raise IntegrityError(f"{path}: {missing} missing at its end, which was at {head.sequence} before")
    return Verified(len(files), lines, first, last[1], unfinished)


def _check_follows(place: str, entry: dict[str, Any], former: str, head: Head) -> None:
    """Check the line at ``place`` against the one before, at ``former``."""
    expected = head.sequence + 1
    if entry["sequence"] > expected:
        raise IntegrityError(f"{_range(expected, entry['sequence'] - 1)} missing before {place}")
    if entry["sequence"] < expected:
        raise IntegrityError(f"{place} is out of order: line {entry['sequence']} stands where {expected} belongs")
    if entry["previous"] != head.sha256:
        raise IntegrityError(f"{former} (line {head.sequence}) is altered: {place} has another hash of it")


def _range(first: int, last: int) -> str:
    return f"line {first} is" if first == last else f"lines {first} to {last} are"


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
        missing, to = [], self.to
        for number in [*sorted(self.beyond), last + 1]:
            if number > to + 1:
                missing.append([to + 1, number - 1])
            to = number
        if not missing:
            return None
        count = sum(end - first + 1 for first, end in missing)
        return {"event": "gap", "missing": missing[:_MAX_RANGES], "count": count, "changes_to": last}


def read_end(path: Path) -> tuple[Head | None, bytes, ChangesSeen]:
    """The head of the last whole line of a chain in a log's file, what follows it, and the changes that have lines."""
    last: tuple[bytes, dict[str, Any]] | None = None
    torn, seen = b"", ChangesSeen()
    for _, _, line in read_lines([path]):
        entry = parse_line(line) if line.endswith(b"\n") else None
        if entry is None:
            torn += line
        else:
            last, torn = (line, entry), b""
            seen.take(entry)
    return None if last is None else Head.of(*last), torn, seen
