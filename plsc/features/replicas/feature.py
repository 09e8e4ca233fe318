"""Averages of head groups' tables as a feature of a run."""

from plsc.features.replicas.averaging import average_bytes
from plsc.features.replicas.config import ReplicasConfig
from plsc.progress import counted
from plsc.train.components import TrainComponents
from plsc.train.feature import Feature


class Replicas(Feature):
    """Says what the averages send; the heads take them by themselves."""

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`."""
        self._components = components

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`: what a rank gives to the network between groups."""
        mesh, tables = self._components.mesh, self._components.tables
        if mesh.replicas.world_size == 1:
            return {}
        period = self.config.section(ReplicasConfig).averaging_period
        staleness = max(table.of.config.section(ReplicasConfig).staleness for table in tables)
        moved, exact = 0.0, 0.0
        for table in tables:
            head, rows = table.head, len(table.head.weight)
            touched = rows * (1 - (1 - head.sample_rate) ** period)
            moved += average_bytes(round(touched), head.dim, len(table.optimizer.tables)) / period
            exact += average_bytes(round(rows * head.sample_rate), head.dim, 0)
        late = f", {counted(staleness, 'step')} late" if staleness else ""
        groups = counted(mesh.replicas.world_size, "head group")
        sent = f"about {moved / 1e6:,.3f} MB per rank and step in the place of {exact / 1e6:,.3f} MB of gradients"
        return {"tables": f"of {groups} averaged every {counted(period, 'step')}{late}: {sent}"}
