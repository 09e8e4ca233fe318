"""The run to plan: a configuration, a number of classes, the ranks, and the table's layout on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from plsc.config import Config, class_tables
from plsc.config.checks import with_precision
from plsc.config.sections import AUTO
from plsc.devices import Device
from plsc.errors import UsageError
from plsc.parallel.mesh import check_head_ranks
from plsc.parallel.strategies import STAGES_OF_A_RANK, Strategy, StrategyOptions, class_within_a_stage

# How the table can be stored, from the most exact down: (weights, momentum or moments).
STORAGES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("bfloat16", "none"))


@dataclass(frozen=True)
class PlanConfig:
    """A run on ``world`` ranks, one GPU each, ``per_node`` to a machine.

    The class table is sharded over ``head_ranks`` ranks and replicated over the others; ``placement`` is where it lies:
    "device", "host" for its machine's memory, or "mmap" for a file on its machine's disk. In a pipeline, the ranks of
    the last stage have all of it.

    Of several class tables it is the first one's, with ``others`` beside it; each has its ``name`` and ``share``.
    One that no step updates and no checkpoint holds is ``fixed``: what it is, in words.
    """

    config: Config
    classes: int
    world: int
    per_node: int
    head_ranks: int
    placement: str = "device"
    name: str = ""
    share: float = 1.0
    fixed: str = ""
    others: tuple["PlanConfig", ...] = ()

    @property
    def tables(self) -> tuple["PlanConfig", ...]:
        """This run with each of its class tables."""
        return (self, *(replace(other, head_ranks=self.head_ranks) for other in self.others))

    @property
    def batch(self) -> int:
        """Samples per rank in one micro-batch; a pipeline cuts a batch in several."""
        return -(-self.config.data.batch_size // self.pipeline_micro_batches)

    @property
    def options(self) -> StrategyOptions:
        """How the backbone lies on the ranks."""
        return self.config.parallel.strategy_options()

    @property
    def kind(self) -> type[Strategy]:
        """The strategy of the ranks that hold the same layers."""
        return class_within_a_stage(self.options, self.data_ranks, offload=self.config.parallel.offload)

    @property
    def pipeline_micro_batches(self) -> int:
        """Micro-batches that are in a pipeline together; 1 without one."""
        return self.options.micro_batches

    @property
    def tp(self) -> int:
        """Ranks of a tensor parallel group."""
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        """Ranks of a pipeline."""
        return self.config.parallel.pp

    @property
    def pipeline_parts(self) -> int:
        """Parts of the backbone on each rank of a pipeline: several of an interleaved one."""
        return STAGES_OF_A_RANK[self.config.parallel.pp_schedule]

    @property
    def model_ranks(self) -> int:
        """Ranks that share a batch: those of a tensor parallel group, in all stages of the pipeline."""
        return self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Numbers of batches under way at a time."""
        return self.options.data_ranks(self.world)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which weights, gradients and the optimizer's state are sharded; 1 where they are whole."""
        return self.options.shards(self.world, self.per_node)

    @property
    def gathering_passes(self) -> int:
        """Passes of a batch for which weights are gathered, by an engine that sums gradients onto shards; 0: none."""
        return self.kind.gathering_passes(self.data_ranks, self.pp)

    @property
    def samples(self) -> int:
        """Samples of a step, of all ranks."""
        return self.batch * self.data_ranks * self.micro_batches

    @property
    def group_batch(self) -> int:
        """Samples per head group in one micro-batch: what a rank gathers."""
        return math.ceil(self.batch * self.share * self.head_ranks / self.tp)

    @property
    def filter_rows(self) -> int:
        """Rows of a sample's class that each pass compares with every row, a label a sample; 0 without a filter."""
        return self.config.head.centers if any(each.filters_negatives for each in self.config.features) else 0

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.config.optim.accumulate * self.pipeline_micro_batches

    @property
    def table_ranks(self) -> int:
        """Ranks that have a part of the table: all, or those of a pipeline's last stage."""
        return self.world // self.pp

    @property
    def replicas(self) -> int:
        """Copies of the table."""
        return self.table_ranks // self.head_ranks

    @property
    def rows(self) -> int:
        """Rows of the table on the rank that has most."""
        return -(-self.classes // self.head_ranks) * self.config.head.centers

    @property
    def visited_rows(self) -> int:
        """Rows of this rank that a micro-batch visits. Positives, all of them others, are shared out evenly."""
        rate, centers = self.config.head.sample_rate, self.config.head.centers
        if rate >= 1:
            return self.rows
        owned = self.rows // centers
        positives = math.ceil(self.batch * self.share * self.data_ranks / self.head_ranks)
        return min(max(round(rate * owned), min(positives, owned)), owned) * centers

    @property
    def updated_rows(self) -> int:
        """Rows of this rank that any of a step's micro-batches visits, each of which draws its own, if not frozen."""
        if self.fixed or self.config.keeps_rows == "all":
            return 0
        missed = 1 - self.visited_rows / max(self.rows, 1)
        return round(self.rows * (1 - missed**self.micro_batches))

    @property
    def backbone_states(self) -> int:
        """Numbers that the backbone's optimizer keeps for each weight: adafactor at most, muon of each matrix."""
        optim = self.config.optim
        if optim.name in ("sgd", "lars"):
            return int(optim.momentum > 0)
        return 2 if optim.name in ("adamw", "lamb") else 1

    @property
    def dim(self) -> int:
        """Of the embeddings."""
        return self.config.embedding_dim

    @property
    def is_sampled(self) -> bool:
        """True where a step visits some of the rows only."""
        return self.config.head.sample_rate < 1

    @property
    def clips_head(self) -> bool:
        """Whether pass 2 runs once more before the update, for the norm of the gradient."""
        return self.config.optim.clip_head and self.config.optim.clip_norm > 0

    def rows_of(self, passes: int) -> int:
        """Rows that pass 1, or pass 2, goes over."""
        return self.updated_rows if passes == 2 else self.visited_rows

    def samples_of(self, passes: int) -> int:
        """Samples of a rank's pass 1; pass 2 has those of all micro-batches."""
        return self.group_batch * (self.micro_batches if passes == 2 else 1)

    @property
    def weight_width(self) -> int:
        """Bytes of a number of the table, and of the features that it is multiplied with."""
        return {"float32": 4, "bfloat16": 2}[self.config.head.weight_dtype]

    @property
    def storage(self) -> tuple[str, str]:
        """(weights, momentum)."""
        return self.config.head.weight_dtype, self.config.head.momentum_dtype

    def placed(self, **parallel: object) -> "PlanConfig":
        """The same with other keys of [parallel]."""
        changed = replace(self.config.parallel, **parallel)  # type: ignore[arg-type]
        return replace(self, config=replace(self.config, parallel=changed))

    def stored_as(self, weights: str, momentum: str) -> "PlanConfig":
        """The same with another storage of the table."""
        return self._with_head(weight_dtype=weights, momentum_dtype=momentum)

    def suited_to(self, device: Device) -> "PlanConfig":
        """The same in precisions that ``device`` has units for, as "auto" would choose them."""
        config = self.config
        if config.precision not in ("fp32", *device.units.precisions):
            features = tuple(section for section in config.features if not section.precision)
            config = with_precision(replace(config, precision=AUTO, features=features), device.units)
        if UNITS_OF[config.head.fp32_precision] not in device.products:
            config = replace(config, head=replace(config.head, fp32_precision="ieee"))
        return replace(self, config=config, others=tuple(other.suited_to(device) for other in self.others))

    def sampled(self, rate: float) -> "PlanConfig":
        """The same with another sample rate."""
        return self._with_head(sample_rate=rate)

    def _with_head(self, **changes: object) -> "PlanConfig":
        head = replace(self.config.head, **changes)  # type: ignore[arg-type]
        return replace(self, config=replace(self.config, head=head))


# What multiplies a float32 table, by head.fp32_precision.
UNITS_OF = {"ieee": "fp32", "tf32": "tf32", "bf16x3": "bf16"}


def plan_config(config: Config, classes: int | Sequence[int], world: int, per_node: int) -> PlanConfig:
    """The run of ``config`` on so many ranks, with the tables of ``classes`` each sharded and placed as it says."""
    head_ranks, tables = config.head_ranks or world // config.parallel.pp, class_tables(config)
    shares = sum(table.share for table in tables)
    first, *others = (
        PlanConfig(
            table.config,
            reduce(lambda room, section: section.planned_classes(room), table.config.features, count),
            world,
            min(per_node, world),
            head_ranks,
            table.config.head.placement.partition(":")[0],
            table.name,
            table.share / shares,
        )
        for table, count in zip(tables, [classes] if isinstance(classes, int) else classes, strict=True)
    )
    added = [table for section in config.features_on for table in section.planned_tables(first)]
    return replace(first, others=(*others, *added))


def check_ranks(world: int, per_node: int, head_ranks: int) -> None:
    """UsageError unless these numbers of ranks go together. ``head_ranks`` 0 stands for all."""
    for option, value in (("--gpus", world), ("--gpus-per-node", per_node)):
        if value < 1:
            raise UsageError(f"{option} {value}: at least one is needed")
    check_head_ranks(head_ranks, world)
