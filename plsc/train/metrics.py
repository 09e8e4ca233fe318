"""Metrics of a run: metrics.jsonl, one JSON object per line, and the same numbers for TensorBoard."""

import json
import math
import time
from pathlib import Path
from typing import Any

from plsc.files import atomic_write
from plsc.train.step import StepResult

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends to RUN/metrics.jsonl and RUN/tensorboard; does nothing where ``enabled`` is false.

    Lines of steps after ``step``, from which the run goes on, are taken out first: a killed run wrote them, and
    they come again. So each step has one line.
    """

    def __init__(self, out: Path, *, step: int, tensorboard: bool, enabled: bool) -> None:
        self._file = None
        self._board = None
        if not enabled:
            return
        _cut(out / METRICS, step)
        self._file = (out / METRICS).open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Report ``values`` (numbers, None, nested mappings of them) of ``step``."""
        if self._file is not None:
            line = {"step": step, **_without_nan(values)}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in _leaves(values):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


class StepMeter:
    """Means since the last line of metrics."""

    def __init__(self) -> None:
        self._images = 0
        self._losses: list[float] = []
        self._since = time.monotonic()

    def update(self, result: StepResult) -> None:
        """Count a step."""
        self._images += result.images
        if not result.skipped:
            self._losses.append(result.loss)

    def reset(self) -> tuple[float | None, float]:
        """(mean loss of the finite steps, images per second) since the last call."""
        now = time.monotonic()
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        rate = self._images / max(now - self._since, 1e-9)
        self._images, self._losses, self._since = 0, [], now
        return loss, rate


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
