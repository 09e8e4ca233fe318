"""The time that a checkpoint costs training: saved in the background, while training waits, and as it once was.

    python benchmarks/checkpoint_stall.py [--classes 1000000] [--dim 128] [--rounds 4] [--folder DIR] [--out DIR]
    python benchmarks/checkpoint_stall.py --classes 2000000 --dim 330 --rounds 3      a state of 2 GB

One process trains a class head alone; after every few steps it saves its state by the next of three ways in turn:
"background" and "waiting" are checkpoint.async_save true and false; "reread" writes by torch.distributed.checkpoint,
reads the files again for their hashes, and syncs at the end. Prints medians over the rounds: the time until the next
step may begin (stall), the time until the checkpoint is published, and a step's time alone and while a checkpoint is
written. ``cost_ms`` is what a checkpoint in the background takes from training in all, the stall and what the steps
beside it take longer, and ``percent_of_1000_steps`` its share where one is saved every 1,000 steps, the default. Adds a
row to benchmarks/results/checkpoint_stall.csv. About a minute, and four times the state's size on disk.
"""

import argparse
import itertools
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lone_head import LoneHead, batches
from results_file import print_and_add, script_parser
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from plsc.config import KeepConfig
from plsc.files import atomic_replace_dir, describe_files, write_json
from plsc.native.allocator import keep_freed_memory
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.checkpoint import CheckpointFolder

WAYS = ("background", "waiting", "reread")
STEPS = 10  # between two checkpoints, at least


class Training(LoneHead):
    """A class head that learns random embeddings."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.x, self.labels = next(batches(args))
        self.count = 0

    def step(self) -> float:
        """Take a step; its seconds."""
        begin = time.perf_counter()
        self.head(self.x, self.labels).backward()
        self.optimizer.step()
        self.count += 1
        return time.perf_counter() - begin


def reread(folder: Path, training: Training) -> None:
    """Write, read again for the hashes, sync and publish, one after another."""
    tmp_path, final = folder / ".reread.tmp", folder / "reread"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves in one process
        save(training.tensors(), storage_writer=FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    files = describe_files(tmp_path, sorted(path.name for path in tmp_path.iterdir()))
    write_json(tmp_path / "manifest.json", files)
    atomic_replace_dir(tmp_path, final)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row of figures."""
    training = Training(args)
    checkpoints = CheckpointFolder(folder, training.mesh, KeepConfig(last=1))
    savers = {way: AsyncCheckpointer(checkpoints, print, background=way == "background") for way in WAYS[:2]}
    stalls: dict[str, list[float]] = {way: [] for way in WAYS}
    published: dict[str, list[float]] = {way: [] for way in WAYS}
    plain: list[float] = []
    beside: list[float] = []
    for way in itertools.chain.from_iterable(itertools.repeat(WAYS, args.rounds)):
        plain += [training.step() for _ in range(STEPS)]
        begin = time.perf_counter()
        if way == "reread":
            reread(folder, training)
        else:
            savers[way].save(training.count, training.tensors(), {})
        stalls[way].append(time.perf_counter() - begin)
        while way == "background" and savers[way].is_saving:
            beside.append(training.step())
            savers[way].poll()
        published[way].append(time.perf_counter() - begin)
    for saver in savers.values():
        saver.close()
    nbytes = sum(block.local.nbytes for shard in training.tensors().values() for block in shard.blocks)
    cost = median(stalls["background"]) + (sum(beside) - len(beside) * median(plain)) / args.rounds
    milliseconds = {
        **{f"stall_{way}_ms": 1e3 * median(stalls[way]) for way in WAYS},
        **{f"published_{way}_ms": 1e3 * median(published[way]) for way in WAYS},
        "step_ms": 1e3 * median(plain),
        "step_beside_background_ms": 1e3 * median(beside),
        "cost_ms": 1e3 * cost,
        "percent_of_1000_steps": 100 * cost / (1000 * median(plain)),
    }
    figures = {name: round(value, 1) for name, value in milliseconds.items()}
    return {"classes": args.classes, "dim": args.dim, "state_mib": nbytes >> 20, "rounds": args.rounds, **figures}


def main() -> None:
    parser = script_parser(
        __doc__, results="checkpoint_stall", classes=1_000_000, dim=128, sample_rate=0.02, batch=64, rounds=4
    )
    parser.add_argument("--folder", type=Path, help="where the checkpoints go while it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as plsc train does
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        row = measure(args, Path(folder))
    print_and_add("checkpoint_stall", row, args.out)


if __name__ == "__main__":
    main()
