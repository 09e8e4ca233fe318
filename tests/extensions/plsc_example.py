"""One of each kind that a package can add to plsc."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc.data import ImageDataset
from plsc.embedding.quality import QualityGate
from plsc.features.averaging.config import AveragingConfig
from plsc.features.averaging.exchange import ModelAveraging
from plsc.gallery.backends import Server
from plsc.gallery.store import Store
from plsc.loggers import LoggedRun, RunLogger
from plsc.losses import Margin
from plsc.models import Backbone
from plsc.parallel import Mesh
from plsc.parallel.gradient_compression import GradientExchange
from plsc.parallel.strategies.ddp import DataParallel


class OneBlock(Backbone):
    """A backbone maps images (B, 3, H, W) to embeddings (B, D)."""

    def __init__(self, embedding_dim: int, image_size: Any) -> None:
        super().__init__("one_block", embedding_dim, image_size)
        self.convolution = nn.Conv2d(3, 16, 3, stride=4)
        self.embed = nn.Linear(16, embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Average one convolution's map."""
        return self.embed(torch.relu(self.convolution(x)).mean((2, 3)))


def one_block(embedding_dim: int, image_size: Any) -> Backbone:
    """A builder of the backbone, called by the name that the configuration has."""
    return OneBlock(embedding_dim, image_size)


@dataclass(frozen=True)
class Halfway(Margin):
    """A margin is a function of the target's cosine; its fields are keys of [head]: here s and m."""

    m: float = 0.2

    def phi(self, cos: Tensor, norm: Tensor | None, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """φ(t) = t − m/2."""
        return cos - self.m / 2


class Stripes(ImageDataset):
    """A reader opens what its name and a colon begin: ``stripes:CLASSES``."""

    def __init__(self, source: str, image_size: Any) -> None:
        classes = int(source.partition(":")[2])
        super().__init__(source, np.repeat(np.arange(classes), 8), [str(c) for c in range(classes)], image_size)

    def key(self, index: int) -> str:
        """A readable id."""
        return f"stripe {index}"

    def picture(self, index: int) -> Tensor:
        """Stripes whose width is the class."""
        rows = torch.arange(32) // (1 + int(self.labels[index])) % 2
        noise = torch.Generator().manual_seed(index)
        return (rows.view(1, 32, 1) * 200 + torch.randint(50, (3, 32, 32), generator=noise)).to(torch.uint8)


class Counted(DataParallel):
    """A strategy places the backbone on the ranks; this one is data parallelism under another name."""


class Signs(GradientExchange):
    """A gradient hook registers one with DDP; this one sends 16 bits."""

    def register(self, net: Any) -> None:
        """Register torch's hook."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        net.register_comm_hook(self._mesh.group, bf16_compress_hook)


def often(mesh: Mesh, module: nn.Module, options: AveragingConfig) -> GradientExchange:
    """An averager averages weights; this one does so at every second step."""
    return ModelAveraging(mesh, module, replace(options, period=2))


def open_local(address: str) -> Store:
    """A store keeps a gallery; this one is plsc's own in the folder of the address."""
    from plsc.gallery.sqlite.store import SqliteStore

    return SqliteStore(address)


LOCAL = Server("FOLDER", "plsc_example:open_local")


class Brightness(QualityGate):
    """A quality gate measures a picture that is to be enrolled; this one is for cameras in the dark."""

    def quality(self, pixels: Tensor, embedding: Any) -> float:
        """The mean of all values."""
        return float(pixels.float().mean())


class Lines(RunLogger):
    """A logger takes numbers and pictures of a run."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._file = (run.out / "lines.txt").open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        if "loss" in values:
            self._file.write(f"{step} {values['loss']:.4f}\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
