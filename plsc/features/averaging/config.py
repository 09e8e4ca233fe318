"""The keys of [averaging]."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.averaging.feature import Averaging


@dataclass(frozen=True)
class AveragingConfig(FeatureConfig):
    """[averaging]: averages of the backbone's weights in the place of its gradients; the class head stays exact.

    Attributes:
        name: With local_sgd each rank steps by its own gradients, and all average their weights every period steps;
            post_local_sgd begins with that at start_step; hierarchical averages more often within groups of ranks;
            diloco takes an outer step by what the ranks have changed; none: gradients are averaged at every step.
        period: Steps from one average over all ranks to the next; diloco is published with 500.
        start_step: post_local_sgd: steps of the run before it, in which gradients are averaged.
        group_ranks: Consecutive ranks (those of a machine, say) that average their gradients with each other at every
            step, whatever the name; a divisor of all ranks; 1: none do.
        group_period: hierarchical: steps from one average of weights within such a group to the next, a divisor of
            period; 1: their gradients are averaged at every step.
        outer_lr: diloco: learning rate of the outer optimizer, SGD with Nesterov's momentum.
        outer_momentum: diloco: momentum of the outer optimizer.
    """

    name: str = key(
        "none",
        choices="plsc.features.averaging.exchange:AVERAGINGS",
        stands_for_section=True,
        moved_from="parallel.averaging",
    )
    period: int = key(8, least=2, moved_from="parallel.averaging_period")
    start_step: int = key(1000, least=1, moved_from="parallel.averaging_start_step")
    group_ranks: int = key(1, least=1, moved_from="parallel.averaging_group_ranks")
    group_period: int = key(1, least=1, moved_from="parallel.averaging_group_period")
    outer_lr: float = key(0.7, above=0, moved_from="parallel.outer_lr")
    outer_momentum: float = key(0.9, least=0, below=1, moved_from="parallel.outer_momentum")

    moves_weights = True
    keeps: ClassVar[Mapping[str, str]] = {"outer": "the momentum of the outer steps (averaging)"}
    alone: ClassVar[Mapping[str, str]] = {
        "parallel.comm_hook": "it sends weights, and no gradients that a hook would compress",
        "parallel.strategy": "it averages whole weights, and leaves their states to the ranks",
        "parallel.tp": "it averages whole weights",
        "parallel.pp": "a pipeline exchanges gradients stage by stage",
        "parallel.communicators": "it sends no buckets of gradients",
        "sync_batchnorm": "ranks have different weights, of which it would mix the statistics",
        "optim.clip_head": "each rank's gradient is clipped by its own norm, and the class table's has no common one",
        "optim.state_dtype": "ranks have codes of their own, which it cannot merge",
    }

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return self.name != "none"

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return f'averaging.name = "{self.name}"'

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse groups that are none."""
        if self.name == "hierarchical" and self.group_ranks == 1:
            yield f"{self.cause} needs groups; give averaging.group_ranks, the ranks of a machine"
        if self.name == "hierarchical" and self.period % self.group_period:
            yield (
                f"averaging.period = {self.period} is no multiple of averaging.group_period = {self.group_period}; "
                "give one"
            )

    def check_world(self, ranks: int) -> None:
        """Raise UsageError unless groups divide so many ranks."""
        from plsc.parallel.mesh import divisors

        if ranks % self.group_ranks:
            raise UsageError(
                f"averaging.group_ranks = {self.group_ranks} does not divide the number of ranks, {ranks}; "
                f"give {divisors(ranks)}"
            )

    def make(self, run: "Config") -> "Averaging":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.averaging.feature import Averaging

        return Averaging(run)
