"""What a person is told: the door of lines to terminals and logs, a progress line, counts and durations.

Names of files, and names in files, hold escape sequences and line ends: a terminal obeys the ones, and what follows the
others reads as if a command had said it. So all that is printed or logged goes through here.
"""

import contextlib
import logging
import os
import shutil
import sys
import time
from functools import cache
from typing import TextIO

PIPE_CLOSED = 141  # 128 and SIGPIPE
_CLEAR = "\r\x1b[K"  # a terminal's line


def printable(text: str) -> str:
    """Return ``text`` as one line that a terminal may show."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def write(text: str, file: TextIO | None) -> None:
    """Write to ``file`` at once; None: it was closed before the command began, and nothing is written.

    Work goes on where nobody reads standard error any more. Standard output is what a command is called for.

    Raises:
        SystemExit: whoever read standard output has left; with the code that shells show of a SIGPIPE.
        OSError: it cannot be written otherwise.
    """
    if file is None:
        return
    try:
        file.write(text)
        file.flush()
    except UnicodeEncodeError:  # of a terminal that shows some letters alone
        write(text.encode(file.encoding, "replace").decode(file.encoding), file)
    except OSError as error:
        is_error, is_output = file is sys.stderr, file is sys.stdout
        if is_error:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (the interpreter flushes it at its end)
            return
        if is_output:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 (so it does this one)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(PIPE_CLOSED) from None
        raise


def flush() -> None:
    """Write what standard error and output hold back; raises as :func:`write`."""
    write("", sys.stderr)
    write("", sys.stdout)


def show(*lines: str) -> None:
    """Print lines on standard output; raises as :func:`write`."""
    write("\n".join(map(printable, lines)) + "\n", sys.stdout)


def note(*lines: str) -> None:
    """Print lines on standard error."""
    write("\n".join(map(printable, lines)) + "\n", sys.stderr)


def note_from_handler(line: str) -> None:
    """Write a line on standard error from the handler of a signal, which may have interrupted Python's own writing."""
    with contextlib.suppress(OSError):
        os.write(2, f"{_CLEAR if os.isatty(2) else ''}{printable(line)}\n".encode())


def ask(question: str) -> str:
    """Ask on the terminal, and return the line that is typed; EOFError where there is none."""
    return input(printable(question))


def warn(name: str, line: str) -> None:
    """Log a warning by the logger ``name``."""
    logging.getLogger(name).warning("%s", printable(line))


@cache
def log_once(name: str, line: str) -> None:
    """Log a warning by the logger ``name``: once in a process, and of several ranks by the first."""
    if os.environ.get("RANK", "0") == "0":
        warn(name, line)


class StatusLine:
    """A line that changes while a command works, and other lines beside it.

    On a terminal it is rewritten in place, cut to the terminal's width; elsewhere each state is a line of its own.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._given = file
        self.rewrites = self._file is not None and self._file.isatty()
        self._is_shown = False

    @property
    def _file(self) -> TextIO | None:
        return sys.stderr if self._given is None else self._given

    def update(self, text: str) -> None:
        """Show ``text`` in place of the line's former state."""
        text = printable(text)
        if self.rewrites:
            text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be rewritten
            write(f"{_CLEAR}{text}", self._file)
            self._is_shown = True
        else:
            write(text + "\n", self._file)

    def print(self, text: str) -> None:
        """Write ``text`` as a line that stays, in place of the changing one."""
        write((_CLEAR if self._is_shown else "") + printable(text) + "\n", self._file)
        self._is_shown = False

    def close(self) -> None:
        """End a line that is shown, so that what others print begins a line of its own."""
        if self._is_shown:
            write("\n", self._file)
            self._is_shown = False


class Progress:
    """Prints at most one line every ``interval`` seconds: count, share, rate and time to go."""

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
        self.quiet = quiet
        self._status = StatusLine(file)
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
            self._status.update(self.line(note))

    def finish(self, note: str = "") -> None:
        """Print the closing line."""
        if not self.quiet:
            self._status.print(self.line(note))

    def line(self, note: str = "") -> str:
        """Format the report."""
        if self.total is None:
            position = f"{self.count:,} {self.unit}"
        else:
            share = min(self.count / max(self.total, 1), 1.0)
            position = f"{self.count:,}/{self.total:,} {self.unit} ({share:.0%})"
        parts = [f"{self.what}: {position}", f"{self.rate:,.1f} {self.unit}/s"]
        if self.total is not None and self.rate > 0 and self.count < self.total:
            parts.append(f"{duration((self.total - self.count) / self.rate)} to go")
        return ", ".join([*parts, note] if note else parts)


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
