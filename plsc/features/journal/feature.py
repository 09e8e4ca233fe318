"""A class table in mapped files with savepoints as a feature of a run."""

import shutil
from typing import Any

from plsc.errors import DataError, UsageError
from plsc.features.journal.config import NOT_HERE
from plsc.features.journal.undo_journal import UndoJournal, check_identities, journal_bytes
from plsc.parallel.collectives import all_gather_object
from plsc.progress import counted
from plsc.train.checkpoint_reader import StoredCheckpoint
from plsc.train.components import TrainComponents
from plsc.train.feature import TableKeeper


class Journal(TableKeeper):
    """Lets a checkpoint be a savepoint of the table's files; a rank that holds no classes has no journal."""

    _journal: UndoJournal | None

    def set_up(self, components: TrainComponents, *, exact: bool) -> None:
        """See :meth:`Feature.set_up`."""
        self._mesh, self._head = components.mesh, components.tables[0].head
        self._journal = self._head.undo_journal

    def take_first(self, *, goes_on: bool) -> bool:
        """See :meth:`TableKeeper.take_first`.

        Raises:
            UsageError: the files are of another run.
            DataError: they are of a run that has checkpoints.
        """
        if self._journal is None or not self._journal.is_adopted:
            return False
        if not goes_on:
            self._journal.refuse_if_adopted()
        self._head.roll_back(0)
        return True

    def take_back(self, stored: StoredCheckpoint, state: Any) -> bool:
        """See :meth:`TableKeeper.take_back`.

        Raises:
            UsageError: the files are of another run, or of another number of ranks.
            DataError: the checkpoint's savepoint is not one of the table here.
        """
        if state is None:
            if self._journal is not None:
                self._journal.refuse_if_adopted()
            return False
        if len(state) != self._mesh.world_size:
            raise UsageError(
                f"the class table lies in files of {len(state)} ranks, one each: resume on as many, not on "
                f"{self._mesh.world_size}"
            )
        if state[self._mesh.rank] != self._identity:
            raise DataError(f"{stored.path} {NOT_HERE}")
        if self._journal is not None:
            self._head.roll_back(stored.step)
        return True

    def keep(self, step: int) -> None:
        """See :meth:`TableKeeper.keep`."""
        if self._journal is not None:
            self._head.set_savepoint(step)

    def flush(self) -> None:
        """See :meth:`TableKeeper.flush`."""
        if self._journal is not None:
            self._journal.flush()

    def forget(self, before: int) -> None:
        """See :meth:`TableKeeper.forget`."""
        if self._journal is not None:
            self._journal.forget(before)

    def state(self) -> Any:
        """The identity of each rank's table."""
        return all_gather_object(self._identity, self._mesh)

    def check_state(self, state: Any, stored: StoredCheckpoint) -> None:
        """See :meth:`Feature.check_state`."""
        if state is not None:
            check_identities(state, stored.path)

    def lines(self) -> dict[str, str]:
        """See :meth:`Feature.lines`: the disk that the table's files take, and the old values beside them."""
        if (journal := self._journal) is None:
            return {}
        rows, row_bytes = journal.num_rows, journal.row_bytes
        kept, nbytes = journal_bytes(rows, row_bytes, self._head.sample_rate, self.config.checkpoint)
        free = shutil.disk_usage(journal.folder).free
        missing = "; that is too little, save more often or keep fewer" if free < nbytes else ""
        return {
            "files": f"a rank's table takes {rows * row_bytes / 1e9:,.3f} GB in {journal.folder}, and what it held at "
            f"the last {counted(kept, 'savepoint')} up to about {nbytes / 1e9:,.3f} GB more; {free / 1e9:,.3f} GB are "
            f"free{missing}"
        }

    @property
    def _identity(self) -> str | None:
        return None if self._journal is None else self._journal.identity
