"""The steps that are traced, by name, and the tracing of one."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_trace.tracer import Counts, Tracer, place_of, traced
from gpu_trace.triton_launches import launches_recorded
from gpu_trace.world import LateExecutor, build, fake_components, fake_rank
from plsc import config as configuration
from plsc.config import ClassTable, Config, class_tables, margin_keys
from plsc.data.loader import PartOfBatch, TrainLoader
from plsc.features.tables.losses import TableBatch
from plsc.models import backbone, vit
from plsc.parallel.step_timeline import StepTimeline
from plsc.train.micro_batches import MicroBatch
from plsc.train.step import Stepper

SMALL = {
    "backbone": "resnet8",
    "precision": "bf16",
    "data.image_size": 32,
    "data.batch_size": 16,
    "head.weight_dtype": "bfloat16",
}
FULL = {"backbone": "iresnet50", "data.image_size": 112, "data.batch_size": 128}
VIT: dict[str, Any] = {"backbone": "vit_of_4_blocks", "data.image_size": 64, "data.batch_size": 64}
ADAMW = {"optim.name": "adamw"}
TABLES = """[
    {name = "a", classes = 4000000, batch_share = 2.0}, {name = "b", classes = 600000, head.margin = "cosface"},
    {name = "c", classes = 400000, head.placement = "host", head.sample_rate = 0.1},
]"""


@contextlib.contextmanager
def short_vit() -> Iterator[None]:
    """Let VIT's backbone be known within: deep enough for a pipeline of two ranks with two stages each."""
    name = VIT["backbone"]

    with (
        patch.dict(vit.SHAPES, {name: vit.Shape(512, 4)}),
        patch.dict(backbone._builders, {name: functools.partial(vit.VisionTransformer, name)}),
    ):
        yield


@dataclass(frozen=True)
class Scenario:
    """A step of a run on ``ranks`` GPUs with ``classes`` classes.

    Attributes:
        settings: configuration keys; the others are those of ``SMALL``, and int8 momentum.
        traced_ranks: whose collectives are compared; all counts are those of the first.
        sizes: batch sizes that differ from the configuration's, by data rank.
        planned: whether ``plsc plan`` knows the step's peak, traffic and collectives within 3%: it takes all batches as
            large as the configuration's.
        steps: to take, until memory in use no longer grows.
        labels: of a sample; 0: labels are (b,).
        above: by what share the plan's peak of memory may be above the step's.
    """

    ranks: int
    classes: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    traced_ranks: tuple[int, ...] = (0,)
    sizes: Mapping[int, int] = field(default_factory=dict)
    planned: bool = True
    steps: int = 2
    labels: int = 0
    above: float = 0.03

    @property
    def config(self) -> Config:
        """The run's configuration."""
        values = {**SMALL, "head.momentum_dtype": "int8", **self.settings}
        with short_vit():
            return configuration.load(None, {name: str(value).lower() for name, value in values.items()})

    @property
    def tables(self) -> list[ClassTable]:
        """Its class tables; none where there is one alone."""
        return class_tables(self.config) if self.config.table else []

    @property
    def rows(self) -> int:
        """Classes of the first rank's shard."""
        return -(-self.classes // (self.config.head_ranks or self.ranks))

    def batch_sizes(self) -> list[int]:
        """Every data rank's number of samples in a micro-batch."""
        parallel, batch_size = self.config.parallel, self.config.data.batch_size
        return [self.sizes.get(rank, batch_size) for rank in range(self.ranks // (parallel.tp * parallel.pp))]


SCENARIOS: dict[str, Scenario] = {
    "50M classes, 1 rank": Scenario(1, 50_000_000, FULL),
    "10M classes, 8 ranks": Scenario(8, 10_000_000, FULL),
    "50M classes, 64 ranks": Scenario(64, 50_000_000, FULL),
    "50M classes, 1,024 ranks": Scenario(1024, 50_000_000, FULL),
    "adamw, 8 ranks": Scenario(8, 10_000_000, ADAMW, (0, 7)),
    "sampled at 0.1, 8 ranks": Scenario(8, 10_000_000, {"head.sample_rate": 0.1}, (0, 4)),
    "host memory, 8 ranks": Scenario(8, 10_000_000, {"head.placement": "host"}, steps=3),
    "host memory, sampled, 8 ranks": Scenario(
        8, 10_000_000, {"head.placement": "host", "head.sample_rate": 0.1}, steps=6
    ),
    "float32, 8 ranks": Scenario(8, 10_000_000, {"head.weight_dtype": "float32", "head.momentum_dtype": "float32"}),
    "groups of 8, 64 ranks": Scenario(64, 1_000_000, {"head_ranks": 8}, (0, 3, 7, 8, 63)),
    "groups of 64, sampled, 1,024 ranks": Scenario(
        1024, 10_000_000, {"head_ranks": 64, "head.sample_rate": 0.1}, (0, 63, 64, 1023)
    ),
    "unequal batches, 8 ranks": Scenario(8, 1_000_000, {}, (0, 3, 5, 7), sizes={3: 0, 5: 1, 7: 5}, planned=False),
    "unequal batches, groups of 4, 8 ranks": Scenario(
        8, 1_000_000, {"head_ranks": 4, "head.margin": "adaface"}, (0, 3, 5, 7), sizes={3: 0, 5: 1, 7: 5}
    ),
    "fp16, accumulate 4, clipped, 8 ranks": Scenario(
        8,
        1_000_000,
        {"precision": "fp16", "optim.accumulate": 4, "optim.clip_norm": 5.0, "optim.clip_head": True},
        (0, 7),
    ),
    "sync_batchnorm, channels_last, average, 8 ranks": Scenario(
        8, 1_000_000, {"sync_batchnorm": True, "channels_last": True, "ema_decay": 0.999}, (0, 7)
    ),
    "zero1, 8 ranks": Scenario(8, 1_000_000, {**ADAMW, "parallel.strategy": "zero1"}, (0, 3, 7)),
    "zero1, 1,024 ranks": Scenario(1024, 1_000_000, {"parallel.strategy": "zero1"}, (0, 1023)),
    "zero2, 8 ranks": Scenario(8, 1_000_000, {**ADAMW, "parallel.strategy": "zero2"}, (0, 7)),
    "fsdp, 8 ranks": Scenario(8, 1_000_000, {"parallel.strategy": "fsdp"}, (0, 3, 7)),
    "fsdp, 1,024 ranks": Scenario(1024, 1_000_000, {"parallel.strategy": "fsdp"}, (0, 1023)),
    "hsdp, adamw, clipped, 64 ranks": Scenario(
        64,
        1_000_000,
        {**ADAMW, "parallel.strategy": "hsdp", "parallel.shard_ranks": 8, "optim.clip_norm": 5.0},
        (0, 1, 11, 63),
    ),
    "tp of 2, 8 ranks": Scenario(8, 1_000_000, {**VIT, "parallel.tp": 2}, (0, 1, 7)),
    "tp of 4, hsdp, clipped, 64 ranks": Scenario(
        64,
        1_000_000,
        {**VIT, "parallel.tp": 4, "parallel.strategy": "hsdp", "parallel.shard_ranks": 4, "optim.clip_norm": 5.0},
        (0, 1, 4, 63),
        above=0.05,  # the head takes less than the backbone is planned to, which is 4% too much here
    ),
    "tp of 8, fsdp, adamw, 1,024 ranks": Scenario(
        1024, 1_000_000, {**VIT, **ADAMW, "parallel.tp": 8, "parallel.strategy": "fsdp"}, (0, 1023)
    ),
    "pp of 4, 1f1b, 8 ranks": Scenario(8, 1_000_000, {**VIT, "parallel.pp": 4}, (0, 2, 4, 6, 7)),
    "pp of 2, interleaved, adamw, clipped, 64 ranks": Scenario(
        64,
        1_000_000,
        {**VIT, **ADAMW, "parallel.pp": 2, "parallel.pp_schedule": "interleaved", "optim.clip_norm": 5.0},
        (0, 32, 1, 63),
    ),
    "pp of 2, tp of 2, hsdp, 64 ranks": Scenario(
        64,
        1_000_000,
        {**VIT, "parallel.pp": 2, "parallel.tp": 2, "parallel.strategy": "hsdp", "parallel.shard_ranks": 4},
        (0, 1, 32, 33, 63),
    ),
    "adamw, 50M classes, 1 rank": Scenario(1, 50_000_000, ADAMW),
    "sampled at 0.1, 50M classes, 1 rank": Scenario(1, 50_000_000, {"head.sample_rate": 0.1}),
    "host memory, sampled at 0.01, 1 rank": Scenario(
        1, 2_000_000, {"head.placement": "host", "head.sample_rate": 0.01}, steps=6
    ),
    "host memory, clipped, 1 rank": Scenario(
        1,
        1_000_000,
        {**ADAMW, "head.placement": "host", "optim.clip_norm": 5.0, "optim.clip_head": True},
        steps=3,
    ),
    "sampled at 0.01, accumulate 2, 8 ranks": Scenario(8, 8_000_000, {"head.sample_rate": 0.01, "optim.accumulate": 2}),
    "float32, sampled at 0.01, clipped, 2 ranks": Scenario(
        2,
        1_000_000,
        {
            "head.weight_dtype": "float32",
            "head.sample_rate": 0.01,
            "optim.clip_norm": 5.0,
            "optim.clip_head": True,
        },
    ),
    "float32 in bf16x3, 50M classes, 1 rank": Scenario(
        1,
        50_000_000,
        {"head.weight_dtype": "float32", "head.momentum_dtype": "float32", "head.fp32_precision": "bf16x3"},
    ),
    "host memory, weights stored, 8 ranks": Scenario(
        8, 10_000_000, {"head.placement": "host", "data.batch_size": 128}, steps=3
    ),
    "sampled at 0.02, accumulate 2, weights stored, 8 ranks": Scenario(
        8, 8_000_000, {"head.sample_rate": 0.02, "optim.accumulate": 2, "data.batch_size": 128}
    ),
    "exponentials kept, 8 ranks": Scenario(8, 10_000_000, {"head.exponentials_memory": "2GiB", "data.batch_size": 128}),
    "exponentials kept, accumulate 2, clipped, groups of 4, 8 ranks": Scenario(
        8,
        1_000_000,
        {
            "head.exponentials_memory": "4GB",
            "head_ranks": 4,
            "data.batch_size": 128,
            "optim.accumulate": 2,
            "optim.clip_norm": 5.0,
            "optim.clip_head": True,
        },
        (0, 7),
    ),
    "three centres, weights stored, 8 ranks": Scenario(8, 1_000_000, {"head.centers": 3, "data.batch_size": 128}),
    "negatives filtered, 8 ranks": Scenario(8, 1_000_000, {"negative_filter.cosine": 0.6}),
    "rows frozen, 8 ranks": Scenario(8, 1_000_000, {"frozen.rows": "0:60000"}),
    "three centres, 8 ranks": Scenario(8, 1_000_000, {"head.centers": 3}, (0, 7)),
    "adamw, float32, sampled, groups of 4, 8 ranks": Scenario(
        8,
        1_000_000,
        {**ADAMW, "head_ranks": 4, "head.sample_rate": 0.1, "head.weight_dtype": "float32"},
        (0, 7),
    ),
    "8 labels, 8 ranks": Scenario(8, 10_000_000, planned=False, labels=8),
    "three tables, 8 ranks": Scenario(8, 5_000_000, {"table": TABLES}, planned=False, steps=3),
    **{
        f"{margin}, 8 ranks": Scenario(8, 1_000_000, {"head.margin": margin})
        for margin in margin_keys()
        if margin != "arcface"
    },
}


def trace(scenario: Scenario, rank: int, mode: FakeTensorMode) -> Counts:
    """The counts of the scenario's last step on one rank; the peak is that of all."""
    config, sizes = scenario.config, scenario.batch_sizes()
    tracer = Tracer(sizes, samples_kept=max(sizes) // config.parallel.tp, share_kept=config.head.sample_rate)
    LateExecutor.tracer = tracer
    with (
        mode,
        traced(tracer),
        launches_recorded(tracer),
        fake_components(),
        fake_rank(rank, scenario.ranks, config.head_ranks) as mesh,
    ):
        counts = {table.name: table.classes or 0 for table in scenario.tables}
        components = build(config, counts or scenario.classes, mesh)
        data_rank = components.strategy.data_rank
        group = [_micro_batch(scenario, sizes, data_rank) for _ in range(config.optim.accumulate)]
        parts = [PartOfBatch(np.arange(len(rows)), list(of_ranks)) for rows, _, of_ranks in group[0].split or []]
        components.loader = cast(TrainLoader, UpcomingBatch(group[0].labels, sizes, parts))
        try:
            _train(Stepper(components), tracer, group, scenario.steps)
        except RuntimeError as error:  # of fake tensors on two devices
            tracer.counts.problems[f"{place_of(error)}: {str(error).splitlines()[0]}"] += 1
    return tracer.counts


def _train(stepper: Stepper, tracer: Tracer, group: list[MicroBatch], steps: int) -> None:
    """Take steps as the trainer does: the result of each is read when the next one is enqueued, its parts are timed."""
    before, timeline = None, StepTimeline(torch.device("cuda", 0))
    with timeline.active():
        for number in range(steps):
            tracer.begin_step(last=number == steps - 1)
            enqueued = stepper.step(group, number)
            timeline.end_step()
            if before is not None:
                before.result()
            before = enqueued
            timeline.take()


class UpcomingBatch(NamedTuple):
    """What a step asks its loader for: the next batch, whose rows of a host table are fetched ahead."""

    next_labels: Tensor
    next_sizes: list[int]
    next_parts: list[PartOfBatch]


def _micro_batch(scenario: Scenario, sizes: list[int], rank: int) -> MicroBatch:
    """One data rank's part of a global batch, as its loader brings it."""
    shape = scenario.config.data.preprocessing.shape
    images = torch.zeros(sizes[rank], *shape, dtype=torch.uint8, pin_memory=True)
    widths = (scenario.labels,) if scenario.labels else ()
    labels = torch.zeros(sizes[rank], *widths, dtype=torch.int64, pin_memory=True)
    tables = []
    shares = sum(table.share for table in scenario.tables)
    for table in scenario.tables:
        of_ranks = [round(size * table.share / shares) for size in sizes]
        rows, own = (torch.zeros(of_ranks[rank], dtype=torch.int64, pin_memory=True) for _ in range(2))
        tables.append(TableBatch(rows, own, of_ranks))
    return MicroBatch(images, labels, sizes, split=tables or None)
