"""Progress line of a long-running command: count, rate and remaining time; counts and durations as text."""

import sys
import time
from typing import TextIO


class Progress:
    """Prints at most one line every ``interval`` seconds: count, share, rate and time to go.

    On a terminal the line is rewritten in place; in a log each report is a line of its own.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "images",
        *,
        interval: float = 5.0,
        done: int = 0,
        file: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        self.what, self.total, self.unit, self.interval = what, total, unit, interval
        self.count = self._first = done
        self.file = file if file is not None else sys.stderr
        self.quiet = quiet
        self._start = time.monotonic()
        self._last = self._start

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return (self.count - self._first) / max(time.monotonic() - self._start, 1e-9)

    def advance(self, by: int = 1, note: str = "") -> None:
        """Count ``by`` more units, and print when it is time. ``note`` ends the line (a loss, say)."""
        self.count += by
        now = time.monotonic()
        if not self.quiet and now - self._last >= self.interval:
            self._last = now
            self._print(self.line(note), final=False)

    def finish(self, note: str = "") -> None:
        """Print the closing line."""
        if not self.quiet:
            self._print(self.line(note), final=True)

    def line(self, note: str = "") -> str:
        """Format the report."""
        if self.total is None:
            position = f"{self.count:,} {self.unit}"
        else:
            position = f"{self.count:,}/{self.total:,} {self.unit} ({self.count / max(self.total, 1):.0%})"
        parts = [f"{self.what}: {position}", f"{self.rate:,.1f} {self.unit}/s"]
        if self.total is not None and self.rate > 0 and self.count < self.total:
            parts.append(f"{duration((self.total - self.count) / self.rate)} to go")
        return ", ".join([*parts, note] if note else parts)

    def _print(self, line: str, *, final: bool) -> None:
        if self.file.isatty():
            self.file.write(f"\r\x1b[K{line}" + ("\n" if final else ""))
        else:
            self.file.write(line + "\n")
        self.file.flush()


def duration(seconds: float) -> str:
    """Format seconds: ``75`` as ``1m15s``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Format a count with its noun: ``counted(1, "image")`` is "1 image", ``counted(4324, "image")`` "4,324 images".

    Args:
        number: how many.
        noun: in the singular; an adjective may stand before it.
        plural: of ``noun``, if it is irregular.
    """
    if number == 1:
        return f"1 {noun}"
    if plural is None:
        if noun.endswith("y") and noun[-2] not in "aeiou":
            plural = f"{noun[:-1]}ies"
        else:
            plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {plural}"
