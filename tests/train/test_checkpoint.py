"""Which checkpoints stay: the newest, one of each period, the best; and what a kill or a full disk leaves of them."""

import errno
import json
import pkgutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_runs import Killable, losses, refusal, run

from plsc.config import KeepConfig
from plsc.parallel import Mesh
from plsc.train import checkpoint, checkpoint_reader, evaluate, opening
from plsc.train.checkpoint import CheckpointFolder, Published, removable

Ranks = Any
HOUR = 3600.0
ALONE = Mesh(0, 1, 0, torch.device("cpu"))


def saved(hours: list[float], accuracies: dict[int, float] | None = None) -> list[Published]:
    """A checkpoint at each of the hours, oldest first; the number of each is its name."""
    found = accuracies or {}
    return [Published(Path(str(number)), HOUR * hour, found.get(number)) for number, hour in enumerate(hours)]


def kept(checkpoints: list[Published], keep: KeepConfig) -> list[int]:
    removed = removable(checkpoints, keep)
    return [int(each.path.name) for each in checkpoints if each not in removed]


def test_the_newest_stay() -> None:
    assert kept(saved([0, 1, 2, 3, 4]), KeepConfig(last=2)) == [3, 4]
    assert kept(saved([0]), KeepConfig(last=2)) == [0]
    assert kept([], KeepConfig()) == []


def test_the_last_of_each_period_stays() -> None:
    checkpoints = saved([0, 5, 11.9, 12, 23, 25, 26, 27, 28])  # periods of 12 hours: to 11.9, to 23, to 28
    assert kept(checkpoints, KeepConfig(last=1, every_hours=12)) == [2, 4, 8]
    assert kept(checkpoints, KeepConfig(last=3, every_hours=12)) == [2, 4, 6, 7, 8]


def test_the_best_stay_and_of_equal_ones_the_earlier() -> None:
    checkpoints = saved([0, 1, 2, 3, 4, 5], {0: 0.5, 1: 0.9, 2: 0.8, 3: 0.9})
    assert kept(checkpoints, KeepConfig(last=1, best=1)) == [1, 5]
    assert kept(checkpoints, KeepConfig(last=1, best=3)) == [1, 2, 3, 5]
    assert kept(checkpoints, KeepConfig(last=1, best=9)) == [0, 1, 2, 3, 5]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.one_of(st.none(), st.floats(0, 1))), max_size=25),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 12.0]),
    st.integers(0, 3),
)
def test_removing_after_each_one_leaves_what_removing_at_the_end_does(
    found: list[tuple[float, float | None]], last: int, every_hours: float, best: int
) -> None:
    """Unless the clock is set back, a run that was restarted keeps what one that never stopped does."""
    keep = KeepConfig(last=last, every_hours=every_hours, best=best)
    hours = sorted(hour for hour, _ in found)
    checkpoints = saved(hours, {number: each for number, (_, each) in enumerate(found) if each is not None})
    present: list[Published] = []
    for each in checkpoints:
        present.append(each)
        removed = removable(present, keep)
        assert each not in removed
        present = [one for one in present if one not in removed]
    assert kept(checkpoints, keep) == [int(each.path.name) for each in present]


def publish(folder: CheckpointFolder, step: int, accuracy: float | None = None) -> str | None:
    tmp_path = folder.prepare(step)
    for name in (checkpoint.STATE, checkpoint.METADATA):
        (tmp_path / name).write_bytes(b"{}")
    return folder.publish(tmp_path, step, {}, accuracy)


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir())


def test_a_restart_goes_by_what_the_manifests_say(tmp_path: Path) -> None:
    keep = KeepConfig(last=1, best=1)
    for step, accuracy in enumerate([0.3, 0.9, None, 0.8], start=1):
        assert publish(CheckpointFolder(tmp_path, ALONE, keep), step, accuracy) is None
    assert names(CheckpointFolder(tmp_path, ALONE)) == ["latest", "step-00000002", "step-00000004"]
    manifest = tmp_path / "step-00000002/manifest.json"
    for content in ("[]", "{", '{"accuracy": NaN, "saved_at": "now"}'):  # damaged: it has no accuracy any more
        manifest.write_text(content)
        assert checkpoint.describe_published(manifest.parent).accuracy is None
    assert publish(CheckpointFolder(tmp_path, ALONE, keep), 5) is None
    assert names(CheckpointFolder(tmp_path, ALONE)) == ["latest", "step-00000004", "step-00000005"]


def test_what_was_removed_by_half_is_removed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, ALONE, KeepConfig(last=1))
    publish(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", lambda path, ignore_errors=False: None)  # as killed there
        publish(folder, 2)
    assert names(folder) == [".step-00000001.removed", "latest", "step-00000002"]
    assert [path.name for path in folder.published()] == ["step-00000002"]
    folder.clean()
    assert names(folder) == ["latest", "step-00000002"]


def test_what_cannot_be_removed_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, ALONE, KeepConfig(last=1))
    publish(folder, 1)

    def busy(path: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(Path, "rename", busy)
    failure = publish(folder, 2)
    assert failure == f"{tmp_path}/step-00000001: Device or resource busy"
    assert [path.name for path in folder.published()] == ["step-00000001", "step-00000002"]


def rated(mesh: Any, out: Path, changes: dict[str, Any], accuracies: list[float], resume: str | None = None) -> None:
    """Train with evaluations whose mean accuracies are given."""
    given_results = iter(accuracies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "evaluate_sets", lambda *_: {"a": {"accuracy": next(given_results)}})
        patch.setattr(evaluate, "summary", lambda results: results)
        patch.setattr(evaluate, "_format_result", str)
        patch.setattr(opening, "check_sets", lambda configuration: None)
        run(mesh, out, {"eval.sets": ["a"], **changes}, resume)


def test_a_run_keeps_the_checkpoint_of_its_best_evaluation(tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        "epochs": None,
        "steps": 8,
        "eval.every_steps": 3,
        "checkpoint.every_steps": 1,
        "checkpoint.keep.last": 2,
        "checkpoint.keep.best": 1,
        "data.batch_size": 6,
    }
    ranks(2, rated, tmp_path, changes, [0.7, 0.6, 0.5])  # after steps 3, 6 and 8
    ranks(2, rated, tmp_path, {**changes, "steps": 10, "checkpoint.every_steps": 0}, [0.6, 0.9], "auto")  # 9, 10
    folder = CheckpointFolder(tmp_path / "checkpoints", ALONE)
    assert names(folder) == ["latest", "step-00000009", "step-00000010"]
    assert json.loads((tmp_path / "checkpoints/step-00000009/manifest.json").read_text())["accuracy"] == 0.6


def test_a_best_checkpoint_outlives_the_newer_ones(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"epochs": None, "steps": 6, "eval.every_steps": 2, "checkpoint.every_steps": 0}
    changes |= {"checkpoint.keep.last": 1, "checkpoint.keep.best": 1}
    ranks(1, rated, tmp_path, changes, [0.7, 0.6, 0.7])
    assert names(CheckpointFolder(tmp_path / "checkpoints", ALONE)) == ["latest", "step-00000002", "step-00000006"]
    state = json.loads((tmp_path / "checkpoints/step-00000006/state.json").read_text())
    assert state["best"] == {"step": 2, "accuracy": 0.7}


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "checkpoint.CheckpointFolder._remove_surplus:before",
        "checkpoint.shutil.rmtree:before:8",  # it is renamed, and not removed
        "checkpoint.CheckpointFolder._remove_surplus:after",
        "evaluate.atomic_write:before",
        "evaluate.atomic_write:after",
    ],
)
def test_killed_while_others_are_removed(fault: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {"checkpoint.keep": 1, "epochs": None, "steps": 12, "optim.schedule": "constant"}
    killable = Killable(1, tmp_path, changes, fault=fault)
    assert killable.wait() == [-signal.SIGKILL]
    published = CheckpointFolder(tmp_path / "checkpoints", ALONE).published()
    assert published
    checkpoint_reader.open_checkpoint(published[-1], ALONE)
    ranks(1, run, tmp_path, changes, "auto")
    assert sorted(losses(tmp_path)) == list(range(1, 13))
    assert names(CheckpointFolder(tmp_path / "checkpoints", ALONE)) == ["latest", "step-00000012"]


def with_a_full_disk(mesh: Any, out: Path, place: str, steps: int = 12) -> str:
    """Train, with the disk full at one place of the second checkpoint, that of step 8; the error that ends the run."""
    owner, _, name = f"plsc.train.{place}".rpartition(".")
    original, calls = getattr(pkgutil.resolve_name(owner), name), 0

    def failing(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil.resolve_name(owner), name, failing)
        return refusal(mesh, out, {"checkpoint.keep": 2, "epochs": None, "steps": steps})


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("checkpoint_writer.FileSystemWriter.write_data", "the checkpoint {}/checkpoints/.step-00000008.tmp"),
        ("checkpoint_writer.FileSystemWriter.finish", "the checkpoint {}/checkpoints/.step-00000008.tmp"),
        ("async_checkpoint.write_json", "the checkpoint {}/checkpoints/.step-00000008.tmp"),
        ("checkpoint.write_manifest", "the checkpoint {}/checkpoints/.step-00000008.tmp"),
        ("checkpoint.atomic_replace_dir", "the checkpoint {}/checkpoints/.step-00000008.tmp"),
        ("evaluate.atomic_write", "{}/model.safetensors"),
    ],
)
def test_a_full_disk_before_it_is_published_costs_that_checkpoint(
    place: str, what: str, tmp_path: Path, ranks: Ranks
) -> None:
    assert ranks(1, with_a_full_disk, tmp_path, place) == [""]
    assert names(CheckpointFolder(tmp_path / "checkpoints", ALONE)) == ["latest", "step-00000004", "step-00000012"]
    cannot = f"cannot write {what.format(tmp_path)}: No space left on device; free some space"
    assert f"no checkpoint of step 8: {cannot}; training goes on" in (tmp_path / "train.log").read_text()
    checkpoint_reader.open_checkpoint(tmp_path / "checkpoints/step-00000012", ALONE)


def test_a_full_disk_at_the_last_one_ends_the_run(tmp_path: Path, ranks: Ranks) -> None:
    (message,) = ranks(1, with_a_full_disk, tmp_path, "checkpoint_writer.FileSystemWriter.write_data", 8)
    assert message.startswith("DataError: cannot write the checkpoint")
    assert message.endswith("No space left on device; free some space")


def test_a_full_disk_after_it_is_published_is_reported(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, with_a_full_disk, tmp_path, "checkpoint.atomic_write")
    assert names(CheckpointFolder(tmp_path / "checkpoints", ALONE)) == ["latest", "step-00000008", "step-00000012"]
    reported = f"step 8 is published, but not all after it: {tmp_path}/checkpoints: No space left on device"
    assert reported in (tmp_path / "train.log").read_text()
