"""Start one command as several ranks of this machine, as torchrun would, and end them together."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plsc.errors import UsageError, first_line
from plsc.progress import note, write

# They ask a run to save its state and end: a person, a system that shuts down, Slurm before a time limit (--signal).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_SECONDS = 20.0  # how long the other ranks may take to end by themselves once one has failed


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, of which this is number ``rank``; the first one keeps the store where all ranks meet.

    Attributes:
        count: machines.
        rank: this one's number, from 0.
        address: the first one's host name or address, as the others reach it.
        port: of the store; 0 takes a free one, which only a single machine can.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"--nnodes {self.count}: at least one machine is needed")
        if not 0 <= self.rank < self.count:
            raise UsageError(f"--node-rank {self.rank}: of {self.count} machines it is 0 to {self.count - 1}")


def launch(argv: list[str], nproc: int, nodes: Nodes = Nodes()) -> int:
    """Run ``plsc ARGV…`` as ``nproc`` ranks on this machine, of as many on each of ``nodes``, and wait for them.

    The CPU's cores are shared out between the ranks (OMP_NUM_THREADS, unless it is set). When one rank ends with an
    error the others are ended too; STOP_SIGNALS are passed on, so that every rank can save its state.

    Returns:
        0 when every rank ended well, else the exit code of the first that failed (128 + N where signal N killed it).
    """
    if nproc < 1:
        raise UsageError(f"--nproc {nproc}: at least one rank is needed")
    # The ranks meet in a store of this process, as torchrun's do: a port that is only probed could be taken meanwhile.
    port = nodes.port
    if nodes.rank == 0:
        store = _make_store(nodes)
        port = store.port
    ranks = [_start(argv, rank, nproc, port, nodes) for rank in range(nproc)]
    listeners = [_Listener(process) for process in ranks[1:]]

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        code = _wait(ranks)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _end(ranks)
    errors = [line for listener in listeners for line in listener.errors()]
    if code and errors and ranks[0].returncode <= 0:  # the first rank, whose lines are shown, did not fail itself
        note(errors[0].rstrip("\n"))
    return code


def commands_of_nodes(argv: list[str], nproc: int, nodes: Nodes) -> list[str]:
    """The command, as a shell takes it, that starts ``nproc`` ranks of ``plsc ARGV…`` on each machine of ``nodes``."""
    command = ["plsc", *argv, "--nproc", str(nproc)]
    if nodes.count == 1:
        return [shlex.join(command)]
    command += ["--nnodes", str(nodes.count), "--master-addr", nodes.address, "--master-port", str(nodes.port)]
    return [shlex.join([*command, "--node-rank", str(rank)]) for rank in range(nodes.count)]


def _make_store(nodes: Nodes) -> TCPStore:
    try:
        return TCPStore(nodes.address, nodes.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:  # torch's DistNetworkError and its like
        raise UsageError(
            f"the ranks cannot meet at {nodes.address}:{nodes.port}: {first_line(error)}; "
            "give the first machine's --master-addr, and a free --master-port"
        ) from None


class _Listener:
    """Pass a rank's standard error on, but hold its error lines back: all ranks often fail for one reason."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._errors: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def errors(self) -> list[str]:
        """The lines kept back, once the rank has ended."""
        self._thread.join(1.0)
        return self._errors

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.startswith("plsc ") and ": error: " in line:
                    self._errors.append(line)
                else:
                    write(line, sys.stderr)


def _start(argv: list[str], rank: int, nproc: int, port: int, nodes: Nodes) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "plsc.tools.entry", *argv],
        env=rank_environment(rank, nproc, port, nodes),
        stderr=subprocess.PIPE if rank else None,
        text=True,
        errors="replace",
    )


def _wait(ranks: list[subprocess.Popen[str]]) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            if code < 0:
                note(f"plsc: rank {rank} was killed by {signal.Signals(-code).name}; ending the others")
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    """Let the ranks that still run end by themselves for a while (they may be saving), then make them."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def rank_environment(rank: int, nproc: int, port: int, nodes: Nodes = Nodes()) -> dict[str, str]:
    """torchrun's variables for a local rank that meets the others in the store at ``port``; cores shared out."""
    threads = max((os.cpu_count() or 1) // nproc, 1)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(nodes.rank * nproc + rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nodes.count * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(nodes.rank),
        "MASTER_ADDR": nodes.address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
