"""Runs that are killed again and again, on changing numbers of ranks, beside a run that nothing happened to.

    python benchmarks/kill_rounds.py [--rounds 50] [--seed 0] [--ways kill outage sigterm disk agent] [--out DIR]

Each round goes on with a run of 40 steps by --resume auto, on 1, 2 or 3 ranks, and ends it at a random step, every
second time while a checkpoint is being written:

- kill: one rank by SIGKILL; the others have to end by themselves, and one line has to name it.
- outage: all ranks by SIGKILL.
- sigterm: one rank is asked to stop; all have to save and end with exit code 143.
- disk: the disk is filled to the last byte; a moment later, all ranks are killed. For this, the runs are on a file
  system of their own in memory, which only root can make; without, such rounds are left out.
- agent: two agents of torchrun, of which one is killed, or it and its rank; the other one has to go on by itself.

A finished run's losses have to be those of the undisturbed run, one line per step, within --tolerance (the numbers of
ranks change the order of sums, which run in float64 here); then the next run begins. Prints a line per round and adds
a row to benchmarks/results/kill_rounds.csv. About 15 s a round on two busy cores.
"""

import contextlib
import itertools
import multiprocessing as mp
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from results_file import RESULTS, add_row, script_parser
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plsc.train.metrics import read_metrics

WAYS = ("kill", "outage", "sigterm", "disk", "agent")
WORLDS = (1, 2, 3)
STEPS = 40
GLOBAL_BATCH = 12
LIMIT_SECONDS = 120.0  # for whatever has to happen in a round
RECIPE = f"""
backbone = "resnet8"
embedding_dim = 16
precision = "fp32"
sync_batchnorm = true
steps = {STEPS}
[data]
train = "avatars:20x6"
image_size = 32
workers = 0
[optim]
lr = 0.02
[checkpoint]
every_steps = 2
[log]
every_steps = 1
to = []
"""
CONTEXT = mp.get_context("forkserver")


def main() -> int:
    """Run the rounds; 1 if a run is not what it should be."""
    assert __doc__ is not None
    parser = script_parser(__doc__, rounds=50, seed=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tolerance", type=float, default=1e-6, help="of a loss, relative")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the row")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    CONTEXT.set_forkserver_preload(["torch", "plsc.train", "plsc.tools.train"])
    with tempfile.TemporaryDirectory() as name, _own_file_system(Path(name)) as is_own:
        ways = [way for way in args.ways if way != "disk" or is_own]
        rounds = Rounds(Path(name), random.Random(args.seed), ways)
        begin = time.monotonic()
        for number in range(args.rounds):
            rounds.one(number)
        rounds.finish()
        row = rounds.row() | {"seed": args.seed, "seconds": round(time.monotonic() - begin)}
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    add_row("kill_rounds", row, args.out)
    return int(row["worst"] > args.tolerance)


class Rounds:
    """Rounds of one run after another.

    Args:
        folder: of the runs.
        draw: decides when, how and where.
        ways: to end a run.
    """

    def __init__(self, folder: Path, draw: random.Random, ways: list[str]) -> None:
        self._folder, self._draw, self._ways = folder, draw, ways
        (folder / "recipe.toml").write_text(RECIPE)
        self._runs = (folder / f"run{number}" for number in itertools.count())
        whole = Ranks(1, folder / "undisturbed")
        whole.wait([0])
        self._expected = losses(whole.out)
        assert sorted(self._expected) == list(range(1, STEPS + 1))
        self._out = next(self._runs)
        self._count: Counter[str] = Counter()
        self._worst, self._slowest, self._finished, self._inside = 0.0, 0.0, 0, 0

    def one(self, number: int) -> None:
        """Go on with the present run, or the next where that is over, and end it."""
        way = self._ways[number % len(self._ways)]
        world = 2 if way == "agent" else self._draw.choice(WORLDS[1:] if way == "kill" else WORLDS)
        while True:
            started = Agents(self._out) if way == "agent" else Ranks(world, self._out)
            if started.reaches(self._draw.randint(1, 8), while_saving=number % 2 == 1, draw=self._draw):
                break
            started.wait([0] * len(started.processes))  # it had come to its end before
            self._compare()
        self._inside += bool(list(self._out.glob("checkpoints/.step-*.tmp")))
        step, begin = max(losses(self._out)), time.monotonic()
        said = getattr(self, f"_{way}")(started)
        self._count[way] += 1
        print(
            f"round {number}: {way} of {world} after step {step}: {said}, {time.monotonic() - begin:.1f} s", flush=True
        )

    def finish(self) -> None:
        """Let the present run come to its end."""
        Ranks(self._draw.choice(WORLDS), self._out).wait()
        self._compare()

    def row(self) -> dict[str, Any]:
        """The figures of all rounds."""
        counts = {way: self._count[way] for way in WAYS}
        counts |= {"rounds": self._count.total(), "inside": self._inside, "runs": self._finished}
        return {**counts, "worst": float(f"{self._worst:.2g}"), "slowest_s": round(self._slowest, 1)}

    def _kill(self, ranks: "Ranks") -> str:
        victim, begin = self._draw.randrange(len(ranks.processes)), time.monotonic()
        ranks.kill(victim)
        codes = ranks.wait()
        self._slowest = max(self._slowest, time.monotonic() - begin)
        assert all(codes), codes
        named = re.findall(r"lost touch with rank (\d+)", ranks.errors())
        assert named == [str(victim)], ranks.errors()
        return f"rank {victim} is named"

    def _outage(self, ranks: "Ranks") -> str:
        ranks.end()
        return "all are gone"

    def _sigterm(self, ranks: "Ranks") -> str:
        ranks.kill(self._draw.randrange(len(ranks.processes)), signal.SIGTERM)
        codes = ranks.wait()
        assert set(codes) <= {143, 0}, (codes, ranks.errors())  # 0: it was in its last step
        return f"exit codes {codes}"

    def _disk(self, ranks: "Ranks") -> str:
        filler = self._folder / "filler"
        fill(filler)
        time.sleep(self._draw.uniform(0.2, 2.0))
        gone_on = all(process.is_alive() for process in ranks.processes)
        ranks.end()
        filler.unlink()
        return "it had gone on" if gone_on else f"it had ended: {ranks.errors()[-300:].strip()}"

    def _agent(self, agents: "Agents") -> str:
        step, with_rank = max(losses(self._out)), self._draw.random() < 0.5
        agents.kill_second(with_rank=with_rank)
        begin = time.monotonic()
        while agents.processes[0].is_alive() and max(losses(self._out), default=0) < min(step + 3, STEPS):
            assert time.monotonic() - begin < LIMIT_SECONDS, agents.errors()
            time.sleep(0.05)
        self._slowest = max(self._slowest, time.monotonic() - begin)
        went_on = max(losses(self._out))
        agents.end()
        assert went_on >= min(step + 3, STEPS), agents.errors()
        return f"{'with' if with_rank else 'without'} its rank; the other went on"

    def _compare(self) -> None:
        """Compare the losses of a finished run, and name the next."""
        lines = [line["step"] for line in read_metrics(self._out) if "loss" in line]
        assert lines == list(range(1, STEPS + 1)), lines
        found = losses(self._out)
        self._worst = max([self._worst, *(abs(found[step] / loss - 1) for step, loss in self._expected.items())])
        shutil.rmtree(self._out)
        self._out = next(self._runs)
        self._finished += 1


class Processes:
    """Processes that go on with the run ``out``."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.processes: list[BaseProcess] = []
        self._before = _identity(out)
        self._said = out.with_name("said")
        self._said.write_text("")

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        """Start one more."""
        process = CONTEXT.Process(target=_quietly, args=(str(self._said), function, *arguments))
        process.start()
        self.processes.append(process)

    def reaches(self, steps: int, *, while_saving: bool, draw: random.Random) -> bool:
        """Wait for so many steps, and then for a checkpoint under way; False where the run ends before."""
        deadline = time.monotonic() + LIMIT_SECONDS
        first: int | None = None
        while True:
            found = losses(self.out) if _identity(self.out) != self._before else {}
            first = min(found, default=None) if first is None and not self._before else first
            first = max(found, default=None) if first is None else first
            if found and first is not None and max(found) >= min(first + steps - 1, STEPS - 1):
                break
            if any(process.exitcode is not None for process in self.processes):
                assert all(process.exitcode in (None, 0) for process in self.processes), self.errors()
                return False
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.005)
        while while_saving and not list(self.out.glob("checkpoints/.step-*.tmp")):
            if any(process.exitcode is not None for process in self.processes):
                return False
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        return all(process.exitcode is None for process in self.processes)

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one."""
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self, expected: list[int] | None = None) -> list[int | None]:
        """Wait until all have ended; their exit codes."""
        deadline = time.monotonic() + LIMIT_SECONDS
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"the run does not end: {codes}, {self.errors()}"
        assert expected is None or codes == expected, (codes, self.errors())
        return codes

    def end(self) -> None:
        """Kill all, with the processes that they have started."""
        for process in self.processes:
            for pid in [*_children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid or 0, signal.SIGKILL)
        self.wait()

    def errors(self) -> str:
        """What all have said."""
        return self._said.read_text(errors="replace")


class Ranks(Processes):
    """Ranks as `plsc train --nproc` starts them."""

    def __init__(self, world: int, out: Path) -> None:
        super().__init__(out)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world):
            self.start(_be_rank, rank, world, self._store.port, str(out))


class Agents(Processes):
    """Two agents of torchrun with a rank each, of which one is enough; the first keeps the rendezvous."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
        port = store.port
        del store
        for number in range(2):
            self.start(_be_agent, port, str(out), number == 0)

    def kill_second(self, *, with_rank: bool) -> None:
        """Kill the agent that does not keep the rendezvous."""
        victims = [self.processes[1].pid, *(_children(self.processes[1].pid) if with_rank else [])]
        for pid in victims:
            os.kill(pid or 0, signal.SIGKILL)


def _quietly(said: str, function: Callable[..., None], *arguments: Any) -> None:
    """Run in a process of its own, whose standard error goes to the file ``said``."""
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    function(*arguments)


def _be_rank(rank: int, world: int, port: int, out: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os._exit(_train(out, "--resume", "auto"))


def _be_agent(port: int, out: str, is_host: bool) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    waits = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3, "is_host": is_host}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id="rounds",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs=waits,
        max_restarts=5,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, _be_elastic_rank)(out)


def _be_elastic_rank(out: str) -> None:
    """A restart of the same launch goes on by itself; a launch that finds the run of another one is told to."""
    sys.exit(_train(out, *(["--resume", "auto"] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else [])))


def _train(out: str, *options: str) -> int:
    import torch

    from plsc.tools import entry
    from plsc.train import failures

    torch.set_num_threads(1)
    entry._HOLD_SECONDS, failures._REPORT_SECONDS = 0.1, 2.0
    batch = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    recipe = str(Path(out).with_name("recipe.toml"))
    return entry.main(["train", recipe, "--out", out, "--data.batch_size", str(batch), *options])


def losses(out: Path) -> dict[int, float]:
    """The losses by step."""
    return {line["step"]: line["loss"] for line in read_metrics(out) if "loss" in line}


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def _identity(out: Path) -> int:
    """Changes when a run is begun, or resumed: metrics.jsonl is written anew then."""
    with contextlib.suppress(FileNotFoundError):
        return (out / "metrics.jsonl").stat().st_ino
    return 0


def _children(pid: int | None) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


@contextmanager
def _own_file_system(folder: Path) -> Iterator[bool]:
    """Mount one of 256 MB in memory on ``folder`` if this process may; yields whether it could."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "plsc", str(folder)]
    try:
        is_own = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_own = False
    try:
        yield is_own
    finally:
        if is_own:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
