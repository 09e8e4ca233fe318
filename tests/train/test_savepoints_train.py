"""Runs whose class table lies in files that are part of their checkpoints: killed, they learn what others do."""

import re
from pathlib import Path

import pytest
import torch
from support.tiny_runs import TINY, Killable, losses, register_tiny, run, run_until

from plsc import config
from plsc.errors import DataError, UsageError
from plsc.parallel import Mesh
from plsc.train.checkpoint_inspection import describe_checkpoint, write_centres

ONE = Mesh(0, 1, 0, torch.device("cpu"))
SAMPLED = {
    "head.sample_rate": 0.3,
    "head.weight_dtype": "bfloat16",
    "head.momentum_dtype": "int8",
    "checkpoint.every_steps": 3,
}
FAULTS = (
    "trainer.capture:after",
    "checkpoint.CheckpointFolder.publish:before",
    "checkpoint.CheckpointFolder.publish:after",
)


def journaled(folder: Path) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    return {**SAMPLED, "head.placement": f"mmap:{folder}/table", "head.journal": True}


def log(out: Path) -> str:
    return (out / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_killed_inside_and_between_checkpoints(tmp_path, world):
    register_tiny()
    whole = Killable(world, tmp_path / "whole", SAMPLED)
    assert whole.wait() == [0] * world
    changes = journaled(tmp_path / "files")
    for fault in ("", *(FAULTS if world == 1 else FAULTS[:1])):
        killable = Killable(world, tmp_path / "killed", changes, resume="auto", fault=fault)
        if not fault:
            killable.wait_for_step(2)  # before the first checkpoint
            killable.kill(list(range(world)))
        killable.wait()
    assert Killable(world, tmp_path / "killed", changes, resume="auto").wait() == [0] * world
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    names = [path.name for path in (tmp_path / "killed" / "checkpoints").glob("step-*")]
    kept = min(int(name.removeprefix("step-")) for name in names)
    steps = {int(path.name.partition("undo-")[2]) for path in (tmp_path / "files").glob("*undo-*")}
    assert min(steps) == kept


@pytest.mark.slow
def test_a_checkpoint_and_its_files_belong_together(tmp_path):
    changes = {**journaled(tmp_path / "files"), "steps": 6, "epochs": None}
    run_until(ONE, tmp_path / "run", changes, None, 4)
    with pytest.raises(UsageError, match="holds the table of an earlier run"):
        run(ONE, tmp_path / "other", changes)
    with pytest.raises(DataError, match="holds no table of step 0, but of 3, 4"):
        run(ONE, tmp_path / "other", changes, resume="auto")
    for moved in (journaled(tmp_path / "elsewhere"), {"head.placement": "device", "head.journal": False}):
        with pytest.raises(DataError, match=r"is not the one here: give the same head\.placement"):
            run(ONE, tmp_path / "run", {**changes, **moved}, resume="auto")
    run(ONE, tmp_path / "run", changes, resume="auto")
    run(ONE, tmp_path / "whole", {**SAMPLED, "steps": 6, "epochs": None})
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert re.search(r"files +a rank's table takes .* GB in .*files, and what it held at", log(tmp_path / "run"))
    last = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert describe_checkpoint(last)["table_files"] == changes["head.placement"]
    with pytest.raises(DataError, match="holds no class centres: they lie in the files of mmap:"):
        write_centres(last, tmp_path / "centres.npy")


@pytest.mark.slow
def test_a_run_with_whole_checkpoints_goes_on_in_files(tmp_path):
    whole = {**SAMPLED, "steps": 9, "epochs": None}
    changes = {**whole, **journaled(tmp_path / "files")}
    run_until(ONE, tmp_path / "run", whole, None, 4)
    run_until(ONE, tmp_path / "run", changes, "auto", 7)
    run(ONE, tmp_path / "run", changes, resume="auto")
    run(ONE, tmp_path / "whole", whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"head.placement": "host"}, "head.journal is for a table in a file"),
        ({"checkpoint.keep.best": 1}, "head.journal goes back to the last checkpoints alone"),
        ({"checkpoint.keep.every_hours": 12}, "head.journal goes back to the last checkpoints alone"),
    ],
)
def test_what_does_not_go_with_a_journal_is_refused(keys, words):
    given = {"head.placement": "mmap:table", "head.journal": True, "eval.every_steps": 1, "eval.sets": ("avatars:4x2",)}
    with pytest.raises(UsageError, match=words):
        config.load(None, {**TINY, "backbone": "resnet8", **given, **keys})
