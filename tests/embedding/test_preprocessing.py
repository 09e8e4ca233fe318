"""Warnings of pictures that are no aligned crops, and the files that a run directory stands for."""

from pathlib import Path

import pytest
import torch

from plsc.data.codec import decode_image, encode_image
from plsc.embedding.embedder import model_file
from plsc.embedding.preprocessing import picture_warnings
from plsc.errors import UsageError


def noise(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def codes(picture: torch.Tensor, image_size: int = 112) -> list[str]:
    return [warning.code for warning in picture_warnings(picture, image_size)]


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (112, 112, []),
        (56, 56, []),
        (224, 224, []),
        (112, 96, ["not_square"]),
        (120, 112, []),
        (250, 250, ["wrong_size"]),
        (40, 40, ["wrong_size"]),
        (2000, 3000, ["not_square"]),
        (1, 1, ["wrong_size", "uniform"]),
    ],
)
def test_the_shape_of_a_crop(height: int, width: int, expected: list[str]) -> None:
    assert codes(noise(height, width)) == expected


def test_uniform_pictures() -> None:
    for colour in (0, 255, 128):
        assert codes(torch.full((3, 112, 112), colour, dtype=torch.uint8)) == ["uniform"]
    stored = encode_image(torch.full((3, 112, 112), 90, dtype=torch.uint8))
    assert codes(decode_image(stored, "grey")) == ["uniform"]
    red = torch.zeros(3, 112, 112, dtype=torch.uint8)
    red[0] = 255
    assert codes(red) == ["uniform"]


def test_a_dark_crop_and_thin_strokes_are_not_uniform() -> None:
    assert codes(noise(112, 112) // 16) == []
    strokes = torch.full((3, 105, 105), 255, dtype=torch.uint8)
    strokes[:, 20:80, 50:53] = 0
    assert codes(strokes, 64) == []


def test_a_warning_says_what_it_is_about() -> None:
    (warning,) = picture_warnings(noise(250, 250), 112)
    assert warning.message == "250x250 pixels are far from the model's 112x112"


def test_a_run_stands_for_its_last_weights_and_best_is_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(UsageError, match="no run directory"):
        model_file(run)
    (run / "model.safetensors").touch()
    assert model_file(run).name == "model.safetensors"
    with pytest.raises(UsageError, match="trained without"):
        model_file(run, best=True)
    (run / "best.safetensors").touch()
    assert model_file(run, best=True).name == "best.safetensors"
    assert model_file(run / "best.safetensors") == run / "best.safetensors"
    with pytest.raises(UsageError, match="is a file"):
        model_file(run / "model.safetensors", best=True)
    with pytest.raises(UsageError, match="does not exist"):
        model_file(tmp_path / "nothing", best=True)
