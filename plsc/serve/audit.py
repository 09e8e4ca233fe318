"""The audit log: who did, read and was refused what; in a chain of hashes, and on disk before a write is answered.

A thread writes the lines, those of all requests that wait together, and syncs the file once for them. Each line carries
a number and the SHA-256 of the line before, so that what was changed shows:

{"sequence": 7, "time": "…", "event": "write", "token": "desk", …, "previous": "64 hexadecimal digits"}

The log is FILE.1, FILE.2 and so on, oldest first, and last FILE itself, in which lines are written. The first line of
all is a ``genesis``; every file that follows begins with a ``rotated``, whose ``kept_from`` is the number of the first
line that was meant to be kept. What a crash left of a line stands in the ``recovered`` that follows it.

A store numbers its changes from 1 on, and the line of a request names those that it made as ``changes``. A process that
is killed between a commit and the line leaves a number that no line has. The next start finds it, and says so in an
entry of its own: ``gap``, with ``missing``, a list of [first, last]. The first line of a file that follows another says
what is known by then: all up to ``changes_to``, and of later ones ``changes``.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from plsc.errors import UsageError, first_line
from plsc.files import sync
from plsc.gallery.validation import now
from plsc.progress import note

Event = Literal["write", "read", "search", "refusal"]
EVENTS: dict[str, Event] = {"writes": "write", "reads": "read", "searches": "search", "refusals": "refusal"}
ROTATED_BYTES = 64 * 2**20
MAX_IDS = 256  # in a line
FIRST_PREVIOUS = "0" * 64
_MAX_BEYOND = 10_000  # changes in flight at the same time are far fewer: what is missing then does not come any more
_MAX_RANGES = 256  # in a line
_REFUSALS_A_MINUTE = 60  # a flood of them must not fill the disk
_TORN_BYTES = 4096  # of what a crash left, shown
_CLOSING_SECONDS = 10.0
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_sync = getattr(os, "fdatasync", os.fsync)  # not every system has the former


class Head(NamedTuple):
    """A line by its number and the SHA-256 of its bytes; written as NUMBER:SHA256."""

    sequence: int
    sha256: str

    def __str__(self) -> str:
        """The form that :func:`plsc.serve.audit_chain.parse_head` reads."""
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


class AuditLog:
    """Append lines to the log; the methods may be called from any thread.

    Args:
        path: the log, created readable by its owner alone; None writes to standard error.
        rotated_bytes: size from which the file is renamed and a new one begun.
        keep: how many rotated files are kept, at least 1; None is all.
    """

    def __init__(self, path: Path | None, *, rotated_bytes: int = ROTATED_BYTES, keep: int | None = None) -> None:
        self._path, self._rotated_bytes, self._keep = path, rotated_bytes, keep
        self._waiting: list[tuple[dict[str, Any], Future[None] | None]] = []
        self._wake = threading.Condition()
        self._closed = False
        self._refusals = _RefusalLimit()
        self.head = BEGINNING
        self._descriptor = sys.stderr.fileno() if path is None else _open_log(path)
        self._is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode) and path is not None
        self._seen = ChangesSeen()
        self._go_on()
        self._thread = threading.Thread(target=self._run, name="plsc-audit", daemon=True)
        self._thread.start()

    def account_for(self, last_change: int) -> None:
        """Name, in an entry of its own, what a store did that has no line; called before anything else is written.

        Args:
            last_change: the number of the store's last change.
        """
        begins = self.head.sequence == 0  # with the line of its genesis
        gap = self._seen.gap(last_change) if self._is_file else None
        if gap is None:
            return
        self._append([{"time": now(), **gap}], durable=True)
        if begins:  # what a store did before its first log is no loss
            return
        if "undone" in gap:
            told = "the store is an older one than the audit log tells of"
        else:
            told = f"changes by other commands, or just before a kill, have no line in the audit log: {gap['count']}"
        note(f"plsc serve: {told}; see the gap at its end")

    def write(self, event: Event, **entry: Any) -> None:
        """Append a line soon; of refusals only so many a minute, which tell how many others there were."""
        if event == "refusal":
            suppressed = self._refusals.admit()
            if suppressed is None:
                return
            entry["suppressed"] = suppressed
        self._put(event, entry, None)

    async def write_durably(self, event: Event, **entry: Any) -> None:
        """Append a line, and return when it is on disk, or on standard error where the disk takes it no more."""
        written: Future[None] = Future()
        self._put(event, entry, written)
        await asyncio.wrap_future(written)

    def close(self) -> None:
        """Write what waits, and close the file."""
        if (suppressed := self._refusals.suppressed) > 0:
            self._put("refusal", {"suppressed": suppressed}, None)
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSING_SECONDS)
        if self._path is not None and not self._thread.is_alive():
            os.close(self._descriptor)

    def _put(self, event: Event, entry: dict[str, Any], written: Future[None] | None) -> None:
        line = {"time": now(), "event": event, **entry}
        with self._wake:
            self._waiting.append((line, written))
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                together, self._waiting = self._waiting, []
            if not together:
                return
            try:
                self._append([entry for entry, _ in together], durable=any(written for _, written in together))
            except Exception as error:  # whoever waits for a line must not wait for ever
                note(f"plsc serve: the audit log failed: {first_line(error)}")
            for _, written in together:
                if written is not None and written.set_running_or_notify_cancel():
                    written.set_result(None)

    def _append(self, entries: Sequence[dict[str, Any]], *, durable: bool) -> None:
        """Write lines by one write, or where it does not take them all, each by its own."""
        head, lines = self.head, []
        for entry in entries:
            line, head = head.line(entry)
            lines.append(line)
        try:
            self._write(b"".join(lines))
            self.head = head
            for entry in entries:
                self._seen.take(entry)
            if durable and self._is_file:
                _sync(self._descriptor)
            if self._is_file and os.fstat(self._descriptor).st_size >= self._rotated_bytes:
                self._rotate()
            if len(self._seen.beyond) > _MAX_BEYOND and (gap := self._seen.gap(self._seen.last)) is not None:
                self._append([{"time": now(), **gap}], durable=True)
        except OSError as error:
            if self.head == head:
                _report(error, "its lines may be lost in a power cut")
            elif len(entries) > 1:
                for entry in entries:
                    self._append([entry], durable=durable)
            else:
                _report(error, f"It lacks: {lines[0].decode().rstrip()}")

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size if self._is_file else 0
        written = os.write(self._descriptor, data)
        if written < len(data):
            if self._is_file:
                os.ftruncate(self._descriptor, size)  # half a line would end the chain
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _go_on(self) -> None:
        """Find the last line, and write what has to stand before the next one."""
        if self._path is None or not self._is_file:
            self._append([{"time": now(), "event": "genesis"}], durable=False)
            return
        former = [other for _, other in numbered_files(self._path)]
        last, torn, self._seen = read_end(self._path)
        if last is None and former and not torn:  # killed between renaming the file and beginning a new one
            last, _, self._seen = read_end(former[-1])
            self.head = last or BEGINNING
            self._append([self._rotation(former[-1])], durable=True)
        elif last is None:
            entry = {"time": now(), "event": "genesis", **(_set_aside(self._path) if torn else {})}
            if torn:
                os.close(self._descriptor)
                self._descriptor = _open_log(self._path)
            self._append([entry], durable=True)
        else:
            self.head = last
            if torn:
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(torn))
                shown = torn[:_TORN_BYTES].decode("ascii", "backslashreplace")
                recovered = {"time": now(), "event": "recovered", "torn_bytes": len(torn), "torn": shown}
                self._append([recovered], durable=True)
        sync(self._path.parent)

    def _rotate(self) -> None:
        assert self._path is not None, "standard error is not rotated"
        numbered = numbered_files(self._path)
        number = numbered[-1][0] + 1 if numbered else 1
        _sync(self._descriptor)
        target = self._path.with_name(f"{self._path.name}.{number}")
        self._path.rename(target)
        try:
            descriptor = os.open(self._path, _FLAGS, 0o600)
        except OSError:
            target.rename(self._path)  # the next line tries again
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        sync(self._path.parent)
        self._append([self._rotation(target)], durable=True)
        for _, old in numbered_files(self._path)[: -self._keep] if self._keep is not None else []:
            old.unlink()

    def _rotation(self, former: Path) -> dict[str, Any]:
        """The first line of a file that follows ``former``."""
        assert self._path is not None
        numbered = [other for _, other in numbered_files(self._path)]
        kept = numbered if self._keep is None else numbered[-self._keep :]
        about = {"former": former.name, "kept_from": _first_sequence(kept[0]), **self._seen.known()}
        return {"time": now(), "event": "rotated", **about}


class _RefusalLimit:
    """Which refusals get a line: at most ``_REFUSALS_A_MINUTE``."""

    def __init__(self) -> None:
        self._since, self._left = time.monotonic(), _REFUSALS_A_MINUTE
        self.suppressed = 0

    def admit(self) -> int | None:
        """How many had no line since the last one that had, or None for one that has none."""
        moment = time.monotonic()
        if moment - self._since >= 60.0:
            self._since, self._left = moment, _REFUSALS_A_MINUTE
        if self._left == 0:
            self.suppressed += 1
            return None
        self._left -= 1
        suppressed, self.suppressed = self.suppressed, 0
        return suppressed


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


def read_lines(files: list[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """The lines of files, each with its file and number; the end of a line is left on."""
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield path, number, line


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


def audit_path(spec: Path) -> Path:
    """The log that ``spec`` names: itself, or that of a store's folder."""
    return spec / "audit.jsonl" if spec.is_dir() else spec


def _open_log(path: Path) -> int:
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write the audit log {path}: {error.strerror}; name another file") from None


def _first_sequence(path: Path) -> int:
    with path.open("rb") as file:
        entry = parse_line(file.readline())
    return 0 if entry is None else int(entry["sequence"])


def _set_aside(path: Path) -> dict[str, str]:
    """Rename a log without a chain; returns what the genesis says of it."""
    target = path.with_name(f"{path.name}.unchained")
    if target.exists():
        raise UsageError(f"{path} is no audit log with a chain, and {target} exists already; move one of them away")
    path.rename(target)
    return {"unchained": target.name, "unchained_sha256": hashlib.sha256(target.read_bytes()).hexdigest()}


def _report(error: OSError, lacks: str) -> None:
    message = f"plsc serve: the audit log takes no lines ({error.strerror}); free its disk. {lacks}"
    with contextlib.suppress(OSError):
        note(message)
