"""Sound files that crafted ones are made from: a run and its checkpoint, a model, a set, an index, a gallery."""

import io
import os
import shutil
import zipfile
from collections.abc import Callable
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
log = { to = [] }
"""


class Samples:
    """Paths of sound files in ``folder``; a case copies what it changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "train.toml"
        self.run = folder / "run"
        self.checkpoint = self.run / "checkpoints/step-00000001"  # of the training's only step
        self.model = folder / "model.safetensors"
        self.embeddings = folder / "faces.emb"  # 12 rows
        self.index = folder / "faces.idx"  # an exact one of them
        self.store = folder / "store"  # a gallery of one collection of them
        self.snapshot = folder / "store.snapshot"
        self.picture = folder / "private.jpg"
        self.records = folder / "pictures.rec"  # 12 pictures, with its companions


# A case writes its file into an empty folder, and returns the arguments of the command that reads it.
Case = Callable[[Path, Samples], list[str]]
Content = bytes | Callable[[Samples], bytes]  # the large ones are made when they are needed
Change = Callable[[Path], object]
EMBED = "embed {file} --data avatars:2x2 --out {out}/out.emb"


def arguments(words: str, folder: Path, samples: Samples, file: Path) -> list[str]:
    """The words of a command, in which {file} is what was crafted, {out} a place beside, and {model} … are samples."""
    return [word.format(**vars(samples), file=file, out=folder.parent) for word in words.split()]


def content_of(content: Content, samples: Samples) -> bytes:
    """Make what is only made when it is needed."""
    return content if isinstance(content, bytes) else content(samples)


def crafted(words: str, name: str, content: Content) -> Case:
    """The command ``words`` reads a file ``name`` of this content."""

    def make(folder: Path, samples: Samples) -> list[str]:
        (folder / name).write_bytes(content_of(content, samples))
        return arguments(words, folder, samples, folder / name)

    return make


def copied(words: str, sample: str, change: Change, name: str = "copy") -> Case:
    """The command ``words`` reads a copy of the folder ``sample``, after its ``change``."""

    def make(folder: Path, samples: Samples) -> list[str]:
        shutil.copytree(getattr(samples, sample), folder / name)
        change(folder / name)
        return arguments(words, folder, samples, folder / name)

    return make


def _written(text: str) -> Change:
    return lambda folder: (folder / "manifest.json").write_text(text)


def piped(path: Path) -> None:
    """Put a pipe that nobody writes to in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def members_of(archive: bytes) -> dict[str, bytes]:
    """The files in a zip archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name: file.read(name) for name in file.namelist()}


def packed(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of these files."""
    with zipfile.ZipFile(content := io.BytesIO(), "w", compression) as file:
        for name, member in members.items():
            file.writestr(name, member)
    return content.getvalue()


MANIFESTS: dict[str, Change] = {
    "a manifest of 200 MB": lambda folder: os.truncate(folder / "manifest.json", 200_000_000),
    "a manifest that is a pipe": lambda folder: piped(folder / "manifest.json"),
    "a manifest nested deeply": _written("[" * 100_000),
    "a manifest nested deeply in a dictionary": _written('{"format": ' + '{"a":' * 100_000),
    "a manifest of a million digits": _written("9" * 1_000_000),
    "a manifest of a value of a million digits": _written('{"a": ' + "9" * 1_000_000 + "}"),
    "a manifest of NaN": _written('{"format": "x", "seal": NaN}'),
    "a manifest that is cut off": lambda folder: os.truncate(folder / "manifest.json", 60),
}


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
