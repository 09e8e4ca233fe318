"""The launcher: exit codes, one error line, no rank left behind."""

import subprocess
import sys
import textwrap

import pytest
from support.ranks import run_command

from plsc.errors import UsageError
from plsc.parallel.launch import launch


@pytest.mark.slow
def test_an_error_that_every_rank_meets_is_told_once(tmp_path):
    done = run_command("eval", "raw-pixels", "--data", "nowhere/", "--nproc", "2", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.count("error:") == 1, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_dies_takes_the_others_with_it(tmp_path):
    """Rank 1 kills itself; rank 0 would wait for ever."""
    code = textwrap.dedent("""
        import os, signal, sys, time
        import plsc.parallel.launch as launcher
        if "RANK" not in os.environ:
            launcher.GRACE_SECONDS = 0.2
            start = launcher._start
            def patched(argv, rank, nproc, port):
                import subprocess
                return subprocess.Popen([sys.executable, __file__], env=launcher.rank_environment(rank, nproc, port),
                                        stderr=subprocess.PIPE if rank else None, text=True)
            launcher._start = patched
            sys.exit(launcher.launch([], 2))
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """)
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + 9
    assert "rank 1 was killed by SIGKILL" in done.stderr


def test_no_rank_at_all_is_refused():
    with pytest.raises(UsageError):
        launch(["data"], 0)
