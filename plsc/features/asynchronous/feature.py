"""Asynchronous training as a feature of a run."""

from torch import nn

from plsc.features.asynchronous.changes import AsynchronousChanges
from plsc.features.asynchronous.config import AsynchronousConfig
from plsc.features.asynchronous.strategy import AsynchronousReplicas
from plsc.parallel import Mesh
from plsc.parallel.strategies import Strategy
from plsc.parallel.strategies.ddp import GradientExchange
from plsc.parallel.strategies.layout import Layout
from plsc.progress import counted
from plsc.train.components import TrainComponents
from plsc.train.feature import Feature


class Asynchronous(Feature):
    """Lets each of several ranks step by itself, and exchange what it changes with the others."""

    def strategy(self, mesh: Mesh) -> Strategy:
        """See :meth:`Feature.strategy`."""
        return AsynchronousReplicas(Layout(mesh, mesh, mesh, {}, None))

    def exchange(self, backbone: nn.Module, mesh: Mesh) -> GradientExchange:
        """See :meth:`Feature.exchange`."""
        return AsynchronousChanges(mesh, backbone, self.config.section(AsynchronousConfig))

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`: exchange what the class table's optimizer changes, too."""
        self._components = components
        if isinstance(components.exchange, AsynchronousChanges):
            components.exchange.take_table(components.tables[0].optimizer)

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`: what a rank sends to each of the others."""
        components, own = self._components, self.config.section(AsynchronousConfig)
        if not components.strategy.steps_alone:
            return {}
        period = own.period if own.mode == "half" else 1
        weights = sum(each.parameter.numel() * each.parameter.element_size() for each in components.strategy.weights)
        head = components.tables[0].head
        rows = 4 * head.dim * len(head.weight) * (1 - (1 - head.sample_rate) ** period)
        sent = f"{weights / 1e6:,.3f} MB of the backbone's changes and about {rows / 1e6:,.3f} MB of the table's"
        return {
            "async": f"{own.mode}, staleness at most {own.staleness}; a rank sends each other one {sent} every "
            f"{counted(period, 'step')}; it steps by its share of the learning rate; metrics are the first rank's"
        }
