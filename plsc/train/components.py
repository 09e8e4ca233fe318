"""The components of a run, built from its configuration: data, backbone, head, optimizers."""

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from plsc.config import Config, check_together
from plsc.data import ImageDataset
from plsc.data.identity import counts, samples
from plsc.data.image_cache import open_cache
from plsc.data.loader import TrainLoader, auto_workers
from plsc.errors import UsageError
from plsc.feature_config import section_name
from plsc.models import Backbone, load_weights
from plsc.models.preprocessing import Preprocessing
from plsc.models.recompute_budget import recompute_activations
from plsc.models.weights import adopt_preprocessing, create_for, unwrapped, weights_preprocessing
from plsc.models.wrappers import RotationTTA
from plsc.optim.backbone_optimizers import Hyperparameters, make_backbone_optimizer
from plsc.optim.gradients import GradScaler
from plsc.optim.head_optimizers import HeadOptimizer
from plsc.optim.parameter_groups import parameter_groups
from plsc.optim.verdict import UpdateCounter, Verdict
from plsc.parallel import Mesh, convert_sync_batchnorm
from plsc.parallel.collectives import all_gather_object, on_main, raise_on_all_ranks
from plsc.parallel.gradient_compression import ExchangeOptions, GradientExchange, gradient_exchange
from plsc.parallel.strategies import Strategy, Wrapping, make_strategy
from plsc.parallel.sync_batchnorm import sum_gradients_in_float64
from plsc.toml_keys import options_of
from plsc.train.feature import Feature, TableKeeper, overriding
from plsc.train.micro_batches import ClassLoss
from plsc.train.tables import TrainedTable, make_tables, peak_rates

# Log lines of torch.compile that no user can act on: about DDP's own code, and about a machine without a GPU.
_IGNORED_LOGS = {
    "torch._dynamo.variables.ctx_manager": "Profiler record function",
    "torch.utils.cpp_extension": "No CUDA runtime",
}
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MovingAverage:
    """Exponential moving average of a backbone's weights, which is often the better model to evaluate and to ship.

    ``values``, copies of this rank's parts of the backbone, become decay·average + (1 − decay)·backbone after each
    step. The decay starts at 0.1 and rises to ``decay`` as (1 + n)/(10 + n) over the updates n (TensorFlow's
    ExponentialMovingAverage), so that the random initial weights do not linger. Running statistics are averaged
    likewise. torch's AveragedModel copies the weights of the first step and renames the keys, timm's ModelEmaV3 warms
    up along another curve: with either, resumed runs would part from their beginning.
    """

    def __init__(self, parts: Mapping[str, Tensor], decay: float) -> None:
        self.values = {name: part.clone() for name, part in parts.items()}
        self.decay = decay
        self.updates = UpdateCounter()

    @torch.no_grad()
    def update(self, parts: Mapping[str, Tensor], verdict: Verdict) -> None:
        """Take in the parts as they are now, unless ``verdict`` skips the step."""
        number = self.updates.begin(verdict)
        weight = torch.where(verdict.flag != 0, 0.0, 1 - min(self.decay, number / (9 + number)))
        averaged: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for name, old in self.values.items():
            if old.is_floating_point():
                both = averaged.setdefault(old.device, ([], []))
                both[0].append(old)
                both[1].append(parts[name])
            else:
                old.copy_(parts[name])
        for device, (olds, present) in averaged.items():
            changes = torch._foreach_sub(present, olds)
            torch._foreach_mul_(changes, weight.to(device))
            torch._foreach_add_(olds, changes)


@dataclass
class TrainComponents:
    """Everything that a step touches.

    ``strategy`` holds the backbone and takes it through steps; replicas exchange gradients, or weights, through
    ``exchange``. ``features`` are the rare ones that the run has, by their sections' names.
    ``data`` says which images and classes these are (:func:`plsc.data.identity.samples`); a run goes on with the same.
    """

    config: Config
    mesh: Mesh
    dataset: ImageDataset
    data: dict[str, Any]
    loader: TrainLoader
    strategy: Strategy
    exchange: GradientExchange
    tables: list[TrainedTable]
    class_loss: ClassLoss
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    scaler: GradScaler
    features: dict[str, Feature]

    @property
    def voters(self) -> Mesh:
        """The ranks that agree on whether a step goes through: all, or this one where each steps by itself."""
        alone = self.strategy.head_mesh if self.strategy.steps_alone else None
        return self.mesh if alone is None else alone

    @property
    def head_optimizers(self) -> list[HeadOptimizer]:
        """Those of all class tables."""
        return [table.optimizer for table in self.tables]

    @property
    def keeper(self) -> TableKeeper | None:
        """The feature that keeps the class tables' rows itself; None: checkpoints hold them."""
        return next((each for each in self.features.values() if isinstance(each, TableKeeper)), None)

    @cached_property
    def _say_whether_it_trains(self) -> list[Callable[[], bool]]:
        return overriding(self.features.values(), "trains_backbone")

    @property
    def trains_backbone(self) -> bool:
        """Whether the backbone needs a backward pass now."""
        return all(trains() for trains in self._say_whether_it_trains)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the backbone have the average of the weights of all ranks, where they have their own, until the end.

        The ranks' moving averages give way to their average for good: it is the moving average of the average.
        """
        if self.average is not None and self.exchange.replicas_differ:
            self.exchange.average([value for value in self.average.values.values() if value.is_floating_point()])
        with self.exchange.averaged():
            yield

    def average_statistics(self) -> None:
        """Set running statistics, the backbone's and its moving average's, to their means over the ranks; all call.

        The mean of the ranks' moving averages is the moving average of their mean.
        """
        self.strategy.average_buffers({} if self.average is None else self.average.values)

    def shipped_model(self) -> nn.Module:
        """Return the model that is evaluated and exported; every rank calls.

        It is the moving average if there is one, perhaps under rotation TTA.
        """
        model = self.strategy.whole(None if self.average is None else self.average.values)
        return RotationTTA(unwrapped(model)) if self.config.rotation_tta else model


def with_preprocessing(config: Config) -> Config:
    """Fill in what [data] leaves unset of the preprocessing contract: as init_weights bring it, else plsc's own values.

    Raises as :func:`plsc.models.load_weights` does, and :class:`UsageError` where another key does not go with it.
    """
    data = config.data
    names = [field.name for field in dataclasses.fields(Preprocessing)]
    given = {name: value for name in names if (value := getattr(data, name)) is not None}
    brought = None
    if config.init_weights and len(given) < len(names):
        brought = weights_preprocessing(config.backbone, config.init_weights)
    contract = dataclasses.replace(brought or Preprocessing(), **given)
    filled = dataclasses.replace(config, data=data.with_contract(contract))
    check_together(filled)
    return filled


def autocast_dtype(precision: str) -> torch.dtype | None:
    """What the backbone computes in, None for float32. "auto" is none of them: it is resolved when a run starts."""
    return None if precision == "fp32" else AUTOCAST_DTYPES[precision]


def build(config: Config, dataset: ImageDataset, mesh: Mesh) -> TrainComponents:
    """Build every component; every rank calls. UsageError where the configuration asks for the impossible.

    ``config.precision`` is not "auto" any more: :func:`plsc.config.checks.with_precision`.
    """
    if config.compile_mode != "default" and (mesh.world_size > 1 or mesh.device.type != "cuda"):
        has = "a CPU has none" if mesh.device.type != "cuda" else f"there are {mesh.world_size} ranks"
        raise UsageError(f'compile_mode = "{config.compile_mode}" is CUDA graphs of one GPU, and {has}; leave it out')
    torch.manual_seed(config.seed)  # the same first weights on every rank
    features = {section_name(type(section)): section.make(config) for section in config.features_on}
    strategy = raise_on_all_ranks(mesh, lambda: _strategy(config, features.values(), mesh))
    backbone = raise_on_all_ranks(mesh, lambda: _backbone(config))
    for prepare in overriding(features.values(), "prepare"):
        raise_on_all_ranks(mesh, partial(prepare, backbone))
    template = copy.deepcopy(backbone).to("meta")  # of the one in host memory: no device holds two
    for convert in overriding(features.values(), "convert"):
        raise_on_all_ranks(mesh, partial(convert, backbone, mesh.device))
    backbone = backbone.to(mesh.device)
    loader = raise_on_all_ranks(mesh, lambda: make_loader(config, dataset, strategy))
    if config.sync_batchnorm:
        backbone = convert_sync_batchnorm(backbone, strategy.peers)
    exact = _sums_exactly(config, mesh)
    exchange = raise_on_all_ranks(mesh, lambda: _exchange(config, features.values(), backbone, strategy.peers, loader))
    exchange = sum_gradients_in_float64(backbone, mesh) if exact else exchange
    groups = raise_on_all_ranks(mesh, lambda: _named_groups(config, backbone, strategy))
    strategy.wrap(backbone, template, _wrapping(config, strategy, exchange))
    optimizer = raise_on_all_ranks(mesh, lambda: strategy.optimizer(_optimizer_maker(config, strategy), groups))
    exchange.take_momentum(optimizer)
    tables = raise_on_all_ranks(mesh, lambda: make_tables(config, dataset, strategy, exact=exact))
    components = TrainComponents(
        config,
        mesh,
        dataset,
        on_main(lambda: samples(dataset), mesh) | counts(dataset),
        loader,
        strategy,
        exchange,
        tables,
        _class_loss(features.values(), tables, strategy),
        optimizer,
        MovingAverage(strategy.parts(), config.ema_decay) if config.ema_decay else None,
        GradScaler(mesh, enabled=config.precision == "fp16"),
        features,
    )
    for set_up in overriding(features.values(), "set_up"):
        raise_on_all_ranks(mesh, partial(set_up, components, exact=exact))
    return components


def _class_loss(features: Iterable[Feature], tables: Sequence[TrainedTable], strategy: Strategy) -> ClassLoss:
    """The loss of a feature that has several class tables; else that of the only one."""
    own = (class_loss(tables, strategy) for class_loss in overriding(features, "class_loss"))
    return next(own, None) or ClassLoss(tables, strategy)


def _strategy(config: Config, features: Iterable[Feature], mesh: Mesh) -> Strategy:
    """The strategy of a feature, where one has its own and there are several ranks; else that of [parallel]."""
    own = (strategy(mesh) for strategy in overriding(features, "strategy") if mesh.world_size > 1)
    found: Strategy | None = next(own, None)
    options = config.parallel.strategy_options()
    return found or make_strategy(options, mesh, offload=config.parallel.offload)


def optimizer_steps(config: Config, steps: int) -> int:
    """Optimizer steps of so many steps of the loader, up to an epoch's end."""
    return -(-steps // config.optim.accumulate)


def _exchange(
    config: Config, features: Iterable[Feature], backbone: nn.Module, mesh: Mesh, loader: TrainLoader
) -> GradientExchange:
    """The exchange of a feature, where one has its own and there are several ranks; else the hook of [parallel]."""
    own = (exchange(backbone, mesh) for exchange in overriding(features, "exchange") if mesh.world_size > 1)
    if (found := next(own, None)) is not None:
        return cast(GradientExchange, found)
    warmup_steps = round(config.parallel.dgc_warmup_epochs * optimizer_steps(config, loader.steps_per_epoch))
    return gradient_exchange(config.parallel.comm_hook, backbone, mesh, exchange_options(config, warmup_steps))


def exchange_options(config: Config, dgc_warmup_steps: int = 0) -> ExchangeOptions:
    """The options of ``parallel.comm_hook``; a warm-up, counted in epochs there, given in steps."""
    clip_norm = config.optim.clip_norm
    return options_of(ExchangeOptions, config.parallel, dgc_warmup_steps=dgc_warmup_steps, clip_norm=clip_norm)


def _wrapping(config: Config, strategy: Strategy, exchange: GradientExchange) -> Wrapping:
    dtype = autocast_dtype(config.precision)
    return Wrapping(
        autocast=partial(torch.autocast, strategy.mesh.device.type, dtype=dtype, enabled=dtype is not None),
        compile=partial(_compiled, mode=config.compile_mode) if config.compile else None,
        exchange=exchange,
        bucket_mb=config.parallel.bucket_mb,
        reduce_dtype=AUTOCAST_DTYPES.get(config.parallel.comm_hook),
        offload=config.parallel.offload,
        least_images=1 if config.sync_batchnorm and strategy.peers.world_size > 1 else 2,
    )


def _compiled(net: nn.Module, mode: str) -> nn.Module:
    for name, start in _IGNORED_LOGS.items():
        logging.getLogger(name).addFilter(partial(_not_startswith, start))
    return torch.compile(net, mode=mode)  # type: ignore[return-value]


def _not_startswith(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)


def make_loader(config: Config, dataset: ImageDataset, strategy: Strategy) -> TrainLoader:
    """This rank's loader."""
    data = config.data
    return TrainLoader(
        dataset,
        batch_size=data.batch_size,
        rank=strategy.data_rank,
        world_size=strategy.data_ranks,
        seed=config.seed,
        augment=data.augment,
        workers=auto_workers() if isinstance(data.workers, str) else data.workers,
        max_bad_records=data.max_bad_records,
        cache=open_cache(data.cache, dataset, partial(all_gather_object, mesh=strategy.mesh)),
        pin_memory=strategy.mesh.device.type == "cuda",
        counts_own=strategy.steps_alone,
    )


def make_backbone(config: Config) -> Backbone:
    """The backbone that the configuration describes, on the CPU, with fresh weights; its blocks recompute as told."""
    backbone = create_for(
        config.init_weights,
        config.backbone,
        embedding_dim=config.embedding_dim,
        image_size=config.data.preprocessing.image_size,
    )
    adopt_preprocessing(backbone, config.data.preprocessing)
    recompute_activations(
        backbone,
        config.recompute,
        every=config.recompute_every,
        budget=config.recompute_budget,
        images=config.data.batch_size,
        dtype=autocast_dtype(config.precision),
    )
    return backbone


def _backbone(config: Config) -> nn.Module:
    backbone: nn.Module = make_backbone(config)
    if config.init_weights:
        load_weights(backbone, config.init_weights)
        adopt_preprocessing(unwrapped(backbone), config.data.preprocessing)  # perhaps not that of the weights
    return backbone.to(memory_format=torch.channels_last) if config.channels_last else backbone


def _sums_exactly(config: Config, mesh: Mesh) -> bool:
    """Return whether all sums run in float64, so that losses do not depend on the number of ranks."""
    parallel = config.parallel
    are_whole = parallel.strategy in ("ddp", "zero1") and parallel.tp == parallel.pp == 1
    is_ddps_own = parallel.comm_hook == "none" and parallel.communicators == 1
    is_plain = config.precision == "fp32" and not config.compile and is_ddps_own
    return config.sync_batchnorm and are_whole and is_plain and mesh.device.type == "cpu"


def _named_groups(config: Config, backbone: nn.Module, strategy: Strategy) -> list[dict[str, Any]]:
    """Parameter groups of the whole backbone, with the weights' names."""
    optim, names = config.optim, {weight: name for name, weight in backbone.named_parameters()}
    lr = peak_rates(config, strategy.data_ranks)[0]
    patterns = [(table.name, table.values) for table in optim.groups]
    groups = parameter_groups(backbone, lr, no_decay=optim.no_decay, layer_decay=optim.layer_decay, patterns=patterns)
    return [{**group, "params": [names[weight] for weight in group["params"]]} for group in groups]


def _optimizer_maker(config: Config, strategy: Strategy) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Return what makes the backbone's optimizer of parameter groups."""
    device = strategy.mesh.device
    values = options_of(
        Hyperparameters,
        config.optim,
        lr=peak_rates(config, strategy.data_ranks)[0],
        fused=strategy.steps_on_device or Verdict.host_decides(device),
        compiled=config.compile or device.type != "cpu",
    )
    return lambda groups: make_backbone_optimizer(config.optim.name, groups, values)
