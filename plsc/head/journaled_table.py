"""A table in mapped files that are part of the checkpoints: they outlive the run, and go back to its savepoints.

:mod:`plsc.head.undo_journal` is the journal itself, and says what the files are.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head.class_table import TableShape
from plsc.head.host_memory import Column, HostMemory
from plsc.head.host_table import HostTable
from plsc.head.undo_journal import UndoJournal
from plsc.parallel.mesh import Mesh


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

    def __init__(self, shape: TableShape, dtype: torch.dtype, device: torch.device, memory: JournaledFiles) -> None:
        self.journal = memory.journal
        super().__init__(shape, dtype, device, memory)

    def _fill(self, dtype: torch.dtype) -> None:
        if not self.journal.is_adopted:  # else the norms are in a file too
            super()._fill(dtype)

    def set_savepoint(self, step: int) -> None:
        """Let the journal begin anew with the present state, as that of ``step``."""
        self.settle()
        self.notice_writes()
        self.journal.set_savepoint(step)

    def roll_back(self, step: int) -> None:
        """Take back the state of savepoint ``step``, of all reserved rows; see :meth:`UndoJournal.roll_back`."""
        self.forget_prefetched()
        self.settle()
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
