"""Fresh ranks of a benchmark: how they are started and heard, and how each times its steps and answers."""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plsc.bench.harness import last_line, thread_limits
from plsc.errors import PlscError
from plsc.files import read_json, write_json
from plsc.parallel.launch import rank_environment
from plsc.parallel.mesh import shutdown

Result = Mapping[str, Any]  # figures of one turn, or {"reason": why there are none}
Batch = TypeVar("Batch")

_MAX_OVER_RANKS = ("wall_s", "memory_mib", "peak_mib")
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


# Of the process that compares ---------------------------------------------------------------------------------------


def measure_on_ranks(module: str, task: Mapping[str, Any], nproc: int, threads: int, limit: float) -> Result:
    """Run ``python -m MODULE TASK.json FOLDER`` on new ranks, which are killed after ``limit`` seconds.

    Args:
        module: a module that ends with :func:`be_rank`.
        task: what it is to measure, as JSON.
        nproc: ranks.
        threads: OpenMP and BLAS threads of each.
        limit: in seconds.

    Returns:
        Over the ranks the mean of CPU seconds and rates, the largest wall time and memory; or only ``reason``.
    """
    with tempfile.TemporaryDirectory(prefix="plsc-bench-") as name:
        folder = Path(name)
        write_json(folder / "task.json", task)
        # The launcher holds the rendezvous store: port 0 takes a free port, and no rank has to outlive the others.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [_start_rank(module, rank, nproc, threads, store.port, folder) for rank in range(nproc)]
        try:
            problem = _wait(ranks, limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        paths = [folder / f"rank-{rank}.json" for rank in range(nproc)]
        results = [read_json(path) for path in paths if path.exists()]
        if (failed := next((result for result in results if "reason" in result), None)) is not None:
            return {"reason": failed["reason"]}
        if problem is not None or len(results) < len(ranks):
            return {"reason": problem or _last_output(folder)}
    return _merge_ranks(results)


def _start_rank(module: str, rank: int, nproc: int, threads: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder / "task.json"), str(folder)],
            env=rank_environment(rank, nproc, port) | thread_limits(threads),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], limit: float) -> str | None:
    """Return None once every rank ended well, else a reason; "" where the failed rank's output gives it."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if any(codes):
            killed = [-code for code in codes if code is not None and code < 0]
            return f"a rank was killed by signal {killed[0]}" if killed else ""
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
    return f"took longer than {limit:g} s"


def _last_output(folder: Path) -> str:
    """Return the last line that some rank printed before it ended without a result."""
    for path in sorted(folder.glob("rank-*.log")):
        if line := last_line(path.read_text(encoding="utf-8", errors="replace")):
            return line
    return "a rank ended without a result"


def _merge_ranks(results: Sequence[Result]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in results[0]:
        values = [result[key] for result in results]
        if key in _MAX_OVER_RANKS:
            merged[key] = max(values)
        elif values[0] is None or isinstance(values[0], str):
            merged[key] = values[0]
        else:
            merged[key] = sum(values) / len(values)
    return merged


# Of a rank ----------------------------------------------------------------------------------------------------------


def be_rank(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be a rank of :func:`measure_on_ranks`: measure the task, and leave the figures, or why there are none."""
    task, folder = map(Path, sys.argv[1:])
    result: dict[str, Any]
    try:
        result = measure(read_json(task))
    except Exception as error:  # whatever an implementation does wrong is its result
        result = {"reason": _reason(error)}
    write_json(folder / f"rank-{os.environ['RANK']}.json", result)
    if "reason" in result:
        os._exit(1)  # without clean-up: the other ranks wait for this one, and it would wait for them
    shutdown()


def _reason(error: Exception) -> str:
    """Return a failure as one line for the table."""
    text = " ".join(str(error).split())
    if isinstance(error, PlscError):
        return text
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(s in text.lower() for s in _OUT_OF_MEMORY):
        return "does not fit into memory"
    return f"{type(error).__name__}: {text}"[:200]


def time_steps(step: Callable[[Batch], object], batches: Sequence[Batch], device: torch.device) -> dict[str, float]:
    """Return the medians of a step's ``cpu_s``, this process's processor time, and ``wall_s``."""
    return _time_on_gpu(step, batches) if device.type == "cuda" else _time_on_cpu(step, batches)


def _time_on_cpu(step: Callable[[Batch], object], batches: Sequence[Batch]) -> dict[str, float]:
    cpu, wall = [], []
    for batch in batches:
        cpu_start, start = time.process_time(), time.perf_counter()
        step(batch)
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - start)
    return {"cpu_s": statistics.median(cpu), "wall_s": statistics.median(wall)}


def _time_on_gpu(step: Callable[[Batch], object], batches: Sequence[Batch]) -> dict[str, float]:
    # Events are recorded between steps and read at the end: a synchronisation per step would stop the queue.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    torch.cuda.synchronize()
    cpu_start = time.process_time()
    marks[0].record()
    for batch, mark in zip(batches, marks[1:], strict=True):
        step(batch)
        mark.record()
    torch.cuda.synchronize()
    cpu = (time.process_time() - cpu_start) / len(batches)
    wall = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]
    return {"cpu_s": cpu, "wall_s": statistics.median(wall)}
