"""A training on one GPU that is ended by kill -9 and goes on, bit by bit beside one that nothing happened to.

    python benchmarks/resume_killed.py OUT.json [--device cpu]

A small backbone in bf16 learns drawn avatars for 40 steps, with a checkpoint every 5. A second run is killed once it
has logged step 13, and resumed. Losses of all steps and every tensor of the last checkpoint have to be the same: their
digests stand in OUT.json, and ``note`` says what differs. Exit code 1 where something does.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from plsc.train.metrics import METRICS, read_metrics

STEPS, KILLED_AFTER, LIMIT_SECONDS = 40, 13, 180.0
RECIPE = f"""
backbone = "resnet8"
embedding_dim = 64
precision = "PRECISION"
steps = {STEPS}
[data]
train = "avatars:200x4"
image_size = 32
batch_size = 32
workers = 0
[head]
weight_dtype = "bfloat16"
momentum_dtype = "int8"
[optim]
lr = 0.02
clip_norm = 5.0
[checkpoint]
every_steps = 5
[log]
every_steps = 1
to = []
"""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file of the result")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    args = parser.parse_args()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    environment = {**os.environ, **hidden, "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as name:
        recipe, whole, killed = (Path(name) / part for part in ("recipe.toml", "whole", "killed"))
        recipe.write_text(RECIPE.replace("PRECISION", "bf16" if args.device == "cuda" else "fp32"))
        command = [sys.executable, "-m", "plsc.tools.entry", "train", str(recipe), "--nproc", "1", "--out"]
        subprocess.run([*command, str(whole)], env=environment, check=True)
        last = STEPS
        while last == STEPS:  # it came to its end before the signal, as on a busy machine
            shutil.rmtree(killed, ignore_errors=True)
            last = kill(subprocess.Popen([*command, str(killed)], env=environment, start_new_session=True), killed)
        subprocess.run([*command, str(killed), "--resume", "auto"], env=environment, check=True)
        found = {"whole": digests(whole), "resumed": digests(killed)}
    wrong = [what for what, digest in found["whole"].items() if found["resumed"].get(what) != digest]
    right = not wrong and found["whole"].keys() == found["resumed"].keys()
    note = f"killed after step {last}: {'the same bits' if right else 'differs: ' + ', '.join(wrong)}"
    args.out.write_text(json.dumps({"right": right, "killed_after": last, "digests": found, "note": note}))
    print(note)
    return int(not right)


def kill(process: "subprocess.Popen[bytes]", out: Path) -> int:
    """Kill a run and its ranks when it has logged enough steps; the last one that it logged."""
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        ended = False
        while last_step(out) < KILLED_AFTER:
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"the run came to step {last_step(out)} and no further")
            ended = process.poll() is not None  # what it logged before is read once more
            time.sleep(0.002)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    return last_step(out)


def last_step(out: Path) -> int:
    """The last step that a run has logged; 0 where there is none."""
    lines = read_metrics(out) if (out / METRICS).exists() else []
    return max((line["step"] for line in lines), default=0)


def digests(out: Path) -> dict[str, str]:
    """Of a run's losses, last weights, and each file of tensors of its last checkpoint."""
    losses = {line["step"]: line["loss"] for line in read_metrics(out) if "loss" in line}
    assert sorted(losses) == list(range(1, STEPS + 1)), sorted(losses)
    last = max((out / "checkpoints").glob("step-*"))
    found = {str(path.relative_to(out)): path.read_bytes() for path in sorted(last.rglob("*.distcp"))}
    weights = (out / "model.safetensors").read_bytes()
    found["weights"] = weights[8 + int.from_bytes(weights[:8], "little") :]  # metadata have an order of their own
    found["losses"] = json.dumps(losses, sort_keys=True).encode()
    return {what: hashlib.sha256(content).hexdigest() for what, content in found.items()}


if __name__ == "__main__":
    sys.exit(main())
