"""The command plsc eval: what it prints, writes and refuses."""

import json

import pytest
import torch

from plsc.data.codec import encode_image
from plsc.tools.entry import main

SET = "avatars:6x4@900"


def pictures(folder, shots, sizes):
    """A folder for each of some people, with ``shots`` pictures of noise: {name: (height, width)}."""
    for person, size in sizes.items():
        (folder / person).mkdir()
        for number in range(shots):
            pixels = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
            (folder / person / f"{number}.png").write_bytes(encode_image(pixels, "png"))


@pytest.mark.slow
def test_it_prints_a_table_and_writes_result_and_pictures(tmp_path, capsys):
    out, roc, scores = tmp_path / "result.json", tmp_path / "roc.png", tmp_path / "scores.svg"
    argv = ["eval", "raw-pixels", "--data", SET, "--image-size", "32", "--json", str(out)]
    assert main([*argv, "--plot", str(roc), "--histogram", str(scores)]) == 0
    result = json.loads(out.read_text())["sets"][SET]
    assert (result["images"], result["identities"], result["impostor_pairs"]) == (24, 6, 240)
    assert set(result["tar@far"]) == {"1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6"}
    assert "from impostor pairs" in capsys.readouterr().out
    assert roc.stat().st_size > 1000
    assert scores.stat().st_size > 1000


def test_files_are_replaced_only_when_asked(tmp_path, capsys):
    argv = ["eval", "raw-pixels", "--data", SET, "--image-size", "32"]
    for option, name in (("--plot", "roc.png"), ("--histogram", "h.svg"), ("--json", "r.json")):
        (tmp_path / name).write_text("mine")
        assert main([*argv, option, str(tmp_path / name)]) == 2
        assert f"{tmp_path / name} exists already: give --overwrite to replace it" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "mine"
    assert main([*argv, "--json", str(tmp_path / "r.json"), "--overwrite"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["model"] == "raw-pixels"


def test_pictures_that_are_no_crops_are_counted(tmp_path, capsys):
    pictures(tmp_path, 2, {"a": (40, 32), "b": (40, 40)})
    assert main(["eval", "raw-pixels", "--data", str(tmp_path), "--image-size", "32"]) == 0
    warning = "warning: 2 of 4 pictures may not be cropped as the model expects"
    assert (error := capsys.readouterr().err).count(warning) == 1
    assert "the first, a/0.png: 32x40 pixels are not square" in error


def test_classes_of_one_image_are_refused(tmp_path, capsys):
    pictures(tmp_path, 1, {"a": (32, 32), "b": (32, 32)})
    argv = ["eval", "raw-pixels", "--image-size", "32", "--data", str(tmp_path)]
    line = f"{tmp_path.name}: no class has two images, so there is nothing to compare"
    assert main([*argv, "--json", str(tmp_path / "result.json")]) == 1
    assert f"plsc eval: error: {line}" in capsys.readouterr().err
    assert json.loads((tmp_path / "result.json").read_text())["sets"][tmp_path.name]["images"] == 2
    assert main([*argv, SET]) == 0
    assert f"warning: {line}" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_share_the_work_and_give_the_same_result(tmp_path):
    argv = ["eval", "raw-pixels", "--data", SET, "--image-size", "32", "--batch-size", "5", "--json"]
    assert main([*argv, str(tmp_path / "one.json")]) == 0
    assert main([*argv, str(tmp_path / "two.json"), "--nproc", "2"]) == 0
    assert json.loads((tmp_path / "one.json").read_text()) == json.loads((tmp_path / "two.json").read_text())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["raw-pixels"], "give --pairs"),
        (["raw-pixels", "--data", SET, "--best"], "--best"),
        (["raw-pixels", "--pairs", "none.bin"], "none.bin"),
        (["raw-pixels", "--pairs", "faces.txt"], "is a .bin file"),
        (["raw-pixels", "--data", SET, "nowhere"], "there is no nowhere"),
        (["raw-pixels", "--ijb", "nowhere"], "nowhere"),
        (["no-such-model", "--data", SET], "no-such-model"),
        (["raw-pixels", "--data", SET, "--batch-size", "0"], "--batch-size 0"),
        (["raw-pixels", "--data", SET, "--seed", "-1"], "--seed -1"),
        (["raw-pixels", "--data", SET, "--nproc", "0"], "--nproc 0"),
        (["raw-pixels", "--data", SET, "--plot", "roc.txt"], "must end in"),
        (["raw-pixels", "--data", SET, "--plot", "nowhere/roc.png"], "no folder nowhere"),
        (["raw-pixels", "--data", SET, "--calibration", "c.json"], "raw-pixels has no embeddings"),
        (["m", "--ijb", "IJBC", "--calibration", "c.json"], "single images"),
        (["m", "--pairs", "x.bin", "--calibration", "c.json"], "say --flip no"),
        (["m", "--data", "x", "--calibration", "nowhere/c.json"], "name a file in a folder"),
    ],
)
def test_a_wrong_request_is_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
