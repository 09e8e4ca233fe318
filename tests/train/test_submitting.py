"""The jobs that docs/features/schedulers.md submits: to Slurm, here a cluster of this node alone, and to Kubernetes."""

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from support.page_runner import ROOT, blocks_of
from support.waiting import free_port

FACES = """
backbone = "resnet8"
embedding_dim = 16
precision = "fp32"
steps = 40
[data]
train = "avatars:6x4"
image_size = 32
batch_size = 6
workers = 1
[checkpoint]
every_steps = 0
[eval]
sets = []
"""
SLURM = ("slurmctld", "slurmd", "sbatch", "munged")
# A credential's life is also how long a job that is put back into the queue waits there.
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=1
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def commands_first() -> dict[str, str]:
    """The environment, with the commands of this one's virtual environment before all others."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def block(title: str) -> str:
    """The block of docs/features/schedulers.md that shows the file ``title``."""
    (found,) = [each.text for each in blocks_of(ROOT / "docs" / "features" / "schedulers.md") if each.title == title]
    return found


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster of this machine alone; the environment that its commands need."""
    missing = [name for name in SLURM if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs Slurm's {', '.join(missing)}" if missing else "Slurm's daemons need root")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    names = {"host": socket.gethostname().split(".")[0], "folder": folder, "ports": [free_port(), free_port()]}
    (folder / "slurm.conf").write_text(SLURM_CONF.format(**names, cpus=os.cpu_count()))
    environment = {**commands_first(), "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    options = [f"--{name}={folder / file}" for name, file in {**files, "seed-file": "seed"}.items()]
    try:
        for command in (["munged", "--force", *options], ["slurmctld"], ["slurmd"]):
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
        yield environment
        end_jobs(environment)
    finally:
        for name in ("slurmd", "slurmctld", "munged"):
            file = folder / f"{name}.pid"
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGKILL)


def end_jobs(environment: dict[str, str]) -> None:
    """End what still runs, and wait for it: a job's processes outlive the daemons."""
    subprocess.run(["scancel", "--me"], env=environment, check=True, capture_output=True, timeout=30)
    for _ in range(150):
        left = subprocess.run(["squeue", "--noheader"], env=environment, check=True, capture_output=True, timeout=30)
        if not left.stdout.strip():
            return
        time.sleep(0.2)


def wait_for_text(log: Path, text: str, seconds: float = 250.0) -> str:
    deadline = time.monotonic() + seconds
    while text not in (found := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, f"no {text!r} in:\n{found}"
        time.sleep(0.2)
    return found


@pytest.mark.live
@pytest.mark.slow
def test_a_job_of_slurm_saves_at_its_signal_and_goes_on_from_the_queue(slurm: dict[str, str], tmp_path: Path) -> None:
    script = block("train.sbatch").replace("/shared/", "").replace("--nproc 8", "--nproc 2")
    script = script.replace("--nodes=2", "--nodes=1").replace(" --gpus-per-node=8 --cpus-per-task=64", "")
    (tmp_path / "train.sbatch").write_text(script)
    (tmp_path / "faces.toml").write_text(FACES.replace("steps = 40", "steps = 100000"))

    def ask(*command: str) -> str:
        return subprocess.run(command, env=slurm, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    job = ask("sbatch", "--parsable", "train.sbatch").strip()
    log = tmp_path / f"faces-{job}.log"
    wait_for_text(log, "train: step ")
    ask("scancel", "--signal=USR1", job)
    wait_for_text(log, "plsc train: error: stopped by a signal after step ")  # srun may tell the exit code before
    first = wait_for_text(log, "exit code 138")
    assert "Traceback" not in first
    (tmp_path / "faces.toml").write_text(FACES.replace("steps = 40", f"steps = {stopped_at(first) + 2}"))
    second = wait_for_text(log, "holds the last weights").removeprefix(first)
    assert f"step {stopped_at(first):,}" in second
    assert "Traceback" not in second


def stopped_at(log: str) -> int:
    return int(log.partition("stopped by a signal after step ")[2].partition(";")[0].replace(",", ""))


def kubernetes() -> dict[str, Any]:
    """The objects of the page's file by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(block("faces.yaml"))}


def test_the_objects_of_kubernetes_fit_the_published_schemas() -> None:
    packed = (ROOT / "tests" / "fixtures" / "kubeflow_trainer_v1alpha1.json.gz").read_bytes()
    schemas, objects = json.loads(gzip.decompress(packed)), kubernetes()
    assert objects.keys() == schemas.keys() == {"TrainingRuntime", "TrainJob"}
    checks = {kind: jsonschema_rs.validator_for(schema) for kind, schema in schemas.items()}
    for kind, check in checks.items():
        assert [str(error) for error in check.iter_errors(objects[kind])] == []
    reference = objects["TrainJob"]["spec"]["runtimeRef"]
    assert reference == {"kind": "TrainingRuntime", "name": objects["TrainingRuntime"]["metadata"]["name"]}
    objects["TrainJob"]["spec"]["trainer"]["nodes"] = 2
    (job,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert not any(check.is_valid(objects[kind]) for kind, check in checks.items())


@pytest.mark.live
@pytest.mark.slow
def test_the_pods_command_trains_under_the_trainers_variables(tmp_path: Path) -> None:
    """The variables that Trainer's plug-in for torch sets in each pod, here two of one process on this machine."""
    trainer = kubernetes()["TrainJob"]["spec"]["trainer"]
    (tmp_path / "faces.toml").write_text(FACES.replace("steps = 40", "steps = 2"))
    words = [word.replace("/shared", str(tmp_path)) for word in trainer["command"] + trainer["args"]]
    assert words[:3] == ["torchrun", "--no-python", "plsc"]
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
        **{each["name"]: each["value"] for each in trainer["env"]},
    }
    logs = [tmp_path / f"pod-{rank}.log" for rank in range(trainer["numNodes"])]
    pods = []
    try:
        for rank, log in enumerate(logs):
            environment = commands_first() | variables | {"PET_NODE_RANK": str(rank)}
            with log.open("w") as file:
                pods.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=file, stderr=file))
        codes = [pod.wait(timeout=200) for pod in pods]
    finally:
        for pod in pods:
            pod.terminate()  # torchrun ends its ranks
            pod.wait(timeout=60)
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    assert "trained 2 steps" in logs[0].read_text()
    assert "2 ranks" in (tmp_path / "runs" / "faces" / "train.log").read_text()
