"""Harness that the benchmarks share: environment columns, fresh processes, peak memory, CSV files."""

import contextlib
import csv
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plsc.errors import DataError
from plsc.files import atomic_write, read_json, write_json
from plsc.sizes import peak_resident_bytes

MIB = 2**20
_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_REASON_LENGTH = 200  # characters of a failure that a table shows


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


# Fresh processes ----------------------------------------------------------------------------------------------------


def thread_limits(threads: int) -> dict[str, str]:
    """Return the environment variables that limit OpenMP and BLAS to ``threads`` threads.

    Libraries read them when they are loaded, so they take effect in a new process only.
    """
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def run_task(module: str, task: Mapping[str, Any], folder: Path, *, threads: int, limit: float) -> dict[str, Any]:
    """Run ``python -m MODULE TASK.json RESULT.json`` in a new process and return its result.

    Args:
        module: a module that ends with :func:`answer_task`.
        task: what it is to measure, as JSON.
        folder: where both files are written.
        threads: OpenMP and BLAS threads of the process.
        limit: seconds after which it is killed.

    Raises:
        DataError: it took too long, or failed; the message is the last line that it printed.
    """
    task_path, result_path = folder / "task.json", folder / "result.json"
    result_path.unlink(missing_ok=True)
    write_json(task_path, task)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(task_path), str(result_path)],
            env={**os.environ, **thread_limits(threads)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"took longer than {limit:g} s") from None
    if done.returncode or not result_path.exists():
        raise DataError(last_line(done.stderr) or f"ended with exit code {done.returncode}")
    result: dict[str, Any] = read_json(result_path)
    return result


def answer_task(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be the process of :func:`run_task`: measure the task in the first argument's file, write into the second's."""
    task_path, result_path = sys.argv[1:]
    write_json(Path(result_path), measure(read_json(Path(task_path))))


def last_line(text: str) -> str:
    """Return the last line of a process's output, shortened for a table; "" where there is none."""
    lines = text.strip().splitlines()
    return lines[-1][:_REASON_LENGTH] if lines else ""


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
        self.before = _status_mib("VmRSS") if _STATUS.exists() else _high_water_mib()

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
    wanted = int(_status_mib("VmData") * MIB) + more
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _high_water_mib() -> float:
    return (peak_resident_bytes() or 0) / MIB


def _status_mib(field: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


# Results ------------------------------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None of no values."""
    return statistics.median(values) if values else None


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the fields of the first as columns; None becomes an empty cell."""
    with atomic_write(path) as tmp_path, tmp_path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
