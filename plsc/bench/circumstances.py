"""What measured a result: the date, the device and the versions."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch


def circumstances(device_name: str | None = None) -> dict[str, str]:
    """The columns that every row of results begins with; ``device_name`` is :func:`device` where left out."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device() if device_name is None else device_name,
        "versions": versions(),
    }


def device() -> str:
    """The GPU's name, else the processor's, where the system tells it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor()


def processor() -> str:
    """The processor's name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> str:
    """Of Python, torch and numpy."""
    return f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
