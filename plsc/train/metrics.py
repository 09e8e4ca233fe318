"""Metrics of a run: metrics.jsonl, one JSON object per line, and the same numbers for TensorBoard and other loggers."""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from plsc.errors import UsageError
from plsc.files import AppendFile, atomic_write

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
    """Appends to RUN/metrics.jsonl and RUN/tensorboard, and calls loggers; does nothing where ``enabled`` is false.

    Lines of steps after ``step``, from which the run goes on, are taken out first: a killed run wrote them, and
    they come again. So each step has one line. A logger that raises is called again at the next line; the first time,
    ``warn`` is called with its error.
    """

    def __init__(
        self,
        out: Path,
        *,
        step: int,
        tensorboard: bool,
        enabled: bool,
        loggers: Sequence[Logger] = (),
        warn: Callable[[str], None] = print,
    ) -> None:
        self._file: AppendFile | None = None
        self._board: _EventFile | None = None
        functions = [_log_function(logger) for logger in loggers]  # on every rank: a wrong one ends all of them
        self._functions = functions if enabled else []
        self._warn, self._failed = warn, set[int]()
        if not enabled:
            return
        _cut(out / METRICS, step)
        self._file = AppendFile(out / METRICS)
        if tensorboard:
            self._board = _EventFile(out / "tensorboard", step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Report ``values`` (numbers, None, nested mappings of them) of ``step``."""
        if self._file is not None:
            line = {"step": step, **_without_nan(values)}
            self._file.write_line(json.dumps(line, allow_nan=False))
        if self._board is not None:
            self._board.write(step, _leaves(values))
        for index, function in enumerate(self._functions):
            try:
                function(dict(_leaves(values)), step=step)
            except Exception as error:  # a tracking service that is down is no reason to lose the run
                if index not in self._failed:
                    self._failed.add(index)
                    self._warn(f"logger {_name(function)} failed at step {step:,}, and may go on to: {error!r}")

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


class _EventFile:
    """TensorBoard's event file of a run, in which points from ``step`` on that were written before count no more.

    TensorBoard's own writer appends from a thread of its own, which ends for good where the disk is full.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(AppendFile(folder / name))
        self._add(step=step, file_version="brain.Event:2")
        self._add(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, values: Sequence[tuple[str, float]]) -> None:
        """Append the points of ``step``."""
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values]
        self._add(step=step, summary=self._summary(value=points))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


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


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


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
