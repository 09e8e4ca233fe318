"""Runs whose classes come and go in files that are part of their checkpoints: killed, they learn what others do."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import Killable, losses, refusal, register_tiny, run, run_until

from plsc.errors import UsageError
from plsc.features.dynamic.named_table import NamedTable
from plsc.files import read_json
from plsc.parallel import Mesh
from plsc.tools.entry import main
from plsc.train.checkpoint_inspection import find_checkpoints

ONE = Mesh(0, 1, 0, torch.device("cpu"))
COMING = {
    "backbone": "plain",
    "sync_batchnorm": True,
    "epochs": None,
    "steps": 14,
    "data.batch_size": 4,
    "dynamic.max_classes": 14,
    "dynamic.expire_after": 2,  # of ten classes, four at a time: they go, and come again
    "head.weight_dtype": "bfloat16",
    "head.momentum_dtype": "int8",
    "checkpoint.every_steps": 3,
    "checkpoint.keep.last": 2,
}


def journaled(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {**COMING, "head.placement": f"mmap:{folder}/table", "journal.enabled": True}


def rows_of(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """The rows of a checkpoint by name, as plsc table exports them."""
    assert main(["table", "export", str(path), str(out / "rows.safetensors"), "--overwrite"]) == 0
    rows, names = load_file(out / "rows.safetensors")["weight"], read_json(out / "rows.json")["classes"]
    return {name: row for row, (name,) in zip(rows, names, strict=True)}


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_killed_inside_and_between_checkpoints(tmp_path: Path, world: int) -> None:
    register_tiny()
    assert Killable(world, tmp_path / "whole", COMING).wait() == [0] * world
    changes = journaled(tmp_path / "files")
    for fault, step in (("", 2), ("trainer.capture:after", 0), ("", 8)):
        killable = Killable(world, tmp_path / "killed", changes, resume="auto", fault=fault)
        if not fault:
            killable.wait_for_step(step)
            killable.kill(list(range(world)))
        killable.wait()
    assert Killable(world, tmp_path / "killed", changes, resume="auto").wait() == [0] * world
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for mine, other in zip(*(find_checkpoints(tmp_path / name) for name in ("killed", "whole")), strict=True):
        assert mine.name == other.name
        found, expected = rows_of(mine, tmp_path), rows_of(other, tmp_path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(row, expected[name]) for name, row in found.items())


def test_a_run_in_files_goes_on_as_one_in_memory(tmp_path: Path) -> None:
    changes = journaled(tmp_path / "files")
    run_until(ONE, tmp_path / "run", changes, None, 7)
    shutil.copytree(tmp_path / "files", tmp_path / "before")
    before = rows_of(tmp_path / "run", tmp_path / "before")
    run(ONE, tmp_path / "run", changes, resume="auto")
    run(ONE, tmp_path / "whole", COMING)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    found, expected = rows_of(tmp_path / "run", tmp_path), rows_of(tmp_path / "whole", tmp_path)
    assert found.keys() == expected.keys() == set(NamedTable(find_checkpoints(tmp_path / "run")[-1]).names)
    assert all(torch.equal(row, expected[name]) for name, row in found.items())
    # what expired before the two checkpoints that are kept is in no file, and no journal, any more
    held = {name for path in find_checkpoints(tmp_path / "run") for name in NamedTable(path).names}
    assert (gone := before.keys() - held)
    words = ["check", str(tmp_path / "run"), "--removed", str(tmp_path / "before" / "rows.safetensors")]
    assert main(["table", *words]) == 0
    assert main(["table", *words, "--files", str(tmp_path / "before"), "--json", str(tmp_path / "found.json")]) == 1
    assert {each["name"] for each in read_json(tmp_path / "found.json")["found"]} >= gone


def test_rows_in_files_are_not_changed_from_outside(tmp_path: Path) -> None:
    changes = {**journaled(tmp_path / "files"), "steps": 3}
    run(ONE, tmp_path / "run", changes)
    table = NamedTable(find_checkpoints(tmp_path / "run")[-1])
    name = table.names[0]
    for change in (
        lambda: table.remove([name]),
        lambda: table.split(name, ["Ada"]),
        lambda: table.merge([name], table.names[1]),
        lambda: table.add(table),
    ):
        with pytest.raises(UsageError, match="lie in files that the run alone changes"):
            change()
    assert main(["table", "rename", str(tmp_path / "run"), name, "Ada"]) == 0
    more = {**changes, "steps": 4}
    assert "holds a table with" in refusal(ONE, tmp_path / "run", {**more, "dynamic.max_classes": 20}, "auto")
    run(ONE, tmp_path / "run", more, resume="auto")
    assert "Ada" in NamedTable(find_checkpoints(tmp_path / "run")[-1]).names
