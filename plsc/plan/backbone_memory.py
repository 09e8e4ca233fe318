"""Memory of the backbone on a rank under each strategy: weights, gradients, optimizer state, activations.

With W, G and S bytes of weights, gradients and optimizer state, n ranks to shard over, and the largest blocks b:

- ddp: W + G + S. Communication hooks add their residuals (:func:`exchange_of`).
- zero1: W + G + S/n (Rajbhandari et al., ZeRO, SC 2020, section 5.1), where a weight's state lies on one rank whole.
- zero2: (W + G + S)/n, and W gathered from the forward to the backward pass (section 5.2; FSDP's SHARD_GRAD_OP).
- fsdp: (W + G + S)/n (ZeRO stage 3), and what is gathered: the block that computes, the one fetched ahead of it, in the
  backward pass their gradients (Zhao et al., PyTorch FSDP, VLDB 2023). hsdp: the same with n = shard_ranks.
- tp = K: a block's linear layers and activations /K; the inputs of its two branches are gathered whole, and norms
  and their gradients are whole (Korthikanti et al., 2022, section 4.2, without its second gather).
- pp = K: the blocks /K. gpipe keeps the activations of all m micro-batches (Huang et al., 2019), 1f1b of at most the
  stages that follow (PipeDream-flush: Narayanan et al., 2021); interleaved of (K − 1)/(K·v) more, v parts to a rank.
  Under fsdp and hsdp, a stage's weights and gradients are whole during a step.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from plsc.devices import Device
from plsc.optim.eight_bit_adamw import block_size
from plsc.parallel.gradient_compression import ExchangeOptions, PlannedExchange, planned_exchange
from plsc.parallel.strategies.cuts import balanced, batches_held, cut_dimension, splits_tokens, stage_of
from plsc.plan.backbone import BackboneProfile, Parameter, Unit
from plsc.plan.plan_config import PlanConfig
from plsc.train.components import exchange_options


@dataclass(frozen=True)
class BackboneMemory:
    """Bytes of a rank: ``kept`` all the time; beside the head's passes, at the backward pass's peak, and after it.

    ``forward`` and ``backward`` have the activations, ``gradients`` what is there from the backward pass to the update
    and not in ``kept``, ``update`` what the update takes beside them. ``host`` lies in the machine's memory, and
    ``stored`` is what the first rank writes of a checkpoint.
    """

    kept: dict[str, int]
    forward: int
    backward: int
    gradients: int
    update: int
    host: int
    stored: int


@dataclass(frozen=True)
class GatheredUnit:
    """What fsdp gathers together, in bytes: its ``weights``, ``trained`` ones among them, as they are gathered.

    ``gradients`` are those of the trained ones, without what fills up the ranks' shares. ``alive`` activations are
    there when its backward pass begins, which adds ``backward``, gradients included, and leaves ``entered``.
    """

    weights: int
    trained: int
    gradients: int
    alive: int
    backward: int
    entered: int


@dataclass(frozen=True)
class Stage:
    """What a rank computes: weights as tensor parallelism leaves them, of one stage of a pipeline.

    ``received`` are a pipeline's buffers of what the ranks before and behind send, for all micro-batches.
    """

    parameters: tuple[Parameter, ...]
    activations: int
    transient: int
    units: tuple[GatheredUnit, ...]
    received: int = 0

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The weights with a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)


def backbone_memory(run: PlanConfig, profile: BackboneProfile, device: Device, stage: int) -> BackboneMemory:
    """The bytes of a rank in a pipeline's stage; ``profile`` is the backbone's at the run's batch and precision."""
    held = held_stage(run, profile, stage)
    if is_sharded(run):
        return _sharded(run, profile, held)
    return _whole(run, profile, held, device)


def held_stage(run: PlanConfig, profile: BackboneProfile, number: int) -> Stage:
    """The share of a rank in the pipeline's stage of this number."""
    one = _micro_batch_of(profile, run.tp, run.pp, run.pipeline_parts, run.shard_ranks, number)
    held = batches_held(run.options.pp_schedule, number, run.pp, run.pipeline_micro_batches)
    return replace(one, activations=int(one.activations * held), received=_received(run, profile, number))


def _received(run: PlanConfig, profile: BackboneProfile, stage: int) -> int:
    """Bytes of the tokens and gradients that a stage receives, for each micro-batch a buffer of its own."""
    if run.pp == 1 or not profile.blocks:
        return 0
    ends = int(stage == 0) + int(stage == run.pp - 1)
    return (2 * run.pipeline_parts - ends) * run.pipeline_micro_batches * profile.blocks[0].output // run.tp


@functools.lru_cache(maxsize=256)
def _micro_batch_of(profile: BackboneProfile, tp: int, pp: int, parts: int, shards: int, number: int) -> Stage:
    """What a stage holds with one micro-batch under way."""
    blocks, transient = profile.blocks, profile.peak - profile.activations
    if not blocks or tp * pp == 1:
        units = _units(profile, profile.parameters, 1, shards)
        return Stage(profile.parameters, profile.activations, transient, units)
    spans = balanced(len(blocks), pp * parts)
    kept = sum(_kept(profile, blocks[place], tp) for span in spans[number::pp] for place in span)
    kept += blocks[0].entered - _split_input(profile, tp) if number == 0 else 0
    if number == pp - 1:
        behind = profile.activations - blocks[-1].entered - blocks[-1].kept
        kept += behind // tp if splits_tokens(profile.tokens, tp) else behind
    held = (each for each in profile.parameters if stage_of(each.name, spans, profile.embedding) % pp == number)
    parameters = tuple(_split(each, tp) for each in held)
    return Stage(parameters, kept, transient // tp, _units(profile, parameters, tp, shards))


def _units(profile: BackboneProfile, parameters: Iterable[Parameter], tp: int, shards: int) -> tuple[GatheredUnit, ...]:
    """The units in the order of the forward pass, with ``parameters`` as tensor parallelism leaves them."""
    weights, gathered, gradients, trained = (Counter[str | None]() for _ in range(4))
    for parameter in parameters:
        whole = gathered_bytes([parameter], shards)
        weights[parameter.unit] += parameter.nbytes
        gathered[parameter.unit] += whole
        gradients[parameter.unit] += parameter.nbytes * parameter.is_trained
        trained[parameter.unit] += whole * parameter.is_trained
    unsplit = Counter[str | None]()
    for parameter in profile.parameters:
        unsplit[parameter.unit] += parameter.nbytes
    less = _split_input(profile, tp)  # activations, than without tensor parallelism
    units = []
    for unit in profile.units:
        name, is_block = unit.name, unit.is_block and tp > 1
        kept, output = (_kept(profile, unit, tp), unit.output // tp) if is_block else (unit.kept, unit.output)
        entered = unit.entered - less
        backward = unit.backward * weights[name] // max(unsplit[name], 1)
        alive = entered + kept + output
        units.append(GatheredUnit(gathered[name], trained[name], gradients[name], alive, backward, entered))
        less += unit.kept - kept
    return tuple(units)


def _split_input(profile: BackboneProfile, tp: int) -> int:
    """Bytes of the first block's input that are other ranks', where tokens are split."""
    output = profile.blocks[0].output if splits_tokens(profile.tokens, tp) else 0
    return output - output // tp


def _kept(profile: BackboneProfile, block: Unit, tp: int) -> int:
    """Activations that a block keeps: with tokens split all but the gathered inputs, else those within its branches."""
    if not splits_tokens(profile.tokens, tp):
        return block.kept - block.split + block.split // tp
    gathered = min(2 * block.input, block.kept)  # a block that is recomputed keeps its output alone
    return gathered + (block.kept - gathered) // tp


def _split(parameter: Parameter, tp: int) -> Parameter:
    """A weight as a rank of a group has it."""
    dim = cut_dimension(parameter.name)
    shape = tuple(-(-size // tp) if number == dim else size for number, size in enumerate(parameter.shape))
    return replace(parameter, shape=shape)


def nbytes(parameters: Iterable[Parameter], ranks: int = 1) -> int:
    """Bytes of weights on the rank that has most, each sharded over ``ranks`` along its first dimension."""
    return sum(
        parameter.nbytes // max(first, 1) * -(-first // ranks)
        for parameter in parameters
        for first in [parameter.shape[0] if parameter.shape else 1]
    )


def gathered_bytes(parameters: Iterable[Parameter], ranks: int) -> int:
    """Bytes of weights that are gathered from ``ranks``: FSDP2 fills their shares up to the largest."""
    return nbytes(parameters, ranks) * ranks


def is_sharded(run: PlanConfig) -> bool:
    """True where fully_shard gathers weights and sums gradients onto shards, perhaps of one rank."""
    return run.gathering_passes > 0


def _whole(run: PlanConfig, profile: BackboneProfile, stage: Stage, device: Device) -> BackboneMemory:
    """Of weights that a rank holds whole, but for what tensor and pipeline parallelism leave to others."""
    weights, trained = nbytes(stage.parameters), nbytes(stage.trained)
    parts = partitions(run, stage.trained)
    states = max(state_bytes(run, part) for part in parts)
    exchange = exchange_of(run, stage.trained)
    kept = {
        "backbone weights": weights,
        "backbone buffers, twice": 2 * profile.buffers,  # a step that is not finite is taken back
        "backbone optimizer state": states,
        **exchange.kept,
    }
    is_kept = not frees_gradients(run)
    if is_kept:
        kept["backbone gradients"] = trained
    if run.config.ema_decay:
        kept["moving average"] = weights + profile.buffers
    gradients = (0 if is_kept else trained) + exchange.transient
    # without an exchange, DDP lets gradients add up beside its buckets
    beside = (trained if run.micro_batches > 1 and run.data_ranks > 1 else 0) + stage.received
    # torch's optimizers work on all weights at a time on GPUs, and copy them once
    largest = max((parameter.nbytes for parameter in stage.trained), default=0)
    copied = max(map(nbytes, parts)) if device.kind == "cuda" else largest
    stored = (2 if run.config.ema_decay else 1) * (weights + profile.buffers) + states
    peak = stage.activations + stage.transient + exchange.transient + beside
    return BackboneMemory(kept, stage.activations + beside, peak, gradients, copied, 0, stored)


def _sharded(run: PlanConfig, profile: BackboneProfile, stage: Stage) -> BackboneMemory:
    """Of fully_shard: the shards lie on the device, or on the host, and what is gathered comes on top."""
    ranks, offload, gathers_once = run.shard_ranks, run.config.parallel.offload, run.gathering_passes == 1
    weights, trained = nbytes(stage.parameters, ranks), nbytes(stage.trained, ranks)
    states = state_bytes(run, stage.trained, ranks)
    average = weights if run.config.ema_decay else 0
    sharded = {"backbone weights": weights, "backbone optimizer state": states, "moving average": average}
    on_device = {} if offload else {name: size for name, size in sharded.items() if size}
    averaged = profile.buffers if average else 0
    kept = {**on_device, "backbone buffers, twice": 2 * profile.buffers + averaged}
    # gradients of micro-batches add up before a sum
    whole = nbytes(stage.trained) if run.micro_batches > 1 or run.pp > 1 else 0
    # gathered from the forward pass to the backward's end
    root = gathered_bytes((p for p in stage.parameters if p.unit is None or gathers_once), ranks)
    root += stage.received
    if run.pp > 1:
        backward = stage.activations + stage.transient + whole
    else:
        units = tuple(replace(unit, weights=0) for unit in stage.units) if gathers_once else stage.units
        backward = _gathered_peak(replace(stage, units=units), whole, 0 if offload else ranks)
    summed = 0 if offload else trained
    return BackboneMemory(
        kept,
        forward=stage.activations + root + whole,
        backward=root + backward,
        gradients=summed,
        update=0 if offload else trained,
        host=(sum(sharded.values()) + trained) if offload else 0,
        stored=weights + states + average + (1 + bool(average)) * profile.buffers,
    )


def _gathered_peak(stage: Stage, whole: int, ranks: int) -> int:
    """Return the bytes of activations, gathered weights and gradients that fsdp's backward pass holds at most.

    Beside a unit that computes, the next one is gathered, and the gradients of the one before are being summed. At its
    begin it lies in the collective's buffer and in its own; at its end, its gradients do.

    Args:
        stage: what the rank computes.
        whole: bytes of gradients that earlier micro-batches have left, in which case each unit's go with its sum.
        ranks: over which sums of gradients are sharded; 0 where they leave the device.
    """
    peak = stage.activations + stage.transient + whole
    summed = done = 0
    for unit, following in zip(reversed(stage.units), [*reversed(stage.units[:-1]), None], strict=True):
        ahead = following.weights if following is not None else 0
        begin = unit.alive + 2 * unit.weights + summed
        middle = unit.alive + unit.backward + unit.weights + ahead + summed
        end = unit.entered + unit.gradients + unit.trained + ahead
        shards = done // ranks if ranks else 0
        peak = max(peak, max(begin, middle, end) + shards + max(whole - done, 0))
        summed, done = unit.trained, done + unit.gradients
    return peak


def frees_gradients(run: PlanConfig) -> bool:
    """True if the backbone's gradients are freed each step; else they stay in data parallel's buckets."""
    return run.data_ranks == 1 and run.micro_batches == 1


def partitions(run: PlanConfig, trained: Iterable[Parameter]) -> list[list[Parameter]]:
    """The weights that each rank steps and gives to the others; one part where every rank steps all that it holds."""
    weights = list(trained)
    parts = run.kind.stepped_weights([weight.nbytes for weight in weights], run.data_ranks)
    return [[weights[place] for place in part] for part in parts]


def state_bytes(run: PlanConfig, parameters: Iterable[Parameter], ranks: int = 1) -> int:
    """Bytes of the optimizer's state on the rank that has most, of weights each sharded along its first dimension."""
    return sum(round(nbytes([each], ranks) * _state_ratio(run, each)) for each in parameters)


def _state_ratio(run: PlanConfig, parameter: Parameter) -> float:
    """Bytes of state for each of a float32 weight's."""
    size = block_size(parameter.shape) if run.config.optim.state_dtype == "int8" else None
    return run.backbone_states if size is None else (2 + 8 / size) / 4


def exchange_of(run: PlanConfig, parameters: Iterable[Parameter]) -> PlannedExchange:
    """What the exchange of these weights' gradients takes in a step, as its class says."""
    shapes = tuple(parameter.shape for parameter in parameters if parameter.is_trained)
    hook, options = run.config.parallel.comm_hook, exchange_options(run.config)
    return _exchange(hook, options, shapes, run.data_ranks, run.backbone_states)


@functools.lru_cache(maxsize=256)
def _exchange(
    hook: str, options: ExchangeOptions, shapes: tuple[tuple[int, ...], ...], ranks: int, states: int
) -> PlannedExchange:
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    return planned_exchange(hook, weights, ranks, options, states)
