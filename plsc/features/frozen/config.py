"""The keys of [frozen]."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.toml_keys import key, toml_value

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.frozen.feature import Frozen


@dataclass(frozen=True)
class FrozenConfig(FeatureConfig):
    """[frozen]: weights of the backbone, and rows of the class table, that are not trained.

    Attributes:
        weights: Patterns of names of the backbone's weights that are not trained, as layer1.* or *: they keep their
            values bit for bit, and batch normalisation all of whose weights are frozen keeps its statistics, and
            applies them. frozen = "layer1.*" is short for it.
        rows: Classes that stay in the softmax and whose rows no step changes: all, START:STOP (STOP is the first that
            trains), or FILE.npy of class numbers; where classes come and go, all or FILE.txt of names, one
            a line; unset: none.
    """

    weights: tuple[str, ...] = key((), in_stages=True, stands_for_section=True)
    rows: str | None = key(None, in_tables=True, moved_from="head.frozen_rows")

    goes_with_own_steps = True

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        in_stages = any("frozen.weights" in stage.values for stage in run.stage)
        in_groups = any(table.values.get("frozen") for table in run.optim.groups)
        return bool(self.weights) or in_stages or in_groups

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return f"frozen.weights = {toml_value(self.weights)}"

    def head_options(self) -> dict[str, Any]:
        """See :meth:`FeatureConfig.head_options`."""
        return {} if self.rows is None else {"frozen_rows": self.rows}

    @property
    def keeps_rows(self) -> str:
        """See :attr:`FeatureConfig.keeps_rows`."""
        return "" if self.rows is None else "all" if self.rows == "all" else "some"

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse weights that freeze or thaw where ranks keep parts of gradients or have weights of their own."""
        from plsc.config import stage_configs

        in_stages = {stage.section(FrozenConfig).weights for stage in stage_configs(run)}
        causes = [other.cause for other in run.features_on if other.moves_weights]
        if len(in_stages) > 1 and run.parallel.delays_gradients:
            yield (
                f'parallel.comm_hook = "{run.parallel.comm_hook}" keeps back parts of gradients for later steps, so '
                'no stage can change frozen; give comm_hook = "bf16", or the same frozen to the whole run'
            )
        if causes and (len(in_stages) > 1 or "*" in self.weights):
            yield (
                f"{causes[0]} moves weights without gradients, so no stage can change frozen, and not all can be "
                "frozen; leave it out, or give the same frozen to the whole run"
            )
        learning = [other.cause for other in run.features_on if other.needs_trained_backbone]
        if learning and "*" in self.weights and not run.stage:
            yield f'frozen = "*" trains nothing that {learning[0]} could change; leave one of them out'

    @classmethod
    def former_state(cls, state: Mapping[str, Any]) -> Any:
        """See :meth:`FeatureConfig.former_state`."""
        return state.get("frozen") or None

    @classmethod
    def left_out(cls, state: Any) -> str:
        """Refuse to go on: the optimizer's states are stored by the places of the weights that are not frozen."""
        first = state[0] if isinstance(state, list) and state else state
        raise UsageError(
            f"frozen and optim.groups freeze other weights for the whole run than it began with ({first}, for "
            "one); set them back to go on, or begin another run (another --out), with --init_weights "
            "RUN/model.safetensors and a [[stage]] for what changes on the way"
        )

    def make(self, run: "Config") -> "Frozen":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.frozen.feature import Frozen

        return Frozen(run)
