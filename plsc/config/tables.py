"""The class tables of a run: the configuration that holds for each, and what several do not go with."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from plsc.config.sections import Config, TableKeys
from plsc.config.stages import with_values

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}").fullmatch
_OF_THE_TABLE = {field.name for field in dataclasses.fields(TableKeys)}


@dataclass(frozen=True)
class TableConfig:
    """A class table of a run.

    Attributes:
        name: "" of the only table, which [head] describes.
        config: that of the run, with the values that the table gives.
        classes: rows of the table; None: as many as the data has classes.
        batch_share: its share of each batch, in relation to the other tables' shares.
        loss_weight: the factor of its mean loss in the run's loss.
    """

    name: str
    config: Config
    classes: int | None = None
    batch_share: float = 1.0
    loss_weight: float = 1.0

    @property
    def prefix(self) -> str:
        """What stands before its name where several are told of: "" or "NAME."."""
        return f"{self.name}." if self.name else ""


def table_configs(config: Config) -> list[TableConfig]:
    """The class tables of a run, or of one of its stages: those of [[table]], or the one that [head] describes."""
    if not config.table:
        return [TableConfig("", config)]
    found = []
    for table in config.table:
        own = {name: value for name, value in table.values.items() if name in _OF_THE_TABLE}
        changes = {name: value for name, value in table.values.items() if name not in own}
        of_table = with_values(dataclasses.replace(config, table=()), changes)
        found.append(TableConfig(**{"name": "", **own}, config=of_table))
    return found


def refusals_of_tables(config: Config) -> Iterator[str]:
    """Say what of several class tables does not go together, or not with the run."""
    if not config.table:
        return
    tables = table_configs(config)
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
        if (ranks := getattr(config.parallel, axis)) > 1:
            yield f"[[table]] is not made for parallel.{axis} = {ranks}; leave one of them out"
    for table in tables:
        yield from (f"table {table.name}: {refusal}" for refusal in table.config.refusals())
