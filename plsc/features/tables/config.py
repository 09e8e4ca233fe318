"""Several class tables by [[table]]: the configuration that holds for each, and what they do not go with."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plsc.config.class_tables import ClassTable
from plsc.config.sections import TableKeys
from plsc.config.stages import with_values
from plsc.errors import UsageError
from plsc.feature_config import FeatureConfig
from plsc.progress import counted

if TYPE_CHECKING:
    from plsc.config import Config, DataConfig
    from plsc.data import ImageDataset
    from plsc.features.tables.feature import Tables

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}").fullmatch
# Keys of [[table]] by the attributes of a class table.
_OF_THE_TABLE = {field.name: field.name.removeprefix("batch_") for field in dataclasses.fields(TableKeys)}


@dataclass(frozen=True)
class TablesConfig(FeatureConfig):
    """Several class tables over one backbone; their keys are those of [[table]]."""

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return bool(run.table)

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return "[[table]]"

    def class_tables(self, run: "Config") -> list[ClassTable]:
        """See :meth:`FeatureConfig.class_tables`."""
        found = []
        for table in run.table:
            own = {_OF_THE_TABLE[name]: value for name, value in table.values.items() if name in _OF_THE_TABLE}
            changes = {name: value for name, value in table.values.items() if name not in _OF_THE_TABLE}
            of_table = with_values(dataclasses.replace(run, table=()), changes)
            found.append(ClassTable(**{"name": "", **own}, config=of_table))
        return found

    def open_data(self, run: "Config", open_one: "Callable[[DataConfig], ImageDataset]") -> "ImageDataset":
        """See :meth:`FeatureConfig.open_data`; UsageError: a table has fewer rows than its data has classes."""
        from plsc.features.tables.joined import JoinedDataset

        tables = self.class_tables(run)
        parts = {table.name: open_one(table.config.data) for table in tables}
        for table in tables:
            if table.classes is not None and table.classes < (needed := parts[table.name].num_classes):
                raise UsageError(
                    f"table {table.name} has classes = {table.classes:,}, and {table.config.data.train} "
                    f"{counted(needed, 'class')}; leave classes out"
                )
        classes = [table.classes or parts[table.name].num_classes for table in tables]
        return JoinedDataset(parts, [table.share for table in tables], classes)

    def refusals(self, run: "Config") -> Iterator[str]:
        """Say what of several class tables does not go together, or not with the run."""
        tables = self.class_tables(run)
        for number, table in enumerate(tables, start=1):
            if not _NAME(table.name):
                yield f'table {number}: name = "{table.name}" names no table; give 1 to 32 of a-z, 0-9, - and _'
        names = [table.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                yield f'two tables have the name "{name}"; give each its own'
        placements = [table.config.head.placement for table in tables]
        for placement in placements:
            if placement.startswith("mmap:") and placements.count(placement) > 1:
                yield f'two tables lie in head.placement = "{placement}"; give each a file of its own'
        for axis in ("tp", "pp"):
            if (ranks := getattr(run.parallel, axis)) > 1:
                yield f"[[table]] is not made for parallel.{axis} = {ranks}; leave one of them out"
        for table in tables:
            yield from (f"table {table.name}: {refusal}" for refusal in table.config.refusals())

    def make(self, run: "Config") -> "Tables":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.tables.feature import Tables

        return Tables(run)
