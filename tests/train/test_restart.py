"""Runs under torchrun that lose a rank: they go on by themselves, and leave a run of another launch alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import HANG_SECONDS
from support.tiny_runs import losses, run

Ranks = Any

# Rank 1 of attempt 0 kills itself where step 7 begins: after the checkpoint of step 4, and before that of step 8.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import plsc
from plsc.errors import PlscError
from plsc.train import step
from support.tiny_runs import run

torch.set_num_threads(1)
take = step.Stepper.step

def dying(self, group, number, *rest):
    if number == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, group, number, *rest)

step.Stepper.step = dying
try:
    run(plsc.init("cpu"), Path(sys.argv[1]), {"data.batch_size": 6, "epochs": 2})
except PlscError as error:
    print("refused:", error, flush=True)
    sys.exit(error.exit_code)
"""


def torchrun(script: Path, out: Path, nproc: int, restarts: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [*command, str(script), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def whole(mesh: Any, out: Path) -> None:
    run(mesh, out, {"data.batch_size": 6, "epochs": 2})


@pytest.mark.slow
def test_a_restart_goes_on_with_its_own_run_and_with_no_other(tmp_path: Path, ranks: Ranks) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "run"
    done = torchrun(script, out, nproc=2, restarts=2)
    assert done.returncode == 0, done.stderr
    assert "restarted by torchrun: resumed from" in (out / "train.log").read_text()
    ranks(2, whole, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")
    first, second = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    before = json.loads((out / "launch.json").read_text())
    refused = torchrun(script, out, nproc=1, restarts=1)
    assert refused.returncode != 0
    assert refused.stdout.count("holds a run already; go on with it by --resume auto") == 2  # attempts
    assert json.loads((out / "launch.json").read_text()) == before
