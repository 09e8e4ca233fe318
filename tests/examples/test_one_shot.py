"""Omniglot's one-shot tasks: the errors that are counted are those that are there, and the page shows them."""

import base64
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc import models
from plsc.data.codec import encode_image

MAIN = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "omniglot_one_shot.py"))["main"]


def drawing(seed: int) -> torch.Tensor:
    """Blocks of black and white."""
    blocks = np.random.default_rng(seed).integers(0, 2, (1, 7, 7), dtype=np.uint8) * 255
    return torch.from_numpy(np.kron(np.repeat(blocks, 3, axis=0), np.ones((1, 15, 15), np.uint8)))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of three characters, whose tests are copies; of the second the first two truths are exchanged."""
    for run in (1, 2):
        folder, lines = tmp_path / f"run{run:02}", []
        for number in range(3):
            for kind, name in (("training", "class"), ("test", "item")):
                path = folder / kind / f"{name}{number + 1:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode_image(drawing(10 * run + number), "png"))
            truth = number + 1 if run == 1 or number == 2 else 2 - number
            lines.append(f"run{run:02}/test/item{number + 1:02}.png run{run:02}/training/class{truth:02}.png")
        (folder / "class_labels.txt").write_text("\n".join([*lines, ""]))
    return tmp_path


def test_errors_are_counted_and_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    models.save_model(models.create("resnet8", embedding_dim=16, image_size=32), runs / "m.safetensors")
    model, page = str(runs / "m.safetensors"), runs / "errors.html"
    assert MAIN([model, "--runs", str(runs), "--out", str(page)]) == {model: pytest.approx(2 / 6)}
    assert "2 of 6 wrong, 33.33%" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    for name in ("test/item01", "test/item02", "training/class01", "training/class02"):
        assert base64.b64encode((runs / "run02" / f"{name}.png").read_bytes()).decode() in text
    for name in ("run02/test/item03", "run01/test/item01"):
        assert base64.b64encode((runs / f"{name}.png").read_bytes()).decode() not in text


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        MAIN(["m.safetensors", "--runs", str(tmp_path)])
    assert refused.value.code == 2
    assert "holds no run*/class_labels.txt" in capsys.readouterr().err
