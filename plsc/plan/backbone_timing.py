"""Seconds of the backbone's part of a step under each strategy: computing, exchanging, updating.

With W and G bytes of weights and gradients, d ranks that see different images, s of them that share one set of weights,
a rank moves in a step

- ddp: 2·G·(d − 1)/d for the all-reduce, of which the backward pass hides most; with a communication hook, 2·(d − 1)/d
  times what :meth:`plsc.parallel.gradient_compression.GradientExchange.planned` counts, (d − 1) times if it gathers.
- zero1: as ddp, and W·(d − 1)/d for the broadcast of the updated weights.
- zero2: W·(d − 1)/d for an all-gather in the forward pass of each micro-batch, and as much for a reduce-scatter.
- fsdp: W·(s − 1)/s for an all-gather in the forward pass, as much for one in the backward pass, of each micro-batch,
  and G·(s − 1)/s for the reduce-scatter of the last: 1.5 times ddp's (Rajbhandari et al., ZeRO, SC 2020, section 7.2).
- hsdp: the same within its s ranks, and 2·(G/s)·(r − 1)/r for the all-reduce over its r = d/s replicas.
- tp = K: two all-gathers and two reduce-scatters of a block's tokens in each pass (Korthikanti et al., 2022, section
  4.2.2), half of them in float32, as norms give the tokens and take their gradients; nothing hides them.
- pp = K: a block's output, and the gradient of its input, of each of a rank's parts; and the bubble, (K − 1)/(v·m) of
  the time of m micro-batches, v parts of the backbone to a rank (Narayanan et al., 2021, section 2.2).
"""

from dataclasses import dataclass

from plsc.devices import Device
from plsc.parallel.gradient_compression import PlannedExchange
from plsc.plan.backbone import BackboneProfile, Operation
from plsc.plan.backbone_memory import (
    Stage,
    exchange_of,
    gathered_bytes,
    held_stage,
    is_sharded,
    nbytes,
    partitions,
)
from plsc.plan.devices import HOST_BANDWIDTH, Collective, Links
from plsc.plan.plan_config import PlanConfig

# Of the bound max(FLOPs / product speed, bytes / copy speed), summed over a backbone's operations, training reaches
# this share: 0.46 where arcface_torch publishes 4,803 images/s (IResNet-50, fp16, 8 V100), 0.39 where PLSC publishes
# 10,744 (8 A100). benchmarks/retrodiction.py fits it, and seconds for each operation, to all that the two publish.
BACKBONE_SHARE = 0.4
# Of the speed of large products, the head's four reach this share: exp and rounding between them count into it.
HEAD_SHARE = 0.5
# Multiplications that F(2x2, 3x3) of Lavin and Gray (CVPR 2016) saves in float32, where cuDNN chooses it.
WINOGRAD = 2.25
OVERLAPPED_SHARE = 0.8  # of the passes beside which a collective runs, during which it is under way already
BACKWARD_SHARE = 2 / 3  # of a backbone's time
_EXPOSED_SHARE = 0.1  # of a collective at least: the first gather, the last bucket


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's speed that a training loop reaches, in its ``backbone`` and in the ``head``'s products.

    ``operation`` seconds are added for each operation of the backbone, forward and backward: launches, what runs
    between them, the optimizer's. ``tf32``: whether convolutions in float32 may take TF32, PyTorch's default.
    """

    backbone: float = BACKBONE_SHARE
    head: float = HEAD_SHARE
    operation: float = 0.0
    tf32: bool = True


DEFAULT = Efficiency()


def plan_backbone_time(
    run: PlanConfig, profile: BackboneProfile, device: Device, links: Links, efficiency: Efficiency = DEFAULT
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step's backbone on the slowest rank by part: those that add up, and those that pass beside them."""
    number = _busiest_stage(run, profile)
    stage = held_stage(run, profile, number)
    passes, bubble = _passes(run, profile, device, efficiency)
    exchange = exchange_of(run, stage.parameters)
    gathered, reduced = _gathered(run, stage, links), _reduced(run, stage, links, exchange)
    exchanging = "reduce-scatter" if is_sharded(run) else exchange.words
    backward = passes / run.micro_batches * BACKWARD_SHARE
    gather_waits = _exposed(gathered, passes)
    left = passes - (gathered - gather_waits) / OVERLAPPED_SHARE  # gathers and sums share the links
    reduce_waits = _exposed(reduced, min(backward, left))
    parts = {
        "backbone, forward and backward": passes,
        "pipeline, bubble": bubble,
        "pipeline, sends": _sends(run, profile, links),
        "tensor parallel, collectives": _tensor_collectives(run, profile, links, is_first=number == 0),
        "backbone, weights gathered, not hidden": gather_waits,
        f"backbone, {exchanging} not hidden": reduce_waits,
        "backbone, gradients compressed": exchange.traffic / device.bandwidth,
        "backbone, shards copied": _shards_copied(run, stage) / device.bandwidth,
        "backbone, updated weights broadcast": _broadcast(run, stage, links),
        "backbone, update": _update(run, stage, device),
    }
    hidden = {
        f"backbone, {exchanging}": reduced - reduce_waits,
        "backbone, weights gathered": gathered - gather_waits,
    }
    return parts, hidden


def backbone_seconds(
    profile: BackboneProfile, device: Device, *, channels_last: bool, efficiency: Efficiency = DEFAULT
) -> float:
    """Forward and backward of one micro-batch on one rank."""
    bound = sum(_bounds(profile, device, channels_last, efficiency.tf32))
    return bound / efficiency.backbone + len(profile.operations) * efficiency.operation


def _bounds(profile: BackboneProfile, device: Device, channels_last: bool, tf32: bool) -> list[float]:
    """Seconds of each operation at the device's speeds.

    Of a GPU's convolutions, those in float32 take the faster of TF32 and, on CUDA cores, Winograd's algorithm; those in
    16 bits want channels last, and cuDNN transposes what is not, there and back.
    """

    def bound(operation: Operation) -> float:
        products = operation.flops / device.product_speed(operation.precision)
        traffic = operation.traffic
        if operation.convolved and device.kind == "cuda":
            if operation.precision != "fp32":
                traffic += 0 if channels_last else 2 * operation.convolved
            else:
                products /= WINOGRAD if operation.is_winograd else 1.0
                products = min(products, operation.flops / device.product_speed("tf32")) if tf32 else products
        return max(products, traffic / device.bandwidth)

    return [bound(operation) for operation in profile.operations]


def _passes(run: PlanConfig, profile: BackboneProfile, device: Device, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds of a step's passes on a rank, and of the pipeline's bubble beside them."""
    blocks = profile.blocks
    channels_last = run.config.channels_last
    whole = backbone_seconds(profile, device, channels_last=channels_last, efficiency=efficiency) * run.micro_batches
    if not blocks or run.model_ranks == 1:
        return whole, 0.0
    bounds = _bounds(profile, device, channels_last, efficiency.tf32)
    forward = sum(bounds[: profile.forward_operations])
    stem = sum(bounds[: blocks[0].forward.start]) / forward
    in_blocks = sum(sum(bounds[number] for number in block.forward) for block in blocks) / forward
    tail = 1 - stem - in_blocks
    most = -(-len(blocks) // run.pp) / len(blocks)
    ends = stem + tail if run.pp == 1 else max(stem, tail)
    busy = whole * (in_blocks * most / run.tp + ends)
    return busy, busy * (run.pp - 1) / (run.pipeline_parts * run.pipeline_micro_batches)


def _busiest_stage(run: PlanConfig, profile: BackboneProfile) -> int:
    """The number of the stage with most weights to exchange: the first or the last."""
    return max({0, run.pp - 1}, key=lambda number: nbytes(held_stage(run, profile, number).trained))


def _exposed(seconds: float, beside: float) -> float:
    """The part of a collective that the passes ``beside`` it do not hide."""
    return max(seconds - OVERLAPPED_SHARE * beside, _EXPOSED_SHARE * seconds)


def _gathered(run: PlanConfig, stage: Stage, links: Links) -> float:
    """Seconds of a step's all-gathers: every unit's in both passes, the root's in one; from the host, shards' too."""
    if not is_sharded(run):
        return 0.0
    ranks, per_node, tp = run.shard_ranks, run.per_node, run.tp
    units = [unit.weights for unit in stage.units if unit.weights]
    root = gathered_bytes(stage.parameters, ranks) - sum(units)
    passes, times = run.gathering_passes, _gathers(run)
    moved = times * (passes * sum(units) + root)
    calls = times * (passes * len(units) + 1)
    seconds = links.seconds(moved * (ranks - 1) / ranks, ranks, per_node, stride=tp, calls=calls)
    return seconds + (moved / ranks / links.bus if run.config.parallel.offload else 0.0)


def _gathers(run: PlanConfig) -> int:
    """Batches of a step for which weights are gathered: a pipeline's stage keeps them for all its micro-batches."""
    return run.config.optim.accumulate if run.pp > 1 else run.micro_batches


def _reduced(run: PlanConfig, stage: Stage, links: Links, exchange: PlannedExchange) -> float:
    """Seconds of a step's exchange of gradients."""
    ranks, per_node, tp = run.data_ranks, run.per_node, run.tp
    sent = exchange.sent
    if not is_sharded(run):
        copies = ranks - 1 if exchange.is_gathered else 2 * (ranks - 1) / ranks
        kind: Collective = "all_gather" if exchange.is_gathered else "all_reduce"
        return links.seconds(copies * sent, ranks, per_node, collective=kind, stride=tp)
    shards = run.shard_ranks
    replicas = ranks // shards
    calls = sum(unit.weights > 0 for unit in stage.units) + 1
    filled = sent * gathered_bytes(stage.trained, shards) / max(nbytes(stage.trained), 1)
    scattered = filled * (shards - 1) / shards
    seconds = links.seconds(scattered, shards, per_node, collective="reduce_scatter", stride=tp, calls=calls)
    across = 2 * filled / shards * (replicas - 1) / replicas
    seconds += links.seconds(across, replicas, per_node, collective="all_reduce", stride=tp * shards, calls=calls)
    return seconds + (nbytes(stage.trained, shards) / links.bus if run.config.parallel.offload else 0.0)


def _shards_copied(run: PlanConfig, stage: Stage) -> int:
    """Bytes: FSDP2 copies what it gathers out of the collective's buffer, and gradients into that of theirs."""
    if not is_sharded(run):
        return 0
    ranks = run.shard_ranks
    gathered, summed = gathered_bytes(stage.parameters, ranks), gathered_bytes(stage.trained, ranks)
    return 2 * run.gathering_passes * _gathers(run) * gathered + 2 * summed


def _broadcast(run: PlanConfig, stage: Stage, links: Links) -> float:
    """Seconds in which ranks give each other the weights that each of them stepped, one after another."""
    ranks = len(partitions(run, stage.trained))
    moved = nbytes(stage.trained) * (ranks - 1) / ranks
    calls = min(ranks, len(stage.trained))
    return links.seconds(moved, ranks, run.per_node, collective="broadcast", calls=calls)


def _update(run: PlanConfig, stage: Stage, device: Device) -> float:
    """Gradients twice (norm, update), weights and states there and back; the moving average likewise."""
    ranks = run.shard_ranks
    weights, trained = nbytes(stage.parameters, ranks), nbytes(stage.trained, ranks)
    stepped = max(nbytes(part, ranks) for part in partitions(run, stage.trained))
    moved = trained + (3 + 2 * run.backbone_states) * stepped + (3 * weights if run.config.ema_decay else 0)
    speed = HOST_BANDWIDTH / run.per_node if run.config.parallel.offload else device.bandwidth
    return moved / speed


def _tensor_collectives(run: PlanConfig, profile: BackboneProfile, links: Links, *, is_first: bool) -> float:
    """Seconds of the collectives within a stage's blocks, and of the first stage's split of the tokens."""
    ranks = run.tp
    if ranks == 1:
        return 0.0
    blocks = -(-len(profile.blocks) // run.pp) * run.micro_batches
    block = profile.blocks[0]
    splits = run.micro_batches if is_first else 0  # gradients of the first block's input are gathered
    moved = (4 * (block.input + block.output) * blocks + block.output * splits) * (ranks - 1) / ranks
    return links.seconds(moved, ranks, run.per_node, calls=8 * blocks + splits)


def _sends(run: PlanConfig, profile: BackboneProfile, links: Links) -> float:
    """Seconds of what the busiest rank sends: outputs and gradients, to ranks that lie a stage's number apart."""
    if run.pp == 1:
        return 0.0
    ends = int(run.pp == 2)  # each of two ranks has one end of the backbone, to which nothing is sent
    calls = (2 * run.pipeline_parts - ends) * run.micro_batches
    moved = calls * profile.blocks[0].output / run.tp
    stride = run.world // run.pp
    return links.seconds(moved, 2, run.per_node, collective="send", stride=stride, calls=calls)
