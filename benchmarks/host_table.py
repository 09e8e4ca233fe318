"""A class table that memory does not hold: trained from a mapped file, killed by SIGKILL, resumed with equal losses.

    python benchmarks/host_table.py [--classes 5000000] [--dim 128] [--sample-rate 0.01] [--folder DIR] [--out DIR]

One run goes through; another is killed after half of its steps and resumed from its last checkpoint. Synthetic
embeddings of 2,000 identities stand for a backbone's; all other classes are negatives. Prints steps per second, the
peak of resident memory beyond the libraries' by part, and the table's size; adds a row to
benchmarks/results/host_table.csv. About two minutes, and three times the table's size on disk.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lone_head import LoneHead, forget_peak, resident, sizes_of, worker_command
from results_file import print_and_add, script_parser

from plsc.config import KeepConfig
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.checkpoint import CheckpointFolder
from plsc.train.checkpoint_reader import open_newest


class Worker(LoneHead):
    """One training process: a line of JSON per event on stdout."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.libraries = resident("VmRSS")
        self.peaks: dict[str, float] = {}
        forget_peak()
        begin = time.monotonic()
        super().__init__(args, placement=f"mmap:{args.folder / 'table'}")
        self.head.inverse_norms()
        self.note("creation")
        self.creation_seconds = time.monotonic() - begin
        self.checkpoints = CheckpointFolder(args.folder / "checkpoints", self.mesh, KeepConfig(last=1))
        self.checkpointer = AsyncCheckpointer(self.checkpoints, print, background=False)  # the least memory

    def note(self, part: str) -> None:
        """Remember the peak of the part that ends here, above the libraries'."""
        self.peaks[part] = max(self.peaks.get(part, 0.0), resident("VmHWM") - self.libraries)
        forget_peak()

    def resume(self) -> int:
        """The step to go on from, with the newest checkpoint's state taken back."""
        stored = open_newest(self.checkpoints)
        if stored is None:
            return 0
        stored.load_into(self.tensors())
        self.head.set_extra_state(stored.state["head"])
        self.optimizer.steps = stored.step
        self.note("load")
        return stored.step

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        self.checkpointer.save(step, self.tensors(), {"head": self.head.get_extra_state()})
        self.note("save")

    def go(self) -> None:
        """Train to the last step, and tell the figures."""
        done = self.resume()
        total = 0.0
        for step, loss, seconds, _ in self.train(done):
            total += seconds
            print(json.dumps({"step": step, "loss": loss}), flush=True)
            if step % self.args.save_every == 0:
                self.note("training")
                self.save(step)
        self.note("training")
        mean_norm = self.head.mean_norm()
        self.note("mean norm")
        print(
            json.dumps(
                {
                    "steps_per_second": (self.args.steps - done) / total,
                    "creation_seconds": self.creation_seconds,
                    "libraries_mib": self.libraries,
                    "peaks_mib": self.peaks,
                    "mean_norm": mean_norm,
                }
            )
        )


def run(args: argparse.Namespace, folder: Path, kill_at: int = 0) -> tuple[dict[int, float], dict[str, Any]]:
    """One worker's losses and figures; with ``kill_at`` it is killed after that step."""
    folder.mkdir(exist_ok=True)
    losses: dict[int, float] = {}
    with subprocess.Popen(worker_command(__file__, args, folder=folder), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if "step" not in event:
                return losses, event
            losses[event["step"]] = event["loss"]
            if event["step"] == kill_at:
                os.kill(process.pid, signal.SIGKILL)
                return losses, {}
    raise SystemExit("a worker ended early: see above")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both runs, compared; the row of figures."""
    whole, figures = run(args, folder / "whole")
    size = sum(path.stat().st_size for path in (folder / "whole").glob("table.*"))
    shutil.rmtree(folder / "whole")
    before, _ = run(args, folder / "killed", kill_at=args.steps // 2 + args.save_every // 4)
    after, resumed = run(args, folder / "killed")
    equal = {**before, **after} == whole and all(before[step] == after[step] for step in before.keys() & after.keys())
    peaks = {part: round(value) for part, value in {**resumed["peaks_mib"], **figures["peaks_mib"]}.items()}
    print(
        f"killed after step {max(before)}, resumed from step {min(after) - 1}: losses "
        f"{'are equal' if equal else 'DIFFER'}"
    )
    return {
        **sizes_of(args),
        "table_mib": round(size / 2**20),
        "steps_per_second": round(figures["steps_per_second"], 2),
        "creation_seconds": round(figures["creation_seconds"], 1),
        "first_loss": round(whole[1], 3),
        "last_loss": round(whole[args.steps], 3),
        "losses_equal_after_kill": equal,
        "libraries_mib": round(figures["libraries_mib"]),
        **{f"peak_{part.replace(' ', '_')}_mib": value for part, value in sorted(peaks.items())},
    }


def main() -> None:
    parser = script_parser(
        __doc__, results="host_table", classes=5_000_000, dim=128, sample_rate=0.01, batch=128, steps=60, save_every=20
    )
    parser.add_argument("--folder", type=Path, help="where the tables and checkpoints go while it runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        Worker(args).go()
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        row = measure(args, Path(folder))
    print_and_add("host_table", row, args.out)


if __name__ == "__main__":
    main()
