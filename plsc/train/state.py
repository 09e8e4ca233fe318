"""The state of a run between two steps: captured for a checkpoint, and restored on any number of ranks."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plsc import config as configuration
from plsc.config import Config
from plsc.errors import DataError, UsageError
from plsc.parallel.collectives import all_reduce_sum
from plsc.strict_toml import toml_value
from plsc.train.checkpoint import StoredCheckpoint
from plsc.train.components import TrainComponents, optimizer_steps, trainable

# Keys that determine the stored tensors' shapes and types, or the order of the samples.
FIXED = (
    "backbone",
    "embedding_dim",
    "seed",
    "data.image_size",
    "head.margin",
    "head.centers",
    "head.weight_dtype",
    "head.momentum_dtype",
    "optim.name",
    "optim.head",
)


@dataclass
class Position:
    """Progress of a run.

    ``step`` counts optimizer steps and names checkpoints; ``schedule_step`` is where the learning rate stands.
    They part when a run goes on with another batch size: ``schedule_step`` then counts in steps of the new one.
    """

    step: int = 0
    schedule_step: int = 0
    skipped: int = 0
    best: dict[str, Any] = field(default_factory=dict)


def average_buffers(components: TrainComponents) -> None:
    """Set every rank's running statistics to the mean over ranks; each rank has seen its own samples alone."""
    if components.mesh.world_size == 1:
        return
    buffers = [buffer for buffer in components.backbone.buffers() if buffer.is_floating_point()]
    if buffers:
        flat = all_reduce_sum(torch.cat([buffer.flatten() for buffer in buffers]), components.mesh)
        means = (flat / components.mesh.world_size).split([buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def capture(components: TrainComponents, position: Position) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tensors that this rank writes, everything else as JSON) of a run between two steps."""
    average_buffers(components)
    components.head_optimizer.average_replicas()
    tensors: dict[str, Any] = {
        **_prefixed("head.", components.head.sharded_state()),
        **_prefixed("head_optimizer.", components.head_optimizer.sharded_state()),
        **_prefixed(f"exchange.{components.mesh.rank}.", components.exchange.state()),
    }
    if components.mesh.is_main:
        tensors |= _prefixed("backbone.", components.backbone.state_dict())
        tensors |= _prefixed("optimizer.", _optimizer_tensors(components))
        if components.average is not None:
            tensors |= _prefixed("average.", components.average.model.state_dict())
    return tensors, _small_state(components, position)


def restore(components: TrainComponents, stored: StoredCheckpoint) -> Position:
    """Put a checkpoint's state into freshly built components, on any number of ranks.

    Raises:
        UsageError: the configuration or the data is not that of the run.
    """
    state = stored.state
    _check_config(state["config"], components.config)
    _check_data(state["data"], components)
    stored.load_into(
        {
            **_prefixed("head.", components.head.sharded_state()),
            **_prefixed("head_optimizer.", components.head_optimizer.sharded_state()),
            **_prefixed("backbone.", components.backbone.state_dict()),
        }
    )
    delayed = _delayed_gradients(components, stored)
    momenta = {f"{name}_buffer": tensor for name, tensor in delayed.items() if name.endswith(".momentum")}
    momenta |= {name.replace(".optimizer.", "."): tensor for name, tensor in delayed.items() if ".optimizer." in name}
    _load_optimizer(components, stored.read("optimizer.") | momenta, state.get("optimizer", {}))
    components.exchange.restore(components.optimizer, delayed)
    if components.average is not None:
        _load_average(components, stored)
    components.head.set_extra_state(state["head"])
    components.head_optimizer.load_state_dict({**components.head_optimizer.state_dict(), "steps": state["head_steps"]})
    if state["scaler"] and components.scaler.is_enabled():
        components.scaler.load_state_dict(state["scaler"])
    components.loader.load_state_dict(state["loader"])
    return Position(state["step"], _schedule_step(components, state), state["skipped"], state["best"])


def changed_keys(before: dict[str, Any], config: Config) -> list[str]:
    """``"optim.lr = 0.2 (was 0.1)"`` for each key that differs from the run's configuration so far."""
    old = _old_config(before)
    return [
        f"{name} = {_shown(configuration.get(config, name))} (was {_shown(configuration.get(old, name))})"
        for name in configuration.KEYS
        if configuration.get(config, name) != configuration.get(old, name)
    ]


def steps_per_epoch(components: TrainComponents) -> int:
    """Optimizer steps of an epoch."""
    return optimizer_steps(components.config, components.loader)


def _small_state(components: TrainComponents, position: Position) -> dict[str, Any]:
    return {
        "step": position.step,
        "schedule_step": position.schedule_step,
        "skipped": position.skipped,
        "best": position.best,
        "world_size": components.mesh.world_size,
        "steps_per_epoch": steps_per_epoch(components),
        "config": configuration.to_dict(components.config),
        "data": components.data,
        "loader": components.loader.state_dict(),
        "scaler": components.scaler.state_dict(),
        "optimizer": _optimizer_numbers(components),
        "head": components.head.get_extra_state(),
        "head_steps": components.head_optimizer.steps,
        "average_updates": components.average.updates.count if components.average is not None else 0,
    }


def _schedule_step(components: TrainComponents, state: dict[str, Any]) -> int:
    """Convert the schedule's step to the present batch size: where epochs are counted, their share stays the same."""
    now, then = steps_per_epoch(components), int(state["steps_per_epoch"])
    step = int(state["schedule_step"])
    return step if components.config.epochs is None or now == then else round(step * now / then)


def _check_config(before: dict[str, Any], config: Config) -> None:
    old = _old_config(before)
    for name in FIXED:
        was, now = configuration.get(old, name), configuration.get(config, name)
        if was != now:
            raise UsageError(
                f"{name} was {_shown(was)} when the run began and is {_shown(now)} now; set it back to go on, or "
                "begin another run (another --out), with --init_weights RUN/model.safetensors to build on this one"
            )


def _old_config(tree: dict[str, Any]) -> Config:
    try:
        return configuration.from_dict(tree)
    except UsageError as error:
        raise DataError(f"the checkpoint's configuration is not one of this version: {error}") from None


def _check_data(before: dict[str, Any], components: TrainComponents) -> None:
    for name, now in components.data.items():
        if before[name] != now:
            what = "labels are others"
            if name != "labels_sha256":
                what = f"{name} were {before[name]:,} and are {now:,}"
            raise UsageError(
                f"data.train = {components.dataset.source} is not what the run began with: its {what}; bring that "
                "data back, or begin another run (another --out), with --init_weights RUN/model.safetensors"
            )


def _shown(value: Any) -> str:
    return "unset" if value is None else toml_value(value)


def _prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _optimizer_state(components: TrainComponents) -> dict[str, Any]:
    """``{"INDEX.NAME": value}`` of every weight's state, by the weight's place in the backbone.

    The optimizer's own numbering follows its parameter groups, which may be others when the run goes on.
    """
    state = components.optimizer.state
    return {
        f"{index}.{name}": value
        for index, weight in enumerate(trainable(components.backbone))
        for name, value in state.get(weight, {}).items()
        if value is not None
    }


def _optimizer_tensors(components: TrainComponents) -> dict[str, Tensor]:
    return {name: value for name, value in _optimizer_state(components).items() if isinstance(value, Tensor)}


def _optimizer_numbers(components: TrainComponents) -> dict[str, Any]:
    """What is no tensor of a weight: Muon's kind of each weight, and the steps that LAMB counts in every group."""
    numbers = {name: value for name, value in _optimizer_state(components).items() if not isinstance(value, Tensor)}
    steps = components.optimizer.param_groups[0].get("step")
    return numbers if steps is None else {**numbers, "step": float(steps)}


def _load_optimizer(components: TrainComponents, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    optimizer = components.optimizer
    groups = optimizer.state_dict()["param_groups"]
    if "step" in numbers:
        groups = [{**group, "step": numbers["step"]} for group in groups]
    in_optimizer = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbering = {id(weight): index for index, weight in enumerate(in_optimizer)}
    weights = trainable(components.backbone)
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, dot, entry = name.partition(".")
        if dot:
            weight = weights[int(index)]
            state.setdefault(numbering[id(weight)], {})[entry] = _laid_out_as(weight, value)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out_as(weight: Tensor, value: Any) -> Any:
    """Copy a tensor of the weight's shape into its layout (channels_last): fused updates would fall back else."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    return torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)


def _delayed_gradients(components: TrainComponents, stored: StoredCheckpoint) -> dict[str, Tensor]:
    """Tensors that the exchange kept on ranks: this rank's own in a world of the same size, else the ranks' mean.

    Exchanged by all ranks, the mean amounts to what each would have sent. It is read rank by rank: all ranks' tensors
    together are as large as many models.
    """
    if not any(name.startswith("exchange.") for name in stored.stored):
        return {}
    world, mesh = int(stored.state["world_size"]), components.mesh
    if world == mesh.world_size and components.exchange.keeps_state:
        return stored.read(f"exchange.{mesh.rank}.")
    means: dict[str, Tensor] = {}
    for rank in range(world):
        for name, tensor in stored.read(f"exchange.{rank}.").items():
            means[name] = means.get(name, 0) + tensor / world
    return means


def _load_average(components: TrainComponents, stored: StoredCheckpoint) -> None:
    """The stored average; where the run had none so far, it begins with the weights as they are."""
    assert components.average is not None
    tensors = stored.read("average.")
    components.average.model.load_state_dict(tensors or components.backbone.state_dict())
    components.average.updates.count = int(stored.state["average_updates"])
