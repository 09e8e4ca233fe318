"""The lines of a report: what was looked at, whether it is right, what was found, and what to do where it is not."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from plsc.progress import printable, write

State = Literal["ok", "FAIL", "-"]
Tick = Callable[[str], None]  # is told what is being looked at, so that a rank that hangs can be named
_COLOURS = {"ok": "\033[32m", "FAIL": "\033[1;31m", "-": "\033[2m"}
_PLAIN = "\033[0m"
_CLEARED = "\r\033[K"  # the line in which the cursor stands
_NAME_WIDTH = 40


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        name: of what was looked at, unique in its section.
        state: "ok", "FAIL", or "-" for what does not exist here or was not looked at.
        text: what was found.
        advice: what to do where it failed.
        figures: the numbers behind the text, for JSON.
    """

    name: str
    state: State
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def found(name: str, text: object, **figures: Any) -> Line:
    """A line of something that is right, or is reported only."""
    return Line(name, "ok", str(text), figures=figures)


def absent(name: str, reason: str) -> Line:
    """A line of something that does not exist here."""
    return Line(name, "-", reason)


def failed(name: str, text: object, advice: str, **figures: Any) -> Line:
    """A line of something that is wrong."""
    return Line(name, "FAIL", str(text), advice, figures)


def checked(name: str, text: object, is_right: bool, advice: str, **figures: Any) -> Line:
    """A line of something that is right or wrong."""
    return found(name, text, **figures) if is_right else failed(name, text, advice, **figures)


def merge(by_rank: Sequence[Sequence[Line]]) -> list[Line]:
    """The lines of a section over all ranks: the first rank's, and what is wrong on another in its place.

    Figures that ranks have in common are the first rank's; ``by_rank`` in them lists those of all.
    """
    merged = []
    for first in _all_names(by_rank):
        on_ranks = [next((line for line in lines if line.name == first.name), None) for lines in by_rank]
        wrong = {rank: line for rank, line in enumerate(on_ranks) if line is not None and line.state == "FAIL"}
        shown = next(iter(wrong.values()), first)
        if len(by_rank) > 1:
            who = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}: " if wrong else ""
            figures = [dict(line.figures) if line is not None else None for line in on_ranks]
            everywhere = {"by_rank": figures} if any(figures) else {}
            shown = replace(shown, text=who + shown.text, figures={**shown.figures, **everywhere})
        merged.append(shown)
    return merged


def _all_names(by_rank: Sequence[Sequence[Line]]) -> list[Line]:
    """The first rank's lines, and behind them the failures that only others have."""
    lines = {line.name: line for line in by_rank[0]}
    for others in by_rank[1:]:
        for line in others:
            if line.state == "FAIL":
                lines.setdefault(line.name, line)
    return list(lines.values())


class Report:
    """All sections of a report; each is printed when it is added, below its title.

    Args:
        ranks: that take part.
        out: where lines are printed, in colour if it is a terminal; None prints nothing.
    """

    def __init__(self, ranks: int, out: TextIO | None = None) -> None:
        self._ranks, self.out = ranks, out
        self._started = datetime.now(UTC)
        self._shows_work = False
        self.sections: dict[str, list[Line]] = {}

    def begin(self, title: str) -> None:
        """Print the title of a section that is being looked at."""
        if title not in self.sections:
            self.sections[title] = []
            self._print(title)

    def show_work(self, text: str) -> None:
        """Show on a terminal what is being looked at, until the next line is printed."""
        if self.out is not None and self.out.isatty():
            self._shows_work = True
            width = shutil.get_terminal_size().columns - 1
            write(f"{_CLEARED}{f'        … {printable(text)}'[:width]}", self.out)

    def add(self, title: str, lines: Sequence[Line]) -> None:
        """Add lines to a section, a new one or the last."""
        self.begin(title)
        self.sections[title] += lines
        for line in lines:
            self._print(f"{line.name:<{_NAME_WIDTH}}{line.text}", mark=f"  {self._mark(line.state)}  ")
            if line.state == "FAIL" and line.advice:
                self._print(f"  {'':<{_NAME_WIDTH + 6}}-> {line.advice}")

    @property
    def failures(self) -> list[str]:
        """The names of all lines that failed, behind their sections'."""
        return [
            f"{title}: {line.name}" for title, lines in self.sections.items() for line in lines if line.state == "FAIL"
        ]

    @property
    def seconds(self) -> float:
        """Since the report was begun."""
        return (datetime.now(UTC) - self._started).total_seconds()

    def close(self) -> None:
        """Print the verdict."""
        count = sum(map(len, self.sections.values()))
        if self.failures:
            self._print(f"{len(self.failures)} of {count} lines FAIL ({'; '.join(self.failures)})")
        else:
            self._print(f"all ok: {count} lines in {self.seconds:.0f} s")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "ranks": self._ranks,
            "sections": {
                title: {line.name: _as_dict(line) for line in lines} for title, lines in self.sections.items()
            },
        }

    def _mark(self, state: State) -> str:
        text = f"{state:<4}"
        in_colour = self.out is not None and self.out.isatty() and not os.environ.get("NO_COLOR")
        return f"{_COLOURS[state]}{text}{_PLAIN}" if in_colour else text

    def _print(self, text: str, mark: str = "") -> None:
        if self.out is not None:
            write(f"{_CLEARED if self._shows_work else ''}{mark}{printable(text)}\n", self.out)
            self._shows_work = False


def _as_dict(line: Line) -> dict[str, Any]:
    return {key: value for key, value in asdict(line).items() if key != "name" and value not in ("", {})}
