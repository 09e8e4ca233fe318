"""Runs whose classes are known by name: other data goes on with the rows of before, on any number of ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_runs import Killable, assert_same_losses, refusal, run, run_until, stored

from plsc.errors import UsageError
from plsc.features.dynamic.key_map import KeyMap
from plsc.features.dynamic.named_table import NamedTable
from plsc.files import read_json
from plsc.tools.entry import main
from plsc.train.checkpoint_inspection import find_checkpoints, verify_checkpoint
from plsc.train.metrics import read_metrics

Ranks = Any
DYNAMIC = {
    "backbone": "plain",
    "sync_batchnorm": True,
    "epochs": None,
    "steps": 10,
    "data.batch_size": 12,
    "dynamic.max_classes": 14,
}


def rows_by_name(mesh: Any, out: Path, step: int) -> dict[str, torch.Tensor]:
    """The class rows of a checkpoint by the names of their classes."""
    weight, state = stored(mesh, out, step, "head.")["weight"], stored(mesh, out, step, "keys.")
    keys = KeyMap()
    keys.load_state(state, [0])
    return {keys.names[key]: weight[row] for key, row in zip(keys.keys.tolist(), keys.classes.tolist(), strict=True)}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, never interrupted, and on other data after its tenth step."""
    out = tmp_path_factory.mktemp("dynamic") / "run"
    ranks(1, run, out, DYNAMIC)
    return out


@pytest.mark.live
def test_a_run_killed_at_three_ranks_goes_on_at_two(whole: Path, tmp_path: Path, ranks: Ranks) -> None:
    killed = Killable(3, tmp_path, {**DYNAMIC, "data.batch_size": 4})
    killed.wait_for_step(6)
    killed.kill([0, 1, 2])
    killed.wait()
    ranks(2, run, tmp_path, {**DYNAMIC, "data.batch_size": 6}, "auto")
    assert_same_losses(tmp_path, whole, rel=1e-5)
    (mine, *_), (theirs, *_) = ranks(2, rows_by_name, tmp_path, 10), ranks(1, rows_by_name, whole, 10)
    assert mine.keys() == theirs.keys() == {f"avatar-{number}" for number in range(10)}
    for name, row in mine.items():
        assert torch.allclose(row, theirs[name], rtol=1e-3, atol=1e-5)


def test_other_data_goes_on_with_the_rows_of_before(whole: Path, ranks: Ranks) -> None:
    (before,) = ranks(1, rows_by_name, whole, 10)
    more = {**DYNAMIC, "data.train": "avatars:6x6@6", "steps": 13, "head.sample_rate": 0.0, "optim.weight_decay": 0.0}
    (result,) = ranks(1, run, whole, more, "auto")
    assert result["classes"] == 6
    log = (whole / "train.log").read_text()
    assert "classes 10 by name, at most 14\n" in log
    assert "other data: 36 images of 6 classes, before 60 of 10; the epoch begins anew" in log
    (after,) = ranks(1, rows_by_name, whole, 13)
    assert after.keys() == {f"avatar-{number}" for number in range(12)}
    moved = {name for name, row in before.items() if not torch.equal(row, after[name])}
    assert moved == {f"avatar-{number}" for number in range(6, 10)}
    assert [line["step"] for line in read_metrics(whole)][-4:] == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic.max_classes": None}, "dynamic.max_classes was set when the run began and is unset now"),
        ({"dynamic.max_classes": 9}, "dynamic.max_classes = 9, and data.train has 10 classes"),
        ({"dynamic.max_classes": 11, "data.train": "avatars:2x6"}, "max_classes = 11 is too few for the 12 classes"),
    ],
)
def test_what_does_not_go_on_is_refused(whole: Path, ranks: Ranks, changes: dict[str, Any], message: str) -> None:
    (said,) = ranks(1, refusal, whole, {**DYNAMIC, "steps": 20, **changes}, "auto")
    assert message in said


def test_tables_of_one_run_are_dynamic_each_by_itself(tmp_path: Path, ranks: Ranks) -> None:
    tables = [
        {
            "name": "faces",
            "data": {"train": "avatars:10x6"},
            "dynamic": {"max_classes": 20},
            "head": {"placement": "host"},
        },
        {"name": "scenes", "data": {"train": "avatars:8x4@50"}},
    ]
    changes = {**DYNAMIC, "dynamic.max_classes": None, "steps": 5, "table": tables, "head.momentum_dtype": "int8"}
    ranks(1, run, tmp_path / "one", {**changes, "checkpoint.every_steps": 2})
    ranks(2, run, tmp_path / "two", {**changes, "data.batch_size": 6, "checkpoint.every_steps": 2})
    assert_same_losses(tmp_path / "two", tmp_path / "one", rel=1e-3)


def test_groups_that_are_averaged_go_on_after_a_checkpoint_as_others(tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        **DYNAMIC,
        "steps": 9,
        "data.batch_size": 5,
        "dynamic.expire_after": 2,
        "head_ranks": 1,
        "replicas.averaging_period": 3,
    }
    ranks(2, run, tmp_path / "whole", changes, head_ranks=1)
    ranks(2, run_until, tmp_path / "stopped", changes, None, 4, head_ranks=1)  # where the other has a checkpoint too
    ranks(2, run, tmp_path / "stopped", changes, "auto", head_ranks=1)
    assert_same_losses(tmp_path / "stopped", tmp_path / "whole", rel=0)


def in_files(run: Path, name: str, row: torch.Tensor) -> list[Path]:
    wanted = [name.encode(), row.numpy().tobytes()]
    files = [path for path in run.rglob("*") if path.is_file()]
    return [path for path in files if any(content in path.read_bytes() for content in wanted)]


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def test_a_removed_class_is_in_no_file_and_the_run_goes_on(
    copied: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    (before,) = ranks(1, rows_by_name, copied, 13)
    assert len(in_files(copied, "avatar-7", before["avatar-7"])) > 1
    assert main(["table", "check", str(copied), "avatar-7"]) == 1
    assert main(["table", "remove", str(copied), "avatar-7"]) == 0
    said = capsys.readouterr().out
    assert "step-00000013: 1 class removed, 11 left" in said
    assert main(["table", "check", str(copied), "avatar-7"]) == 0
    assert in_files(copied, "avatar-7", before["avatar-7"]) == []
    assert not [path for path in find_checkpoints(copied) if verify_checkpoint(path)["problems"]]
    (after,) = ranks(1, rows_by_name, copied, 13)
    assert after.keys() == before.keys() - {"avatar-7"}
    assert all(torch.equal(row, before[name]) for name, row in after.items())
    ranks(2, run, copied, {**DYNAMIC, "data.batch_size": 6, "data.train": "avatars:5x6", "steps": 15}, "auto")
    (last,) = ranks(1, rows_by_name, copied, 15)
    assert last.keys() == after.keys()


def test_a_name_that_no_batch_has_met_is_removed_too(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1, run, tmp_path, {**DYNAMIC, "steps": 1, "dynamic.admit_after": 50, "checkpoint.every_steps": 1})
    assert main(["table", "check", str(tmp_path), "avatar-3"]) == 1
    assert main(["table", "remove", str(tmp_path), "avatar-3"]) == 0
    assert main(["table", "check", str(tmp_path), "avatar-3"]) == 0
    assert main(["table", "check", str(tmp_path), "avatar-4"]) == 1
    for words in (["info", str(tmp_path)], ["export", str(tmp_path), str(tmp_path / "table.safetensors")]):
        assert main(["table", *words]) == 2
        assert "has no class with a row yet; train it further first" in capsys.readouterr().err
    with pytest.raises(UsageError, match="has no class with a row yet"):
        NamedTable(find_checkpoints(tmp_path)[-1]).add(NamedTable(find_checkpoints(tmp_path)[-1]))
    (result,) = ranks(1, run, tmp_path, {**DYNAMIC, "steps": 2, "dynamic.admit_after": 1}, "auto")
    assert result["steps"] == 2


def test_classes_are_merged_renamed_and_added_by_name(copied: Path, whole: Path, ranks: Ranks, tmp_path: Path) -> None:
    (before,) = ranks(1, rows_by_name, copied, 13)
    (tmp_path / "names.txt").write_text("avatar-1\navatar-2\n")
    for command in (
        ["merge", str(copied), "--names", str(tmp_path / "names.txt"), "--into", "avatar-0"],
        ["rename", str(copied), "avatar-3", "Ada"],
        ["remove", str(copied), "avatar-4"],
        ["add", str(copied), "avatar-3", "avatar-4", "--from", str(whole)],
        ["info", str(copied), "--names", "--json", str(tmp_path / "info.json")],
    ):
        assert main(["table", *command]) == 0
    assert main(["table", "export", str(copied), str(tmp_path / "table.safetensors")]) == 0
    named, rows = read_json(tmp_path / "table.json")["classes"], load_file(tmp_path / "table.safetensors")["weight"]
    assert ["avatar-0", "avatar-1", "avatar-2"] in [sorted(names) for names in named]
    assert len(named) == len(rows) == 12 - 2 - 1 + 2
    found = read_json(tmp_path / "info.json")
    assert found["classes"] == 12 - 2 - 1 + 2
    assert found["names"] == sorted({*before, "Ada"})
    (after,) = ranks(1, rows_by_name, copied, 13)
    assert after.keys() == before.keys() | {"Ada"}
    units = [torch.nn.functional.normalize(before[f"avatar-{number}"].double(), dim=0) for number in range(3)]
    mean = torch.nn.functional.normalize(sum(units), dim=0) * before["avatar-0"].norm()
    assert torch.equal(after["Ada"], rows[named.index(["Ada"])])
    for name in ("avatar-0", "avatar-1", "avatar-2"):
        assert torch.allclose(after[name].double(), mean, atol=1e-6)
    for new, old in (
        ("Ada", "avatar-3"),
        ("avatar-3", "avatar-3"),
        ("avatar-4", "avatar-4"),
        ("avatar-11", "avatar-11"),
    ):
        assert torch.equal(after[new], before[old])
    changes = {**DYNAMIC, "data.batch_size": 6, "data.train": "avatars:9x6", "steps": 15}
    (result, _) = ranks(2, run, copied, changes, "auto")
    assert result["steps"] == 15


def test_what_a_table_does_not_hold_is_refused(whole: Path, copied: Path, ranks: Ranks, tmp_path: Path) -> None:
    table, other = (NamedTable(find_checkpoints(folder)[-1]) for folder in (copied, whole))
    with pytest.raises(UsageError, match="has no class avatar-70"):
        table.remove(["avatar-7", "avatar-70"])
    with pytest.raises(UsageError, match="has a class avatar-8 already"):
        table.rename("avatar-7", "avatar-8")
    with pytest.raises(UsageError, match="has a class avatar-8 already"):
        table.add(other, ["avatar-8"])
    ranks(1, run, tmp_path / "fixed", {**DYNAMIC, "dynamic.max_classes": None, "steps": 1})
    with pytest.raises(UsageError, match="they are numbers of the data"):
        NamedTable(find_checkpoints(tmp_path / "fixed")[-1])


def test_a_class_is_split_into_new_names_and_into_those_that_were_merged(
    copied: Path, ranks: Ranks, tmp_path: Path
) -> None:
    (before,) = ranks(1, rows_by_name, copied, 13)
    for command in (
        ["merge", str(copied), "avatar-1", "avatar-2", "--into", "avatar-0"],
        ["split", str(copied), "avatar-0", "--into", "avatar-2", "Ada"],
        ["info", str(copied), "--names", "--json", str(tmp_path / "info.json")],
        ["export", str(copied), str(tmp_path / "table.safetensors")],
    ):
        assert main(["table", *command]) == 0
    assert read_json(tmp_path / "info.json")["names"] == sorted({*before, "Ada"})
    named, tensors = read_json(tmp_path / "table.json")["classes"], load_file(tmp_path / "table.safetensors")
    shared = [sorted(names) for names in named].index(["avatar-0", "avatar-1"])
    assert named[-2:] == [["avatar-2"], ["Ada"]]
    assert len(named) == len(before) == len(tensors["weight"])
    (after,) = ranks(1, rows_by_name, copied, 13)
    assert all(torch.equal(after[name], after["avatar-0"]) for name in ("avatar-1", "avatar-2", "Ada"))
    assert tensors["momentum"][shared].any()
    assert not tensors["momentum"][-2:].any()
    for name in before.keys() - {"avatar-0", "avatar-1", "avatar-2"}:
        assert torch.equal(after[name], before[name])
    with pytest.raises(UsageError, match="has a class avatar-4 already"):
        NamedTable(find_checkpoints(copied)[-1]).split("avatar-3", ["avatar-4"])
    with pytest.raises(UsageError, match="3 classes do not fit beside 12: max_classes is 14"):
        NamedTable(find_checkpoints(copied)[-1]).split("avatar-3", ["a", "b", "c"])
    (result,) = ranks(1, run, copied, {**DYNAMIC, "data.train": "avatars:3x6", "steps": 15}, "auto")
    assert result["steps"] == 15


def test_a_refused_change_leaves_the_checkpoint_as_it_was(
    copied: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1, run, tmp_path / "other", {**DYNAMIC, "data.train": "avatars:6x6@50", "steps": 3})
    name = str(copied)
    assert main(["table", "merge", name, "avatar-1", "--into", "avatar-0"]) == 0
    newest = find_checkpoints(copied)[-1]
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    (tmp_path / "twice.txt").write_text("avatar-51\navatar-52\navatar-51\n")
    other = ["--from", str(tmp_path / "other")]
    for command, message in (
        (["add", name, "avatar-51", "avatar-51", *other], "the class avatar-51 is named twice"),
        (["add", name, "--names", str(tmp_path / "twice.txt"), *other], "the class avatar-51 is named twice"),
        (["add", name, "avatar-2", "avatar-51", *other], "has a class avatar-2 already"),
        (["add", name, "avatar-51", "", *other], "one of the names is empty"),
        (["merge", name, "avatar-2", "avatar-2", "--into", "avatar-2"], "avatar-2 is merged into itself alone"),
        (["split", name, "avatar-2", "--into", "avatar-2"], "has a class avatar-2 already"),
        (["split", name, "avatar-0", "--into", "avatar-1", "avatar-1"], "the class avatar-1 is named twice"),
        (["split", name, "avatar-0", "--into", "Ada", ""], "one of the names is empty"),
        (["rename", name, "avatar-2", "avatar-2"], "has a class avatar-2 already"),
        (["rename", name, "avatar-2", ""], "one of the names is empty"),
        (["remove", name, "avatar-2", "avatar-70"], "has no class avatar-70"),
    ):
        capsys.readouterr()
        assert main(["table", *command]) == 2, command
        assert message in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in newest.iterdir()} == before
    assert verify_checkpoint(newest)["problems"] == []
    assert main(["table", "remove", name, "avatar-2", "avatar-2"]) == 0
    assert f"{newest}: 1 class removed, {NamedTable(newest).num_classes} left" in capsys.readouterr().out
