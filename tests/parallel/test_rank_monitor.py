"""A rank that makes no progress is named by its place and function; one that compiles is not."""

import importlib.util
import select
import time

import pytest

from plsc.parallel.rank_monitor import RankMonitor

pytestmark = pytest.mark.live

SLOW = "import time\n\n\ndef compile_kernel(seconds):\n    time.sleep(seconds)\n"


@pytest.fixture
def hangs(monkeypatch):
    """A monitor of one rank, and the lines that it reports after 1 s without progress."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    lines = []
    monitor = RankMonitor(1.0, lambda hang: lines.append(hang.line))
    yield monitor, lines
    monitor.end()


def wait(lines, seconds=60.0):
    end = time.monotonic() + seconds
    while not lines and time.monotonic() < end:
        select.select([], [], [], 0.01)  # the monitor names this frame, and time.sleep has one of its own in tests
    return lines


@pytest.mark.slow
def test_a_process_without_progress_is_reported_once(hangs):
    monitor, lines = hangs
    monitor.meet("the first product")
    (line,) = wait(lines)
    assert line.startswith("no progress for 1 s at 'the first product', in wait (test_rank_monitor.py:")
    time.sleep(1.5)
    assert len(lines) == 1


@pytest.mark.slow
def test_compiling_a_kernel_is_progress(hangs, tmp_path):
    _, lines = hangs
    file = tmp_path / "triton" / "compiler" / "compiler.py"
    file.parent.mkdir(parents=True)
    file.write_text(SLOW)
    spec = importlib.util.spec_from_file_location("slow_compiler", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.compile_kernel(2.5)
    assert lines == []
    assert "in wait" in wait(lines)[0]


def test_one_rank_gathers_its_own_value(hangs):
    monitor, lines = hangs
    assert monitor.gather("lines", {"a": [1]}) == [{"a": [1]}]
    monitor.end()
    assert lines == []
