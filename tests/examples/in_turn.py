"""On a rank: runs examples one after another, and writes what each returns; a launch for each would take minutes.

``torchrun --nproc-per-node N in_turn.py TASKS.json RESULTS.json``: the tasks are [EXAMPLE, [ARGUMENT, …]], or
["plsc train", {KEY: VALUE, …}] for the run of plsc_train.toml with these keys.
"""

import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
# What packages warn of that is right as it is, or that only they can mend.
IGNORED = (
    r".*`srun` command is available",  # Lightning, wherever Slurm is installed
    r".*treespec, LeafSpec.*deprecated",  # Lightning's use of torch
    r"The dirpath has changed",  # Lightning's, as the run that goes on has a folder of its own
    r"Using ModelCheckpoint with manual optimization",  # which then holds the step's result, as it should
)


def run(name: str, arguments: Any) -> Any:
    """What the example's main() returns, or the losses of plsc train."""
    if name != "plsc train":
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments)
    import plsc
    from plsc import config
    from plsc.train import train
    from plsc.train.metrics import read_metrics

    out = Path(arguments.pop("out"))
    train(config.load(EXAMPLES / "plsc_train.toml", arguments), plsc.init(), out=out, quiet=True)
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in IGNORED:
        warnings.filterwarnings("ignore", message)
    tasks, results = map(Path, sys.argv[1:])
    found = [run(*task) for task in json.loads(tasks.read_text())]
    if torch.distributed.get_rank() == 0:
        results.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
