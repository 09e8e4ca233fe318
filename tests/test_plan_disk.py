"""The plan's disk beside what a run leaves: a table's files, their journals, checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from support.tiny_runs import register_tiny, run

from plsc.parallel import Mesh
from plsc.tools.entry import main

pytestmark = pytest.mark.slow
ONE = Mesh(0, 1, 0, torch.device("cpu"))
CHANGES = {
    "embedding_dim": 128,
    "data.train": "avatars:4000x1",
    "head.sample_rate": 0.05,
    "head.weight_dtype": "bfloat16",
    "head.momentum_dtype": "int8",
    "epochs": None,
    "steps": 9,
    "checkpoint.every_steps": 3,
    "checkpoint.keep.last": 2,
}


def taken(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def planned(out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, int], str]:
    """The disk that ``plsc plan`` gives for the run in ``out``, as JSON and as text."""
    capsys.readouterr()
    assert main(["plan", str(out / "config.toml"), "--gpu-memory", "16GiB", "--json", str(out / "plan.json")]) == 0
    return json.loads((out / "plan.json").read_text())["disk"], capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_table_in_files_takes_what_is_planned(tmp_path, capsys):
    register_tiny()
    files = tmp_path / "files"
    files.mkdir()
    run(ONE, tmp_path / "run", {**CHANGES, "head.placement": f"mmap:{files}/table", "journal.enabled": True})
    disk, text = planned(tmp_path / "run", capsys)
    journals = list(files.glob("*.undo-*"))
    columns = [path for path in files.iterdir() if path not in journals and path.suffix != ".json"]
    assert disk["table"] == taken(columns)
    # of three savepoints, that of the last step is empty, and there is none after it
    assert len(journals) == 2
    assert disk["journals"] / 3 == pytest.approx(taken(journals), rel=0.1)
    (checkpoint, _) = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert disk["checkpoint"] == pytest.approx(taken(list(checkpoint.iterdir())), rel=0.5)
    assert disk["checkpoint"] < disk["table"]
    for name in ("the table's files, of each rank", "what they held at 3 savepoints", "3 checkpoints, the next one"):
        assert f"\n  {name}" in text


def test_whole_checkpoints_take_what_is_planned(tmp_path, capsys):
    register_tiny()
    run(ONE, tmp_path / "run", {**CHANGES, "data.train": "avatars:20000x1", "steps": 6})
    disk, text = planned(tmp_path / "run", capsys)
    found = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(found) == 2
    assert [disk["checkpoint"]] * 2 == pytest.approx([taken(list(each.iterdir())) for each in found], rel=0.05)
    assert disk["checkpoints"] == 3
    assert disk["table"] == 0
    assert "journals" not in disk
    assert "savepoints" not in text
