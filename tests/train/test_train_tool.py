"""plsc train from the outside: its arguments, its ranks, its one line for what is wrong."""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.ranks import run_command

from plsc.tools.entry import main

SMALL = """
backbone = "mobilefacenet"
embedding_dim = 32
precision = "fp32"
steps = 3
[data]
train = "avatars:4x6"
image_size = 32
batch_size = 4
workers = 1
[log]
every_steps = 1
to = []
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


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


@pytest.mark.live
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


@pytest.mark.live
@pytest.mark.slow
def test_two_ranks_with_a_replica_of_the_table_each(recipe: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    out = tmp_path / "run"
    trained = command(str(recipe), "--nproc", "2", "--head_ranks", "1", "--out", str(out))
    assert trained.returncode == 0, trained.stderr
    assert "head_ranks = 1" in (out / "config.toml").read_text()
    stored = FileSystemReader(out / "checkpoints/step-00000003").read_metadata().state_dict_metadata["head.weight"]
    assert [chunk.sizes[0] for chunk in stored.chunks] == [4]


@pytest.mark.live
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


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "ranks_line"),
    [
        (["--parallel.tp", "2"], "global batch 8 = 8 x 1 group of 2 ranks"),
        (["--parallel.pp", "2", "--parallel.pp_micro_batches", "2", "--precision", "bf16"], "blocks over 2 ranks"),
    ],
)
def test_two_ranks_share_a_vit_and_three_cannot(keys: list[str], ranks_line: str, recipe: Path, tmp_path: Path) -> None:
    words = [str(recipe), "--backbone", "vit_tiny", "--data.batch_size", "8", "--eval.sets", "avatars:4x3@4", *keys]
    refused = command(*words, "--nproc", "3", "--out", str(tmp_path / "refused"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"{keys[0][2:]} = 2 does not divide the number of ranks, 3" in refused.stderr
    assert not (tmp_path / "refused").exists()
    done = command(*words, "--nproc", "2", "--out", str(tmp_path / "run"), "--json", str(tmp_path / "json"))
    assert done.returncode == 0, done.stderr
    assert ranks_line in (tmp_path / "run/train.log").read_text()
    assert json.loads((tmp_path / "json").read_text())["steps"] == 3
    assert "blocks.11.mlp.fc2.weight" in load_file(tmp_path / "run/model.safetensors")
