"""Kill -9 of the service itself keeps what it promised: the short form of benchmarks/serve_durability.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_durability.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["--encrypt"], ["--migrate"], ["--migrate", "--encrypt"]], ids=lambda more: " ".join(more) or "plain"
)
def test_kills_of_the_service_lose_double_and_bring_back_nothing(more: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "3", "--seconds", "2", "--seed", "5", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["acknowledged"] > 0
    assert figures["rotations"] == more.count("--encrypt")
    assert ("steps" in figures) == ("--migrate" in more)
