"""Classes that come and go in files with savepoints: killed at any write, all is as at the last one, bit for bit."""

import multiprocessing as mp
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_problems import ONE
from support.killed_writes import kill_at_write

import plsc
from plsc.errors import DataError, UsageError
from plsc.files import atomic_write

DIM, STEPS, EVERY = 16, 12, 3
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "bf16+int8": ({"weight_dtype": "bfloat16", "momentum_dtype": "int8", "sample_rate": 0.3}, plsc.HeadSGD),
    "f32, AdamW, 2 centers": ({"centers": 2, "chunk_classes": 7}, plsc.HeadAdamW),
}


class Run:
    """A head over files in ``folder``, whose batches bring new keys, and which loses some after most steps."""

    def __init__(self, folder: Path, kind: str = "bf16+int8", **options: Any) -> None:
        given, optimizer = KINDS[kind]
        placed = {"placement": f"mmap:{folder}/table", "journal": True, **given, **options}
        self.head = plsc.DynamicHead(DIM, 60, ONE, expire_after=4, **placed)
        extra = {"momentum": 0.9} if optimizer is plsc.HeadSGD else {}
        self.optimizer = optimizer(self.head, lr=0.1, weight_decay=0.01, **extra)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(6, DIM, generator=generator, requires_grad=True)
        self.head(x, torch.randint(3 * number, 3 * number + 9, (6,), generator=generator)).backward()
        self.optimizer.step()
        keys = self.head.key_map.keys.tolist()
        if number % 3 == 1:
            self.head.remove(keys[1:3])
        elif number % 3 == 2:
            self.head.merge(keys[-2:], into=keys[0])

    def go_on(self, step: int, keys: dict[str, torch.Tensor]) -> None:
        """Take back what a checkpoint of ``step`` would."""
        self.head.roll_back(step)
        self.head.load_key_state(keys)
        self.head.set_extra_state({"forwards": step, "margin": {}})
        self.optimizer.steps = step

    def everything(self) -> list[torch.Tensor]:
        """Keys, and all that is stored for the classes that there are."""
        rows = {**self.head.sharded_state(), **self.optimizer.sharded_state()}
        tensors = [*self.head.key_state().values(), *(shard.blocks[0].local for shard in rows.values())]
        return [tensor.clone() for tensor in (*tensors, self.head.inverse_norms())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def undisturbed(kind: str) -> list[list[torch.Tensor]]:
    """Everything after each step of a table in memory."""
    run = Run(Path("nowhere"), kind, placement="host", journal=False)
    states = []
    for number in range(STEPS + 1):
        states.append(run.everything())
        run.step(number)
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_goes_back_to_any_savepoint_and_on_from_it(tmp_path: Path, kind: str) -> None:
    expected = undisturbed(kind)
    run, keys = Run(tmp_path, kind), {}

    def is_as_after(step: int) -> bool:
        found, wanted = run.everything(), expected[step]
        counts = found.pop(7)  # which a table in memory has no need of
        return counts.tolist() == [run.head.num_classes] and same(found, wanted)

    for number in range(STEPS):
        if number in (0, 2, 6):
            run.head.set_savepoint(number)
            keys[number] = run.head.key_state()
        assert is_as_after(number)
        run.step(number)
    for step in (6, 6, 2, 0):
        run.go_on(step, keys[step])
        assert is_as_after(step)
        run.step(step)
        assert is_as_after(step + 1)
    again = Run(tmp_path, kind)
    with pytest.raises(UsageError, match="holds the table of an earlier run"):
        again.head.load_key_state(keys[6])
    with pytest.raises(DataError, match="no keys of a class table in these files"):
        run.head.load_key_state({**keys[6], "counts": keys[6]["counts"] + 1})


def go_on_and_train(folder: Path, kind: str) -> Run:
    """Go on from the last savepoint, with one every third step."""
    torch.set_num_threads(1)
    run, done, start = Run(folder, kind), folder / "done.pt", 0
    if run.head.undo_journal.is_adopted:
        start, keys = torch.load(done, weights_only=True) if done.exists() else (0, None)
        run.head.roll_back(start) if keys is None else run.go_on(start, keys)
    else:
        run.head.set_savepoint(0)
    for number in range(start, STEPS):
        run.step(number)
        if (number + 1) % EVERY == 0:
            run.head.set_savepoint(number + 1)
            with atomic_write(done) as tmp_path:  # as a checkpoint is published
                torch.save((number + 1, run.head.key_state()), tmp_path)
            run.head.undo_journal.forget(number + 1)
    return run


def killed(folder: Path, kind: str, writes: int) -> None:
    """Train until so many writes to files or table were made; the last is not made, or is torn."""
    kill_at_write(writes, [(torch.Tensor, "__setitem__")])
    go_on_and_train(folder, kind)
    os._exit(0)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_write(tmp_path: Path, kind: str) -> None:
    (tmp_path / "whole").mkdir()
    expected = go_on_and_train(tmp_path / "whole", kind).everything()
    assert same(expected[:7] + expected[8:], undisturbed(kind)[STEPS])
    draw, context, kills = random.Random(kind), mp.get_context("forkserver"), 0
    context.set_forkserver_preload(["torch", "plsc.train", "support.tiny_runs"])
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(8):
        process = context.Process(target=killed, args=(folder, kind, draw.randrange(1, 250)))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 4
    assert same(go_on_and_train(folder, kind).everything(), expected)


def test_a_removed_row_leaves_the_journal_with_the_savepoints_before_its_removal(tmp_path: Path) -> None:
    run = Run(tmp_path, "f32, AdamW, 2 centers", momentum_dtype="float32")
    for number in range(2):
        run.head.set_savepoint(number)
        run.step(number)
    run.head.set_savepoint(2)
    key = int(run.head.key_map.keys[0])
    row = run.head.rows_of([key])[0].numpy().tobytes()

    def files_with_it() -> list[str]:
        run.head.weight.sum()  # waits until all updates have landed
        return sorted(path.suffix for path in tmp_path.iterdir() if row in path.read_bytes())

    assert files_with_it() == [".weight"]
    run.head.remove([key])
    assert files_with_it() == [".undo-00000002"]
    run.head.set_savepoint(3)
    run.head.undo_journal.forget(2)
    assert files_with_it() == [".undo-00000002"]
    run.head.undo_journal.forget(3)
    assert files_with_it() == []
