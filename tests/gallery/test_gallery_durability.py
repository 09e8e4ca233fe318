"""Kill -9 under load keeps what was acknowledged: the short form of benchmarks/gallery_durability.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gallery_durability.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--full-disk"], ["--encrypt"], ["--encrypt", "--full-disk"], ["--migrate"], ["--migrate", "--full-disk"]],
    ids=["plain", "full disk", "encrypted", "encrypted on a full disk", "moving", "moving on a full disk"],
)
def test_three_kills_lose_nothing_that_was_acknowledged(more: list[str], tmp_path: Path) -> None:
    if "--full-disk" in more:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root")
        subprocess.run(["umount", tmp_path], check=True)
    command = [sys.executable, str(SCRIPT), "--rounds", "3", "--seconds", "1", "--seed", "5", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["acknowledged"] > 0
