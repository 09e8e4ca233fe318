"""Backward-compatible training as a feature of a run: a loss among the centres of an old model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from plsc.errors import UsageError
from plsc.features.compatible.config import CompatibleConfig
from plsc.features.compatible.influence_loss import InfluenceLoss, make_influence_loss
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents
from plsc.train.feature import Feature
from plsc.train.state import stored_config


class Compatible(Feature):
    """Adds the influence loss to that of the run.

    Attributes:
        influence: the loss, once the components are there.
    """

    loss_name = "influence_loss"
    influence: InfluenceLoss

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`; raises as :func:`make_influence_loss` does."""
        self._mesh, self._data_ranks = components.mesh, components.strategy.data_ranks
        self.influence = make_influence_loss(self.config, components.dataset, components.strategy, exact=exact)
        self.loss_weight = self.influence.weight

    def begin_step(self, labels: Sequence[Tensor]) -> None:
        """See :meth:`Feature.begin_step`."""
        self.influence.begin(labels, self._mesh, self._data_ranks)

    def loss(self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See :meth:`Feature.loss`; the mean is over samples that have a centre."""
        share = self.influence.share(labels)
        return self.influence(embeddings, labels, sizes), share

    def state(self) -> Any:
        """See :meth:`Feature.state`."""
        return self.influence.identity

    def check_state(self, state: Any, stored: StoredCheckpoint) -> None:
        """Refuse other centres by the same name: an old run may have gone on since, or begun anew.

        Checkpoints of earlier versions have no digest of them.
        """
        source = self.config.section(CompatibleConfig).with_
        if not isinstance(state, dict):
            return
        if stored_config(stored.state["config"]).section(CompatibleConfig).with_ != source:
            return
        own = self.influence
        if any(state.get(name, now) != now for name, now in own.identity.items()):
            also = ": rows or names are others" if state.get("origin") == own.origin else ""
            raise UsageError(
                f"compatible.with = {source} holds other centres ({own.origin}) than when the run began "
                f"({state.get('origin')}){also}; give the checkpoint or file that holds those, or begin another run"
            )

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`."""
        return {"old": self.influence.describe()}

    def flops_per_image(self) -> float:
        """Logits, and the embedding's gradient."""
        head = self.influence.head
        return 4.0 * head.dim * head.num_classes * head.centers
