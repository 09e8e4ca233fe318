"""The keys of [replicas]."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.replicas.feature import Replicas


@dataclass(frozen=True)
class ReplicasConfig(FeatureConfig):
    """[replicas]: class tables of head groups (head_ranks) that are averaged every few steps.

    Attributes:
        averaging_period: Steps after which the class tables of head groups, each updated by its own group's samples,
            are averaged; 1: gradients are summed over the groups at every step, and the tables stay equal.
        staleness: Steps after which such an average comes in, while groups keep going; for tables on host or mmap; 0:
            they wait for it.
    """

    averaging_period: int = key(1, least=1, moved_from="parallel.head_averaging_period")
    staleness: int = key(0, least=0, in_tables=True, moved_from="head.staleness")

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return self.averaging_period > 1 or self.staleness > 0

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return f"replicas.averaging_period = {self.averaging_period}"

    def head_options(self) -> dict[str, Any]:
        """See :meth:`FeatureConfig.head_options`."""
        return {"averaging_period": self.averaging_period, "staleness": self.staleness}

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse tables without groups, and what the head itself refuses, in the words of keys."""
        from plsc.features.replicas.averaging import ReplicaOptions
        from plsc.head.storage import TableStorage

        if run.head_ranks == 0:
            yield (
                "replicas.averaging_period and replicas.staleness are for the tables of several head groups; give "
                "head_ranks, the ranks of a group"
            )
        head = run.head
        try:
            options = ReplicaOptions(self.averaging_period, self.staleness)
            options.check_table(TableStorage.of(head.weight_dtype, head.momentum_dtype, head.placement))
            if run.optim.clip_head and options.averages:
                options.refuse_clipping()
        except UsageError as error:
            words = {
                "staleness is": "replicas.staleness is",
                "averaging_period": "replicas.averaging_period",
                "clip the backbone's alone": "leave optim.clip_head out",
                "placement=": "head.placement=",
            }
            text = str(error)
            for of_the_head, of_a_key in words.items():
                text = text.replace(of_the_head, of_a_key)
            yield text

    def make(self, run: "Config") -> "Replicas":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.replicas.feature import Replicas

        return Replicas(run)
