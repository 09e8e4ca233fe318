"""Fine-tuning a model of timm, the head first and then the whole: what is frozen, and what the run ships."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.tiny_runs import stored

from plsc import config
from plsc.errors import UsageError
from plsc.models import load_model
from plsc.models.preprocessing import Preprocessing
from plsc.train import train
from plsc.train.components import with_preprocessing

pytestmark = pytest.mark.exhaustive

Ranks = Any
# 60 images in batches of 20: three steps an epoch; the trunk thaws after the first two epochs of the recipe.
SMALL = {
    "backbone": "timm:test_byobnet",
    "embedding_dim": 16,
    "precision": "fp32",
    "epochs": 3,
    "data.train": "avatars:10x6",
    "data.image_size": [64, 32],
    "data.batch_size": 20,
    "data.workers": 0,
    "eval.sets": ["avatars:6x3@100"],
    "log.to": (),
    "checkpoint.every_steps": 3,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """timm's own file of random weights, with running statistics of images."""
    torch.manual_seed(11)
    model = timm.create_model("test_byobnet")
    model.train()(torch.rand(16, 3, 64, 32))
    path = tmp_path_factory.mktemp("weights") / "byobnet.pth"
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, path)
    return path


def recipe(weights: Path, changes: dict[str, Any] | None = None) -> config.Config:
    return config.load("fine_tune_timm", {**SMALL, "init_weights": str(weights), **(changes or {})})


def run(mesh: Any, out: Path, weights: Path, resume: str | None = None) -> None:
    torch.set_num_threads(1)
    train(recipe(weights), mesh, out=out, resume=resume, quiet=True)


@pytest.mark.slow
def test_the_recipe_trains_the_head_first_and_then_the_whole(weights: Path, tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, run, tmp_path, weights)
    published = torch.load(weights, weights_only=True)["state_dict"]
    (head_first,), (whole,) = ranks(1, stored, tmp_path, 6), ranks(1, stored, tmp_path, 9)
    trunk = {name: tensor for name, tensor in head_first.items() if ".trunk." in f".{name}"}
    assert len(trunk) > 50
    for name, tensor in trunk.items():  # weights and running statistics alike
        assert torch.equal(tensor, published[name.partition("trunk.")[2]]), name
        if tensor.is_floating_point():
            assert not torch.equal(tensor, whole[name]), name
    others = [name for name in head_first if name not in trunk and head_first[name].is_floating_point()]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in others} == {"fc", "features"}
    model = load_model(tmp_path / "model.safetensors")
    imagenet = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
    assert model.preprocessing == Preprocessing((64, 32), *imagenet, "bicubic")
    log = (tmp_path / "train.log").read_text()
    assert "64x32 (height x width) px" in log
    assert "mean 123.675/116.28/103.53, std 58.395/57.12/57.375 of values 0 to 255; resized by bicubic" in log
    assert "the layers behind the trunk (fc, features) too" in log
    written = config.load(tmp_path / "config.toml").data
    assert (written.image_size, written.interpolation, written.mean) == ((64, 32), "bicubic", imagenet[0])


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_pixels(weights: Path, tmp_path: Path, ranks: Ranks) -> None:
    ranks(1, short, tmp_path, weights, {})
    message = ranks(1, short, tmp_path, weights, {"data.mean": "127.5"})[0]
    assert message.startswith("data.mean was [123.675, 116.28, 103.53] when the run began and is 127.5 now")


def short(mesh: Any, out: Path, weights: Path, changes: dict[str, Any]) -> str:
    torch.set_num_threads(1)
    settings = {"epochs": None, "steps": 2, "eval.sets": [], "stage": [], "optim.warmup_epochs": 0.0, **changes}
    try:
        train(recipe(weights, settings), mesh, out=out, resume="auto", quiet=True)
    except UsageError as error:
        return str(error)
    return ""


def test_what_is_given_goes_before_what_the_weights_bring(weights: Path) -> None:
    brought = with_preprocessing(recipe(weights, {"data.image_size": None})).data.preprocessing
    assert (brought.image_size, brought.interpolation) == (160, "bicubic")
    given = with_preprocessing(recipe(weights, {"data.std": "64", "data.interpolation": "bilinear"})).data.preprocessing
    assert (given.image_size, given.std, given.interpolation) == ((64, 32), 64.0, "bilinear")
    assert given.mean == brought.mean


def test_without_weights_a_backbone_of_timm_takes_plscs_own_numbers() -> None:
    anew = config.load(None, {"backbone": "timm:test_byobnet"})
    assert with_preprocessing(anew).data.preprocessing == Preprocessing(112)
