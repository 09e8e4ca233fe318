"""Classes that come and go as a feature of a run."""

from itertools import pairwise
from typing import Any

from plsc.errors import UsageError
from plsc.features.dynamic.config import other_classes
from plsc.features.dynamic.dynamic_head import DynamicHead
from plsc.features.dynamic.named_first_rows import insert_first_rows
from plsc.parallel.tensor_shard import TensorShard
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents
from plsc.train.feature import Feature
from plsc.train.tables import TrainedTable


class DynamicClasses(Feature):
    """Tells tables the names of their data's classes, and keeps the keys of these in checkpoints."""

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`: labels are places in names from now on."""
        self._tables, names = components.tables, components.dataset.class_names
        firsts = [*(table.first_class for table in self._tables), len(names)]
        for table, (first, stop) in zip(self._tables, pairwise(firsts), strict=True):
            if isinstance(table.head, DynamicHead):
                table.head.use_names([names[place] for place in range(first, stop)])

    def first_rows(self, table: TrainedTable, source: str) -> bool:
        """See :meth:`Feature.first_rows`: by name, also where rows are back: no checkpoint has their keys yet."""
        if not isinstance(table.head, DynamicHead):
            return False
        insert_first_rows(table.head, source)
        return True

    def takes_other_data(self) -> bool:
        """See :meth:`Feature.takes_other_data`."""
        return all(isinstance(table.head, DynamicHead) for table in self._tables)

    def table_tensors(self) -> dict[str, TensorShard]:
        """See :meth:`Feature.table_tensors`: the keys, all of which a head's first rank writes."""
        found = {}
        for prefix, head in self._heads():
            for name, tensor in head.key_state().items():
                own = tensor if head.mesh.is_main else tensor[:0]
                first = 0 if head.mesh.is_main else len(tensor)
                found[prefix + name] = TensorShard.of_rows(own, first, len(tensor))
        return found

    def restore_tables(self, stored: StoredCheckpoint) -> None:
        """See :meth:`Feature.restore_tables`."""
        for prefix, head in self._heads():
            head.load_key_state(stored.read(prefix))

    def state(self) -> Any:
        """That the run has it; the keys are tensors."""
        return True

    def check_state(self, state: Any, stored: StoredCheckpoint) -> None:
        """Refuse a checkpoint that other tables have keys in."""
        named = {name.rpartition(".")[0] + "." for name in stored.stored if name.startswith("keys.")}
        if named != {prefix for prefix, _ in self._heads()}:
            raise UsageError(other_classes(*(("set", "unset") if named else ("unset", "set"))))

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`: how many there are by name."""
        tables = [table for table in self._tables if isinstance(table.head, DynamicHead)]
        told = [
            f"{f'{table.name}: ' if table.name else ''}{table.head.num_classes:,} by name, at most "
            f"{table.head.max_classes:,}"
            for table in tables
        ]
        return {"classes": "; ".join(told)}

    def _heads(self) -> list[tuple[str, DynamicHead]]:
        """Those whose classes come and go, each with the prefix of its keys' names in a checkpoint."""
        found = [(f"keys.{each.of.prefix}", each.head) for each in self._tables]
        return [(prefix, head) for prefix, head in found if isinstance(head, DynamicHead)]
