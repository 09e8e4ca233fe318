"""The run to plan: a configuration, a number of classes, the ranks, and the table's layout on them."""

from dataclasses import dataclass, replace

from plsc.config import Config
from plsc.errors import UsageError
from plsc.parallel.mesh import check_head_ranks

# How the table can be stored, from the most exact down: (weights, momentum or moments).
STORAGES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("bfloat16", "none"))


@dataclass(frozen=True)
class PlanConfig:
    """A run on ``world`` ranks, one GPU each, ``per_node`` to a machine.

    The class table is sharded over ``head_ranks`` ranks and replicated over the others; ``placement`` is where it lies:
    "device", "host" for its machine's memory, or "mmap" for a file on its machine's disk.
    """

    config: Config
    classes: int
    world: int
    per_node: int
    head_ranks: int
    placement: str = "device"

    @property
    def batch(self) -> int:
        """Samples per rank in one micro-batch."""
        return self.config.data.batch_size

    @property
    def group_batch(self) -> int:
        """Samples per head group in one micro-batch: what a rank gathers."""
        return self.batch * self.head_ranks

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.config.optim.accumulate

    @property
    def replicas(self) -> int:
        """Copies of the table."""
        return self.world // self.head_ranks

    @property
    def rows(self) -> int:
        """Rows of the table on the rank that has most."""
        return -(-self.classes // self.head_ranks) * self.config.head.centers

    @property
    def visited_rows(self) -> int:
        """Rows of this rank that take part in a step. Positives, all of them others, are shared out evenly."""
        rate, centers = self.config.head.sample_rate, self.config.head.centers
        if rate >= 1:
            return self.rows
        owned = self.rows // centers
        positives = -(-self.batch * self.world * self.micro_batches // self.head_ranks)
        return min(max(round(rate * owned), min(positives, owned)), owned) * centers

    @property
    def backbone_states(self) -> int:
        """Numbers that the backbone's optimizer keeps for each weight: adafactor at most, muon of each matrix."""
        optim = self.config.optim
        if optim.name in ("sgd", "lars"):
            return int(optim.momentum > 0)
        return 2 if optim.name in ("adamw", "lamb") else 1

    @property
    def weight_width(self) -> int:
        """Bytes of a number of the table, and of the features that it is multiplied with."""
        return {"float32": 4, "bfloat16": 2}[self.config.head.weight_dtype]

    @property
    def storage(self) -> tuple[str, str]:
        """(weights, momentum)."""
        return self.config.head.weight_dtype, self.config.head.momentum_dtype

    def stored_as(self, weights: str, momentum: str) -> "PlanConfig":
        """The same with another storage of the table."""
        return self._with_head(weight_dtype=weights, momentum_dtype=momentum)

    def sampled(self, rate: float) -> "PlanConfig":
        """The same with another sample rate."""
        return self._with_head(sample_rate=rate)

    def _with_head(self, **changes: object) -> "PlanConfig":
        head = replace(self.config.head, **changes)  # type: ignore[arg-type]
        return replace(self, config=replace(self.config, head=head))


def check_ranks(world: int, per_node: int, head_ranks: int) -> None:
    """UsageError unless these numbers of ranks go together. ``head_ranks`` 0 stands for all."""
    for option, value in (("--gpus", world), ("--gpus-per-node", per_node)):
        if value < 1:
            raise UsageError(f"{option} {value}: at least one is needed")
    check_head_ranks(head_ranks, world)
