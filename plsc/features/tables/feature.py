"""Several class tables as a feature of a run."""

from collections.abc import Sequence

from plsc.features.tables.losses import TableLosses
from plsc.parallel.strategies import Strategy
from plsc.train.feature import Feature
from plsc.train.tables import TrainedTable


class Tables(Feature):
    """Gives each class table the part of a batch that is of its data."""

    def class_loss(self, tables: Sequence[TrainedTable], strategy: Strategy) -> TableLosses:
        """See :meth:`Feature.class_loss`."""
        return TableLosses(tables, strategy)
