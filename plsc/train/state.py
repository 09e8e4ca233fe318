"""What a checkpoint holds, and whether a run may go on from it."""

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
from plsc.train.parts import Parts

# What the stored tensors, or the order of the samples, hang on.
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
)


@dataclass
class Position:
    """How far a run is.

    ``step`` counts optimizer steps and names checkpoints; ``schedule_step`` is where the learning rate stands.
    They part when a run goes on with another batch size: ``schedule_step`` then counts in steps of the new one.
    """

    step: int = 0
    schedule_step: int = 0
    skipped: int = 0
    best: dict[str, Any] = field(default_factory=dict)


def average_buffers(parts: Parts) -> None:
    """Give every rank the mean of all ranks' running statistics, which each has of its own samples alone."""
    if parts.mesh.world_size == 1:
        return
    buffers = [buffer for buffer in parts.backbone.buffers() if buffer.is_floating_point()]
    if buffers:
        flat = all_reduce_sum(torch.cat([buffer.flatten() for buffer in buffers]), parts.mesh)
        means = (flat / parts.mesh.world_size).split([buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def capture(parts: Parts, position: Position) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors that this rank writes, everything else as JSON holds it) of a run between two steps."""
    average_buffers(parts)
    tensors: dict[str, Any] = {
        **_prefixed("head.", parts.head.sharded_state()),
        **_prefixed("head_optimizer.", parts.head_optimizer.sharded_state()),
    }
    if parts.mesh.is_main:
        tensors |= _prefixed("backbone.", parts.backbone.state_dict())
        tensors |= _prefixed("optimizer.", _optimizer_tensors(parts.optimizer))
        if parts.average is not None:
            tensors |= _prefixed("average.", parts.average.model.state_dict())
    return tensors, _small_state(parts, position)


def restore(parts: Parts, stored: StoredCheckpoint) -> Position:
    """Put a checkpoint's state into freshly built parts, on any number of ranks.

    Raises:
        UsageError: the configuration or the data is not that of the run.
    """
    state = stored.state
    _check_config(state["config"], parts.config)
    _check_data(state["data"], parts)
    stored.load_into(
        {
            **_prefixed("head.", parts.head.sharded_state()),
            **_prefixed("head_optimizer.", parts.head_optimizer.sharded_state()),
            **_prefixed("backbone.", parts.backbone.state_dict()),
        }
    )
    _load_optimizer(parts.optimizer, stored.read("optimizer."))
    if parts.average is not None:
        _load_average(parts, stored)
    parts.head.set_extra_state(state["head"])
    parts.head_optimizer.load_state_dict({**parts.head_optimizer.state_dict(), "steps": state["head_steps"]})
    if state["scaler"] and parts.scaler.is_enabled():
        parts.scaler.load_state_dict(state["scaler"])
    parts.loader.load_state_dict(state["loader"])
    return Position(state["step"], _schedule_step(parts, state), state["skipped"], state["best"])


def changes(before: dict[str, Any], config: Config) -> list[str]:
    """``"optim.lr = 0.2 (was 0.1)"`` for each key that differs from the run's configuration so far."""
    old = _old_config(before)
    return [
        f"{name} = {_shown(configuration.get(config, name))} (was {_shown(configuration.get(old, name))})"
        for name in configuration.KEYS
        if configuration.get(config, name) != configuration.get(old, name)
    ]


def steps_per_epoch(parts: Parts) -> int:
    """Optimizer steps of an epoch."""
    return -(-parts.loader.steps_per_epoch // parts.config.optim.accumulate)


def _small_state(parts: Parts, position: Position) -> dict[str, Any]:
    return {
        "step": position.step,
        "schedule_step": position.schedule_step,
        "skipped": position.skipped,
        "best": position.best,
        "world_size": parts.mesh.world_size,
        "steps_per_epoch": steps_per_epoch(parts),
        "config": configuration.to_dict(parts.config),
        "data": parts.data,
        "loader": parts.loader.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "head": parts.head.get_extra_state(),
        "head_steps": parts.head_optimizer.steps,
        "average_updates": parts.average.updates if parts.average is not None else 0,
    }


def _schedule_step(parts: Parts, state: dict[str, Any]) -> int:
    """With epochs to go by, the schedule stands where it stood as a share of them, in steps of today's size."""
    now, then = steps_per_epoch(parts), int(state["steps_per_epoch"])
    step = int(state["schedule_step"])
    return step if parts.config.epochs is None or now == then else round(step * now / then)


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


def _check_data(before: dict[str, Any], parts: Parts) -> None:
    for name, now in parts.data.items():
        if before[name] != now:
            what = "labels are others"
            if name != "labels_sha256":
                what = f"{name} were {before[name]:,} and are {now:,}"
            raise UsageError(
                f"data.train = {parts.dataset.source} is not what the run began with: its {what}; bring that "
                "data back, or begin another run (another --out), with --init_weights RUN/model.safetensors"
            )


def _shown(value: Any) -> str:
    return "unset" if value is None else toml_value(value)


def _prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``{"INDEX.NAME": tensor}`` of every parameter's state."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items() if value is not None
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_average(parts: Parts, stored: StoredCheckpoint) -> None:
    """The stored average; where the run had none so far, it begins with the weights as they are."""
    assert parts.average is not None
    tensors = stored.read("average.")
    parts.average.model.load_state_dict(tensors or parts.backbone.state_dict())
    parts.average.updates = int(stored.state["average_updates"])
