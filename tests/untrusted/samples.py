"""Sound files that crafted ones are made from: a run and its checkpoint, a model, a set, an index, a gallery."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from support.measured import Commands

from plsc import models
from plsc.data.codec import encode_image

CONFIG = """\
backbone = "resnet8"
embedding_dim = 8
precision = "fp32"
steps = 1
data = { train = "avatars:4x3", image_size = 32, batch_size = 4, workers = 0 }
checkpoint = { every_steps = 1 }
log = { tensorboard = false }
"""

Arguments = list[str | Path]


@dataclass(frozen=True)
class Samples:
    """Paths of sound files in ``folder``; a case copies what it changes."""

    folder: Path

    @property
    def config(self) -> Path:
        """A training's configuration."""
        return self.folder / "train.toml"

    @property
    def run(self) -> Path:
        """The training's run directory."""
        return self.folder / "run"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of its only step."""
        return self.run / "checkpoints/step-00000001"

    @property
    def model(self) -> Path:
        """A backbone as .safetensors."""
        return self.folder / "model.safetensors"

    @property
    def embeddings(self) -> Path:
        """An embedding set of 12 rows."""
        return self.folder / "faces.emb"

    @property
    def index(self) -> Path:
        """An exact index of them."""
        return self.folder / "faces.idx"

    @property
    def store(self) -> Path:
        """A gallery's folder, with one collection of them."""
        return self.folder / "store"

    @property
    def snapshot(self) -> Path:
        """A snapshot of it."""
        return self.folder / "store.snapshot"

    @property
    def picture(self) -> Path:
        """A private picture."""
        return self.folder / "private.jpg"

    @property
    def records(self) -> Path:
        """A .rec of 12 pictures with its companions."""
        return self.folder / "pictures.rec"


# A case writes its file into an empty folder, and returns the arguments of the command that reads it.
Case = Callable[[Path, Samples], Arguments]


def make_samples(folder: Path, commands: Commands) -> Samples:
    """Make all of them in ``folder``, by the commands that users have."""
    samples = Samples(folder)
    samples.config.write_text(CONFIG)
    samples.picture.write_bytes(encode_image(torch.zeros(3, 112, 112, dtype=torch.uint8)))
    torch.manual_seed(0)
    models.save_model(models.create("resnet8", embedding_dim=8, image_size=32).eval(), samples.model)
    for words in (
        ["train", samples.config, "--out", samples.run],
        ["embed", samples.model, "--data", "avatars:4x3@50", "--out", samples.embeddings],
        ["index", "build", samples.embeddings, "--out", samples.index],
        ["gallery", "import", samples.store, "people", samples.embeddings],
        ["gallery", "snapshot", samples.store, "--out", samples.snapshot],
        ["data", "convert", "avatars:4x3@50", samples.records, "--size", "32"],
    ):
        done = commands(*words)
        assert done.code == 0, (words, done.output)
    return samples


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as compact JSON."""
    path.write_text(json.dumps(value))
