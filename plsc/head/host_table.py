"""A class table in host memory, whose rows are copied to the compute device, all at once or chunk by chunk."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.head.class_table import Chunk, ClassRows, ClassTable, OptimizerState, TableShape, normal_rows, renew_norms
from plsc.head.host_memory import Column, HostMemory
from plsc.head.low_precision import Rounding, RowState, check_state_dtype, scale_name
from plsc.head.sampling import places_in
from plsc.head.staging import Stage, Staging
from plsc.parallel.tensor_shard import TensorShard


class HostTable(ClassTable):
    """Rows and their 1/norms in host memory, and their transfer to and from the compute device.

    Args:
        shape: of the rows.
        dtype: of the weights.
        device: the compute device.
        memory: allocates, ordinary memory or a mapped file.
    """

    is_resident = False
    clears_state = True  # of rows that come in

    def __init__(self, shape: TableShape, dtype: torch.dtype, device: torch.device, memory: HostMemory) -> None:
        self.memory, self.device = memory, device
        self.weight = memory.table("weight", shape.reserved, shape.dim, dtype)
        self.weight.use(shape.rows)
        # .data has a version counter of its own: updates write to the column, so that the parameter's version counts
        # writes from outside alone
        super().__init__(shape, self.weight.values.data)
        self.inverse_norm = memory.numbers("inverse_norm", shape.reserved, torch.promote_types(dtype, torch.float32))
        self.inverse_norm.use(shape.rows)
        self._inverse_norm = self.inverse_norm.values
        self.staging = Staging(device)
        self._columns = {"weight": self.weight}
        self._state_columns: Mapping[str, Column] = {}  # of the newest optimizer, fetched along with the rows
        self._prefetched: deque[_Prefetched] = deque()
        self._fill(dtype)
        self.norms_are_current()

    def _fill(self, dtype: torch.dtype) -> None:
        """Store first values and their norms; the device's generator makes them: placement must not change a run."""
        for rows, normal in normal_rows(self.parameter.shape, self.first_row, self.shape.seed, self.device):
            values = normal.to(dtype)
            self.weight.write(rows, values.cpu())
            norms = torch.empty(len(values), dtype=self._inverse_norm.dtype, device=values.device)
            renew_norms(ClassRows(values, norms), slice(0, len(values)))
            self.inverse_norm.write(rows, norms.cpu())

    @property
    def version(self) -> int:
        """A number that changes with every update and with every write from outside."""
        return super().version + self.staging.updates

    def rows(self, selected: Tensor | None, *, training: bool = False) -> ClassRows:
        """The rows of local classes ``selected``, fetched now; all of them (None) are streamed during the pass.

        Where an update may follow (``training``), the optimizer's state is fetched with them.
        """
        self.notice_writes()
        if selected is None:
            return StreamedRows(self.weight.values, self.inverse_norm.values, self.centers, host=self)
        return self._fetched(self.staging.fetch(self._rows_of(selected), self._fetched_columns(training)), selected)

    def rows_again(self, selected: Tensor | None, before: list[ClassRows], update: OptimizerState | None) -> ClassRows:
        """The rows for pass 2; with ``update``, they are written back after it."""
        columns = update.columns if isinstance(update, HostState) else None
        if selected is None:
            weight, norms = self.weight.values, self.inverse_norm.values
            return StreamedRows(weight, norms, self.centers, host=self, update=columns)
        stages = [rows.stage for rows in before if isinstance(rows, FetchedRows)]
        if not stages:  # batches took all the classes that there were, and more have come since
            stage = self.fetched_now(self._rows_of(selected))
        else:
            stage = stages[0] if len(stages) == 1 else self.staging.combine(self._rows_of(selected), stages)
        if columns is not None:
            self.staging.complete(stage, columns.values())
        return self._rows_in(stage, selected, update=columns)

    def new_state(self, dtypes: Mapping[str, torch.dtype], rounding: Rounding) -> "HostState":
        """Tables of zeros in host memory, which are fetched and written back with their rows."""
        tables: dict[str, RowState] = {}
        columns: dict[str, Column] = {}
        for name, dtype in dtypes.items():
            check_state_dtype(dtype)
            columns[name] = values = self.memory.table(name, self.shape.reserved, self.shape.dim, dtype)
            scale = None
            if dtype == torch.int8:
                columns[scale_name(name)] = self.memory.numbers(scale_name(name), self.shape.reserved, torch.float32)
                scale = columns[scale_name(name)].values
            tables[name] = RowState.over(values.values, scale, rounding)
        self._state_columns = columns
        self._columns |= columns
        return self._following(HostState(self, tables, columns))

    def _use(self, rows: int) -> None:
        self.weight.use(rows)
        self.inverse_norm.use(rows)
        self._inverse_norm, self.parameter.data = self.inverse_norm.values, self.weight.values.data

    def prefetch(self, key: int, labels: Tensor, classes: Tensor) -> None:
        """Begin to fetch ``classes``, which training batch ``key`` with these labels (B,) of all ranks selects."""
        stage = self.staging.fetch(self._rows_of(classes), self._fetched_columns(training=True))
        self._prefetched.append(_Prefetched(key, labels, classes, stage))

    @property
    def num_prefetched(self) -> int:
        """Batches that were prefetched and have not begun."""
        return len(self._prefetched)

    def forget_prefetched(self) -> None:
        """Discard what was prefetched."""
        self._prefetched.clear()

    def take_prefetched(self, key: int, labels: Tensor) -> tuple[Tensor, ClassRows] | None:
        """Take what was fetched for this batch; None, and discard everything fetched, if it was for another one."""
        if not self._prefetched:
            return None
        first = self._prefetched.popleft()
        if first.key != key or not torch.equal(first.labels, labels):
            self._prefetched.clear()
            return None
        return first.classes, self._fetched(first.stage, first.classes)

    def wait_written(self) -> None:
        """Wait until every update is stored."""
        self.staging.wait_written()

    def row_shard(self, local: Tensor, name: str = "weight") -> TensorShard:
        """As :class:`ClassTable` does; it is up to date, and a mapped file's pages are given back as it is read."""
        self._prefetched.clear()
        self.wait_written()
        return TensorShard.of_rows(local, *self.stored_at, self._columns[name].release)

    def _discard_norms(self) -> None:
        self._prefetched.clear()
        self.wait_written()

    def _renew_norms(self, rows: slice) -> None:
        stage = self.fetched_now(rows)
        renew_norms(self._rows_in(stage), slice(0, stage.count))
        self.inverse_norm.write(rows, stage.columns[self.inverse_norm].cpu())

    def fetched_now(self, rows: slice | Tensor) -> Stage:
        """Rows with weights and norms, up to date."""
        return self.staging.ready(self.staging.fetch(rows, [self.weight, self.inverse_norm]))

    def _fetched_columns(self, training: bool) -> list[Column]:
        return [self.weight, self.inverse_norm, *(self._state_columns.values() if training else ())]

    def _rows_of(self, classes: Tensor) -> Tensor:
        return ClassRows(self.weight.values, self.inverse_norm.values, self.centers).rows_of(classes)

    def _fetched(self, stage: Stage, classes: Tensor) -> "FetchedRows":
        return self._rows_in(self.staging.ready(stage), classes)

    def _rows_in(
        self, stage: Stage, classes: Tensor | None = None, update: Mapping[str, Column] | None = None
    ) -> "FetchedRows":
        weight, norms = stage.columns[self.weight], stage.columns[self.inverse_norm]
        return FetchedRows(weight, norms, self.centers, stage=stage, classes=classes, host=self, update=update)


class HostState(OptimizerState):
    """An optimizer's tables in host memory: ``columns`` by name, int8 scales among them."""

    def __init__(self, table: HostTable, tables: Mapping[str, RowState], columns: Mapping[str, Column]) -> None:
        super().__init__(table, tables)
        self.columns, self._clears = columns, table.clears_state

    def use(self, rows: int) -> None:
        """Let the first ``rows`` of the tables' memory be theirs."""
        for state in self.tables.values():
            state.use(rows, clears=self._clears)
        for column in self.columns.values():
            column.use(rows)

    def of(self, chunk: Chunk) -> dict[str, RowState]:
        """The fetched copies that ``chunk.index`` selects rows of; they were fetched with the chunk's rows."""
        rows = chunk.table
        assert isinstance(rows, FetchedRows)
        copies = {name: rows.stage.columns[column] for name, column in self.columns.items()}
        return {
            name: RowState.over(copies[name], copies.get(scale_name(name)), table.rounding)
            for name, table in self.tables.items()
        }


@dataclass(frozen=True)
class _Prefetched:
    key: int
    labels: Tensor
    classes: Tensor
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class FetchedRows(ClassRows):
    """Copies of the rows of local ``classes`` (sorted), all of which a pass visits.

    With ``update``, they are written back at the end of a pass.
    """

    stage: Stage
    classes: Tensor | None
    host: HostTable
    update: Mapping[str, Column] | None = None

    is_copy = True

    def positions(self, local_labels: Tensor) -> Tensor:
        """Index of each label (B,) among the fetched classes, −1 where it is not one of them."""
        assert self.classes is not None
        return places_in(self.classes, local_labels)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The fetched classes in order, ``size`` at a time."""
        yield from super().chunks(size)
        if self.update is not None:
            self.host.staging.write_back(self.stage)

    def local_rows(self, index: slice | Tensor) -> Tensor:
        """The numbers that rows ``index`` have in this rank's shard."""
        rows = self.stage.rows
        if isinstance(rows, Tensor):
            return rows[index]
        return ClassRows.local_rows(self, index) + int(rows.start)


@dataclass(frozen=True, kw_only=True)
class StreamedRows(ClassRows):
    """The whole table in chunks, each fetched during the computation on the one before it.

    ``weight`` and ``inverse_norm`` are the host's. With ``update``, each chunk is written back after its computation.
    """

    host: HostTable
    update: Mapping[str, Column] | None = None

    is_streamed = True

    def picked(self, index: Tensor) -> ClassRows:
        """Rows ``index`` (n,) alone, on the compute device, in that order."""
        return self.host._rows_in(self.host.fetched_now(index))

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The classes in order, ``size`` at a time, each chunk with its own table of copies."""
        staging = self.host.staging
        columns = [self.host.weight, self.host.inverse_norm, *(self.update or {}).values()]
        starts = iter(range(0, self.num_classes, size))
        upcoming = self._fetch(next(starts, None), size, columns)
        for start in range(0, self.num_classes, size):
            assert upcoming is not None
            stage = staging.ready(upcoming)
            upcoming = self._fetch(next(starts, None), size, columns)
            stop = min(start + size, self.num_classes)
            table = self.host._rows_in(stage, update=self.update)
            yield Chunk(start, stop, slice(0, stage.count), table)
            if self.update is not None:
                staging.write_back(stage)

    def _fetch(self, start: int | None, size: int, columns: list[Column]) -> Stage | None:
        if start is None:
            return None
        rows = self.row_index(start, min(start + size, self.num_classes))
        return self.host.staging.fetch(rows, columns)
