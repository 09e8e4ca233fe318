"""Ranks for tests: a pool of gloo worker processes started once per session, and commands that start ranks.

A test that hangs, dies or warns on any rank fails alone and within minutes, with the stack of every rank; the pool
starts its workers again for the next test.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from support.hermetic import harness

MAX_WORLD = 4
HANG_SECONDS = 240.0  # for one test body or command; the slowest takes 30 on two idle cores
GRACE_SECONDS = 10.0  # for the other ranks once one has failed: they may be waiting for it in a collective
_STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 asks a run to stop


class RankError(AssertionError):
    """A test body failed on a rank; the message holds that rank's traceback, or the stacks of ranks that hang."""


class RankPool:
    """``size`` worker processes that share one gloo store; each call gets groups of the worlds 1 to ``size``."""

    def __init__(self, size: int = MAX_WORLD, hang_seconds: float = HANG_SECONDS) -> None:
        self._size = size
        self._hang_seconds = hang_seconds
        self._workers: list[_Worker] = []

    @harness()
    def __call__(self, world: int, function: Any, *args: Any, head_ranks: int = 0, **options: Any) -> list[Any]:
        """Run ``function(mesh, *args, **options)`` on ``world`` ranks; their results in order, or a RankError.

        With ``head_ranks`` the mesh has head groups of so many ranks.
        """
        if not self._workers:
            self._start()
        workers = self._workers[:world]
        for worker in workers:
            with contextlib.suppress(OSError):  # it has died since; the missing answer says so
                worker.pipe.send(((world, head_ranks or world), function, args, options))
        answers = self._answers(workers)
        failures = [text for ok, text in answers.values() if not ok]
        if len(answers) < world:
            failures += [f"rank {worker.rank} {worker.state()}" for worker in workers if worker.rank not in answers]
            self._kill()
        if failures:
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers:
            worker.process.join(10)
        self._kill()

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers = [_Worker(rank, self._size, self._store.port) for rank in range(self._size)]

    def _answers(self, workers: "list[_Worker]") -> dict[int, tuple[bool, Any]]:
        """(succeeded, result or traceback) by rank, of the ranks that answer in time."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {worker.pipe: worker.rank for worker in workers}
        deadline = time.monotonic() + self._hang_seconds
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionError):  # it has died
                    answers[rank] = pipe.recv()
                if rank not in answers or not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []


def stacks_file(rank: int) -> Path:
    """An empty file for :func:`offer_stacks`."""
    number, name = tempfile.mkstemp(prefix=f"rank{rank}-")
    os.close(number)
    return Path(name)


def offer_stacks(path: Path) -> None:
    """Let this process write its threads' stacks into ``path`` when :func:`stacks_of` asks for them."""
    # in C: it works inside of a collective too
    faulthandler.register(_STACK_SIGNAL, file=path.open("w"), all_threads=True)


def stacks_of(process: BaseProcess, path: Path) -> str:
    """The stacks of a process that offers them in ``path``."""
    assert process.pid is not None
    os.kill(process.pid, _STACK_SIGNAL)
    time.sleep(1.0)
    return path.read_text()


class _Worker:
    """One rank's process, the pipe to it, and the file that it writes its stacks to when it is asked."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        context = mp.get_context("spawn")
        self.rank = rank
        self._stacks = stacks_file(rank)
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, size, port, there, self._stacks), daemon=True)
        self.process.start()
        there.close()  # so that the pipe ends when the worker does

    def state(self) -> str:
        """How it ended, or the stacks of its threads."""
        self.process.join(1.0)  # a pipe closes a moment before its process ends
        if self.process.exitcode is not None:
            return f"ended with exit code {self.process.exitcode}"
        return f"does not answer; it is here:\n{stacks_of(self.process, self._stacks)}"

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self._stacks.unlink(missing_ok=True)


def _serve(rank: int, size: int, port: int, pipe: Connection, stacks: Path) -> None:
    import torch.distributed as dist

    offer_stacks(stacks)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    meshes = _meshes(rank, size)
    while (task := pipe.recv()) is not None:
        key, function, args, options = task
        try:
            with warnings.catch_warnings():  # anew for each body: some libraries change the filters on import
                warnings.simplefilter("error")
                # torch's, where a test lets one rank of several load alone
                warnings.filterwarnings("ignore", ".*torch.distributed is disabled", UserWarning)
                warnings.filterwarnings("ignore", ".torch.jit", DeprecationWarning)  # torch 2.11's, of its own imports
                result = function(meshes[key], *args, **options)
            pipe.send((True, result))
        except Exception:
            pipe.send((False, f"rank {rank} of {key[0]}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _meshes(rank: int, size: int) -> dict[tuple[int, int], Any]:
    """This rank's mesh by (world, ranks of a head group)."""
    import torch.distributed as dist

    from plsc.parallel import Mesh, with_head_groups

    groups = {world: dist.new_group(list(range(world))) for world in range(2, size + 1)}
    meshes = {}
    for world in range(size, rank, -1):
        whole = Mesh(rank, world, rank, torch.device("cpu"), groups.get(world))
        for head_ranks in range(1, world + 1):
            if world % head_ranks == 0:
                meshes[world, head_ranks] = with_head_groups(whole, head_ranks)
    return meshes


def run_command(*words: str, hang_seconds: float = HANG_SECONDS, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``plsc WORDS…``, whose ranks take a thread each and on which a warning is an error.

    Raises:
        RankError: it does not end in time; every process's stacks are in the message.
    """
    command = [sys.executable, "-m", "plsc.tools.entry", *words]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "error",
        "PYTHONFAULTHANDLER": "1",
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the ranks can be found by their session
        **options,
    ) as process:
        try:
            out, err = process.communicate(timeout=hang_seconds)
        except subprocess.TimeoutExpired:
            out, err = _abort(process)
            raise RankError(f"{' '.join(words)} did not end in {hang_seconds:g} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _abort(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """End the processes of ``process``'s session; their stacks stand in what is returned.

    The launcher, which passes its ranks' standard error on, is ended last. Until all ranks have written their stacks
    it is stopped: it would end the others when it sees the first one die.
    """
    process.send_signal(signal.SIGSTOP)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if int(path.name) != process.pid == os.getsid(int(path.name)):
                os.kill(int(path.name), signal.SIGABRT)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(2.0)
    process.send_signal(signal.SIGABRT)
    return process.communicate()
