"""A rank that is killed, stopped or hangs in mid-run: one line says which one, and all end, wherever they wait."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from plsc.errors import PlscError
from plsc.optim.verdict import Verdict

pytestmark = pytest.mark.live

# A rank's program: plsc train with short waits. With "stuck" its main thread stands still in a step, as one does that
# waits for a GPU, and hears of no error; with "reading" rank 1 reads an image for ever; with "saving" it stops in a
# checkpoint; with "hasty" the ranks do not wait for the one that reports, whose process is at its own end then.
PROGRAM = textwrap.dedent("""
    import os, signal, sys, time
    from plsc.data.loader import BatchReader
    from plsc.parallel.rank_monitor import RankMonitor
    from plsc.tools import entry
    from plsc.train import async_checkpoint, failures, step

    entry._HOLD_SECONDS, failures._REPORT_SECONDS = 0.1, 0.05 if sys.argv[1] == "hasty" else 2.0
    stuck, said, take, beat = sys.argv[1] == "stuck", sys.argv[2], step.Stepper.step, RankMonitor._beat
    save = async_checkpoint.AsyncCheckpointer.save

    def beating(self, now):
        place, seen = self._place, beat(self, now)
        if "step" in place:
            open(said + "-place" + os.environ["RANK"], "w").close()
        return seen

    def read_for_ever(self, request):
        time.sleep(120)

    def stepping(self, group, number, stop=0):
        if number == 2:
            open(said + str(self.components.mesh.rank), "w").close()
            if stuck:
                time.sleep(120)
            if sys.argv[1] == "reading" and os.environ["RANK"] == "1":
                BatchReader.__getitem__ = read_for_ever
        if number >= 2:
            time.sleep(0.05)
        return take(self, group, number, stop)

    def saving(*words):
        at_work = os.path.exists(said + "1") and os.path.exists(said + "-place1")
        if sys.argv[1] == "saving" and os.environ["RANK"] == "1" and at_work:
            os.kill(os.getpid(), signal.SIGSTOP)
        return save(*words)

    async_checkpoint.AsyncCheckpointer.save = saving
    step.Stepper.step, RankMonitor._beat = stepping, beating
    sys.exit(entry.main(["train", *sys.argv[3:]]))
""")
RECIPE = """
backbone = "resnet8"
embedding_dim = 16
precision = "fp32"
steps = 100000
[data]
train = "avatars:6x4"
image_size = 32
batch_size = 2
workers = 0
[checkpoint]
every_steps = 1
"""


@contextlib.contextmanager
def started(world: int, folder: Path, mode: str, *options: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """The ranks of a run, at its third step; what is left of them is killed.

    Where their time is limited, the others know of each that it is at a step: they are told rarely where it is not.
    """
    (folder / "program.py").write_text(PROGRAM)
    (folder / "recipe.toml").write_text(RECIPE)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
        }
        words = ["program.py", mode, str(folder / "said"), "recipe.toml", "--out", "run", *options]
        settings = {"cwd": folder, "env": environment, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, *words], **settings))  # type: ignore[call-overload]
    try:
        names = ("said", "said-place") if "--parallel.timeout_seconds" in options else ("said",)
        while not all((folder / f"{name}{rank}").exists() for name in names for rank in range(world)):
            assert all(rank.poll() is None for rank in ranks), [rank.communicate()[1] for rank in ranks if rank.poll()]
            time.sleep(0.02)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["working", "hasty", "stuck"])
def test_the_others_name_it_in_one_line_and_end(mode: str, tmp_path: Path) -> None:
    with started(3, tmp_path, mode) as ranks:
        ranks[1].send_signal(signal.SIGKILL)
        texts = [ranks[number].communicate(timeout=200)[1] for number in (0, 2)]
        assert [process.wait() for process in ranks] == [1, -signal.SIGKILL, 1]
    errors = [line for text in texts for line in text.splitlines() if "error" in line]
    assert len(errors) == 1, texts
    lost = "(rank 1|another rank)" if mode == "hasty" else "rank 1"  # who does not wait may not learn which
    line = rf"plsc train: error: rank [02] lost touch with {lost}; --resume auto goes on from the last checkpoint"
    assert re.fullmatch(line, errors[0])
    assert not re.search(r"Traceback|\[W\d", "".join(texts)), texts  # nor a warning of torch's


def errors_of(ranks: list["subprocess.Popen[str]"], waiting: list[int]) -> list[str]:
    """The lines of errors of the ranks that wait for the others, once these have ended."""
    texts = [ranks[number].communicate(timeout=200)[1] for number in waiting]
    assert "Traceback" not in "".join(texts)
    return [line for text in texts for line in text.splitlines() if "error" in line]


@pytest.mark.slow
def test_a_rank_that_reads_for_ever_is_named_with_its_stack(tmp_path: Path) -> None:
    with started(3, tmp_path, "reading", "--parallel.timeout_seconds", "6") as ranks:
        (line,) = errors_of(ranks, [0, 1, 2])
    told = r"rank 1 \([^()]+, in read_for_ever \(program\.py:\d+\)\) hangs at 'data of step 4': the others wait for "
    assert re.fullmatch(rf"plsc train: error: {told}6 s; --resume auto goes on from the last checkpoint", line)
    log = (tmp_path / "run/train.log").read_text()
    assert re.search(f" waiting: {told}3 s\n", log)
    assert re.search(r" rank 1: read_for_ever \(program\.py:\d+\) < .* < _groups \(trainer\.py:\d+\)", log)
    assert re.search(f" ended: {told}6 s", log)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["working", "saving"])
def test_a_rank_that_is_stopped_is_named(mode: str, tmp_path: Path) -> None:
    with started(3, tmp_path, mode, "--parallel.timeout_seconds", "6") as ranks:
        if mode == "working":
            ranks[1].send_signal(signal.SIGSTOP)
        (line,) = errors_of(ranks, [0, 2])
    assert re.match(r"plsc train: error: rank 1 \([^()]+, no answer\) hangs at '.*step \d+': the others wait", line)


@pytest.mark.slow
def test_ranks_that_are_asked_to_stop_end_with_the_code_of_the_signal(tmp_path: Path) -> None:
    with started(3, tmp_path, "working") as ranks:
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        (line,) = errors_of(ranks, [0, 1, 2])
        assert [process.wait() for process in ranks] == [128 + signal.SIGTERM] * 3
    assert re.match(r"plsc train: error: stopped by a signal after step \d+; its checkpoint is written", line)


@pytest.mark.feature("asynchronous")
@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "half"])
def test_ranks_that_step_by_themselves_name_it_too(way: str, tmp_path: Path) -> None:
    alone = ["--head_ranks", "1", "--head.placement", "host", "--asynchronous.mode", way]
    with started(3, tmp_path, "working", *alone, "--checkpoint.every_steps", "0") as ranks:
        ranks[1].send_signal(signal.SIGKILL)
        (line,) = errors_of(ranks, [0, 2])
        assert [process.wait() for process in ranks] == [1, -signal.SIGKILL, 1]
    assert "lost touch with rank 1; --resume auto goes on from the last checkpoint" in line


class Stalled:
    """An event that a device never comes to."""

    def query(self) -> bool:
        return False


def test_a_device_that_stands_still_is_one_line() -> None:
    verdict = Verdict(torch.zeros(1), limit=0.01)
    verdict._event = Stalled()  # type: ignore[assignment]
    with pytest.raises(PlscError, match=r"did not end a step within 0\.01 s.*--resume auto") as error:
        verdict.numbers()
    assert "\n" not in str(error.value)
