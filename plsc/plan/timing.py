"""Seconds of a step by part: a model of what the operations compute and move, at speeds that are given or named."""

from collections import defaultdict
from dataclasses import dataclass

from plsc.devices import PRODUCT_SHARE, Device
from plsc.head.backends.triton_shape import LARGE_SHARE
from plsc.plan.backbone import BackboneProfile
from plsc.plan.backbone_timing import HEAD_SHARE, plan_backbone_time
from plsc.plan.devices import Collective, Links
from plsc.plan.head_traffic import head_traffic
from plsc.plan.memory import pass_shape, reused_exponentials, row_bytes, stored_widths
from plsc.plan.plan_config import PlanConfig
from plsc.plan.table_terms import replicas_sum

LABEL_BYTES = 8  # gathered with a sample's features, in one all-gather
_STORED_SHARE = LARGE_SHARE / PRODUCT_SHARE  # of the speed of large products, as the choice of stored weights takes it
SUM_BYTES = 8  # a float64: of each sample two in one all-reduce; the other one is the vote on the step


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


def head_seconds(run: PlanConfig, device: Device) -> dict[str, float]:
    """The class head's own work in a step of ``run`` on one rank, by part: without its collectives."""
    traffic = head_traffic(run, device)
    return {
        "head, products": _products(run, device),
        "head, table traffic": traffic.table / device.bandwidth,
        "head, samples' traffic": traffic.samples / device.bandwidth,
    }


def plan_time(run: PlanConfig, profile: BackboneProfile, device: Device, links: Links) -> Timing:
    """The parts of a step of ``run``. Reading the data, and waiting for it, is not among them."""
    backbone, beside = plan_backbone_time(run, profile, device, links)
    parts, hidden = defaultdict(float, backbone), defaultdict(float, beside)
    for table in run.tables:
        head = head_seconds(table, device)
        on_device = sum(head.values())
        bus = _bus(table, links)
        summed, summed_meanwhile = replicas_sum(table, links, head["head, products"])
        for name, seconds in (head | _head_collectives(table, links)).items():
            parts[name] += seconds
        parts["head, replicas' gradients summed"] += summed
        parts["host bus, not hidden"] += max(bus - on_device, 0.0)
        hidden["head, replicas' gradients summed"] += summed_meanwhile
        hidden["host bus"] += min(bus, on_device)
    return Timing(_positive(parts), _positive(hidden), run.samples)


def _products(run: PlanConfig, device: Device) -> float:
    """Two products in each pass, and one with each row of a filter: 8·B·C·D over all, shared out between the ranks.

    Those around stored weights are large, and write and read them meanwhile: that is counted as traffic alone. Pass 2
    makes one of rows whose exponentials were kept.
    """
    samples, speed, seconds = run.group_batch * run.micro_batches, _product_speed(run, device), 0.0
    kept = reused_exponentials(run, device)
    for passes, rows in ((1, run.visited_rows), (2, run.updated_rows)):
        again = kept if passes == 2 else 0
        flops = ((4 + 2 * run.filter_rows) * rows - 2 * again) * samples * run.config.embedding_dim
        if pass_shape(run, device, passes) == "stored":
            moved = samples * (rows * sum(stored_widths(run)) - again * run.weight_width)
            seconds += max(flops / (speed * _STORED_SHARE) - moved / device.bandwidth, 0.0)
        else:
            seconds += flops / (speed * HEAD_SHARE)
    return seconds


def _product_speed(run: PlanConfig, device: Device) -> float:
    """FLOP/s of large products over the table as it is stored and multiplied."""
    if run.storage[0] == "bfloat16":
        return device.product_speed("bf16")
    if run.config.head.fp32_precision == "bf16x3" and "bf16" in device.products:
        return device.products["bf16"] / 3
    return device.product_speed("tf32" if run.config.head.fp32_precision == "tf32" else "fp32")


def _head_collectives(run: PlanConfig, links: Links) -> dict[str, float]:
    """Per micro-batch: features with labels, a filter's rows, float64 sums over shards and the vote, the gradient."""
    ranks, dim = run.head_ranks, run.config.embedding_dim
    sent = run.group_batch * (ranks - 1) / ranks

    def seconds(collective: Collective, bytes_per_sample: float, calls: int = 1) -> float:
        moved = sent * bytes_per_sample
        return run.micro_batches * links.seconds(moved, ranks, run.per_node, collective=collective, calls=calls)

    filtered = 2 * run.filter_rows * dim * run.weight_width
    return {
        "head, features gathered": seconds("all_gather", dim * run.weight_width + LABEL_BYTES),
        **({"head, labels' rows summed": seconds("all_reduce", filtered)} if filtered else {}),
        "head, sums over shards": seconds("all_reduce", 2 * 2 * SUM_BYTES, calls=2),
        "head, gradient scattered": seconds("reduce_scatter", dim * 4),
    }


def _bus(run: PlanConfig, links: Links) -> float:
    """Rows of a table in host memory: weights for all passes and state come, both return; directions do not share.

    A file's rows are taken to be in the page cache: a disk is slower.
    """
    if run.placement == "device":
        return 0.0
    row = row_bytes(run.config)
    # sampled rows stay between the passes; else each micro-batch's first pass takes the whole table
    passes = run.micro_batches + run.clips_head
    again = passes * row["class weights"] if run.config.head.sample_rate >= 1 else 0
    rows = run.updated_rows or run.visited_rows  # frozen ones come too
    return (sum(row.values()) + again) * rows / links.bus


def _positive(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if seconds > 0}
