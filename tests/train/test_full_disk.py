"""A disk that is full while a run writes its metrics and its log: the run goes on, and no line is lost or cut."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plsc.files import AppendFile
from plsc.loggers import LoggedRun
from plsc.train.metrics import MetricsLog, read_metrics
from plsc.train.report import LOG, RunReport


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Let this process write no file beyond ``size`` bytes: what fits of a line is written, the rest is refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def points_of(out: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of each point that TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard")).Reload()
    return [(point.step, point.value) for point in events.Scalars(name)] if name in events.Tags()["scalars"] else []


def test_lines_wait_for_space_and_come_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    file.write_line("first")
    with full_at(10):
        for number in range(3):
            file.write_line(f"line {number}")
        assert path.read_text() == "first\n"
    file.write_line("last")
    file.close()
    assert path.read_text().splitlines() == ["first", "line 0", "line 1", "line 2", "last"]


def test_two_files_append_to_one_log(tmp_path: Path) -> None:
    files = [AppendFile(tmp_path / "log") for _ in range(2)]
    for number in range(6):
        files[number % 2].write_line(str(number))
    for file in files:
        file.close()
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(6)]


def test_a_device_without_space_is_no_error() -> None:
    if os.path.exists("/dev/full"):  # noqa: PTH110
        file = AppendFile(Path("/dev/full"))
        file.write_line("lost")
        file.close()


@pytest.mark.parametrize("tensorboard", [False, True])
def test_metrics_of_steps_on_a_full_disk_are_written_later(tensorboard: bool, tmp_path: Path) -> None:
    metrics = MetricsLog(LoggedRun(tmp_path, {}, 0), to=("tensorboard",) if tensorboard else (), enabled=True)
    report = RunReport(tmp_path, enabled=True, quiet=True)
    for step in range(1, 4):
        metrics.write(step, {"loss": float(step)})
    with full_at((tmp_path / "metrics.jsonl").stat().st_size + 7):
        report.log("x" * 200)
        for step in range(4, 40):
            metrics.write(step, {"loss": float(step)})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    metrics.write(40, {"loss": 40.0})
    report.log("after")
    metrics.close()
    report.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 41))
    if tensorboard:
        assert points_of(tmp_path, "loss") == [(step, float(step)) for step in range(1, 41)]
    assert [len(line) > 100 for line in (tmp_path / LOG).read_text().splitlines()] == [True, False]


def test_tensorboard_shows_no_point_twice_after_a_restart(tmp_path: Path) -> None:
    for first, last in [(1, 6), (4, 8)]:  # a run that was killed after step 5, and resumed from step 3
        metrics = MetricsLog(LoggedRun(tmp_path, {}, first - 1), to=("tensorboard",), enabled=True)
        for step in range(first, last):
            metrics.write(step, {"loss": float(step), "eval": {"lfw": {"accuracy": 0.5}}})
        metrics.close()
    assert points_of(tmp_path, "loss") == [(step, float(step)) for step in range(1, 8)]
    assert [step for step, _ in points_of(tmp_path, "eval/lfw/accuracy")] == list(range(1, 8))
