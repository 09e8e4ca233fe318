"""Checkpoints that are written while training goes on: what they hold, when they appear, and what a failure costs."""

import hashlib
import json
import os
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import TINY, run
from torch import Tensor

from plsc import config
from plsc.errors import DataError
from plsc.parallel.tensor_shard import TensorShard
from plsc.train import async_checkpoint, checkpoint_writer
from plsc.train.async_checkpoint import AsyncCheckpointer
from plsc.train.checkpoint import CheckpointFolder
from plsc.train.checkpoint_reader import open_newest
from plsc.train.checkpoint_writer import HostStager, StagingClosedError

Ranks = Any
ROWS = 60


def table(step: int) -> Tensor:
    """The whole table (rows, 5) after ``step``."""
    return torch.arange(ROWS * 5.0).view(ROWS, 5) + 1000 * step


def tensors_of(mesh: Any, step: int) -> dict[str, Any]:
    """This rank's share of the state after ``step``: its rows, and on the first rank tensors of several layouts."""
    share = ROWS // mesh.world_size
    first = mesh.rank * share
    shard = TensorShard.of_rows(table(step)[first : first + share].clone(), first, ROWS)
    images = torch.full((2, 3, 4, 4), float(step)).to(memory_format=torch.channels_last)
    return {"table": shard, **({"count": torch.tensor(step), "images": images} if mesh.is_main else {})}


def overwrite(tensors: dict[str, Any]) -> None:
    """What the next step does to the state."""
    for tensor in tensors.values():
        (tensor.blocks[0].local if isinstance(tensor, TensorShard) else tensor).fill_(-1)


def newest(mesh: Any, folder: CheckpointFolder) -> int:
    """The newest checkpoint's step, once all of it was compared; 0 without one."""
    stored = open_newest(folder)
    if stored is None:
        return 0
    found = stored.read("")
    assert torch.equal(found["table"], table(stored.step))
    assert found["count"].item() == stored.step == stored.state["step"]
    assert torch.equal(found["images"], torch.full((2, 3, 4, 4), float(stored.step)))
    return stored.step


def save(checkpointer: AsyncCheckpointer, step: int) -> None:
    """Save ``step``, and change the state and its small part at once."""
    tensors, state = tensors_of(checkpointer.mesh, step), {"step": step}
    checkpointer.save(step, tensors, state)
    overwrite(tensors)
    state["step"] = -1


def saved_while_it_changes(mesh: Any, path: Path, memory: int, background: bool) -> tuple[int, list[str]]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_checkpoint, "available_bytes", lambda: memory)
        folder = CheckpointFolder(path, mesh)
        checkpointer = AsyncCheckpointer(folder, lines.append, background=background)
        for step in (1, 2, 3):  # each waits for the one before
            save(checkpointer, step)
        checkpointer.wait()
        checkpointer.close()
        assert [each.name for each in folder.published()] == [f"step-0000000{step}" for step in (1, 2, 3)]
        return newest(mesh, folder), lines


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("memory", "background"), [(10**9, True), (1000, True), (0, True), (10**9, False)])
def test_it_holds_the_state_at_its_step_whatever_memory_there_is(
    world: int, memory: int, background: bool, tmp_path: Path, ranks: Ranks
) -> None:
    for step, lines in ranks(world, saved_while_it_changes, tmp_path, memory, background):
        assert step == 3
        waits = ["training waits while most of a checkpoint is written" in line for line in lines]
        assert waits == [True] * (memory < 10**9)  # it is said once


def saved_too_often(mesh: Any, path: Path) -> list[str]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_checkpoint, "LONG_WAIT_SECONDS", 0.0)
        checkpointer = AsyncCheckpointer(CheckpointFolder(path, mesh), lines.append)
        save(checkpointer, 1)
        checkpointer.close()
    return lines


def test_a_long_wait_for_the_checkpoint_before_is_reported(tmp_path: Path, ranks: Ranks) -> None:
    (lines,) = ranks(1, saved_too_often, tmp_path)
    (line,) = lines
    assert re.fullmatch(r"training waited \d+ s until the checkpoint before was written: save less often", line)


def polled(mesh: Any, path: Path) -> list[int]:
    """The published steps after each poll of a checkpoint whose second rank writes when it is allowed to."""
    folder = CheckpointFolder(path, mesh)
    checkpointer = AsyncCheckpointer(folder, print)
    may_write = threading.Event()
    write = checkpoint_writer._HashingStream.write

    def waiting(self: Any, data: Any) -> int:
        may_write.wait()
        return write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr(checkpoint_writer._HashingStream, "write", waiting)
        save(checkpointer, 7)
        counts = []
        for _ in range(3):
            assert not checkpointer.poll()
            counts.append(len(folder.published()))
        may_write.set()
        while checkpointer.is_saving:
            checkpointer.poll()
            time.sleep(0.01)
    checkpointer.close()
    return [*counts, newest(mesh, folder)]


def test_polling_publishes_it_when_all_ranks_have_written(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2, polled, tmp_path) == [[0, 0, 0, 7]] * 2


def synced(mesh: Any, path: Path) -> tuple[set[str], dict[str, str]]:
    """The files that this rank has synced to disk when a checkpoint is published, and the hashes in its manifest."""
    names: set[str] = set()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        names.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noting)
        checkpointer = AsyncCheckpointer(CheckpointFolder(path, mesh), print)
        save(checkpointer, 1)
        checkpointer.wait()
        checkpointer.close()
    files = json.loads((path / "step-00000001/manifest.json").read_text())["files"]
    return names, {name: entry["sha256"] for name, entry in files.items()}


def test_each_rank_writes_and_syncs_its_own_file_with_its_hash(tmp_path: Path, ranks: Ranks) -> None:
    for rank, (names, hashes) in enumerate(ranks(3, synced, tmp_path)):
        assert f"__{rank}_0.distcp" in names
        assert set(hashes) == {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata", "state.json"}
        for name, expected in hashes.items():
            assert hashlib.sha256((tmp_path / "step-00000001" / name).read_bytes()).hexdigest() == expected
        if rank == 0:
            assert names > {".metadata", "state.json", "manifest.json", ".step-00000001.tmp"}
        else:
            assert names == {f"__{rank}_0.distcp"}


def due(mesh: Any, path: Path, minutes: list[float]) -> bool:
    checkpointer = AsyncCheckpointer(CheckpointFolder(path, mesh), print, every_minutes=minutes[mesh.rank])
    time.sleep(0.01)
    found = checkpointer.poll()
    checkpointer.close()
    return found


def test_the_first_ranks_clock_counts(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2, due, tmp_path, [1e-4, 100.0]) == [True, True]
    assert ranks(2, due, tmp_path, [100.0, 1e-4]) == [False, False]


def on_a_full_disk(mesh: Any, path: Path, victim: int) -> tuple[list[str], str, int]:
    """What is reported of a checkpoint that one rank cannot write, what waiting for another says, and the third."""
    lines: list[str] = []
    folder = CheckpointFolder(path, mesh)
    checkpointer = AsyncCheckpointer(folder, lines.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        save(checkpointer, 1)
        while not lines:
            checkpointer.poll()
            time.sleep(0.01)
        save(checkpointer, 2)
        with pytest.raises(DataError) as raised:
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not mesh.is_main or not list(path.iterdir())  # which removes what was left
    save(checkpointer, 3)
    checkpointer.wait()
    checkpointer.close()
    return lines, str(raised.value), newest(mesh, folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_is_reported_on_all_ranks_and_the_next_one_is_written(
    victim: int, tmp_path: Path, ranks: Ranks
) -> None:
    for lines, message, step in ranks(2, on_a_full_disk, tmp_path, victim):
        assert len(lines) == 1
        assert lines[0].startswith(f"no checkpoint of step 1: cannot write the checkpoint {tmp_path}/.step-00000001")
        assert lines[0].endswith("File too large; free some space; training goes on, and tries again later")
        assert message == f"cannot write the checkpoint {tmp_path}/.step-00000002.tmp: File too large; free some space"
        assert step == 3


def trained(mesh: Any, out: Path, changes: dict[str, Any]) -> dict[str, str]:
    """The hashes of the files with tensors, by checkpoint and name."""
    run(mesh, out, changes)
    return {
        f"{folder.name}/{name}": entry["sha256"]
        for folder in (out / "checkpoints").glob("step-*")
        for name, entry in json.loads((folder / "manifest.json").read_text())["files"].items()
        if name.endswith(".distcp")
    }


@pytest.mark.slow
def test_asynchronous_checkpoints_are_the_synchronous_ones_bit_for_bit(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 6, "epochs": 2, "ema_decay": 0.9, "checkpoint.every_steps": 3, "head.centers": 2}
    first = ranks(2, trained, tmp_path / "async", changes)[0]
    second = ranks(2, trained, tmp_path / "sync", {**changes, "checkpoint.async_save": False})[0]
    assert len(first) == 6
    assert first == second


def stored_and_planned(mesh: Any, out: Path, changes: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a checkpoint's tensors, and as the plan has them."""
    from torch.distributed.checkpoint import FileSystemReader

    from plsc.plan import Hardware, Links, named_device, plan

    run(mesh, out, changes)
    entries = FileSystemReader(out / "checkpoints/step-00000002").read_metadata().state_dict_metadata.values()
    stored = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in entries)  # type: ignore[union-attr]
    hardware = Hardware(named_device("h100"), 80 << 30, Links(1e11, 1e11))
    return stored, plan(config.load(None, {**TINY, **changes}), 4000, hardware).configured.memory.checkpoint


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_plan_gives_a_checkpoints_bytes(optimizer: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.train": "avatars:4000x1", "epochs": None, "steps": 2, "optim.name": optimizer, "ema_decay": 0.9}
    ((stored, planned),) = ranks(1, stored_and_planned, tmp_path, {**changes, "head.momentum_dtype": "int8"})
    assert planned == pytest.approx(stored, rel=2e-3)  # which counts steps as well


def test_the_clock_makes_checkpoints_too(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"checkpoint.every_steps": 0, "checkpoint.every_minutes": 1e-6, "data.batch_size": 6}
    ranks(2, trained, tmp_path, changes)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000010", "step-00000020"]  # as often as the ranks look at the clock


def test_a_stager_holds_no_more_than_its_limit() -> None:
    stager = HostStager(100)
    taken: list[int] = []

    def stage() -> None:
        for value in range(20):
            stager.put(torch.full((5,), float(value)))  # 20 bytes
        stager.put(torch.zeros(1000))  # alone

    thread = threading.Thread(target=stage)
    thread.start()
    for _ in range(20):
        copy = stager.get()
        assert stager._held <= 100
        taken.append(int(copy[0].item()))
    assert stager.get().shape == (1000,)
    thread.join()
    assert taken == list(range(20))


def test_closing_a_stager_ends_both_sides() -> None:
    stager = HostStager(0)
    stager.put(torch.zeros(3))
    threading.Timer(0.05, stager.close).start()
    with pytest.raises(StagingClosedError):
        stager.put(torch.zeros(3))
    with pytest.raises(StagingClosedError):
        stager.get()
