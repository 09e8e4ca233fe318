"""Frozen weights as a feature of a run."""

from typing import Any

from torch import nn

from plsc.errors import IntegrityError
from plsc.features.frozen.config import FrozenConfig
from plsc.features.frozen.parts import FrozenNames, FrozenParts, freeze_for_good, frozen_for_good
from plsc.progress import counted
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents
from plsc.train.feature import Feature


class Frozen(Feature):
    """Keeps weights as they are, in the whole run or in some of its stages.

    Attributes:
        by_stage: what the run before its first stage freezes, and each stage.
        parts: what this rank holds of what is frozen now.
    """

    by_stage: list[FrozenNames]
    parts: FrozenParts

    def prepare(self, backbone: nn.Module) -> None:
        """See :meth:`Feature.prepare`."""
        self.by_stage = freeze_for_good(self.config, backbone)

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`."""
        self._strategy = components.strategy
        self.parts = FrozenParts(self.by_stage[0], components.strategy)

    def enter_stage(self, components: TrainComponents, stage: int) -> None:
        """See :meth:`Feature.enter_stage`."""
        self.parts = FrozenParts(self.by_stage[stage], components.strategy)

    def trains_backbone(self) -> bool:
        """See :meth:`Feature.trains_backbone`."""
        return not self.parts.trains_head_alone

    def before_update(self) -> None:
        """Drop the frozen weights' gradients: the optimizer then leaves them and their state as they are."""
        for weight in self.parts.weights:
            weight.grad = None

    def after_evaluation(self) -> None:
        """See :meth:`Feature.after_evaluation`."""
        self.parts.hold()

    def state(self) -> Any:
        """The names of the weights that every stage freezes."""
        return sorted(frozen_for_good(self.by_stage)) or None

    def check_state(self, state: Any, stored: StoredCheckpoint) -> None:
        """Refuse other weights that are frozen for good than the run began with."""
        if not isinstance(state, list | None) or not all(isinstance(name, str) for name in state or ()):
            raise IntegrityError(f"{stored.path} holds no names of frozen weights; it is another program's checkpoint")
        if changed := sorted(frozen_for_good(self.by_stage).symmetric_difference(state or ())):
            FrozenConfig.left_out(changed)

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`: the weights that are not trained now."""
        names = self.parts.names
        weights = {weight.name: weight.shape.numel() for weight in self._strategy.weights}
        if not names.weights:
            return {}
        count = sum(weights.get(name, 0) for name in names.weights)
        rest = "; no backward pass through the backbone" if names.is_whole else ""
        return {
            "frozen": f"{counted(len(names.weights), 'weight')} of {len(weights)}, {count / 1e6:.1f} M numbers{rest}"
        }
