"""Training loops that `plsc bench train` measures: ours, arcface_torch's, and a plain one of PyTorch's own parts."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc import config as configuration
from plsc.bench.head_baselines import (
    LR,
    MARGIN,
    MOMENTUM,
    SCALE,
    WEIGHT_DECAY,
    BenchConfig,
    DenseArcFace,
    check_partial_fc,
    load_file,
    partial_fc_head,
)
from plsc.data.dataset import ImageDataset
from plsc.errors import UsageError
from plsc.models import create
from plsc.models.preprocessing import height_and_width, normalize
from plsc.parallel.mesh import Mesh
from plsc.train.components import build
from plsc.train.step import EnqueuedStep, MicroBatch, Stepper

CLIP_NORM = 5.0  # of arcface_torch's loop
_BACKBONES = Path("backbones") / "iresnet.py"
Images = tuple[Tensor, Tensor]  # uint8 (b, 3, S, S) and labels (b,) on the CPU
Step = Callable[[Any], float]  # takes a prepared batch, returns its loss, or the step's before where that waits less


@dataclass(frozen=True)
class TrainBenchConfig:
    """One measurement: a loop at a size, on the ranks of this machine.

    ``batch`` is per rank; ``threads`` are the CPU threads of a rank; ``device`` is "cpu" or "cuda"; ``arcface_torch``
    is the folder with insightface's partial_fc_v2.py; ``memory_bytes`` is what a rank on a CPU may allocate.
    """

    implementation: str
    backbone: str
    classes: int
    batch: int
    image_size: int = 112
    dim: int = 512
    nproc: int = 2
    threads: int = 1
    steps: int = 3
    device: str = "cpu"
    precision: str = "fp32"
    arcface_torch: str | None = None
    memory_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class TrainingLoop:
    """A loop under measurement: its label in tables, how it takes batches, and a builder of its step on this rank."""

    label: str
    build: Callable[[TrainBenchConfig, Mesh], Step]
    prepare: Callable[[Images, Mesh], Any]
    ours: bool = False


# Ours ---------------------------------------------------------------------------------------------------------------


class _BlankImages(ImageDataset):
    """A data set whose labels alone matter: batches are made of random numbers."""

    def __init__(self, config: TrainBenchConfig) -> None:
        count = max(config.classes, config.batch * config.nproc)
        names = range(config.classes)
        labels = np.arange(count) % config.classes
        super().__init__("benchmark", labels, names, config.image_size)  # type: ignore[arg-type]

    def image(self, index: int) -> Tensor:
        """A black image."""
        return torch.zeros(3, *height_and_width(self.image_size or 1), dtype=torch.uint8)

    def key(self, index: int) -> str:
        """Its number."""
        return str(index)


def _plsc(weight_dtype: str, momentum_dtype: str) -> Callable[[TrainBenchConfig, Mesh], Step]:
    def build_step(config: TrainBenchConfig, mesh: Mesh) -> Step:
        from plsc.native.allocator import keep_freed_memory

        keep_freed_memory()  # as `plsc train` does
        keys = {
            "backbone": config.backbone,
            "embedding_dim": config.dim,
            "precision": config.precision,
            "data.image_size": config.image_size,
            "data.batch_size": config.batch,
            "data.workers": 0,
            "head.margin": "arcface",
            "head.s": SCALE,
            "head.m": MARGIN,
            "head.weight_dtype": weight_dtype,
            "head.momentum_dtype": momentum_dtype,
            "optim.lr": LR,
            "optim.momentum": MOMENTUM,
            "optim.weight_decay": WEIGHT_DECAY,
            "optim.clip_norm": CLIP_NORM,
        }
        stepper = Stepper(build(configuration.load(None, keys), _BlankImages(config), mesh))
        sizes, numbers = [config.batch] * mesh.world_size, itertools.count()
        unread: list[EnqueuedStep] = []

        def step(batch: Images) -> float:
            unread.append(stepper.step([MicroBatch(*batch, sizes)], next(numbers)))
            # as the trainer does, the result of a step is read when the next one is enqueued
            return (unread.pop(0) if len(unread) > 1 else unread[0]).result().loss

        return step

    return build_step


def _as_loaded(batch: Images, mesh: Mesh) -> Images:
    """Our step takes batches as its loader brings them, and normalises on the device."""
    images, labels = batch
    return (images.pin_memory(), labels.pin_memory()) if mesh.device.type == "cuda" else batch


# A plain loop -------------------------------------------------------------------------------------------------------


class _Recogniser(nn.Module):
    """Backbone and all logits in one module, as a classifier is written in PyTorch."""

    def __init__(self, config: TrainBenchConfig, mesh: Mesh) -> None:
        super().__init__()
        self.backbone = create(config.backbone, embedding_dim=config.dim, image_size=config.image_size).to(mesh.device)
        self.head = DenseArcFace(BenchConfig("dense", config.classes, config.batch, config.dim), mesh)
        self._autocast = _autocast(config)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        with self._autocast:
            embeddings = self.backbone(images)
        loss: Tensor = self.head(embeddings.float(), labels)
        return loss


def _plain(config: TrainBenchConfig, mesh: Mesh) -> Step:
    net: nn.Module = _Recogniser(config, mesh).train()
    if mesh.world_size > 1:
        net = nn.parallel.DistributedDataParallel(net, process_group=mesh.group, gradient_as_bucket_view=True)
    weights = list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    return _loop(config, lambda batch: net(*batch), optimizer, weights)


# arcface_torch ------------------------------------------------------------------------------------------------------


def _arcface_torch(config: TrainBenchConfig, mesh: Mesh) -> Step:
    """Set up backbone, PartialFC_V2 and DistributedDataParallel with the options of arcface_torch's train_v2.py."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    warnings.simplefilter("ignore")  # its autocast is of a form that torch now warns of
    folder = check_arcface_torch(config.arcface_torch)
    if config.precision == "bf16":
        raise UsageError("arcface_torch trains in fp32 and fp16")
    head = partial_fc_head(folder, config.dim, config.classes, 1.0, mesh)
    make = getattr(load_file(folder / _BACKBONES), config.backbone, None)
    if make is None:
        raise UsageError(f"arcface_torch has no {config.backbone} in {_BACKBONES}")
    backbone = make(False, dropout=0.0, fp16=config.precision == "fp16", num_features=config.dim).to(mesh.device)
    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    net = nn.parallel.DistributedDataParallel(
        backbone, device_ids=ids, broadcast_buffers=False, bucket_cap_mb=16, find_unused_parameters=True
    )
    net.register_comm_hook(None, fp16_compress_hook)
    net.train()
    net._set_static_graph()
    groups = [{"params": net.parameters()}, {"params": head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    return _loop(config, lambda batch: head(net(batch[0]), batch[1]), optimizer, list(net.parameters()))


def check_arcface_torch(folder: str | Path | None) -> Path:
    """Return the absolute path of a folder that holds arcface_torch's files; UsageError if one is missing."""
    return check_partial_fc(folder, "--arcface-torch", str(_BACKBONES))


# What the two share -------------------------------------------------------------------------------------------------


def _loop(
    config: TrainBenchConfig,
    loss_of: Callable[[Images], Tensor],
    optimizer: torch.optim.Optimizer,
    clipped: list[nn.Parameter],
) -> Step:
    """Return the step that both loops take: forward, backward, clipping, update, and the loss as a number."""
    scaler = torch.amp.GradScaler(config.device, enabled=config.precision == "fp16")

    def step(batch: Images) -> float:
        loss = loss_of(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(clipped, CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()  # both log the loss of every step, for which a GPU's host waits

    return step


def _autocast(config: TrainBenchConfig) -> torch.autocast:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    return torch.autocast(config.device, dtype=dtype, enabled=dtype is not None)


def _on_device(batch: Images, mesh: Mesh) -> Images:
    """Both take normalised images on the device, as arcface_torch's loader brings them: this is not measured."""
    images, labels = batch
    return normalize(images.to(mesh.device)), labels.to(mesh.device)


LOOPS = {
    "plsc": TrainingLoop("plsc, table in bf16 + int8", _plsc("bfloat16", "int8"), _as_loaded, ours=True),
    "plsc-fp32": TrainingLoop("plsc, table in fp32", _plsc("float32", "float32"), _as_loaded, ours=True),
    "arcface-torch": TrainingLoop("arcface_torch", _arcface_torch, _on_device),
    "plain": TrainingLoop("DDP, all logits", _plain, _on_device),
}
NEEDS_PEER = "arcface-torch"
