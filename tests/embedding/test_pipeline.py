"""The pipeline in front of the model: order, errors, what binds, warnings of pictures; small batches on a CPU."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from plsc import models
from plsc.data.codec import decode_image, encode_image
from plsc.embedding.embedder import open_embedder
from plsc.embedding.embedding_set import EmbeddingSet
from plsc.embedding.pipeline import Batch, StallTimes, embedded_batches
from plsc.errors import DataError
from plsc.models.preprocessing import picture_warnings
from plsc.tools.entry import main

CPU = torch.device("cpu")
STUCK = """
import os, time
import numpy as np
from plsc.data import ImageDataset
from plsc.embedding.pipeline import decode_loader
from plsc.models.preprocessing import Preprocessing

class Stuck(ImageDataset):
    def image(self, index):
        print("reading", flush=True)
        time.sleep(1e6)

    def key(self, index):
        return str(index)

stuck = Stuck("stuck", np.zeros(2, dtype=np.int64), ["a"], None)
loader = decode_loader(stuck, [(0, 2)], Preprocessing(), batch_size=1, workers=1)
next(iter(loader))
"""


def batches(count):
    for number in range(count):
        yield Batch(torch.full((3, 1), float(number)), {0: f"error {number}"}, {1: f"warning {number}"})


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_answers_come_in_order_with_their_errors(count):
    answers = list(embedded_batches(lambda images: images * 2, batches(count), StallTimes()))
    assert [float(answer.rows[0, 0]) for answer in answers] == [2.0 * number for number in range(count)]
    assert [answer.errors for answer in answers] == [{0: f"error {number}"} for number in range(count)]
    assert [answer.warnings for answer in answers] == [{1: f"warning {number}"} for number in range(count)]


def test_the_next_batch_is_read_while_the_model_computes():
    """The model's first answer stalls until a second batch has been read."""
    second_read = threading.Event()

    def stream():
        yield Batch(torch.zeros(1, 1), {}, {})
        second_read.set()
        yield Batch(torch.zeros(1, 1), {}, {})

    def embed(images):
        assert second_read.wait(timeout=120)
        return images

    assert len(list(embedded_batches(embed, stream(), StallTimes()))) == 2


@pytest.mark.live
def test_a_worker_ends_with_its_reader():
    """It holds the other end of the reader's output."""
    reader = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"reading\n"
    reader.kill()
    assert reader.communicate(timeout=60) == (b"", None)


def test_time_that_reading_takes_is_told_as_such(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("plsc.embedding.pipeline.time.monotonic", lambda: clock[0])

    def stream():
        for batch in batches(4):
            clock[0] += 1.0
            yield batch

    stalls = StallTimes()
    list(embedded_batches(lambda images: images, stream(), stalls))
    assert stalls == StallTimes(images=4.0, model=0.0)


def test_failures_of_the_model_come_through():
    def broken(images):
        raise DataError("the model does not run")

    with pytest.raises(DataError, match="does not run"):
        list(embedded_batches(broken, batches(5), StallTimes()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    models.save_model(models.create("mobilefacenet", embedding_dim=16, image_size=48), path)
    return path


def test_the_precision_that_auto_picks_is_recorded(model, tmp_path):
    assert open_embedder(model, device=CPU, precision="auto").precision == "fp32"
    argv = ["embed", str(model), "--data", "avatars:3x2", "--workers", "0", "--out"]
    assert main([*argv, str(tmp_path / "auto")]) == 0
    assert EmbeddingSet(tmp_path / "auto").manifest["precision"] == "fp32"
    assert main([*argv, str(tmp_path / "bf16"), "--precision", "bf16"]) == 0
    made, plain = EmbeddingSet(tmp_path / "bf16"), EmbeddingSet(tmp_path / "auto")
    assert made.manifest["precision"] == "bf16"
    assert made.contract_id == plain.contract_id
    a, b = made.rows(0, 6), plain.rows(0, 6)
    cosines = np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosines.min() > 0.999


def noise(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def codes(picture: torch.Tensor, image_size: int = 112) -> list[str]:
    return [warning.code for warning in picture_warnings(picture, image_size)]


@pytest.mark.parametrize(
    ("expected", "shapes"),
    [
        ([], [(112, 112), (56, 56), (224, 224), (120, 112)]),
        (["not_square"], [(112, 96), (2000, 3000)]),
        (["wrong_size"], [(250, 250), (40, 40)]),
        (["wrong_size", "uniform"], [(1, 1)]),
    ],
)
def test_the_shape_of_a_crop(expected, shapes):
    assert [codes(noise(*shape)) for shape in shapes] == [expected] * len(shapes)


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
