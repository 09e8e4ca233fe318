"""The state of the backbone's optimizer, and of its exchange, in a checkpoint: by weight, however they are cut."""

from typing import Any

import torch
from torch import Tensor

from plsc.parallel.collectives import all_gather_object
from plsc.parallel.strategies import Weight
from plsc.parallel.tensor_shard import Block, TensorShard
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents


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


def optimizer_tensors(components: TrainComponents) -> dict[str, Tensor]:
    """The tensors of the weights that this rank steps, by ``"PLACE.NAME"``, as a checkpoint stores them."""
    return {name: value for name, value in _optimizer_state(components).items() if isinstance(value, Tensor)}


def optimizer_numbers(components: TrainComponents) -> dict[str, Any]:
    """What is no tensor of a weight, on any rank: Muon's kind of each weight, and LAMB's steps of every group."""
    numbers = {name: value for name, value in _optimizer_state(components).items() if not isinstance(value, Tensor)}
    steps = components.optimizer.param_groups[0].get("step")
    numbers |= {} if steps is None else {"step": float(steps)}
    return {name: value for rank in all_gather_object(numbers, components.mesh) for name, value in rank.items()}


def restore_optimizer(components: TrainComponents, stored: StoredCheckpoint) -> None:
    """Give the backbone's optimizer, and the exchange of gradients, the states that a checkpoint stores of them."""
    delayed = _delayed_gradients(components, stored)
    momenta = {f"{name}_buffer": tensor for name, tensor in delayed.items() if name.endswith(".momentum")}
    momenta |= {name.replace(".optimizer.", "."): tensor for name, tensor in delayed.items() if ".optimizer." in name}
    states = _stored_states(components, stored) | _own_parts(components, momenta)
    _load_optimizer(components, states, stored.state.get("optimizer", {}))
    components.exchange.restore(components.optimizer, delayed)


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
    """Return a tensor with the layout of this rank's part of a state, which is ``size`` in the whole.

    Fused updates would fall back where a state has another layout than its weight (channels_last).
    """
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
            state.setdefault(numbering[id(weight)], {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


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
