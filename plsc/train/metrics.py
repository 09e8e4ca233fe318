"""Metrics of a run: metrics.jsonl, one JSON object per line, and the same numbers for loggers."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from plsc.errors import UsageError
from plsc.files import AppendFile, atomic_write
from plsc.loggers import LoggedRun, RunLogger, open_logger

METRICS = "metrics.jsonl"


class LogFunction(Protocol):
    """A function that takes the numbers of a step, such as ``wandb.log`` and ``mlflow.log_metrics``."""

    def __call__(self, values: dict[str, float], /, *, step: int) -> object:
        """Take ``values`` by their names, such as "loss" and "time/head"."""


class HasLog(Protocol):
    """An object that takes the numbers of a step, such as a run of W&B."""

    @property
    def log(self) -> LogFunction:
        """The function that does."""


Logger = LogFunction | HasLog


class MetricsLog:
    """Appends to RUN/metrics.jsonl, and hands numbers and pictures to loggers; does nothing where not ``enabled``.

    Lines of steps after that from which the run goes on are taken out first: a killed run wrote them, and they come
    again. So each step has one line. A logger that raises is called again at the next line; the first time, ``warn`` is
    called with its error.

    Args:
        run: the run directory, its configuration, and the step from which it goes on.
        to: names of loggers, see :data:`plsc.loggers.LOGGERS`.
        enabled: this is the first rank.
        loggers: functions that get the numbers too.
        warn: takes a line.
    """

    def __init__(
        self,
        run: LoggedRun,
        *,
        to: Sequence[str] = (),
        enabled: bool,
        loggers: Sequence[Logger] = (),
        warn: Callable[[str], None] = print,
    ) -> None:
        self._file: AppendFile | None = None
        functions = [_log_function(logger) for logger in loggers]  # on every rank: a wrong one ends all of them
        self._functions = functions if enabled else []
        self._opened: list[RunLogger] = []
        self._warn, self._failed = warn, set[str | int]()
        if not enabled:
            return
        _cut(run.out / METRICS, run.step)
        self._file = AppendFile(run.out / METRICS)
        for name in to:
            self._opened += self._open(name, run)

    def _open(self, name: str, run: LoggedRun) -> list[RunLogger]:
        """Open one logger. A run that goes on, at night perhaps, does without one that does not open any more."""
        try:
            opened = open_logger(name, run)
        except UsageError as error:
            if run.step == 0:
                raise
            self._warn(f"warning: {error}")
            return []
        if opened.place:
            self._warn(f"logged to {opened.place}")
        return [opened]

    @property
    def takes_pictures(self) -> bool:
        """Whether some logger takes pictures."""
        return any(logger.takes_pictures for logger in self._opened)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Report ``values`` (numbers, None, nested mappings of them) of ``step``."""
        if self._file is not None:
            line = {"step": step, **_without_nan(values)}
            self._file.write_line(json.dumps(line, allow_nan=False))
        for logger in self._opened:
            self._attempt(logger, step, partial(logger.write, step, dict(_leaves(values))))
        for function in self._functions:
            self._attempt(function, step, partial(function, dict(_leaves(values)), step=step))

    def picture(self, step: int, name: str, draw: Callable[[], bytes]) -> None:
        """Report what ``draw`` draws, an encoded PNG; it is not called where no logger takes pictures."""
        drawn: list[bytes] = []
        if self.takes_pictures:
            self._attempt(name, step, lambda: drawn.append(draw()))
        for png in drawn:
            for logger in self._opened:
                self._attempt(logger, step, partial(logger.picture, step, name, png))

    def close(self) -> None:
        """Close the files, and the loggers."""
        if self._file is not None:
            self._file.close()
        for logger in self._opened:
            self._attempt(logger, None, logger.close)

    def _attempt(self, what: object, step: int | None, act: Callable[[], object]) -> None:
        """Let a logger or function act, or a picture of a name be drawn; warn of the first error of each."""
        try:
            act()
        except Exception as error:  # a tracking service that is down is no reason to lose the run
            key = what if isinstance(what, str) else id(what)
            if key not in self._failed:
                self._failed.add(key)
                when = "when it closed" if step is None else f"at step {step:,}, and may go on to"
                self._warn(f"{_name(what)} failed {when}: {error!r}")


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl; a last line that a killed writer left unfinished is left out."""
    path = out / METRICS
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    entries: list[dict[str, Any]] = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            entries.append(value)
    return entries


def _log_function(logger: Logger) -> LogFunction:
    """UsageError where ``logger`` is neither a function nor has a method log()."""
    function = logger if callable(logger) else getattr(logger, "log", None)
    if not callable(function):
        raise UsageError(f"a logger is a function of (values, step=N) or has a method log() like it, not {logger!r}")
    return function


def _name(what: object) -> str:
    if isinstance(what, str):
        return f"picture {what}"
    return f"logger {getattr(what, '__qualname__', type(what).__name__)}"


def _cut(path: Path, step: int) -> None:
    if path.is_file():
        kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
        with atomic_write(path) as tmp_path:
            tmp_path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    leaves: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            leaves.append((f"{prefix}{key}", float(value)))
    return leaves
