"""The audit log looked through: that its chain holds, and the first line that is missing, altered or out of order."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plsc.errors import IntegrityError, UsageError
from plsc.serve.audit import FIRST_PREVIOUS, Head, numbered_files, parse_line, read_lines

_HEAD = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})", re.ASCII)


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


def log_files(path: Path) -> list[Path]:
    """All files of a log, oldest first; :class:`UsageError` if there are none."""
    files = [other for _, other in numbered_files(path)] if path.parent.is_dir() else []
    files += [path] if path.is_file() else []
    if not files:
        raise UsageError(f"there is no audit log {path}")
    return files


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
