"""What a logger is: it takes a run's numbers and pictures, and goes on in the same place when the run goes on."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from plsc.errors import DataError, UsageError
from plsc.files import read_json, write_json

KEPT = "loggers.json"  # in the run directory: what loggers find again when the run goes on, by their names


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is opened for.

    Attributes:
        out: the run directory, in which a logger's files lie.
        config: every key of the configuration, sections as nested mappings.
        step: the step from which the run goes on; 0 of a new one. What was written of later steps comes again.
    """

    out: Path
    config: Mapping[str, Any]
    step: int

    def kept(self, name: str) -> dict[str, Any]:
        """What :meth:`keep` wrote under ``name`` in this run, in this process or an earlier one; empty before."""
        try:
            values = read_json(self.out / KEPT).get(name, {})
        except (DataError, AttributeError):  # there is none yet, or a disk that was full has cut it off
            return {}
        return values if isinstance(values, dict) else {}

    def keep(self, name: str, values: Mapping[str, Any]) -> None:
        """Write what identifies the logger's place, a tracking service's run say, before its first line."""
        try:
            kept = read_json(self.out / KEPT)
        except DataError:
            kept = {}
        write_json(self.out / KEPT, {**(kept if isinstance(kept, dict) else {}), name: dict(values)})


class RunLogger:
    """Base class of loggers, which the first rank opens where ``log.to`` has their names.

    A subclass takes the :class:`LoggedRun` and opens what it writes to. An error of its methods does not end the run:
    the first one is a line of train.log.

    Attributes:
        packages: modules that it imports and the line that installs each, by its name.
        takes_pictures: whether :meth:`picture` does something; pictures are drawn only where some logger takes them.
        place: where the numbers go, as a line for train.log; empty: nothing to say.
    """

    packages: ClassVar[Mapping[str, str]] = {}
    takes_pictures = False
    place = ""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    @classmethod
    def check(cls, name: str) -> None:
        """Raise UsageError, before training, where the logger ``name`` cannot work here: a package is missing."""
        require_packages(name, cls.packages)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step by their names, such as "loss" and "time/head"; steps never go back."""
        raise NotImplementedError

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Take a picture, an encoded PNG, such as "eval/roc"."""

    def close(self) -> None:
        """Write what waits, and close; called also where the run ends by an error."""


def require_packages(name: str, packages: Mapping[str, str]) -> None:
    """Raise UsageError where a module that the logger ``name`` imports is missing, with the line that installs it."""
    for module, install in packages.items():
        if importlib.util.find_spec(module) is None:
            raise UsageError(f'log.to has "{name}", and {module} is not installed: {install}')
