"""The keys of [asynchronous]."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.asynchronous.feature import Asynchronous

_TOGETHER = "that is for steps which ranks take together"
_UNTRIED = "nobody has tried"


@dataclass(frozen=True)
class AsynchronousConfig(FeatureConfig):
    """[asynchronous]: steps without collectives; ranks send each other what they have changed.

    Attributes:
        mode: Each rank holds the whole backbone and class table (head_ranks = 1, in host memory), steps by its own
            samples, and sends the others what it has changed: full, after every step, in the background; half, once
            for each round of period steps, and waits until that is sent; none: ranks step together.
        staleness: The most steps of any other rank that a step may miss: no rank begins step t before it has what all
            others changed in their steps before t − staleness, and waits for them else. 0: ranks step together.
        period: Steps of a round under half, whose changes are sent together.
    """

    mode: str = key(
        "none", choices=("none", "full", "half"), stands_for_section=True, moved_from="parallel.asynchronous"
    )
    staleness: int = key(8, least=0, moved_from="parallel.staleness")
    period: int = key(8, least=2, moved_from="parallel.averaging_period")

    steps_alone = True
    alone: ClassVar[Mapping[str, str]] = {
        "parallel.strategy": _TOGETHER,
        "parallel.tp": _TOGETHER,
        "parallel.pp": _TOGETHER,
        "parallel.comm_hook": _TOGETHER,
        "parallel.communicators": _TOGETHER,
        "parallel.bucket_mb": _TOGETHER,
        "replicas.averaging_period": _TOGETHER,
        "replicas.staleness": _TOGETHER,
        "sync_batchnorm": _TOGETHER,
        "checkpoint.every_minutes": _TOGETHER,
        "table": _UNTRIED,
        "optim.state_dtype": _UNTRIED,
    }

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return self.mode != "none" and self.staleness > 0

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return f'asynchronous.mode = "{self.mode}"'

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse tables that are not a rank's own, rounds that are never sent in time, and other features."""
        if not self.is_on(run):
            return
        if run.head_ranks != 1 or run.head.placement == "device":
            yield (
                f"{self.cause} lets each rank step by a class table of its own, in host memory; give head_ranks = 1, "
                'and head.placement = "host" or "mmap:FILE"'
            )
        if self.mode == "half" and self.staleness < self.period - 1:
            yield (
                f"{self.cause} sends what asynchronous.period = {self.period} steps have changed at once, and "
                f"asynchronous.staleness = {self.staleness} would wait for a part of them; give {self.period - 1} or "
                "more, or a shorter period"
            )
        if run.precision == "fp16":
            yield f'{self.cause} would give each rank a loss scale of its own; give precision = "bf16"'
        for other in run.features_on:
            if other is not self and not other.goes_with_own_steps:
                yield f"{self.cause} does not go with {other.cause}: {_UNTRIED}; leave one of them out"

    def plan_notes(self) -> list[str]:
        """See :meth:`FeatureConfig.plan_notes`."""
        return ["ranks step together: what asynchronous steps send, and keep in host memory, is not planned"]

    def make(self, run: "Config") -> "Asynchronous":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.asynchronous.feature import Asynchronous

        return Asynchronous(run)
