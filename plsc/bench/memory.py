"""How much memory a process took at its peak, beyond what it held before."""

import contextlib
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
MIB = 2**20


class PeakMemory:
    """Notes what the process holds now (libraries, process group); :meth:`above` tells the peak since, in MiB.

    On a GPU it is PyTorch's own count of allocated bytes; on a CPU the resident set's high-water mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = 0.0
            return
        with contextlib.suppress(OSError):
            _RESET.write_text("5")  # the high-water mark starts anew at the resident set (proc(5))
        self.before = _status_mib("VmRSS") if _STATUS.exists() else _high_water_mib()

    def above(self) -> float:
        """MiB at the peak, less what was there before."""
        return self.peak() - self.before

    def peak(self) -> float:
        """MiB at the peak, everything included."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device)) / MIB
        return _high_water_mib()


def available_bytes() -> int | None:
    """What the system could still give to processes without swapping; None where it does not tell."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    line = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def limit_allocations(more: int) -> None:
    """Let this process allocate ``more`` bytes beyond what it has; beyond that an allocation fails (Linux).

    Without it the kernel ends some process of the machine, and not always the one that asked for too much.
    """
    if not _STATUS.exists():
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = int(_status_mib("VmData") * MIB) + more
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _high_water_mib() -> float:
    if _STATUS.exists():
        return _status_mib("VmHWM")  # ru_maxrss would count the parent's memory before exec
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest / MIB if sys.platform == "darwin" else highest / 1024


def _status_mib(field: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024
