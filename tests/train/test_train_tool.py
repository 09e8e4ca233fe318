"""plsc train from the outside: its arguments, its ranks, its one line for what is wrong."""

import json
import subprocess
from pathlib import Path

import pytest
from support.ranks import run_command

from plsc.tools.entry import main

SMALL = """
backbone = "mobilefacenet"
embedding_dim = 32
precision = "fp32"
steps = 3
[data]
train = "avatars:4x4"
image_size = 32
batch_size = 4
workers = 1
[log]
every_steps = 1
tensorboard = false
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no configuration: plsc train CONFIG.toml"),
        (["/no/such.toml"], "/no/such.toml does not exist"),
        (["avatar_quickstart"], "a shipped configuration; did you mean avatars_quickstart?"),
        (["RECIPE", "--optim.lrr", "1"], "did you mean optim.lr?"),
        (["RECIPE", "--epochs"], "--epochs needs a value"),
        (["RECIPE", "--epochs", "three"], 'epochs = "three" is a string; it takes an integer'),
        (["RECIPE", "stray"], "'stray' belongs to no key"),
        (["RECIPE", "--data.train", "/no/pictures"], "there is no /no/pictures"),
        (["RECIPE", "--nproc", "0"], "--nproc 0"),
        (["RECIPE", "--nproc", "2", "--head_ranks", "3"], "head_ranks = 3 does not divide the number of ranks, 2"),
        (["RECIPE", "--head_ranks", "2"], "head_ranks = 2 does not divide the number of ranks, 1"),
        (
            ["RECIPE", "--nproc", "3", "--parallel.averaging", "local_sgd", "--parallel.averaging_group_ranks", "2"],
            "averaging_group_ranks = 2 does not divide the number of ranks, 3",
        ),
        (["RECIPE", "--out", "/proc/here"], "cannot write into /proc/here"),
        (["RECIPE", "--resume", "/no/where"], "/no/where is no checkpoint"),
        (["RECIPE", "--backbone", "iresnet5"], "did you mean iresnet50?"),
    ],
)
def test_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *[str(recipe) if word == "RECIPE" else word for word in words]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.toml"]  # no empty run directory


def test_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list-keys"]) == 0
    listed = capsys.readouterr().out
    assert "optim.warmup_epochs (unset)" in listed
    assert listed.startswith("The keys that are changed most\n  data.train = ")
    titles = [line for line in listed.splitlines() if line.startswith("[")]
    assert titles[:2] == [
        "[data]: the images to train on.",
        "[head]: the class head; the number of classes comes from the data.",
    ]
    with pytest.warns(FutureWarning, match="now called --list-keys"):
        assert main(["train", "--keys"]) == 0
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["checkpoint.keep"], ["checkpoint.keep.last", "checkpoint.keep.every_hours", "checkpoint.keep.best"]),
        (["gamma"], ["optim.milestones", "optim.gamma"]),
        (["learning_rate"], ["optim.lr"]),
    ],
)
def test_keys_of_a_section_or_about_a_word(
    words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--list-keys", *words]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "] == names


def test_a_configurations_values_stand_beside_the_defaults(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--optim.lr", "0.25", "--list-keys", "lr"]) == 0
    listed = capsys.readouterr().out
    assert "  optim.lr = 0.25   (default: 0.1)\n" in listed
    assert "  optim.base_batch = 512\n" in listed
    assert main(["train", "--list-keys", "leraning_rate"]) == 2
    assert capsys.readouterr().err.endswith("did you mean optim.lr?\n")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command("train", *words)


@pytest.mark.slow
def test_two_ranks_and_a_second_run_in_their_place(recipe: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    first = command(str(recipe), "--nproc", "2", "--out", out, "--json", str(tmp_path / "result.json"))
    assert first.returncode == 0, first.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["classes"]) == (3, 4)
    assert "trained 3 steps" in first.stdout
    again = command(str(recipe), "--nproc", "2", "--out", out)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "holds a run already" in again.stderr


@pytest.mark.slow
def test_two_ranks_with_a_replica_of_the_table_each(recipe: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    out = tmp_path / "run"
    trained = command(str(recipe), "--nproc", "2", "--head_ranks", "1", "--out", str(out))
    assert trained.returncode == 0, trained.stderr
    assert "head_ranks = 1" in (out / "config.toml").read_text()
    stored = FileSystemReader(out / "checkpoints/step-00000003").read_metadata().state_dict_metadata["head.weight"]
    assert [chunk.sizes[0] for chunk in stored.chunks] == [4]


@pytest.mark.slow
def test_a_failure_of_one_rank_is_one_line(recipe: Path, tmp_path: Path) -> None:
    from PIL import Image

    for person in range(2):
        folder = tmp_path / "data" / f"p{person}"
        folder.mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (32, 32), (person * 99, number * 30, 9)).save(folder / f"{number}.png")
    (folder / "7.png").write_bytes(b"no picture")
    words = ["--data.train", str(tmp_path / "data"), "--data.max_bad_records", "0", "--steps", "9"]
    failed = command(str(recipe), "--nproc", "2", "--out", str(tmp_path / "run"), *words)
    assert failed.returncode == 1
    errors = [line for line in failed.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, failed.stderr
    assert "7.png" in errors[0]
    assert "Traceback" not in failed.stderr
