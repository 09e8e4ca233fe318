"""Runs under torchrun that lose a rank: they go on by themselves, and leave a run of another launch alone."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import HANG_SECONDS
from support.tiny_runs import assert_same_files, losses, run

from plsc.files import write_json
from plsc.parallel import Mesh
from plsc.train.resumption import LAUNCH, Launch, after_restart, current_launch

Ranks = Any

CHANGES = {"data.batch_size": 6, "epochs": 2}
# Each attempt tries the folder of a foreign run first. Rank 1 of the first one kills itself where step 10 begins: the
# checkpoint of step 4 is published when that of step 8 begins.
SCRIPT = f"""
import os, signal, sys
from pathlib import Path
import torch
import plsc
from plsc.errors import PlscError
from plsc.train import step
from support.tiny_runs import run

torch.set_num_threads(1)
take = step.Stepper.step
own, foreign = map(Path, sys.argv[1:])

def dying(self, group, number, *rest, **options):
    if number == 9 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, group, number, *rest, **options)

step.Stepper.step = dying
mesh = plsc.init("cpu")
try:
    run(mesh, foreign, {CHANGES})
except PlscError as error:
    os.write(1, f"refused: {{error}}\\n".encode())  # in one piece: two ranks share the pipe
run(mesh, own, {CHANGES})
"""


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", *words]
    path = os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3])  # this checkout's package
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=2 * HANG_SECONDS, check=False
    )


@pytest.mark.live
@pytest.mark.slow
def test_a_restart_goes_on_with_its_own_run_and_with_no_other(tmp_path: Path, ranks: Ranks) -> None:
    script, own, foreign = tmp_path / "script.py", tmp_path / "own", tmp_path / "foreign"
    script.write_text(SCRIPT)
    ranks(2, run, foreign, CHANGES)
    done = torchrun(str(script), str(own), str(foreign))
    assert done.returncode == 0, done.stderr
    assert "restarted by torchrun: resumed from" in (own / "train.log").read_text()
    assert losses(own) == losses(foreign)
    assert_same_files(own, foreign)
    assert done.stdout.count(f"refused: {foreign} holds a run already; go on with it by --resume auto") == 4
    assert (own / "launch.json").exists()
    assert not (foreign / "launch.json").exists()


def test_a_launch_keeps_its_name_and_another_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(0, 1, 0, torch.device("cpu"))
    assert current_launch(mesh) is None
    names = []
    for _ in range(2):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none"}
        for name, value in {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, value)
        launches = [current_launch(mesh) for _ in range(2)]
        assert launches[0] is not None
        assert launches[0] == launches[1]
        names.append(launches[0].name)
    assert names[0] != names[1]


def test_any_agent_of_the_attempt_before_finds_its_run_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    write_json(tmp_path / LAUNCH, asdict(Launch("first store", "a:10", ("a:1:5", "b:1:5"))))
    for launch, is_own in [
        (Launch("first store", "a:11", ("c:1:5",)), True),
        (Launch("another store", "b:11", ("b:1:5",)), True),
        (Launch("another store", "b:11", ("b:1:6",)), False),  # another process of the same number
        (Launch("another store", "c:11", ("c:1:5",)), False),
        (Launch("first store", "a:10", ("a:1:5", "b:1:5")), False),  # the attempt that has begun it
    ]:
        assert after_restart(tmp_path, None, launch) == ((True, "auto") if is_own else (False, None))
    assert after_restart(tmp_path, None, None) == (False, None)
    assert after_restart(tmp_path / "none", None, Launch("", "", ("a:1:5",))) == (False, None)
