"""Rows of benchmarks/results/*.csv: each with its date, device and versions."""

import csv
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def add_row(name: str, row: Mapping[str, Any]) -> None:
    """Append ``row`` to results/NAME.csv behind the date, the device and the versions of what measured it."""
    path = RESULTS / f"{name}.csv"
    is_new = not path.exists()
    whole = {"date": datetime.now(UTC).date().isoformat(), "device": device(), "versions": versions(), **row}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(whole), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(whole)


def device() -> str:
    """The GPU's name, else the processor's, where the system tells it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> str:
    """Of Python, torch and numpy."""
    return f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
