"""docs/serving.md: its requests run as they stand."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.live_service import SIZE, live_service, picture

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def blocks(kind: str) -> str:
    return "\n".join(re.findall(rf"^```{kind}\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("bash") is None, reason="needs curl and bash")
def test_every_request_runs_as_written(tmp_path):
    with live_service(tmp_path, source="model.safetensors") as live:
        for seed, name in enumerate(("ada", "unknown")):
            (tmp_path / f"{name}.jpg").write_bytes(picture(seed, 40, "JPEG"))
        address = ("http://127.0.0.1:8080", live.server.address)
        script = blocks("sh").replace(*address).replace("112", str(SIZE)).replace("python3", sys.executable)
        asked = len(re.findall(r"\bcurl ", script))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        assert asked >= 28
        done = subprocess.run(
            [sys.executable, "-c", blocks("python").replace(*address)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Ada ")
        operations = live.ask("GET", "/openapi.json").json()["paths"]
    script = blocks("sh")
    for path, methods in operations.items():
        place = re.sub(r"\{snapshot\}", r"\\$ID", re.sub(r"\{(person|face)\}", r"\\d", path))
        place = place.replace("{collection}", "staff").replace("{model}", "model").replace("{version}", "1")
        shown = re.search(rf"\$URL{place}(?=[\s?\"|)]|$)", script, flags=re.MULTILINE)
        assert shown, f"{path} {list(methods)} is not shown"
