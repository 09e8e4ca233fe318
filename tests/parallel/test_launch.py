"""The launcher: exit codes, one error line, no rank left behind."""

import shlex
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.ranks import run_command
from support.waiting import free_port

from plsc.errors import UsageError
from plsc.parallel.launch import Nodes, launch
from plsc.tools.entry import main


@pytest.mark.live
@pytest.mark.slow
def test_an_error_that_every_rank_meets_is_told_once(tmp_path):
    done = run_command("eval", "raw-pixels", "--data", "nowhere/", "--nproc", "2", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.count("error:") == 1, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.live
@pytest.mark.slow
def test_a_rank_that_dies_takes_the_others_with_it(tmp_path):
    """Rank 1 kills itself; rank 0 would wait for ever."""
    code = textwrap.dedent("""
        import os, signal, sys, time
        import plsc.parallel.launch as launcher
        if "RANK" not in os.environ:
            launcher.GRACE_SECONDS = 0.2
            start = launcher._start
            def patched(argv, rank, nproc, port, nodes):
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
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 128 + 9
    assert "rank 1 was killed by SIGKILL" in done.stderr


def test_no_rank_at_all_is_refused():
    with pytest.raises(UsageError):
        launch(["data"], 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "localhost"], "of 2 machines it is 0 to 1"),
        (["--nnodes", "0", "--master-addr", "localhost"], "--nnodes 0: at least one machine"),
        (["--nnodes", "3", "--head_ranks", "2", "--master-addr", "localhost"], "the number of ranks, 3"),
    ],
)
def test_machines_that_make_no_run_are_one_line(words, message, capsys):
    assert main(["train", "avatars_quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_dry_run_prints_the_command_of_each_machine(tmp_path, capsys):
    words = ["--nproc", "2", "--optim.lr", "0.5", "--out", str(tmp_path / "a run"), "--dry-run"]
    assert main(["train", "avatars_quickstart", *words, "--nnodes", "2", "--master-addr", "node-0"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("machine 0 of 2, ranks 0 to 1: plsc train avatars_quickstart ")
    command = shlex.split(second.removeprefix("machine 1 of 2, ranks 2 to 3: "))
    assert main([*command[1:], "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [first, second]
    for option, value in {"--node-rank": "1", "--out": str(tmp_path / "a run"), "--optim.lr": "0.5"}.items():
        assert command[command.index(option) + 1] == value
    assert not list(tmp_path.iterdir())


def test_a_dry_run_checks_the_request(capsys):
    assert main(["train", "avatars_quickstart", "--nproc", "3", "--head_ranks", "2", "--dry-run"]) == 2
    assert "does not divide the number of ranks, 3" in capsys.readouterr().err


@pytest.mark.live
def test_an_address_of_another_machine_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"cannot meet at 127\.0\.0\.1:\d+: .*free --master-port"):
            launch(["data"], 1, Nodes(2, 0, "127.0.0.1", taken.getsockname()[1]))


@pytest.mark.live
@pytest.mark.slow
def test_two_machines_train_one_run(tmp_path):
    """Both are this one, with a rank each."""
    words = ["train", "avatars_quickstart", "--data.train", "avatars:6x4", "--data.image_size", "32", "--steps", "2"]
    words += ["--data.workers", "0", "--data.batch_size", "4", "--eval.sets", "[]", "--out", str(tmp_path / "run")]
    words += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with ThreadPoolExecutor() as machines:
        started = [machines.submit(run_command, *words, "--node-rank", str(rank)) for rank in range(2)]
        first, second = (each.result() for each in started)
    assert first.returncode == 0, first.stderr
    assert "trained 2 steps" in first.stdout
    assert "2 ranks on CPU (gloo); global batch 8 = 4 x 2 ranks" in first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
