"""A class table larger than memory, whose files are its checkpoint: trained, killed by SIGKILL, and gone on with.

    python benchmarks/table_beyond_memory.py [--classes 100000000] [--dim 128] [--sample-rate 0.001] [--folder DIR]

One process trains to the last step, undisturbed. A second one rolls the table back to a savepoint and goes on until it
is killed, at a random moment after a step; a third one rolls back again and trains to the last step. Losses, and every
bit of the rows that two of the steps touched, have to be the undisturbed run's. Synthetic embeddings of 2,000
identities stand for a backbone's. The undisturbed run begins with a cold page cache. Adds a row to
benchmarks/results/table_beyond_memory.csv. At the defaults: 40 GB of disk; the time is the disk's.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lone_head import LoneHead, forget_peak, resident, sizes_of, worker_command
from results_file import print_and_add, script_parser

from plsc.files import atomic_write

STATE = "state.json"


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process had read from the disk, and caused to be written."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def drop_from_cache(folder: Path) -> None:
    """Let the page cache forget the table's files."""
    for path in folder.glob("table.*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Worker(LoneHead):
    """One training process: a line of JSON per event on stdout."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.libraries = resident("VmRSS")
        forget_peak()
        begin = time.monotonic()
        super().__init__(args, placement=f"mmap:{args.folder / 'table'}", journal=True)
        self.tell(opened_seconds=time.monotonic() - begin)

    def tell(self, **values: Any) -> None:
        """Print an event."""
        print(json.dumps(values), flush=True)

    def begin(self) -> int:
        """The step to go on from: the present state is that of ``--from-step``, or of the newest checkpoint."""
        begin = time.monotonic()
        state = self.args.folder / STATE
        if not state.exists():
            self.save(0)
            drop_from_cache(self.args.folder)
            self.tell(first_savepoint_seconds=time.monotonic() - begin)
            return 0
        stored = json.loads(state.read_text())
        step = int(stored["step"]) if self.args.from_step is None else self.args.from_step
        self.head.roll_back(step)
        self.head.set_extra_state({"forwards": step, "margin": {}})
        self.optimizer.steps = step
        self.save(step)
        self.tell(rolled_back_to=step, roll_back_seconds=time.monotonic() - begin)
        return step

    def save(self, step: int) -> None:
        """Make a checkpoint: a savepoint of the table, and the small state."""
        journal = self.head.undo_journal
        assert journal is not None
        self.head.set_savepoint(step)
        journal.flush()
        with atomic_write(self.args.folder / STATE) as tmp_path:
            tmp_path.write_text(json.dumps({"step": step}), encoding="utf-8")

    def digest(self) -> str:
        """The SHA-256 of the rows that the last step touched, in all columns."""
        softmax = self.head.softmax
        softmax.table.wait_written()
        rows = softmax.sampler.draw(self.labels, softmax.forwards - 1)
        found = hashlib.sha256(rows.numpy().tobytes())
        for shard in self.tensors().values():
            values = shard.blocks[0].local[rows].contiguous()
            found.update(values.view(torch.uint8).numpy().tobytes())
            shard.release()
        return found.hexdigest()

    def go(self) -> None:
        """Train to the last step, and tell the figures."""
        for step, loss, seconds, cpu_seconds in self.train(self.begin()):
            read, written = disk_bytes()
            self.tell(
                step=step,
                loss=loss,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                read=read,
                written=written,
                peak_mib=resident("VmHWM") - self.libraries,
                anonymous_mib=resident("RssAnon"),
                file_mib=resident("RssFile"),
            )
            if step in (self.args.steps, self.args.digest_step):
                self.tell(digest_of=step, digest=self.digest())
                forget_peak()  # which is training's
            if step % self.args.save_every == 0:
                begin = time.monotonic()
                self.save(step)
                self.tell(saved=step, save_seconds=time.monotonic() - begin)
        self.tell(libraries_mib=self.libraries, faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


def run(args: argparse.Namespace, *words: str, kill_after: tuple[int, float] | None = None) -> list[dict[str, Any]]:
    """One worker's events; with ``kill_after`` it is killed so many seconds after that step."""
    command = worker_command(__file__, args, *words, digest_step=args.digest_step, folder=args.folder)
    events: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
                print(line.rstrip(), flush=True)
                if kill_after is not None and events[-1].get("step") == kill_after[0]:
                    time.sleep(kill_after[1])
                    os.kill(process.pid, signal.SIGKILL)
                    if process.wait() != -signal.SIGKILL:
                        raise SystemExit("the worker had ended before it was killed: give more steps")
                    return events
    if process.returncode:
        raise SystemExit("a worker ended early: see above")
    return events


def values(events: list[dict[str, Any]], name: str, key: str) -> dict[Any, Any]:
    """``{event[key]: event[name]}`` of the events that have both."""
    return {event[key]: event[name] for event in events if name in event and key in event}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All three processes, compared; the row of figures."""
    whole = run(args)
    files = [path.stat() for path in args.folder.glob("table.*") if "undo" not in path.name]
    journals = sum(path.stat().st_size for path in args.folder.glob("table.*.undo-*"))
    seconds = values(whole, "seconds", "step")
    savepoint = args.digest_step - 1
    delay = random.uniform(0, statistics.median(seconds.values()))
    killed = run(args, "--from-step", str(savepoint), kill_after=(savepoint + 2, delay))
    resumed = run(args)
    losses = values(whole, "loss", "step")
    digests = values(whole, "digest", "digest_of")
    again = values(killed, "loss", "step") | values(resumed, "loss", "step")
    equal = all(losses[step] == loss for step, loss in again.items())
    bits_equal = values(resumed, "digest", "digest_of") == digests
    print(f"killed {delay:.1f} s after step {savepoint + 2}: losses equal {equal}, rows equal {bits_equal}")
    last = [event for event in whole if "step" in event]
    half = len(last) // 2
    per_step = [{key: b[key] - a[key] for key in ("read", "written")} for a, b in itertools.pairwise(last)]
    facts = {key: value for event in (*whole, *resumed) for key, value in event.items()}
    return {
        **sizes_of(args),
        "save_every": args.save_every,
        "table_mib": round(sum(stat.st_size for stat in files) / 2**20),
        "journals_mib": round(journals / 2**20),
        "memory_mib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20),
        "creation_seconds": None if args.go_on else round(whole[0]["opened_seconds"], 1),
        "first_step_seconds": round(last[0]["seconds"], 2),
        "seconds_per_step_first_half": round(sum(e["seconds"] for e in last[1:half]) / (half - 1), 3),
        "seconds_per_step_last_half": round(sum(e["seconds"] for e in last[half:]) / (len(last) - half), 3),
        "cpu_seconds_per_step": round(sum(e["cpu_seconds"] for e in last) / len(last), 3),
        "read_mib_per_step": round(sum(e["read"] for e in per_step) / len(per_step) / 2**20, 1),
        "written_mib_per_step": round(sum(e["written"] for e in per_step) / len(per_step) / 2**20, 1),
        "peak_above_libraries_mib": round(max(e["peak_mib"] for e in last)),
        "anonymous_mib": round(max(e["anonymous_mib"] for e in last)),
        "file_mib": round(max(e["file_mib"] for e in last)),
        "libraries_mib": round(facts["libraries_mib"]),
        "save_seconds": round(max(values(whole, "save_seconds", "saved").values()), 1),
        "open_again_seconds": round(resumed[0]["opened_seconds"], 1),
        "roll_back_seconds": round(facts["roll_back_seconds"], 1),
        "losses_equal_after_kill": equal,
        "rows_equal_after_kill": bits_equal,
    }


def main() -> None:
    parser = script_parser(
        __doc__,
        results="table_beyond_memory",
        classes=100_000_000,
        dim=128,
        sample_rate=0.001,
        batch=256,
        steps=30,
        save_every=10,
    )
    parser.add_argument("--folder", type=Path, help="where the table goes while it runs")
    parser.add_argument("--go-on", action="store_true", help="from the table in --folder, which stays there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--from-step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--digest-step", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        Worker(args).go()
        return
    with contextlib.ExitStack() as stack:
        if not args.go_on:
            args.folder = Path(tempfile.mkdtemp(dir=args.folder))
            stack.callback(shutil.rmtree, args.folder)
        done = json.loads((args.folder / STATE).read_text())["step"] if args.go_on else 0
        args.digest_step = done + (args.steps // args.save_every - 1) * args.save_every + 1
        args.steps += done
        row = measure(args)
    print_and_add("table_beyond_memory", row, args.out)


if __name__ == "__main__":
    main()
