"""The audit log's lines: each carries a number and the SHA-256 of the line before, so that what was changed shows.

{"sequence": 7, "time": "…", "event": "write", "token": "desk", …, "previous": "64 hexadecimal digits"}

The log is FILE.1, FILE.2 and so on, oldest first, and last FILE itself, in which lines are written. The first line of
all is a ``genesis``; every file that follows begins with a ``rotated``, whose ``kept_from`` is the number of the first
line that was meant to be kept. What a crash left of a line stands in the ``recovered`` that follows it, and changes of
the store without a line in a ``gap`` (plsc.serve.audit_changes).
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from plsc.errors import IntegrityError, UsageError

FIRST_PREVIOUS = "0" * 64
_HEAD = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})", re.ASCII)


class Head(NamedTuple):
    """A line by its number and the SHA-256 of its bytes; written as NUMBER:SHA256."""

    sequence: int
    sha256: str

    def __str__(self) -> str:
        """The form that :func:`parse_head` reads."""
        return f"{self.sequence}:{self.sha256}"

    def line(self, entry: dict[str, Any]) -> tuple[bytes, "Head"]:
        """The line after this one, without its end, and its head."""
        line = orjson.dumps({"sequence": self.sequence + 1, **entry, "previous": self.sha256})
        return line, Head(self.sequence + 1, hashlib.sha256(line).hexdigest())


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
    """The entry of a line, None if it is none of a chain."""
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
    chain = _Chain(head)
    for file, number, line in read_lines(files):
        if not line.endswith(b"\n"):
            if file != files[-1]:
                raise IntegrityError(f"{file}:{number} ends within a line; the log is damaged from there on")
            chain.unfinished = len(line)
            break
        chain.add(f"{file}:{number}", line[:-1])
    return chain.end(path, len(files))


class _Chain:
    """The chain as far as it has been checked."""

    def __init__(self, noted: Head | None) -> None:
        self._noted = noted
        self._last: tuple[str, Head] | None = None
        self._first = self._lines = self._kept_from = self.unfinished = 0

    def add(self, place: str, line: bytes) -> None:
        """Check the next line; ``place`` names it."""
        entry = parse_line(line)
        if entry is None:
            raise IntegrityError(f"{place} is altered: it is no line of an audit log")
        if self._last is None:
            self._begin(place, entry)
        else:
            self._follow(place, entry, *self._last)
        head = Head(entry["sequence"], hashlib.sha256(line).hexdigest())
        if self._noted is not None and head.sequence == self._noted.sequence and head != self._noted:
            raise IntegrityError(f"{place} (line {head.sequence}) is not as noted; it, or one before it, is altered")
        if entry.get("event") == "rotated" and type(entry.get("kept_from")) is int:
            self._kept_from = max(self._kept_from, entry["kept_from"])
        self._last = place, head
        self._lines += 1

    def end(self, path: Path, files: int) -> Verified:
        """Check what is known when all lines are read."""
        if self._last is None:
            raise IntegrityError(f"{path} is empty: its lines, from 0 on, are missing")
        head = self._last[1]
        if self._first > self._kept_from:
            missing = _range(0, self._first - 1)
            raise IntegrityError(f"{path}: {missing} missing; the log begins with line {self._first}")
        if self._noted is not None and head.sequence < self._noted.sequence:
            missing = _range(head.sequence + 1, self._noted.sequence)
            raise IntegrityError(f"{path}: {missing} missing at its end, which was at {self._noted.sequence} before")
        return Verified(files, self._lines, self._first, head, self.unfinished)

    def _begin(self, place: str, entry: dict[str, Any]) -> None:
        self._first = entry["sequence"]
        if self._first == 0 and (entry.get("event") != "genesis" or entry["previous"] != FIRST_PREVIOUS):
            raise IntegrityError(f"{place} is altered: the first line of a log is its genesis")

    def _follow(self, place: str, entry: dict[str, Any], former: str, head: Head) -> None:
        expected = head.sequence + 1
        if entry["sequence"] > expected:
            raise IntegrityError(f"{_range(expected, entry['sequence'] - 1)} missing before {place}")
        if entry["sequence"] < expected:
            raise IntegrityError(f"{place} is out of order: line {entry['sequence']} stands where {expected} belongs")
        if entry["previous"] != head.sha256:
            raise IntegrityError(f"{former} (line {head.sequence}) is altered: {place} has another hash of it")


def _range(first: int, last: int) -> str:
    return f"line {first} is" if first == last else f"lines {first} to {last} are"
