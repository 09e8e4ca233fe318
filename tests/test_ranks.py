"""The pool of ranks itself: a body that hangs, dies, fails or warns fails one test, soon, and says where it was."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator

import pytest
from support.ranks import RankError, RankPool, run_command
from support.time_limit import time_limit

from plsc.parallel import Mesh
from plsc.parallel.collectives import all_reduce_sum, barrier

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(size=2, hang_seconds=120)
    yield pool
    pool.close()


def total(mesh: Mesh) -> float:
    import torch

    return float(all_reduce_sum(torch.ones(1), mesh))


def wait_for_the_other(mesh: Mesh, fault: str) -> None:
    """Rank 1 does not come to the barrier."""
    if mesh.rank == 1:
        if fault == "hang":
            sleep_for_ever()
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        raise ValueError("rank 1 has failed")
    barrier(mesh)


def sleep_for_ever() -> None:
    time.sleep(1e6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "signs"),
    [
        ("hang", ["rank 0 does not answer", "in barrier", "rank 1 does not answer", "in sleep_for_ever"]),
        ("crash", [f"rank 1 ended with exit code {-signal.SIGSEGV}"]),
        ("fail", ["ValueError: rank 1 has failed"]),
    ],
)
def test_a_fault_of_one_rank_ends_its_test_and_the_next_one_runs(pool: RankPool, fault: str, signs: list[str]) -> None:
    if fault == "hang":
        assert pool(2, total) == [2.0, 2.0]  # the workers are up: the limit is the body's
        pool._hang_seconds = 3.0
    with pytest.raises(RankError) as caught:
        pool(2, wait_for_the_other, fault)
    pool._hang_seconds = 120.0
    for sign in signs:
        assert sign in str(caught.value)
    assert pool(2, total) == [2.0, 2.0]


def warn(mesh: Mesh) -> None:
    if mesh.rank == 1:
        warnings.warn("planted", FutureWarning, stacklevel=1)


def test_a_warning_on_a_rank_fails_its_test(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="FutureWarning: planted"):
        ranks(2, warn)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Runs a command of two ranks with a site module that plants a fault in every Python process of it."""

    def run(fault: str, **options: float) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(fault)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return run_command("eval", "raw-pixels", "--data", "avatars:4x4@9", "--nproc", "2", cwd=tmp_path, **options)

    return run


@pytest.mark.slow
def test_a_command_that_hangs_shows_the_stacks_of_its_ranks(planted) -> None:
    with pytest.raises(RankError) as caught:
        planted("import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(1e6)\n", hang_seconds=60)
    for sign in ("did not end in 60 s", "sitecustomize.py", "was killed by SIGABRT"):
        assert sign in str(caught.value)


@pytest.mark.slow
def test_a_warning_of_a_command_is_an_error(planted) -> None:
    plant = textwrap.dedent("""
        import argparse, os, warnings
        parse_args = argparse.ArgumentParser.parse_args
        def warn(*args):
            warnings.warn("planted", FutureWarning)
            return parse_args(*args)
        if "RANK" in os.environ:
            argparse.ArgumentParser.parse_args = warn
    """)
    done = planted(plant)
    assert done.returncode != 0
    assert "FutureWarning: planted" in done.stderr


def test_a_test_that_hangs_ends_with_its_stack() -> None:
    with pytest.raises(pytest.fail.Exception, match="in sleep_for_ever"), time_limit(0.2):
        sleep_for_ever()
    assert sys.exc_info() == (None, None, None)
