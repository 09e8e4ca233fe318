"""A table in mapped files that are part of the checkpoints: they outlive the run, and go back to its savepoints.

:mod:`plsc.features.journal.undo_journal` is the journal itself, and says what the files are.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.features.journal.undo_journal import UndoJournal
from plsc.head.class_table import TableShape
from plsc.head.host_memory import Column, HostMemory, mapped_file
from plsc.head.host_table import HostTable
from plsc.head.options import HeadFeature
from plsc.head.storage import MappedTables
from plsc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from plsc.head.sharded_head import ShardedHead


@dataclass(frozen=True)
class JournalOptions(HeadFeature):
    """Whether a mapped table's files are a checkpoint of it.

    A head has, besides, the attributes ``set_savepoint``, ``roll_back`` (:class:`JournaledTable`'s) and
    ``undo_journal``, its :class:`UndoJournal`, or None.

    Attributes:
        journal: keep the values that rows had at the last savepoints (:meth:`JournaledTable.set_savepoint`), so that a
            head that is made over the files again goes on after :meth:`JournaledTable.roll_back`, whatever killed the
            process.
    """

    journal: bool = False

    def mapped_tables(self, placement: str) -> MappedTables | None:
        """See :meth:`HeadFeature.mapped_tables`."""
        if not self.journal:
            return None
        if mapped_file(placement) is None:
            raise UsageError(f'journal is for tables in a mapped file: give placement="mmap:FILE", not {placement!r}')
        return JournaledTable.over

    def attach(self, head: "ShardedHead") -> None:
        """See :meth:`HeadFeature.attach`."""
        table = head.softmax.table
        methods = {name: getattr(table, name, _refuse) for name in ("set_savepoint", "roll_back")}
        vars(head).update(methods, undo_journal=getattr(table, "journal", None), journal=self.journal)


def _refuse(step: int) -> None:
    raise UsageError('this head has no savepoints: make it with placement="mmap:FILE" and journal=True')


class JournaledFiles(HostMemory):
    """Columns of a table in mapped files, whose old values a journal keeps; adopted files are mapped as they are.

    Args:
        file: FILE of ``FILE.rankR-of-W.NAME``.
        shape: of the table; one that exists has to be the same.
        mesh: R and W.
    """

    def __init__(self, file: Path, shape: TableShape, mesh: Mesh) -> None:
        super().__init__(file, mesh.rank, mesh.world_size, pinned=False)
        described = {name: value for name, value in asdict(shape).items() if name != "capacity"}
        described["rows"] = shape.reserved  # of which any number may be in use at a savepoint
        self.journal = UndoJournal(self.prefix, described)

    def table(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Column:
        """See :meth:`HostMemory.table`."""
        return self.journal.follow(name, super().table(name, rows, columns, dtype))

    def numbers(self, name: str, rows: int, dtype: torch.dtype) -> Column:
        """See :meth:`HostMemory.numbers`; these are in a file too."""
        if rows == 0:
            return self.journal.follow(name, super().numbers(name, rows, dtype))
        memory = self._mapped(name, rows * dtype.itemsize)
        return self.journal.follow(name, Column(torch.frombuffer(memory, dtype=dtype), path=self.path(name)))

    def _keeps_files(self) -> bool:
        return self.journal.is_adopted


class JournaledTable(HostTable):
    """A :class:`HostTable` with savepoints.

    How many of its reserved rows are in use at a savepoint is the caller's to store.
    """

    clears_state = False  # they hold what they had at a savepoint, and the journal has to see each change
    outlives_run = True

    @classmethod
    def over(
        cls, shape: TableShape, dtype: torch.dtype, device: torch.device, file: Path, mesh: Mesh
    ) -> "JournaledTable":
        """The table in the files of ``file``, as they are where they hold such a table; see :class:`JournaledFiles`."""
        return cls(shape, dtype, device, JournaledFiles(file, shape, mesh))

    def __init__(self, shape: TableShape, dtype: torch.dtype, device: torch.device, memory: JournaledFiles) -> None:
        self.journal = memory.journal
        super().__init__(shape, dtype, device, memory)

    def _fill(self, dtype: torch.dtype) -> None:
        if not self.journal.is_adopted:  # else the norms are in a file too
            super()._fill(dtype)

    def set_savepoint(self, step: int) -> None:
        """Let the present table and optimizer state be those of ``step``, to which :meth:`roll_back` goes.

        Moves no rows: from now on, a row's values go to the journal before it first changes. Withstands ``kill -9`` at
        once, and a power cut when ``undo_journal.flush()`` has returned, which any thread may call meanwhile.

        Raises:
            UsageError: the files are an earlier run's, and were not rolled back.
        """
        self.wait_written()
        self.notice_writes()
        self.journal.set_savepoint(step)

    def roll_back(self, step: int) -> None:
        """Take back the table and the optimizer's tables of savepoint ``step``; make the optimizer first.

        The margin's statistics and the optimizer's number of steps are the caller's, as with any checkpoint.

        Raises:
            DataError: there is no such savepoint.
            IntegrityError: the journal is damaged; nothing was changed.
        """
        self.forget_prefetched()
        self.wait_written()
        self.journal.roll_back(step)
        self.norms_are_current()  # they are journaled too

    def will_change(self, rows: Tensor) -> None:
        """Keep in the journal what ``rows`` hold."""
        self.journal.before_write(rows)

    def notice_writes(self) -> None:
        """As :class:`ClassTable` does; the rows have to be those of a known step."""
        self.journal.refuse_if_adopted()
        super().notice_writes()

    def _discard_norms(self) -> None:
        if self.journal.step is not None:
            raise UsageError(
                "head.weight was written to, which its journal does not hold: a table with savepoints changes through "
                "its optimizer alone; give head.roll_back(step)"
            )
        super()._discard_norms()
