"""Harness that the benchmarks share: environment columns, fresh ranks, peak memory, turns and medians, CSV files."""

import contextlib
import csv
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from plsc.errors import PlscError
from plsc.files import atomic_write, read_json, write_json
from plsc.parallel.launch import rank_environment
from plsc.parallel.mesh import shutdown
from plsc.progress import Progress
from plsc.sizes import peak_resident_bytes, status_bytes

Result = Mapping[str, Any]  # figures of one turn, or {"reason": why there are none}
Batch = TypeVar("Batch")

MIB = 2**20
_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_REASON_LENGTH = 200  # characters of a failure that a table shows
_MAX_OVER_RANKS = ("wall_s", "memory_mib", "peak_mib")
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


# Environment --------------------------------------------------------------------------------------------------------


def environment(device_name: str | None = None) -> dict[str, str]:
    """Return the columns that every row of results begins with: date, device, versions.

    Args:
        device_name: what was measured; by default the GPU's name, on a machine without one the processor's.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": _device_name() if device_name is None else device_name,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
    }


def processor_name() -> str:
    """Return the processor's model name where Linux reports it, else what Python knows of it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()


# Fresh ranks --------------------------------------------------------------------------------------------------------


def thread_limits(threads: int) -> dict[str, str]:
    """Return the environment variables that limit OpenMP and BLAS to ``threads`` threads.

    Libraries read them when they are loaded, so they take effect in a new process only.
    """
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def measure_on_ranks(
    module: str,
    task: Mapping[str, Any],
    *,
    nproc: int = 1,
    threads: int,
    limit: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Run ``python -m MODULE TASK.json FOLDER`` on new ranks, which are killed after ``limit`` seconds.

    Args:
        module: a module that ends with :func:`be_rank`.
        task: what it is to measure, as JSON.
        nproc: ranks.
        threads: OpenMP and BLAS threads of each.
        limit: in seconds.
        variables: of the environment, of the ranks alone.

    Returns:
        Over the ranks the mean of CPU seconds and rates, the largest wall time and memory; or only ``reason``: of a
        rank that ended without a result, the last line that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="plsc-bench-") as name:
        folder = Path(name)
        write_json(folder / "task.json", task)
        # The launcher holds the rendezvous store: port 0 takes a free port, and no rank has to outlive the others.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        known = [rank_environment(rank, nproc, store.port) | thread_limits(threads) for rank in range(nproc)]
        ranks = [_start_rank(module, rank, {**of, **variables}, folder) for rank, of in enumerate(known)]
        try:
            problem = _wait(ranks, limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        paths = [folder / f"rank-{rank}.json" for rank in range(nproc)]
        results = [read_json(path) for path in paths if path.exists()]
        if (reason := failure(results)) is not None:
            return {"reason": reason}
        if problem is not None or len(results) < len(ranks):
            return {"reason": problem or _last_output(folder)}
    return _merge_ranks(results)


def _start_rank(module: str, rank: int, variables: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder / "task.json"), str(folder)],
            env=variables,
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
        if lines := path.read_text(encoding="utf-8", errors="replace").strip().splitlines():
            return lines[-1][:_REASON_LENGTH]
    return "a rank ended without a result"


def _merge_ranks(results: Sequence[Result]) -> dict[str, Any]:
    merged = dict(results[0])
    for key, first in results[0].items():
        values = [result[key] for result in results]
        if key in _MAX_OVER_RANKS:
            merged[key] = max(values)
        elif isinstance(first, float):
            merged[key] = statistics.mean(values)
    return merged


def be_rank(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be a rank of :func:`measure_on_ranks`: measure the task, and leave the figures, or why there are none."""
    task, folder = map(Path, sys.argv[1:])
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
    return f"{type(error).__name__}: {text}"[:_REASON_LENGTH]


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


# Memory -------------------------------------------------------------------------------------------------------------


class PeakMemory:
    """Peak memory of this process since construction, on a CPU without what it held before.

    On a GPU it is PyTorch's count of allocated bytes; on a CPU the high-water mark of the resident set, from which the
    libraries and the process group, resident at construction, are subtracted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = 0.0
            return
        with contextlib.suppress(OSError):
            _RESET_PEAK.write_text("5")  # VmHWM restarts at the present resident set: proc(5)
        self.before = status_bytes("VmRSS") / MIB if _STATUS.exists() else _high_water_mib()

    def above(self) -> float:
        """Return the peak in MiB, less what was held at construction."""
        return self.peak() - self.before

    def peak(self) -> float:
        """Return the peak in MiB, everything included."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device)) / MIB
        return _high_water_mib()


def limit_allocations(more: int) -> None:
    """Let this process allocate ``more`` bytes beyond what it has; a larger allocation fails (Linux only).

    Without the limit the kernel's OOM killer ends some process of the machine, not always the one that asked for too
    much.
    """
    if not _STATUS.exists():
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = status_bytes("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _high_water_mib() -> float:
    return (peak_resident_bytes() or 0) / MIB


# Results ------------------------------------------------------------------------------------------------------------


def in_turn(
    names: Iterable[str], rounds: int, turn: Callable[[str], Result], progress: Progress
) -> dict[str, list[Result]]:
    """Let all take turns, ``rounds`` times over: a change of the machine's load meets all alike.

    What failed is not tried again: its rounds repeat the reason.
    """
    results: dict[str, list[Result]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, earlier in results.items():
            has_failed = bool(earlier) and "reason" in earlier[-1]
            earlier.append(earlier[-1] if has_failed else turn(name))
            progress.advance(note=name)
    return results


def failure(results: Sequence[Result]) -> str | None:
    """Return the reason why a round has no figures; None where all have."""
    return next((result["reason"] for result in results if "reason" in result), None)


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None of no values."""
    return statistics.median(values) if values else None


def summary(figures: Sequence[Result], keys: Sequence[str], spread: str) -> dict[str, Any]:
    """Return the medians of ``keys`` over the rounds, None where there is none, and the extremes of ``spread``."""
    values = {key: [each[key] for each in figures if each.get(key) is not None] for key in keys}
    lowest, highest = min(values[spread], default=None), max(values[spread], default=None)
    return {key: median(of) for key, of in values.items()} | {f"{spread}_low": lowest, f"{spread}_high": highest}


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the fields of the first as columns; None becomes an empty cell."""
    with atomic_write(path) as tmp_path, tmp_path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
