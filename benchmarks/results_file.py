"""Rows of benchmarks/results/*.csv: each with its date, device and versions."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plsc.bench.harness import environment

RESULTS = Path(__file__).parent / "results"


def add_row(name: str, row: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Append ``row`` to FOLDER/NAME.csv behind the date, the device and the versions of what measured it."""
    path = folder / f"{name}.csv"
    is_new = not path.exists()
    whole = {**environment(), **row}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(whole), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(whole)
