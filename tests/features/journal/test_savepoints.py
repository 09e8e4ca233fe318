"""Tables whose files are the checkpoint: killed at any write, they go back to the last savepoint, bit for bit."""

import json
import multiprocessing as mp
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_problems import ONE, everything, same
from support.killed_writes import kill_at_write

import plsc
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import atomic_write

CLASSES, DIM, BATCH, STEPS = 301, 16, 8, 9
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "bf16+int8": ({"weight_dtype": "bfloat16", "momentum_dtype": "int8", "sample_rate": 0.1}, plsc.HeadSGD),
    "f32, AdamW, 2 centers, all classes": ({"centers": 2, "chunk_classes": 37}, plsc.HeadAdamW),
}


class Run:
    """A head and its optimizer over files in ``folder``, and the batches by their number."""

    def __init__(self, folder: Path, kind: str = "bf16+int8", **options: Any) -> None:
        given, optimizer = KINDS[kind]
        placement = f"mmap:{folder}/table"
        self.head = plsc.ShardedHead(DIM, CLASSES, ONE, placement=placement, **{"journal": True, **given, **options})
        extra = {"momentum": 0.9} if optimizer is plsc.HeadSGD else {}
        self.optimizer = optimizer(self.head, lr=0.1, weight_decay=0.01, **extra)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(BATCH, DIM, generator=generator, requires_grad=True)
        loss = self.head(x, torch.randint(CLASSES, (BATCH,), generator=generator))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def go_on(self, step: int) -> None:
        """Take back what a checkpoint of ``step`` would: the table, and the small state."""
        self.head.roll_back(step)
        self.head.set_extra_state({"forwards": step, "margin": {}})
        self.optimizer.steps = step

    def everything(self) -> list[torch.Tensor]:
        return everything(self.head, self.optimizer)


def undisturbed(folder: Path, kind: str) -> list[list[torch.Tensor]]:
    """Everything after each step."""
    run = Run(folder, kind)
    states = [run.everything()]
    for number in range(STEPS):
        run.step(number)
        states.append(run.everything())
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_goes_back_to_any_savepoint_and_on_from_it(tmp_path, kind):
    (tmp_path / "whole").mkdir()
    states = undisturbed(tmp_path / "whole", kind)
    run = Run(tmp_path, kind)
    for number in range(STEPS):
        if number in (0, 2, 6):
            run.head.set_savepoint(number)
        run.step(number)
    assert same(run.everything(), states[STEPS])
    for step in (6, 6, 2, 0):
        run.go_on(step)
        assert same(run.everything(), states[step])
        run.step(step)
        assert same(run.everything(), states[step + 1])
    with pytest.raises(DataError, match="holds no table of step 2, but of 0"):
        run.head.roll_back(2)


def killed(folder: Path, kind: str, writes: int) -> None:
    """Train, with a savepoint every third step, until so many writes to files or table were made; the last is torn."""
    kill_at_write(writes)
    go_on_and_train(folder, kind)
    os._exit(0)


def go_on_and_train(folder: Path, kind: str) -> Run:
    """Go on from the step that ``step.json`` names, with a savepoint every third step."""
    torch.set_num_threads(1)
    run, done, start = Run(folder, kind), folder / "step.json", 0
    if run.head.undo_journal.is_adopted:
        start = json.loads(done.read_text()) if done.exists() else 0
        run.go_on(start)
    else:
        run.head.set_savepoint(0)
    for number in range(start, STEPS):
        run.step(number)
        if (number + 1) % 3 == 0:
            run.head.set_savepoint(number + 1)
            with atomic_write(done) as tmp_path:  # as a checkpoint is published
                tmp_path.write_text(json.dumps(number + 1))
            run.head.undo_journal.forget(number + 1)
    return run


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_write(tmp_path, kind):
    (tmp_path / "whole").mkdir()
    expected = undisturbed(tmp_path / "whole", kind)[STEPS]
    draw = random.Random(kind)
    context, kills = mp.get_context("forkserver"), 0
    context.set_forkserver_preload(["torch", "plsc.train", "support.tiny_runs"])
    for attempt in range(2):
        folder = tmp_path / f"run{attempt}"
        folder.mkdir()
        for _ in range(4):
            process = context.Process(target=killed, args=(folder, kind, draw.randrange(1, 60)))
            process.start()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
        assert same(go_on_and_train(folder, kind).everything(), expected)
    assert kills >= 4


def journaled(folder: Path, steps: int = 3) -> Path:
    """A run's journal of savepoint 0, which holds the rows of some steps."""
    run = Run(folder)
    run.head.set_savepoint(0)
    for number in range(steps):
        run.step(number)
    run.head.weight.sum()  # waits until all updates have landed
    (path,) = folder.glob("table.*.undo-00000000")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("place", [0, 9, 30, 40, 500, -1])
def test_a_damaged_journal_is_one_line_and_changes_nothing(tmp_path, place):
    path = journaled(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(IntegrityError, match=r"undo-00000000 is corrupt: resume") as raised:
        Run(tmp_path).head.roll_back(0)
    assert "\n" not in str(raised.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("left", [0, 20, 32, 2000])
def test_a_truncated_journal_is_damaged(tmp_path, left):
    path = journaled(tmp_path)
    assert path.stat().st_size > 2000
    os.truncate(path, left)
    with pytest.raises(IntegrityError, match="is corrupt"):
        Run(tmp_path).head.roll_back(0)


def test_a_record_that_was_never_finished_does_not_count(tmp_path):
    path = journaled(tmp_path)
    expected = Run(tmp_path)
    for rest in (b"", b"\xff", bytes(8), b"\xff" * 4000, bytes(4000)):
        path.write_bytes(path.read_bytes() + rest)
        run = Run(tmp_path)
        run.head.roll_back(0)
        expected = expected if rest else run
        assert same(run.everything(), expected.everything())


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    journaled(tmp_path)
    before = contents(tmp_path)
    for name in ("undo-00000009", "json"):
        (tmp_path / f".table.rank0-of-1.{name}.{os.getpid()}.tmp").touch()
    another_rank, running = f"rank0-of-10.json.{os.getpid()}", f"rank0-of-1.undo-00000009.{os.getppid()}"
    others = [f".table.{name}.tmp" for name in (another_rank, running)]
    for name in others:
        (tmp_path / name).touch()
    Run(tmp_path)
    assert contents(tmp_path) == {**before, **dict.fromkeys(others, b"")}


def test_rows_of_an_earlier_run_are_neither_read_nor_written_before_they_are_rolled_back(tmp_path):
    journaled(tmp_path)
    run = Run(tmp_path)
    before = contents(tmp_path)
    for use in (lambda: run.step(0), run.head.inverse_norms, lambda: run.head.set_savepoint(1)):
        with pytest.raises(UsageError, match="holds the table of an earlier run"):
            use()
    assert contents(tmp_path) == before
    run.head.roll_back(0)
    run.step(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "holds a table with seed = 0, and this head has 1"),
        ({"centers": 2}, "holds a table with rows = 301, and this head has 602"),
        ({"momentum_dtype": "bfloat16"}, "has 4,816 bytes, and this head's would have 9,632"),
        ({"weight_dtype": "float32"}, "has 9,632 bytes, and this head's would have 19,264"),
    ],
)
def test_files_of_another_table_are_refused(tmp_path, options, words):
    journaled(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=words):
        Run(tmp_path, **options)
    assert contents(tmp_path) == before


def test_a_missing_column_is_one_line(tmp_path):
    journaled(tmp_path)
    (tmp_path / "table.rank0-of-1.momentum").unlink()
    with pytest.raises(DataError, match=r"cannot map the table's file .*momentum: No such file"):
        Run(tmp_path)


def test_a_damaged_description_is_one_line(tmp_path):
    journaled(tmp_path)
    (tmp_path / "table.rank0-of-1.json").write_text("[]")
    with pytest.raises(DataError, match="describes no table; remove"):
        Run(tmp_path)


def test_writes_from_outside_are_refused_after_the_first_savepoint(tmp_path):
    run = Run(tmp_path)
    with torch.no_grad():
        run.head.weight.mul_(2)  # before it, as a script's own first values
    run.head.set_savepoint(0)
    expected = run.everything()
    run.step(0)
    with torch.no_grad():
        run.head.weight.mul_(2)
    with pytest.raises(UsageError, match=r"head\.weight was written to, which its journal does not hold"):
        run.step(1)
    assert len(expected[0]) == CLASSES


@pytest.mark.parametrize("placement", ["device", "host"])
def test_savepoints_are_for_tables_in_files(placement):
    with pytest.raises(UsageError, match="journal is for tables in a mapped file"):
        plsc.ShardedHead(DIM, CLASSES, ONE, placement=placement, journal=True)
    with pytest.raises(UsageError, match="this head has no savepoints"):
        plsc.ShardedHead(DIM, CLASSES, ONE, placement=placement).set_savepoint(0)


def test_a_row_is_journaled_once_between_savepoints(tmp_path):
    """What the disk has to hold is bounded by the table, however many steps there are."""
    path = journaled(tmp_path, steps=200)
    columns = sum((tmp_path / f"table.rank0-of-1.{name}").stat().st_size for name in ("weight", "momentum"))
    columns += 2 * 4 * CLASSES  # 1/norms and scales
    assert path.stat().st_size <= columns + 8 * CLASSES + 8 * 200 + 32
