"""One of each kind that a package can add to plsc."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from plsc.config import Config, FeatureConfig
from plsc.data import ImageDataset
from plsc.embedding.quality import QualityGate
from plsc.errors import UsageError
from plsc.features.averaging.config import AveragingConfig
from plsc.features.averaging.exchange import ModelAveraging
from plsc.gallery.backends import Server
from plsc.gallery.store import Store
from plsc.head.kept_rows import KeptRows
from plsc.head.options import HeadFeature
from plsc.loggers import LoggedRun, RunLogger
from plsc.losses import Margin
from plsc.models import Backbone
from plsc.parallel import Mesh
from plsc.parallel.gradient_compression import GradientExchange
from plsc.parallel.strategies.ddp import DataParallel
from plsc.toml_keys import key
from plsc.train.feature import Feature


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


@dataclass(frozen=True)
class TetherConfig(FeatureConfig):
    """[tether]: a loss that holds embeddings at a length.

    Attributes:
        weight: Weight of the loss in that of the run; 0: none.
        length: Length that embeddings are held at.
    """

    weight: float = key(0.0, least=0)
    length: float = key(1.0, above=0)

    alone: ClassVar[Mapping[str, str]] = {"parallel.pp": "nobody has tried"}

    def is_on(self, run: Config) -> bool:
        """A feature that is off is never made, and costs a step nothing."""
        return self.weight > 0

    @property
    def cause(self) -> str:
        """How refusals begin."""
        return f"tether.weight = {self.weight:g}"

    def make(self, run: Config) -> "Tether":
        """What takes part in the run."""
        return Tether(run)

    def plan_notes(self) -> list[str]:
        """A line of plsc plan."""
        return ["the tether's loss takes no time"]


class Tether(Feature):
    """A feature of a run; this one adds a loss, and remembers how often."""

    loss_name = "tether_loss"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.own = config.section(TetherConfig)
        self.loss_weight, self.steps = self.own.weight, 0

    def begin_step(self, labels: Sequence[Tensor]) -> None:
        """Once a step, before its first micro-batch."""
        self.steps += 1

    def loss(self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, and its share of the step: whole, as this recipe does not accumulate."""
        away = (embeddings.norm(dim=1) - self.own.length).square().mean()
        return away, torch.ones((), dtype=torch.float64)

    def state(self) -> Any:
        """What a checkpoint holds of it."""
        return {"steps": self.steps}

    def restore(self, state: Any) -> None:
        """Go on from there."""
        self.steps = 0 if state is None else int(state["steps"])

    def figures(self) -> dict[str, float]:
        """What a line of metrics says."""
        return {"tethered_steps": self.steps}

    def lines(self) -> dict[str, str]:
        """What the head of train.log says."""
        return {"tether": f"embeddings are held at {self.own.length:g}, weight {self.own.weight:g}"}


@dataclass(frozen=True)
class EveryThird(HeadFeature):
    """An option of a class head: that every third class stays as it is."""

    every_third: bool = False

    def attach(self, head: Any) -> None:
        """Take part in a head that is made."""
        if self.every_third:
            head.keep(self)

    def by_number(self, num_classes: int, own: tuple[int, int], centers: int, device: torch.device) -> KeptRows:
        """The rows of a shard that no update changes."""
        kept = torch.arange(*own, device=device) % 3 == 0
        return KeptRows(kept.repeat_interleave(centers), are_all=False)

    def by_key(self) -> Any:
        """Those of a table whose classes come and go."""
        raise UsageError("every_third is for classes that have numbers; leave it out")


@dataclass(frozen=True)
class ThirdsConfig(FeatureConfig):
    """[thirds]: that option as keys of a run; a table of several may have its own.

    Attributes:
        stay: Keep every third class as it is.
    """

    stay: bool = key(False, stands_for_section=True, in_tables=True)

    def is_on(self, run: Config) -> bool:
        """Nothing of it is in the trainer: the head does it."""
        return False

    def head_options(self) -> dict[str, Any]:
        """Keywords of each class head."""
        return {"every_third": self.stay}


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
