"""Amounts of memory, and counts, as people write them; and what memory the machine has left.

4GB is 4·10^9 bytes, 4GiB is 4·2^30; 2M is a count of two million.
"""

import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

from plsc.errors import UsageError

UNITS: Mapping[str, float] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_THOUSANDS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SHOWN = 80  # characters of what is no amount
_AMOUNT = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:e\+?\d+)?)\s*([a-z]*)\s*")


def parse_memory(
    text: str,
    option: str,
    *,
    units: Mapping[str, float] = UNITS,
    examples: str = "4GB, 500MiB or 4e9 (bytes)",
) -> int:
    """Read an amount of memory.

    Args:
        text: a number with or without a unit, in any case: ``4GB``, ``1.5 GiB``, ``4e9``.
        option: the option that it was given for, named in errors.
        units: bytes of each unit in lower case, where they are not the usual ones.
        examples: of what can be written, for the error.

    Returns:
        Bytes.

    Raises:
        UsageError: anything else, less than a byte, or more bytes than 63 bits count.
    """
    match = _AMOUNT.fullmatch(text.lower())
    size = float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
    if not 1 <= size < 1 << 63:
        raise UsageError(f"{option} {text[:_SHOWN]!r} is no amount of memory; write {examples}")
    return int(size)


def parse_count(text: str) -> int:
    """Read a count, with or without a unit, in any case: ``2059906``, ``2,059,906``, ``500k``, ``2M``, ``1e6``, ``1B``.

    Raises:
        UsageError: anything else, or what is no whole number.
    """
    match = _AMOUNT.fullmatch(re.sub(r"(?<=\d)[,_](?=\d{3}(?!\d))", "", text.lower()))
    try:
        count = Decimal(match[1]) * _THOUSANDS[match[2]] if match and match[2] in _THOUSANDS else Decimal("nan")
    except ArithmeticError:  # an exponent beyond those of decimal
        count = Decimal("inf")
    if not count.is_finite() or count != count.to_integral_value() or count.adjusted() > 18:
        raise UsageError(f"{text[:_SHOWN]!r} is no count; write 2000000, 2M, 500k or 2e6")
    return int(count)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process can get without swapping; None where the system does not report them.

    A container's limit counts (cgroup v2): pages that its files are cached in can be had as well.
    """
    if not meminfo.exists():
        return None
    free = _entry(meminfo, "MemAvailable:") * 1024
    limit = (cgroup / "memory.max").read_text().strip() if (cgroup / "memory.max").exists() else "max"
    if limit == "max":
        return free
    used = int((cgroup / "memory.current").read_text()) - _entry(cgroup / "memory.stat", "inactive_file")
    return max(min(free, int(limit) - used), 0)


def peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the most memory that this process has had resident; None where the system does not report it.

    On Linux from ``status``, since ru_maxrss would count the parent's memory before exec.
    """
    if status.exists():
        return status_bytes("VmHWM", status)
    if sys.platform == "win32":
        return None
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def status_bytes(name: str, status: Path = Path("/proc/self/status")) -> int:
    """Return an amount of memory as Linux tells it of this process: VmRSS, VmHWM (the peak), RssAnon, VmData, …"""
    return _entry(status, f"{name}:") * 1024


def _entry(path: Path, name: str) -> int:
    return next(int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words[0] == name)
