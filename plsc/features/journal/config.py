"""The keys of [journal]."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from plsc.errors import DataError
from plsc.feature_config import DiskTerm, FeatureConfig, RowsOutside
from plsc.toml_keys import key

if TYPE_CHECKING:
    from plsc.config import Config
    from plsc.features.journal.feature import Journal
    from plsc.plan.plan_config import PlanConfig
    from plsc.train.checkpoint_reader import StoredCheckpoint

NOT_HERE = (
    "goes with a class table in files, which is not the one here: give the same head.placement with journal = true, "
    "and bring the files back"
)
_LAST_ALONE = "a journal goes back to the last checkpoints alone"


@dataclass(frozen=True)
class JournalConfig(FeatureConfig):
    """[journal]: a class table whose mapped files are part of the checkpoints.

    Attributes:
        enabled: Let the files of head.placement = mmap:FILE be part of the checkpoints: what rows held at the last ones
            is kept next to them, in place of a copy of the table in each. journal = true is short for it.
    """

    enabled: bool = key(False, stands_for_section=True, moved_from="head.journal")

    keeps_tables = True
    alone: ClassVar[Mapping[str, str]] = {
        "checkpoint.keep.every_hours": _LAST_ALONE,
        "checkpoint.keep.best": _LAST_ALONE,
        "table": "it is for a single table",
    }

    def is_on(self, run: "Config") -> bool:
        """See :meth:`FeatureConfig.is_on`."""
        return self.enabled

    @property
    def cause(self) -> str:
        """See :attr:`FeatureConfig.cause`."""
        return "journal = true"

    def refusals(self, run: "Config") -> Iterator[str]:
        """Refuse tables that are in no file."""
        if self.enabled and not run.head.placement.startswith("mmap:"):
            yield f'{self.cause} is for tables in a mapped file: give head.placement = "mmap:FILE"'

    def head_options(self) -> dict[str, Any]:
        """See :meth:`FeatureConfig.head_options`."""
        return {"journal": True} if self.enabled else {}

    def make(self, run: "Config") -> "Journal":
        """See :meth:`FeatureConfig.make`."""
        from plsc.features.journal.feature import Journal

        return Journal(run)

    def planned_disk(self, table: "PlanConfig", row_bytes: int) -> list[DiskTerm]:
        """See :meth:`FeatureConfig.planned_disk`: what rows held at the checkpoints that can be gone back to."""
        from plsc.features.journal.undo_journal import journal_bytes

        share = table.updated_rows / max(table.rows, 1)
        kept, nbytes = journal_bytes(table.rows, row_bytes, share, table.config.checkpoint)
        return [DiskTerm("journals", f"what they held at {kept} savepoints, about", nbytes)]

    @classmethod
    def former_state(cls, state: Mapping[str, Any]) -> Any:
        """See :meth:`FeatureConfig.former_state`."""
        return state.get("savepoints")

    @classmethod
    def left_out(cls, state: Any) -> str:
        """Refuse to go on: the checkpoint holds no rows."""
        raise DataError(f"the checkpoint {NOT_HERE}")

    @classmethod
    def open_rows(cls, stored: "StoredCheckpoint", state: Any, used: Sequence[int] | None) -> RowsOutside:
        """See :meth:`FeatureConfig.open_rows`."""
        from plsc.features.journal.saved_rows import saved_table

        return saved_table(stored, state, used)
