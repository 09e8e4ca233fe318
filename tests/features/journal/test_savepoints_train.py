"""Runs whose class table lies in files that are part of their checkpoints: killed, they learn what others do."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_runs import Killable, losses, register_tiny, run, run_until

from plsc.errors import DataError, UsageError
from plsc.parallel import Mesh
from plsc.tools.entry import main
from plsc.train.checkpoint_inspection import describe_checkpoint

pytestmark = pytest.mark.live

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
    return {**SAMPLED, "head.placement": f"mmap:{folder}/table", "journal.enabled": True}


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
    for moved in (journaled(tmp_path / "elsewhere"), {"head.placement": "device", "journal.enabled": False}):
        with pytest.raises(DataError, match=r"is not the one here: give the same head\.placement"):
            run(ONE, tmp_path / "run", {**changes, **moved}, resume="auto")
    run(ONE, tmp_path / "run", changes, resume="auto")
    run(ONE, tmp_path / "whole", {**SAMPLED, "steps": 6, "epochs": None})
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert re.search(r"files +a rank's table takes .* GB in .*files, and what it held at", log(tmp_path / "run"))
    last = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert describe_checkpoint(last)["table_files"] == changes["head.placement"]


EXPORTED = {
    **SAMPLED,
    "epochs": None,
    "steps": 12,
    "checkpoint.keep.last": 9,
    "embedding_dim": 24,
    "data.train": "avatars:23x6",
}


def centres_of(path: Path, out: Path, code: int = 0) -> np.ndarray:
    """What ``plsc checkpoint export --centres`` writes, or nothing where it is to fail with ``code``."""
    register_tiny()
    words = ["checkpoint", "export", str(path), str(out / "weights.safetensors"), "--centres", str(out / "centres.npy")]
    assert main([*words, "--overwrite"]) == code
    return np.zeros(0) if code else np.load(out / "centres.npy")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "keys"),
    [(1, {}), (2, {"head.centers": 2, "head.weight_dtype": "float32"})],
    ids=["one rank", "two ranks"],
)
def test_the_centres_of_a_killed_run_are_exported(tmp_path, world, keys):
    assert Killable(world, tmp_path / "whole", {**EXPORTED, **keys}).wait() == [0] * world
    changes = {**EXPORTED, **keys, **{k: v for k, v in journaled(tmp_path / "files").items() if k not in SAMPLED}}
    killable = Killable(world, tmp_path / "killed", changes)
    killable.wait_for_step(7)
    killable.kill(list(range(world)))
    killable.wait()
    before = contents(tmp_path / "files")
    checkpoints = sorted((tmp_path / "killed" / "checkpoints").glob("step-*"))
    assert checkpoints
    exported = [centres_of(path, tmp_path) for path in checkpoints]
    for path, centres in zip(checkpoints, exported, strict=True):
        expected = centres_of(tmp_path / "whole" / "checkpoints" / path.name, tmp_path)
        assert centres.shape == expected.shape
        assert (centres == expected).all()
    assert all((centres != exported[0]).any() for centres in exported[1:])
    assert contents(tmp_path / "files") == before
    assert Killable(world, tmp_path / "killed", changes, resume="auto").wait() == [0] * world


@pytest.mark.slow
def test_centres_whose_files_are_not_those_of_the_checkpoint_are_refused(tmp_path, capsys):
    changes = {**EXPORTED, **journaled(tmp_path / "files"), "steps": 6, "epochs": None}
    run(ONE, tmp_path / "run", changes)
    prefix = tmp_path / "files" / "table.rank0-of-1"
    journal, weight = Path(f"{prefix}.undo-00000003"), Path(f"{prefix}.weight")
    first = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert len(centres_of(first, tmp_path)) == 23

    def refused(words: str, path: Path, content: bytes | None) -> None:
        whole = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        capsys.readouterr()
        centres_of(first, tmp_path, code=1)
        error = capsys.readouterr().err
        path.write_bytes(whole)
        assert error.count("\n") == 1
        assert re.search(words, error)
        assert path.name.partition(".")[0] in error

    held = bytearray(journal.read_bytes())
    held[60] ^= 1
    refused("is corrupt", journal, bytes(held))
    refused("holds no table of step 3, but of 6", journal, None)
    refused("has another size than 23 rows", weight, weight.read_bytes()[:-1])
    refused("bring it back", weight, None)
    described = Path(f"{prefix}.json")
    refused("bring it back", described, None)
    refused("describes another table", described, described.read_bytes().replace(b'"id": "', b'"id": "0'))
    refused(
        "holds no number of first_row", described, described.read_bytes().replace(b'"first_row": 0', b'"first_row": -1')
    )
    assert len(centres_of(first, tmp_path)) == 23


@pytest.mark.slow
def test_a_run_with_whole_checkpoints_goes_on_in_files(tmp_path):
    whole = {**SAMPLED, "steps": 9, "epochs": None}
    changes = {**whole, **journaled(tmp_path / "files")}
    run_until(ONE, tmp_path / "run", whole, None, 4)
    run_until(ONE, tmp_path / "run", changes, "auto", 7)
    run(ONE, tmp_path / "run", changes, resume="auto")
    run(ONE, tmp_path / "whole", whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
