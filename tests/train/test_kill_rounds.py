"""A run that is killed again and again learns what an undisturbed one does: the short form of the benchmark."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import HANG_SECONDS

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_rounds.py"


@pytest.mark.slow
def test_a_round_of_each_way(tmp_path: Path) -> None:
    words = ["--rounds", "4", "--ways", "kill", "sigterm", "disk", "agent", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=2 * HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "kill_rounds.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert [int(row[way]) > 0 for way in ("kill", "sigterm", "agent")] == [True] * 3
    assert int(row["rounds"]) == 4
    assert float(row["worst"]) < 1e-6
