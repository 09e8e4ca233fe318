"""Seconds of a step by part: a model of what the operations compute and move, at speeds that are given or named."""

from dataclasses import dataclass

from plsc.devices import Device
from plsc.head.class_table import OVERLAPPED_CHUNKS
from plsc.plan.backbone import BackboneProfile
from plsc.plan.backbone_timing import HEAD_SHARE, plan_backbone_time
from plsc.plan.devices import Collective, Links
from plsc.plan.memory import clips_head, fused_block, has_fused_passes, row_bytes, stores_gradient
from plsc.plan.plan_config import PlanConfig

# Bytes read and written for each number of the gathered embeddings: 128 in the step that `tests/gpu_trace` counts at
# 1,024 ranks, where they are most of the traffic (both passes, the targets' rows, the features' gradient).
SAMPLE_TRAFFIC = 128
BLOCK_TRAFFIC = 27 * 4  # likewise for each float32 logit of passes that store them
DRAW_TRAFFIC = 21  # likewise for each row among which some are drawn
LABEL_BYTES = 8  # gathered with a sample's features, in one all-gather
SUM_BYTES = 8  # a float64 of each sample in either of two all-reduces; the third one is the vote on the step


@dataclass(frozen=True)
class Timing:
    """Seconds of a step by part, which add up; ``hidden`` ones pass beside them. ``samples``: of all ranks."""

    parts: dict[str, float]
    hidden: dict[str, float]
    samples: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @property
    def images_per_second(self) -> float:
        """Over all ranks."""
        return self.samples / self.seconds


def head_seconds(setup: PlanConfig, device: Device) -> dict[str, float]:
    """The class head's own work in a step of ``setup`` on one rank, by part: without its collectives."""
    return {
        "head, products": _products(setup, device),
        "head, table traffic": _table_traffic(setup, device),
        "head, samples' traffic": _samples_traffic(setup, device),
    }


def plan_time(setup: PlanConfig, profile: BackboneProfile, device: Device, links: Links) -> Timing:
    """The parts of a step of ``setup``. Reading the data, and waiting for it, is not among them."""
    backbone = plan_backbone_time(setup, profile, device, links)
    head = head_seconds(setup, device)
    on_device = sum(head.values())
    bus = _bus(setup, links)
    summed = _replicas_sum(setup, links)
    summed_meanwhile = _hidden_sum(setup, summed, head["head, products"])
    parts = {
        **backbone.parts,
        **head,
        **_head_collectives(setup, links),
        "head, replicas' gradients summed": summed - summed_meanwhile,
        "host bus, not hidden": max(bus - on_device, 0.0),
    }
    hidden = {
        **backbone.hidden,
        "head, replicas' gradients summed": summed_meanwhile,
        "host bus": min(bus, on_device),
    }
    return Timing(_positive(parts), _positive(hidden), setup.samples)


def _products(setup: PlanConfig, device: Device) -> float:
    """Two products in each pass: 8·B·C·D over all, shared out between the ranks."""
    samples = setup.group_batch * setup.micro_batches
    flops = 8 * samples * setup.visited_rows * setup.config.embedding_dim
    return flops / (_product_speed(setup, device) * HEAD_SHARE)


def _product_speed(setup: PlanConfig, device: Device) -> float:
    """FLOP/s of large products over the table as it is stored and multiplied."""
    if setup.storage[0] == "bfloat16":
        return device.products["bf16"]
    speeds = {"ieee": device.products["fp32"], "tf32": device.products["tf32"], "bf16x3": device.products["bf16"] / 3}
    return speeds[setup.config.head.fp32_precision]


def _table_traffic(setup: PlanConfig, device: Device) -> float:
    """The first pass reads weights, once per micro-batch; the second reads and writes all of a row.

    Where the update is not part of pass 2, the float32 gradient is written and read, and weights are read again; where
    the head's norm is clipped, all of that once more, without the update. Passes without Triton's kernels read and
    write (rows, B) blocks of logits; sampling draws a number for each row, and sorts.
    """
    row, gradient = row_bytes(setup.config), 8 * setup.config.embedding_dim
    weights = row["class weights"]
    per_row = setup.micro_batches * weights + 2 * sum(row.values())
    is_fused = has_fused_passes(setup, device)
    if stores_gradient(setup) or not is_fused:
        per_row += gradient + weights
    if not is_fused:
        per_row += BLOCK_TRAFFIC * setup.group_batch * setup.micro_batches
    if clips_head(setup):
        per_row += gradient + 2 * weights
    drawn = 0
    if setup.config.head.sample_rate < 1:
        per_row += weights  # the second pass finds its rows by their numbers, and reads them once more
        drawn = DRAW_TRAFFIC * setup.rows
    return (per_row * setup.visited_rows + drawn) / device.bandwidth


def _samples_traffic(setup: PlanConfig, device: Device) -> float:
    """Gathered embeddings and their gradients, and the parts of a sum that Triton's first pass writes and adds up."""
    numbers = setup.group_batch * setup.config.embedding_dim
    parts = 2 * fused_block(setup, setup.visited_rows, passes=1) if has_fused_passes(setup, device) else 0
    return setup.micro_batches * (SAMPLE_TRAFFIC * numbers + parts) / device.bandwidth


def _head_collectives(setup: PlanConfig, links: Links) -> dict[str, float]:
    """Per micro-batch: features with their labels, float64 sums over shards and the vote, the features' gradient."""
    ranks, dim = setup.head_ranks, setup.config.embedding_dim
    sent = setup.group_batch * (ranks - 1) / ranks

    def seconds(collective: Collective, bytes_per_sample: float, calls: int = 1) -> float:
        moved = sent * bytes_per_sample
        return setup.micro_batches * links.seconds(moved, ranks, setup.per_node, collective=collective, calls=calls)

    return {
        "head, features gathered": seconds("all_gather", dim * setup.weight_width + LABEL_BYTES),
        "head, sums over shards": seconds("all_reduce", 2 * 2 * SUM_BYTES, calls=3),
        "head, gradient scattered": seconds("reduce_scatter", dim * 4),
    }


def _replicas_sum(setup: PlanConfig, links: Links) -> float:
    """Seconds per step of the sum of a replicated table's gradients over its replicas."""
    copies = setup.replicas
    moved = 8 * setup.config.embedding_dim * setup.visited_rows * (copies - 1) / copies
    return links.seconds(moved, copies, setup.per_node, collective="all_reduce", stride=setup.head_ranks)


def _hidden_sum(setup: PlanConfig, summed: float, products: float) -> float:
    """Seconds of the replicas' sum beside the second pass, which makes half of the ``products``; all but a chunk's."""
    if setup.placement != "device":
        return 0.0
    return min(summed * (1 - 1 / OVERLAPPED_CHUNKS), products / 2)


def _bus(setup: PlanConfig, links: Links) -> float:
    """Rows of a table in host memory: weights for both passes and state come, both return; directions do not share.

    A file's rows are taken to be in the page cache: a disk is slower.
    """
    if setup.placement == "device":
        return 0.0
    row = row_bytes(setup.config)
    again = row["class weights"] if setup.config.head.sample_rate >= 1 else 0  # sampled rows stay between the passes
    return (sum(row.values()) + again) * setup.visited_rows / links.bus


def _positive(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if seconds > 0}
