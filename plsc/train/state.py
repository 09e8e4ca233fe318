"""The state of a run between two steps: captured for a checkpoint, and restored on any number of ranks."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plsc import config as configuration
from plsc.config import Config
from plsc.errors import DataError, IntegrityError, UsageError
from plsc.parallel.collectives import all_gather_object, raise_on_all_ranks
from plsc.parallel.strategies import Weight
from plsc.parallel.tensor_shard import Block, TensorShard
from plsc.train.checkpoint import CheckpointFolder, step_of
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents, optimizer_steps
from plsc.train.head_state import described_changes, load_tables

# Keys that determine the stored tensors' shapes, the order of the samples, or their pixels.
FIXED = (
    "backbone",
    "embedding_dim",
    "seed",
    "data.image_size",
    "data.mean",
    "data.std",
    "data.interpolation",
    "head.margin",
    "head.centers",
    "optim.name",
    "optim.head",
    "optim.state_dtype",
)
# Whole numbers of the small state, by their dotted names.
_NUMBERS = (
    "step",
    "skipped",
    "world_size",
    "head_steps",
    "average_updates",
    "data.images",
    "data.classes",
    "loader.epoch",
    "loader.consumed",
    "head.forwards",
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
    components.head_optimizer.average_replicas()
    strategy = components.strategy
    components.average_statistics()
    tensors: dict[str, Any] = _prefixed(f"exchange.{components.mesh.rank}.", components.exchange.state())
    if components.config.head.journal:
        raise_on_all_ranks(components.mesh, lambda: _set_savepoint(components, position.step))
    else:
        for prefix, tables in _class_tables(components).items():
            tensors |= _prefixed(prefix, tables)
    backbone = _prefixed("backbone.", strategy.stored(strategy.parts()))
    if components.average is not None:
        backbone |= _prefixed("average.", strategy.stored(components.average.values))
    backbone |= _prefixed("optimizer.", _optimizer_tensors(components))
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
    _check_data(state["data"], components)
    _check_frozen(state.get("frozen", []), components)
    _restore_tables(components, stored)
    stored.load_into(_prefixed("backbone.", components.strategy.stored(components.strategy.parts())))
    delayed = _delayed_gradients(components, stored)
    momenta = {f"{name}_buffer": tensor for name, tensor in delayed.items() if name.endswith(".momentum")}
    momenta |= {name.replace(".optimizer.", "."): tensor for name, tensor in delayed.items() if ".optimizer." in name}
    states = _stored_states(components, stored) | _own_parts(components, momenta)
    _load_optimizer(components, states, state.get("optimizer", {}))
    components.exchange.restore(components.optimizer, delayed)
    if components.average is not None:
        _load_average(components, stored)
    if not state["head"]["margin"].keys() <= components.head.margin_state.keys():
        raise IntegrityError(f"{stored.path} holds no state of the margin {components.config.head.margin}")
    components.head.set_extra_state(state["head"])
    components.head_optimizer.load_state_dict({**components.head_optimizer.state_dict(), "steps": state["head_steps"]})
    if state["scaler"] and components.scaler.is_enabled():
        components.scaler.load_state_dict(state["scaler"])
    components.loader.load_state_dict(state["loader"])
    schedule_step = _schedule_step(components, state["step"])
    return Position(state["step"], schedule_step, state["skipped"], state["best"], state.get("accuracy"))


def begin_tables(components: TrainComponents, *, goes_on: bool) -> None:
    """Set the savepoint of a run that has no checkpoint yet, or go back to it, if the run ``goes_on``.

    Raises:
        UsageError: the table's files are of another run.
        DataError: they are of a run that has checkpoints.
    """
    journal = components.head.undo_journal
    if journal is not None and journal.is_adopted:
        if not goes_on:
            journal.refuse_if_adopted()
        components.head.roll_back(0)
    else:
        _set_savepoint(components, 0)


def flush_tables(components: TrainComponents) -> None:
    """Sync the files of a table with savepoints to disk."""
    if components.head.undo_journal is not None:
        components.head.undo_journal.flush()


def forget_savepoints(components: TrainComponents, checkpoints: CheckpointFolder) -> None:
    """Remove what the table's journals hold for checkpoints that are gone."""
    journal = components.head.undo_journal
    published = checkpoints.published() if journal is not None else []
    if journal is not None and published:
        journal.forget(step_of(published[0]))


def changed_keys(before: dict[str, Any], config: Config) -> list[str]:
    """``"optim.lr = 0.2 (was 0.1)"`` for each key, and all tables of a kind, that the run had otherwise so far."""
    return configuration.differences(stored_config(before), _with_contract(config))


def changed_tables(stored: StoredCheckpoint, components: TrainComponents) -> list[str]:
    """A line for each table of the head that is kept in another type than the checkpoint stores it in."""
    return [
        line
        for prefix, tables in _class_tables(components).items()
        if stored.state.get("savepoints") is None
        for line in described_changes(stored, prefix, tables)
    ]


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
        "frozen": sorted(components.frozen_for_good),
        "loader": components.loader.state_dict(),
        "scaler": components.scaler.state_dict(),
        "optimizer": _optimizer_numbers(components),
        "head": components.head.get_extra_state(),
        "savepoints": _savepoints(components),
        "head_steps": components.head_optimizer.steps,
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
    for name in ("config", "scaler", "best", "head.margin"):
        stored.value(name, dict)
    stored.value("data.labels_sha256", str)
    frozen, optimizer = stored.state.get("frozen", []), stored.state.get("optimizer", {})
    margin, best = stored.state["head"]["margin"], stored.state["best"]
    if not (
        isinstance(frozen, list)
        and all(isinstance(name, str) for name in frozen)
        and isinstance(optimizer, dict)
        and isinstance(stored.state.get("savepoints"), list | None)
        and all(name == "step" or name.partition(".")[0].isdecimal() for name in optimizer)
        and all(isinstance(number, int | float) for number in margin.values())
        and (not best or (isinstance(best.get("step"), int) and isinstance(best.get("accuracy"), float)))
    ):
        raise IntegrityError(f"{stored.path} holds no state of a run; it is the checkpoint of another program")


def _check_config(before: dict[str, Any], config: Config) -> None:
    old = stored_config(before)
    for name in FIXED:
        was, now = configuration.get(old, name), configuration.get(_with_contract(config), name)
        if was != now:
            raise UsageError(
                f"{name} was {configuration.shown(name, was)} when the run began and is "
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


def _check_frozen(before: list[str], components: TrainComponents) -> None:
    """The optimizer's states are stored by the weights' places among those that are not frozen for good."""
    if changed := sorted(components.frozen_for_good.symmetric_difference(before)):
        raise UsageError(
            f"frozen and optim.groups freeze other weights for the whole run than it began with ({changed[0]}, for "
            "one); set them back to go on, or begin another run (another --out), with --init_weights "
            "RUN/model.safetensors and a [[stage]] for what changes on the way"
        )


def _class_tables(components: TrainComponents) -> dict[str, dict[str, TensorShard]]:
    """This rank's rows of the class table, and of the state beside it, by the prefix of their names."""
    return {
        "head.": components.head.sharded_state(),
        "head_optimizer.": components.head_optimizer.sharded_state(),
    }


def _set_savepoint(components: TrainComponents, step: int) -> None:
    if components.head.undo_journal is not None:
        components.head.set_savepoint(step)


def _savepoints(components: TrainComponents) -> list[str | None] | None:
    """The identity of each rank's table that the checkpoint does not hold; None where it holds them."""
    journal = components.head.undo_journal
    identities = all_gather_object(None if journal is None else journal.identity, components.mesh)
    return identities if any(identities) else None


def _restore_tables(components: TrainComponents, stored: StoredCheckpoint) -> None:
    journal, savepoints = components.head.undo_journal, stored.state.get("savepoints")
    if savepoints is None:
        if journal is not None:
            journal.refuse_if_adopted()
        for prefix, tables in _class_tables(components).items():
            load_tables(stored, prefix, tables)
        if journal is not None:
            components.head.set_savepoint(stored.step)
        return
    if len(savepoints) != components.mesh.world_size:
        raise UsageError(
            f"the class table lies in files of {len(savepoints)} ranks, one each: resume on as many, not on "
            f"{components.mesh.world_size}"
        )
    identity = savepoints[components.mesh.rank]
    if identity != (None if journal is None else journal.identity):
        placed = stored.state["config"]["head"]["placement"]
        raise DataError(
            f"{stored.path} goes with the class table in the files of {placed}, which is not the one here: give the "
            "same head.placement with head.journal = true, and bring the files back"
        )
    if journal is not None:
        components.head.roll_back(stored.step)


def _prefixed(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _optimizer_state(components: TrainComponents) -> dict[str, Any]:
    """``{"PLACE.NAME": value}`` of the state of each weight that this rank steps, by its place in the backbone.

    The optimizer's own numbering follows its parameter groups, which may be others when the run goes on.
    """
    state = components.strategy.local_optimizer(components.optimizer).state
    return {
        f"{weight.place}.{name}": _stored_state(weight, value)
        for weight in components.strategy.trained
        for name, value in state.get(weight.parameter, {}).items()
        if value is not None
    }


def _stored_state(weight: Weight, value: Any) -> Any:
    """A checkpoint's handle of a state of the weight's rows; others as they are."""
    return weight.stored(value) if isinstance(value, Tensor) and _has_rows_of(weight.parameter, value) else value


def _has_rows_of(weight: Tensor, value: Tensor) -> bool:
    """True for what is laid out as the weight, and for the scales of codes, which each belong to a part of a row."""
    return value.dim() > 0 and weight.dim() > 0 and len(value) == len(weight)


def _optimizer_tensors(components: TrainComponents) -> dict[str, Tensor]:
    return {name: value for name, value in _optimizer_state(components).items() if isinstance(value, Tensor)}


def _optimizer_numbers(components: TrainComponents) -> dict[str, Any]:
    """What is no tensor of a weight, on any rank: Muon's kind of each weight, and LAMB's steps of every group."""
    numbers = {name: value for name, value in _optimizer_state(components).items() if not isinstance(value, Tensor)}
    steps = components.optimizer.param_groups[0].get("step")
    numbers |= {} if steps is None else {"step": float(steps)}
    return {name: value for rank in all_gather_object(numbers, components.mesh) for name, value in rank.items()}


def _stored_states(components: TrainComponents, stored: StoredCheckpoint) -> dict[str, Tensor]:
    """Read the states of the weights that this rank steps, of each its own part."""
    optimizer, tensors = components.strategy.local_optimizer(components.optimizer), dict[str, Tensor]()
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    weights = {weight.place: weight for weight in components.strategy.trained if id(weight.parameter) in stepped}
    targets: dict[str, Tensor] = {}
    for name, entry in stored.stored.items():
        prefix, _, key = name.partition(".")
        place = key.partition(".")[0]
        if prefix != "optimizer" or not place.isdecimal() or (weight := weights.get(int(place))) is None:
            continue
        has_rows = len(entry.size) > 0 and entry.size[:1] == weight.shape[:1]
        tensors[key] = torch.empty_like(_alike(weight, entry.size), dtype=entry.properties.dtype, requires_grad=False)
        targets[name] = weight.stored(tensors[key]) if has_rows else tensors[key]
    stored.load_into(targets)
    return tensors


def _alike(weight: Weight, size: torch.Size) -> Tensor:
    """Return a tensor with the layout of this rank's part of a state, which is ``size`` in the whole."""
    if size == weight.shape:
        return weight.parameter
    if len(size) > 0 and size[:1] == weight.shape[:1]:
        return weight.parameter.new_empty((len(weight.parameter), *size[1:]))
    return torch.empty(size)


def _load_optimizer(components: TrainComponents, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    optimizer = components.strategy.local_optimizer(components.optimizer)
    groups = optimizer.state_dict()["param_groups"]
    if "step" in numbers:
        groups = [{**group, "step": numbers["step"]} for group in groups]
    in_optimizer = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbering = {id(weight): index for index, weight in enumerate(in_optimizer)}
    weights = {weight.place: weight.parameter for weight in components.strategy.trained}
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        place, dot, entry = name.partition(".")
        weight = weights.get(int(place)) if dot else None
        if weight is not None and id(weight) in numbering:
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
    for rank in sorted({name.split(".")[1] for name in stored.stored if name.startswith("exchange.")}):
        for name, tensor in stored.read(f"exchange.{rank}.").items():
            means[name] = means.get(name, 0) + tensor / world
    return means


def _own_parts(components: TrainComponents, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut the ranks' states of whole weights, by ``"PLACE.NAME"``, to the parts that this rank steps."""
    weights = {str(weight.place): weight for weight in components.strategy.trained}
    parts: dict[str, Tensor] = {}
    for name, whole in states.items():
        weight = weights.get(name.partition(".")[0])
        if weight is None:
            continue
        if whole.shape != weight.shape:  # of a row or a column: strategies that cut weights take no such optimizer
            parts[name] = whole
            continue
        parts[name] = torch.empty_like(weight.parameter, dtype=whole.dtype, requires_grad=False)
        stored = weight.stored(parts[name])
        blocks = stored.blocks if isinstance(stored, TensorShard) else [Block(stored, (0,) * whole.dim())]
        for local, offsets in blocks:
            local.copy_(whole[tuple(slice(first, first + n) for first, n in zip(offsets, local.shape, strict=True))])
    return parts


def _load_average(components: TrainComponents, stored: StoredCheckpoint) -> None:
    """The stored average; where the run had none so far, it begins with the weights as they are."""
    assert components.average is not None
    strategy, values = components.strategy, components.average.values
    if any(name.startswith("average.") for name in stored.stored):
        stored.load_into(_prefixed("average.", strategy.stored(values)))
    else:
        torch._foreach_copy_(list(values.values()), list(strategy.parts().values()))
    components.average.updates.count = int(stored.state["average_updates"])
