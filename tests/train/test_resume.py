"""A run that was killed, by whatever and wherever, goes on: on as many ranks with the very same losses."""

import hashlib
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.pictures import stored
from support.tiny_runs import Killable, assert_same_files, each_step, losses, open_trainer, refusal, run

from plsc.train.failures import StopRequest
from plsc.train.metrics import read_metrics

Ranks = Any
Unkilled = Callable[[int], dict[int, float]]


@pytest.fixture
def unkilled(trained_once: Any) -> Unkilled:
    """The losses of a run that nothing happened to, by world."""
    return lambda world: losses(trained_once(world, {"data.batch_size": 12 // world}))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_unkilled_learn(world: int, unkilled: Unkilled) -> None:
    found = unkilled(world)
    assert sorted(found) == list(range(1, 21))
    assert sum(found[step] for step in range(16, 21)) < 0.8 * sum(found[step] for step in range(1, 6))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "victims"), [pytest.param(1, [0], marks=pytest.mark.exhaustive), (2, [0]), (2, [1]), (2, [0, 1])]
)
def test_killed_at_a_random_step(
    world: int, victims: list[int], unkilled: Unkilled, tmp_path: Path, ranks: Ranks
) -> None:
    changes = {"data.batch_size": 12 // world}
    killable = Killable(world, tmp_path, changes)
    killable.wait_for_step(random.randint(1, 8))
    killable.kill(victims)
    codes = killable.wait()
    assert codes[victims[0]] == -signal.SIGKILL
    ranks(world, run, tmp_path, changes, "auto")
    assert losses(tmp_path) == unkilled(world)
    steps = [line["step"] for line in read_metrics(tmp_path)]
    assert steps == sorted(set(steps))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "async_checkpoint.ShardWriter:before",
        "checkpoint_writer.HostStager.put:before:40",  # of 26 tensors each: in the training thread
        "checkpoint_writer.HostStager.get:after:40",  # in the writing thread
        "checkpoint_writer.ShardWriter._write:after",
        "async_checkpoint.write_json:before",
        "checkpoint.write_manifest:before",
        "checkpoint.atomic_replace_dir:before",
        "checkpoint.atomic_replace_dir:after",
        "checkpoint.atomic_write:before",
    ],
)
def test_killed_while_it_saves(fault: str, unkilled: Unkilled, tmp_path: Path, ranks: Ranks) -> None:
    killable = Killable(1, tmp_path, fault=fault)
    assert killable.wait() == [-signal.SIGKILL]
    ranks(1, run, tmp_path, {}, "auto")
    assert losses(tmp_path) == unkilled(1)
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000020\n"


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(number: int, unkilled: Unkilled, tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 6, "checkpoint.every_steps": 0}
    killable = Killable(2, tmp_path, changes)
    killable.wait_for_step(2)
    killable.kill([1], number)  # one rank alone hears it, and all stop
    assert killable.wait() == [128 + number] * 2
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == max(losses(tmp_path))
    assert (tmp_path / "model.safetensors").is_file()
    ranks(2, run, tmp_path, changes, "auto")
    assert losses(tmp_path) == unkilled(2)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_three_ranks_resume_bit_for_bit(tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 4}
    ranks(3, run, tmp_path, {**changes, "epochs": None, "steps": 7, "optim.schedule": "constant"}, None)
    ranks(3, run, tmp_path, {**changes, "optim.schedule": "constant"}, "auto")
    ranks(3, run, tmp_path / "whole", {**changes, "optim.schedule": "constant"}, None)
    assert losses(tmp_path) == losses(tmp_path / "whole")


def samples_seen(mesh: Any, out: Path, changes: dict[str, Any], resume: str | None) -> list[str]:
    """The labelled images that this rank was given, by hashes of their pixels."""
    seen: list[str] = []

    def spying(take: Any, _: Any, group: Any, number: int, stop: int) -> Any:
        images = [image for batch in group for image in batch.images]
        seen.extend(hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images)
        return take(group, number, stop)

    with each_step(spying):
        run(mesh, out, changes, resume)
    return seen


def test_other_numbers_of_ranks_see_each_remaining_sample_once(tmp_path: Path, ranks: Ranks) -> None:
    base = {"data.augment": "none", "epochs": None, "head.momentum_dtype": "int8", "head.weight_dtype": "bfloat16"}
    seen: list[str] = []
    for world, steps, resume in ((2, 2, None), (1, 3, "auto"), (3, 4, "auto")):
        changes = {**base, "steps": steps, "data.batch_size": 12 // world}
        for share in ranks(world, samples_seen, tmp_path, changes, resume):
            seen += share
    last = {**base, "epochs": 1, "steps": None, "data.batch_size": 6}
    for share in ranks(2, samples_seen, tmp_path, last, "auto"):
        seen += share
    (whole,) = ranks(1, samples_seen, tmp_path / "whole", {**base, "steps": None, "epochs": 1}, None)
    assert len(set(whole)) == 60
    assert sorted(seen) == sorted(whole)


def test_adamw_average_and_scaler_survive(tmp_path: Path, ranks: Ranks) -> None:
    changes = {
        "optim.name": "adamw",
        "optim.lr": 0.01,
        "ema_decay": 0.9,
        "precision": "fp16",
        "epochs": 2,
        "optim.accumulate": 2,
        "data.batch_size": 6,
        "head.margin": "adaface",
        "head.sample_rate": 0.5,
        "head.centers": 2,
        "head.m": 0.4,
        "optim.schedule": "constant",
    }
    ranks(1, run, tmp_path / "whole", changes, None)
    ranks(1, run, tmp_path / "halves", {**changes, "epochs": None, "steps": 6}, None)
    ranks(1, run, tmp_path / "halves", changes, "auto")
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert_same_files(tmp_path / "halves", tmp_path / "whole")


@pytest.fixture
def finished(tmp_path: Path, ranks: Ranks) -> Path:
    ranks(1, run, tmp_path, {"epochs": 1, "checkpoint.every_steps": 2}, None)
    return tmp_path


def test_a_flipped_bit_is_named_and_an_older_checkpoint_offered(finished: Path, ranks: Ranks) -> None:
    newest = finished / "checkpoints/step-00000005"
    names = sorted(path.name for path in newest.iterdir())
    assert {"manifest.json", "state.json", ".metadata", "__0_0.distcp"} == set(names)
    for name in names:
        content = (newest / name).read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 0x10
        (newest / name).write_bytes(flipped)
        for world in (1, 2):
            for message in ranks(world, refusal, finished, {"data.batch_size": 6}, "auto"):
                assert message.startswith("IntegrityError: ")
                assert str(newest) in message
                assert f"--resume {finished}/checkpoints/step-00000004" in message
                assert "\n" not in message
        (newest / name).write_bytes(content)
    (newest / "__0_0.distcp").unlink()
    assert "missing" in ranks(1, refusal, finished, {}, "auto")[0]


@pytest.mark.exhaustive
def test_going_on_from_an_older_checkpoint(finished: Path, ranks: Ranks) -> None:
    before = losses(finished)
    older = str(finished / "checkpoints/step-00000002")
    ranks(1, run, finished, {"epochs": 1, "checkpoint.every_steps": 0}, older)
    assert losses(finished) == before
    names = sorted(path.name for path in (finished / "checkpoints").glob("s*"))
    assert names == ["step-00000002", "step-00000005", "superseded-step-00000004", "superseded-step-00000005"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "mobilefacenet"}, 'backbone was "tiny" when the run began and is "mobilefacenet" now'),
        ({"embedding_dim": 8}, "embedding_dim was 16"),
        ({"seed": 3}, "seed was 0"),
        ({"head.centers": 2}, "head.centers was 1"),
        ({"optim.name": "adamw"}, 'optim.name was "sgd"'),
        ({"data.train": "avatars:11x6"}, "classes were 10 and are 11"),
        ({"data.train": "avatars:10x7"}, "images were 60 and are 70"),
    ],
)
def test_what_cannot_change_on_resume(changes: dict[str, Any], message: str, finished: Path, ranks: Ranks) -> None:
    text = ranks(1, refusal, finished, changes, "auto")[0]
    if "classes" in message:
        text = text.replace("images were 60 and are 66", "classes were 10 and are 11")
    assert text.startswith("UsageError: ")
    assert message in text
    assert "--init_weights" in text


def test_what_may_change_on_resume(finished: Path, ranks: Ranks) -> None:
    changes = {
        "epochs": 2,
        "optim.lr": 0.01,
        "data.batch_size": 20,
        "head.m": 0.2,
        "ema_decay": 0.5,
        "precision": "bf16",
    }
    result = ranks(1, run, finished, changes, "auto")[0]
    assert result["epochs"] == 2
    assert result["steps"] == 5 + 3


def test_requests_that_cannot_be_met(finished: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> None:
    empty = tmp_path_factory.mktemp("empty")
    for out, resume, message in [
        (finished, None, "holds a run already; go on with it by --resume auto"),
        (finished, str(finished / "checkpoints/step-00000099"), "there is no checkpoint"),
        (finished, str(empty), "is no checkpoint"),
    ]:
        for world in (1, 2):
            for text in ranks(world, refusal, out, {"data.batch_size": 6}, resume):
                assert text.startswith("UsageError: ")
                assert message in text
    assert ranks(1, run, empty / "fresh", {"epochs": 1}, "auto")[0]["steps"] == 5


@pytest.mark.parametrize("journal", [False, True])
def test_a_run_that_ended_before_its_first_step_leaves_the_way_free(
    journal: bool, tmp_path: Path, ranks: Ranks
) -> None:
    for number in range(8):
        folder = tmp_path / "data" / f"p{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(stored(Image.new("RGB", (32, 32), (number * 30, 9, 9)), "PNG"))
    whole = (folder / "7.png").read_bytes()
    (folder / "7.png").write_bytes(b"no picture")
    changes: dict[str, Any] = {
        "data.train": str(tmp_path / "data"),
        "data.batch_size": 8,
        "data.max_bad_records": 0,
        "epochs": None,
        "steps": 3,
        "backbone": "plain",
    }
    if journal:
        changes |= {"head.placement": f"mmap:{tmp_path}/table", "journal.enabled": True}
    late = {**changes, "stage": [{"from_epoch": 9.0, "optim.lr": 0.01}]}
    assert "where the run of 3 steps is over" in ranks(1, refusal, tmp_path / "run", late, None)[0]
    for _ in range(2):
        assert "7.png" in ranks(1, refusal, tmp_path / "run", changes, None)[0]
    (folder / "7.png").write_bytes(whole)
    assert ranks(1, run, tmp_path / "run", changes, None)[0]["steps"] == 3
    assert "holds a run already" in ranks(1, refusal, tmp_path / "run", changes, None)[0]
    if journal:  # files of another configuration are not taken for this one's
        (tmp_path / "other").mkdir()
        assert "holds the table of an earlier run" in ranks(1, refusal, tmp_path / "other", changes, None)[0]


@pytest.mark.parametrize(("scaling", "rate"), [("none", "0.05 (as before)"), ("linear", "0.00117188 (was 0.00234375)")])
def test_fewer_ranks_tell_of_the_smaller_batch(scaling: str, rate: str, tmp_path: Path, ranks: Ranks) -> None:
    changes = {"data.batch_size": 6, "optim.accumulate": 2, "optim.lr_scaling": scaling, "epochs": None}
    changes["optim.schedule"] = "constant"
    ranks(2, run, tmp_path, {**changes, "steps": 1, "checkpoint.every_steps": 1}, None)
    ranks(1, run, tmp_path, {**changes, "steps": 2}, "auto")
    line = f"changed on resume: global batch = 12 (was 24), with peak learning rate = {rate}"
    assert line in (tmp_path / "train.log").read_text()
    ranks(2, run, tmp_path, {**changes, "steps": 3, "data.batch_size": 3}, "auto")
    assert (tmp_path / "train.log").read_text().count("global batch = ") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_answered_at_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(tell=True) as stop:
        signal.raise_signal(number)
        told = capfd.readouterr().err
        signal.raise_signal(number)  # which comes at once: two launchers passed the same one on
        assert stop.signal == number
    assert told.startswith(f"train: {number.name}: the run ends after the steps under way, with a checkpoint")
    assert ("a second one ends it at once" in told) == (number != signal.SIGUSR1)
    assert capfd.readouterr().err == ""
    with StopRequest():
        signal.raise_signal(signal.SIGUSR1)
    assert capfd.readouterr().err == ""


def channels_last_momenta(mesh: Any, out: Path) -> tuple[list[Any], list[Any]]:
    """Sizes and strides of the backbone's convolutions and of their momenta, in a run that was resumed."""
    changes = {"channels_last": True, "epochs": None, "steps": 1, "checkpoint.every_steps": 1}
    run(mesh, out, changes)
    with open_trainer(mesh, out, {**changes, "steps": 2}) as trainer:
        momenta = [(weight, state["momentum_buffer"]) for weight, state in trainer.components.optimizer.state.items()]
    pairs = [(weight, momentum) for weight, momentum in momenta if weight.dim() == 4]
    return [weight.stride() for weight, _ in pairs], [momentum.stride() for _, momentum in pairs]


@pytest.mark.exhaustive
def test_momenta_keep_the_weights_layout(tmp_path: Path, ranks: Ranks) -> None:
    weights, momenta = ranks(1, channels_last_momenta, tmp_path / "run")[0]
    assert weights
    assert momenta == weights
