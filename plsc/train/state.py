"""The state of a run between two steps: captured for a checkpoint, and restored on any number of ranks."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from plsc import config as configuration
from plsc.config import FEATURES, Config, class_tables
from plsc.errors import DataError, IntegrityError, PlscError, UsageError
from plsc.feature_config import feature_states, section_class
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents, optimizer_steps
from plsc.train.feature import overriding
from plsc.train.head_state import (
    capture_tables,
    check_numbers,
    prefixed,
    restore_numbers,
    restore_tables,
    table_numbers,
)
from plsc.train.optimizer_state import optimizer_numbers, optimizer_tensors, restore_optimizer
from plsc.train.same_data import changed_data, check_data

# Whole numbers of the small state, by their dotted names.
_NUMBERS = (
    "step",
    "skipped",
    "world_size",
    "average_updates",
    "data.images",
    "data.classes",
    "loader.epoch",
    "loader.consumed",
)


@dataclass
class Position:
    """Progress of a run.

    ``step`` counts optimizer steps and names checkpoints; ``schedule_step`` is where the learning rate stands.
    They part when a run goes on with another batch size: ``schedule_step`` then counts in steps of the new one.
    ``accuracy`` is the mean accuracy of an evaluation after ``step``.
    """

    step: int = 0
    schedule_step: int = 0
    skipped: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    accuracy: float | None = None


def capture(components: TrainComponents, position: Position) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tensors that this rank writes, everything else as JSON) of a run between two steps."""
    for optimizer in components.head_optimizers:
        optimizer.make_replicas_equal()
    strategy = components.strategy
    components.average_statistics()
    tensors: dict[str, Any] = prefixed(f"exchange.{components.mesh.rank}.", components.exchange.state())
    tensors |= capture_tables(components, position.step)
    for name, feature in components.features.items():
        own = prefixed(f"features.{name}.", feature.tensors())
        tensors |= own if components.mesh.is_main else {}
    backbone = prefixed("backbone.", strategy.stored(strategy.parts()))
    if components.average is not None:
        backbone |= prefixed("average.", strategy.stored(components.average.values))
    backbone |= prefixed("optimizer.", optimizer_tensors(components))
    tensors |= {name: tensor for name, tensor in backbone.items() if strategy.writes(name, tensor)}
    return tensors, _small_state(components, position)


def restore(components: TrainComponents, stored: StoredCheckpoint) -> Position:
    """Put a checkpoint's state into freshly built components, on any number of ranks.

    Raises:
        UsageError: the configuration or the data is not that of the run.
        IntegrityError: the checkpoint does not hold what a run writes.
    """
    _check_state(stored)
    state = stored.state
    _check_config(state["config"], components.config)
    for name, feature in components.features.items():
        feature.check_state(feature_states(state).get(name), stored)
    left_out_features(stored, components)
    is_same_data = _check_data(stored, components)
    restore_tables(components, stored)
    stored.load_into(prefixed("backbone.", components.strategy.stored(components.strategy.parts())))
    restore_optimizer(components, stored)
    if components.average is not None:
        _load_average(components, stored)
    restore_numbers(components, stored)
    for name, feature in components.features.items():
        stored.load_into(prefixed(f"features.{name}.", feature.tensors()))
        feature.restore(feature_states(state).get(name))
    if state["scaler"] and components.scaler.is_enabled():
        components.scaler.load_state_dict(state["scaler"])
    components.loader.load_state_dict(state["loader"] if is_same_data else _begun_anew(state))
    schedule_step = _schedule_step(components, state["step"])
    return Position(state["step"], schedule_step, state["skipped"], state["best"], state.get("accuracy"))


def changed_keys(before: dict[str, Any], config: Config) -> list[str]:
    """``"optim.lr = 0.2 (was 0.1)"`` for each key, and all tables of a kind, that the run had otherwise so far."""
    return configuration.differences(stored_config(before), _with_contract(config))


def steps_per_epoch(components: TrainComponents) -> int:
    """Optimizer steps of an epoch."""
    return optimizer_steps(components.config, components.loader.steps_per_epoch)


def _small_state(components: TrainComponents, position: Position) -> dict[str, Any]:
    return {
        "step": position.step,
        "skipped": position.skipped,
        "best": position.best,
        "accuracy": position.accuracy,
        "world_size": components.mesh.world_size,
        "config": configuration.to_dict(components.config),
        "data": components.data,
        "epoch_samples": components.dataset.mixture.epoch_length,
        "features": {name: feature.state() for name, feature in components.features.items()},
        "loader": components.loader.state_dict(),
        "scaler": components.scaler.state_dict(),
        "optimizer": optimizer_numbers(components),
        **table_numbers(components),
        "average_updates": components.average.updates.count if components.average is not None else 0,
    }


def _schedule_step(components: TrainComponents, step: int) -> int:
    """Where the schedule stands after ``step`` steps: where epochs are counted, it ends with the loader's last one."""
    config, loader = components.config, components.loader
    if config.epochs is None:
        return step
    return (loader.epoch + 1) * steps_per_epoch(components) - optimizer_steps(config, loader.steps_left)


def _check_state(stored: StoredCheckpoint) -> None:
    """Raise IntegrityError unless the small state holds what going on takes from it."""
    for name in _NUMBERS:
        stored.value(name, int)
    check_numbers(stored)
    for name in ("config", "scaler", "best"):
        stored.value(name, dict)
    stored.value("data.labels_sha256", str)
    optimizer = stored.state.get("optimizer", {})
    best = stored.state["best"]
    if not (
        isinstance(optimizer, dict)
        and isinstance(stored.state.get("features", {}), dict)
        and all(name == "step" or name.partition(".")[0].isdecimal() for name in optimizer)
        and (not best or (isinstance(best.get("step"), int) and isinstance(best.get("accuracy"), float)))
    ):
        raise IntegrityError(f"{stored.path} holds no state of a run; it is the checkpoint of another program")


def _check_config(before: dict[str, Any], config: Config) -> None:
    before_tables, tables = class_tables(stored_config(before)), class_tables(_with_contract(config))
    names = [", ".join(table.name for table in found) or "none" for found in (before_tables, tables)]
    if names[0] != names[1]:
        raise UsageError(
            f"the tables were {names[0]} when the run began and are {names[1]} now; set them back to go on, or begin "
            "another run (another --out), with --init_weights RUN/model.safetensors to build on this one"
        )
    for table_before, table in zip(before_tables, tables, strict=True):
        _check_keys(table_before.config, table.config, f"table {table.name}: " if table.name else "")


def _check_keys(old: Config, config: Config, where: str) -> None:
    for name in (name for name, entry in configuration.KEYS.items() if entry.is_fixed):
        was, now = configuration.get(old, name), configuration.get(config, name)
        if was != now:
            raise UsageError(
                f"{where}{name} was {configuration.shown(name, was)} when the run began and is "
                f"{configuration.shown(name, now)} now; set it back to go on, or "
                "begin another run (another --out), with --init_weights RUN/model.safetensors to build on this one"
            )


def stored_config(tree: dict[str, Any]) -> Config:
    """Return the configuration in a checkpoint's small state; DataError where it is not one of this version."""
    try:
        return _with_contract(configuration.from_dict(tree))
    except UsageError as error:
        raise DataError(f"the checkpoint's configuration is not one of this version: {error}") from None


def _with_contract(config: Config) -> Config:
    """Set the keys of the preprocessing contract that are unset, as in earlier versions, to plsc's own values."""
    return dataclasses.replace(config, data=config.data.with_contract(config.data.preprocessing))


def _begun_anew(state: dict[str, Any]) -> dict[str, int]:
    """The loader's position where other data goes on: the beginning of the epoch that was not over."""
    loader = state["loader"]
    return {**loader, "epoch": loader["epoch"] + (loader["consumed"] >= state["epoch_samples"]), "consumed": 0}


def _check_data(stored: StoredCheckpoint, components: TrainComponents) -> bool:
    """Whether the loader goes on where it was; UsageError where other data came, and no feature takes it."""
    if any(takes() for takes in overriding(components.features.values(), "takes_other_data")):
        changed = changed_data(stored.state["data"], components.data)
        return set(changed) <= {"keys_sha256"}
    check_data(stored, components.dataset, components.data)
    return True


def left_out_features(stored: StoredCheckpoint, components: TrainComponents) -> list[str]:
    """What the run had of features that it has no more; PlscError where it cannot go on without one."""
    found = []
    for name, of_feature in feature_states(stored.state).items():
        if name not in components.features and of_feature is not None and FEATURES.find(name) is not None:
            try:
                found.append(section_class(name).left_out(of_feature))
            except PlscError as error:
                raise type(error)(f"{stored.path}: {error}") from None
    return [text for text in found if text]


def _load_average(components: TrainComponents, stored: StoredCheckpoint) -> None:
    """The stored average; where the run had none so far, it begins with the weights as they are."""
    assert components.average is not None
    strategy, values = components.strategy, components.average.values
    if any(name.startswith("average.") for name in stored.stored):
        stored.load_into(prefixed("average.", strategy.stored(values)))
    else:
        torch._foreach_copy_(list(values.values()), list(strategy.parts().values()))
    components.average.updates.count = int(stored.state["average_updates"])
