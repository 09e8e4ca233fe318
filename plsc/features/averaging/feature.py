"""Averages of weights as a feature of a run."""

from torch import nn

from plsc.features.averaging.config import AveragingConfig
from plsc.features.averaging.exchange import model_averaging
from plsc.parallel import Mesh
from plsc.parallel.strategies.ddp import GradientExchange
from plsc.progress import counted
from plsc.train.components import TrainComponents
from plsc.train.feature import Feature


class Averaging(Feature):
    """Lets ranks average their weights in the place of their gradients."""

    def exchange(self, backbone: nn.Module, mesh: Mesh) -> GradientExchange:
        """See :meth:`Feature.exchange`."""
        return model_averaging(self.config.section(AveragingConfig), backbone, mesh)

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`."""
        self._components = components

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`: what a rank gives to the network of all ranks."""
        components, averaging = self._components, self.config.section(AveragingConfig)
        if components.mesh.world_size == 1:
            return {}
        weights = [weight.parameter for weight in components.strategy.weights]
        period, start = averaging.period, averaging.start_step
        sent = sum(components.exchange.sent_bytes(weights, start + step) for step in range(period))
        whole = sum(weight.numel() * weight.element_size() for weight in weights)
        groups = f" in groups of {averaging.group_ranks}" if averaging.group_ranks > 1 else ""
        return {
            "average": f"{averaging.name}{groups}: {sent / 1e6:,.3f} MB of weights per rank every "
            f"{counted(period, 'step')}, {sent / period / 1e6:,.3f} MB per step in the place of {whole / 1e6:,.3f} MB "
            "of gradients"
        }
