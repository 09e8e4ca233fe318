"""What a run is made of, built from its configuration: data, backbone, head, optimizers."""

import copy
import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from plsc.config import MARGINS, Config, DataConfig, HeadConfig
from plsc.data.dataset import ImageDataset, open_dataset
from plsc.data.loader import TrainLoader
from plsc.data.transforms import RotatedDataset
from plsc.errors import UsageError
from plsc.head.sharded_head import ShardedHead
from plsc.losses.margins import MARGINS as MARGIN_TYPES
from plsc.losses.margins import Margin
from plsc.models import create, load_weights
from plsc.models.weights import unwrapped
from plsc.models.wrappers import RotationTTA
from plsc.optim.gradients import GradScaler
from plsc.optim.head_optimizers import HeadAdamW, HeadOptimizer, HeadSGD
from plsc.parallel import Mesh, convert_sync_batchnorm, data_parallel
from plsc.parallel.wide_gradients import sum_gradients_in_float64
from plsc.train.agreement import on_every_rank
from plsc.train.ema import MovingAverage

# What torch says while it compiles and nobody can mend: of data parallel's own code, and of a machine without a GPU.
_NOISE = {
    "torch._dynamo.variables.ctx_manager": "Profiler record function",
    "torch.utils.cpp_extension": "No CUDA runtime",
}
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CACHE: dict[str, Any] = {"auto": "auto", "always": True, "never": False}


@dataclass
class Parts:
    """Everything that a step touches; ``net`` wraps ``backbone`` (data parallel, compiled).

    ``data`` is what must not change about the data set while a run pauses.
    """

    config: Config
    mesh: Mesh
    dataset: ImageDataset
    data: dict[str, Any]
    loader: TrainLoader
    backbone: nn.Module
    net: nn.Module
    head: ShardedHead
    optimizer: torch.optim.Optimizer
    head_optimizer: HeadOptimizer
    average: MovingAverage | None
    scaler: GradScaler

    @property
    def judged(self) -> nn.Module:
        """What is evaluated and exported: the moving average where there is one, perhaps under rotation TTA."""
        model = self.average.model if self.average is not None else self.backbone
        return RotationTTA(unwrapped(model)) if self.config.rotation_tta else model

    def autocast(self) -> torch.autocast:
        """The arithmetic of the backbone's passes."""
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        return torch.autocast(self.mesh.device.type, dtype=dtype, enabled=dtype is not None)


def open_training_data(data: DataConfig) -> ImageDataset:
    """The pictures that [data] names; raises as :func:`plsc.data.open_dataset` does."""
    dataset = open_dataset(data.train, image_size=data.image_size, max_bad_records=data.max_bad_records)
    return RotatedDataset(dataset) if data.rotation_classes else dataset


def build(config: Config, dataset: ImageDataset, mesh: Mesh) -> Parts:
    """Make every part; every rank calls. UsageError where the configuration asks for what cannot be."""
    torch.manual_seed(config.seed)  # the same first weights on every rank
    backbone, average = on_every_rank(mesh, lambda: _backbone(config, mesh))
    exact = _sums_exactly(config, mesh)
    net = data_parallel(backbone, mesh, sum_gradients_in_float64(backbone, mesh) if exact else None)
    if config.compile:
        net = _compiled(net)
    head = on_every_rank(mesh, lambda: make_head(config, dataset.num_classes, mesh, exact=exact))
    return Parts(
        config,
        mesh,
        dataset,
        fingerprint(dataset),
        on_every_rank(mesh, lambda: make_loader(config, dataset, mesh)),
        backbone,
        net,
        head,
        _optimizer(config, net),
        make_head_optimizer(config, head),
        average,
        GradScaler(mesh, enabled=config.precision == "fp16"),
    )


def _compiled(net: nn.Module) -> nn.Module:
    for name, start in _NOISE.items():
        logging.getLogger(name).addFilter(partial(_begins_otherwise, start))
    return torch.compile(net)  # type: ignore[return-value]


def _begins_otherwise(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


def fingerprint(dataset: ImageDataset) -> dict[str, Any]:
    """Numbers of images and classes, and a hash of the labels in their order."""
    labels = np.ascontiguousarray(dataset.labels, dtype="<i8")
    digest = hashlib.sha256(labels.data).hexdigest()
    return {"images": len(dataset), "classes": dataset.num_classes, "labels_sha256": digest}


def make_loader(config: Config, dataset: ImageDataset, mesh: Mesh) -> TrainLoader:
    """This rank's loader."""
    data = config.data
    return TrainLoader(
        dataset,
        batch_size=data.batch_size,
        rank=mesh.rank,
        world_size=mesh.world_size,
        seed=config.seed,
        augment=data.augment,
        workers=data.workers,
        max_bad_records=data.max_bad_records,
        cache_images=_CACHE[data.cache],
    )


def make_margin(head: HeadConfig) -> Margin:
    """The margin that [head] describes; UsageError for values that it does not take."""
    given = {name: getattr(head, name) for name in MARGINS[head.margin]}
    try:
        return MARGIN_TYPES[head.margin](**{name: value for name, value in given.items() if value is not None})
    except UsageError as error:
        raise UsageError(f"[head] margin {head.margin}: {error}") from None


def _backbone(config: Config, mesh: Mesh) -> tuple[nn.Module, MovingAverage | None]:
    backbone: nn.Module = create(config.backbone, embedding_dim=config.embedding_dim, image_size=config.data.image_size)
    if config.init_weights:
        load_weights(backbone, config.init_weights)
    backbone = backbone.to(mesh.device)
    if config.channels_last:
        backbone = backbone.to(memory_format=torch.channels_last)
    average = MovingAverage(copy.deepcopy(backbone), config.ema) if config.ema else None
    return convert_sync_batchnorm(backbone, mesh) if config.sync_batchnorm else backbone, average


def _sums_exactly(config: Config, mesh: Mesh) -> bool:
    """Whether sums over samples and classes run in float64, so that losses do not hang on the number of ranks."""
    plain = config.precision == "fp32" and not config.compile
    return config.sync_batchnorm and plain and mesh.device.type == "cpu"


def make_head(config: Config, num_classes: int, mesh: Mesh, *, exact: bool = False) -> ShardedHead:
    """The class head that [head] describes; with ``exact``, a float32 table becomes float64, and so do all sums."""
    head = config.head
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "none": None}
    weight_dtype = dtypes[head.weight_dtype]
    assert weight_dtype is not None
    if exact and weight_dtype == torch.float32:
        weight_dtype = torch.float64
    return ShardedHead(
        dim=config.embedding_dim,
        num_classes=num_classes,
        mesh=mesh,
        margin=make_margin(head),
        sample_rate=head.sample_rate,
        weight_dtype=weight_dtype,
        momentum_dtype=dtypes[head.momentum_dtype],
        centers=head.centers,
        seed=config.seed,
        placement=head.placement,
    )


def _optimizer(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    """Of the backbone: every weight decays, as in arcface_torch's recipes."""
    optim = config.optim
    weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if optim.name == "sgd":
        return torch.optim.SGD(weights, optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)
    betas = (optim.betas[0], optim.betas[1])
    return torch.optim.AdamW(weights, optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)


def make_head_optimizer(config: Config, head: ShardedHead) -> HeadOptimizer:
    """The head's optimizer, as [optim] describes it."""
    optim = config.optim
    lr = optim.lr if optim.head_lr is None else optim.head_lr
    if optim.name == "sgd":
        momentum = optim.momentum if head.momentum_dtype is not None else 0.0
        return HeadSGD(head, lr, momentum=momentum, weight_decay=optim.weight_decay)
    betas = (optim.betas[0], optim.betas[1])
    return HeadAdamW(head, lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
