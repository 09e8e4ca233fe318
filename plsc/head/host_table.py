"""A class table in host memory, whose rows are copied to the compute device, all at once or chunk by chunk."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head.class_table import (
    Chunk,
    ClassRows,
    ClassTable,
    OptimizerState,
    ResidentTable,
    class_range,
    normal_rows,
    renew_norms,
)
from plsc.head.host_memory import Column, HostMemory, mapped_file
from plsc.head.low_precision import Rounding, RowState, check_state_dtype, scale_name
from plsc.head.staging import Stage, Staging
from plsc.head.undo_journal import UndoJournal
from plsc.parallel.mesh import Mesh
from plsc.parallel.tensor_shard import TensorShard


def create_table(
    placement: str,
    mesh: Mesh,
    *,
    num_classes: int,
    dim: int,
    dtype: torch.dtype,
    centers: int,
    seed: int,
    requires_grad: bool,
    journal: bool = False,
) -> ClassTable:
    """Make this rank's rows with their first values, on the device or in host memory as ``placement`` says.

    With ``journal``, a mapped file that holds such a table is taken as it is.

    Raises:
        UsageError, DataError: as :class:`HostMemory` does.
    """
    device = mesh.device
    first, stop = class_range(num_classes, mesh.head.rank, mesh.head.world_size)
    shape = ((stop - first) * centers, dim)
    first_row, total_rows = first * centers, num_classes * centers
    if not is_staged(placement, device):
        return ResidentTable(
            shape,
            dtype,
            device,
            first_row=first_row,
            total_rows=total_rows,
            centers=centers,
            seed=seed,
            requires_grad=requires_grad,
        )
    kept = _journal(mesh, placement, shape, first_row, total_rows, centers, seed) if journal else None
    pinned = device.type == "cuda"
    memory = HostMemory(mapped_file(placement), mesh.rank, mesh.world_size, pinned=pinned, journal=kept)
    table = HostTable(memory, shape, dtype, device, first_row=first_row, total_rows=total_rows, centers=centers)
    if kept is not None:
        table.journal = kept
        if kept.is_adopted:
            table.norms_are_current()  # they are in a file too
            return table
    # Values come from the device's generator, as those of a resident table do: placement must not change a run.
    for rows, values in normal_rows(shape, first_row, seed, device):
        table.fill(rows, values.to(dtype))
    table.norms_are_current()
    return table


def _journal(
    mesh: Mesh, placement: str, shape: tuple[int, int], first_row: int, total_rows: int, centers: int, seed: int
) -> UndoJournal:
    file = mapped_file(placement)
    assert file is not None
    about = {"rows": shape[0], "dim": shape[1], "first_row": first_row, "total_rows": total_rows}
    prefix = file.with_name(f"{file.name}.rank{mesh.rank}-of-{mesh.world_size}")
    return UndoJournal(prefix, {**about, "centers": centers, "seed": seed})


def is_staged(placement: str, device: torch.device) -> bool:
    """Return whether rows are copied to compute with them: a CPU reads its own memory in place, but not a file."""
    if placement == "device" or device.type == "meta":
        return False
    return device.type != "cpu" or mapped_file(placement) is not None


class HostTable(ClassTable):
    """Rows and their 1/norms in host memory, and their transfer to and from the compute device.

    The rows begin as zeros; :func:`create_table` fills them.

    Args:
        memory: allocates, ordinary memory or a mapped file.
        shape: (rows, D).
        dtype: of the weights.
        device: the compute device.
        first_row, total_rows, centers: as :class:`ClassTable`'s.
    """

    def __init__(
        self,
        memory: HostMemory,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        first_row: int,
        total_rows: int,
        centers: int,
    ) -> None:
        self.memory, self.device = memory, device
        self.weight = memory.table("weight", *shape, dtype)
        # .data has a version counter of its own: updates write to the column, so that the parameter's version counts
        # writes from outside alone
        super().__init__(self.weight.values.data, first_row, total_rows, centers, requires_grad=False)
        self.inverse_norm = memory.numbers("inverse_norm", shape[0], torch.promote_types(dtype, torch.float32))
        self.staging = Staging(device)
        self._state_columns: Mapping[str, Column] = {}  # of the newest optimizer, fetched along with the rows
        self._prefetched: deque[_Prefetched] = deque()

    @property
    def version(self) -> int:
        """A number that changes with every update and with every write from outside."""
        return super().version + self.staging.updates

    def fill(self, rows: slice, values: Tensor) -> None:
        """Store first values (n, D), of the weights' dtype and on the compute device, and their norms."""
        self.weight.write(rows, values.cpu())
        norms = torch.empty(len(values), dtype=self.inverse_norm.values.dtype, device=values.device)
        renew_norms(ClassRows(values, norms), slice(0, len(values)))
        self.inverse_norm.write(rows, norms.cpu())

    def notice_writes(self) -> None:
        """As :class:`ClassTable` does; a journaled table has to be that of a known step."""
        if self.journal is not None:
            self.journal.refuse_if_adopted()
        super().notice_writes()

    def rows(self, selected: Tensor | None, *, training: bool = False) -> ClassRows:
        """The rows of local classes ``selected``, fetched now; all of them (None) are streamed during the pass.

        Where an update may follow (``training``), the optimizer's state is fetched with them.
        """
        self.notice_writes()
        if selected is None:
            return StreamedRows(self.weight.values, self.inverse_norm.values, self.centers, host=self)
        return self._fetched(self.staging.fetch(self._rows_of(selected), self._columns(training)), selected)

    def rows_again(self, selected: Tensor | None, before: list[ClassRows], update: OptimizerState | None) -> ClassRows:
        """The rows for pass 2; with ``update``, they are written back after it."""
        columns = update.columns if isinstance(update, HostState) else None
        if selected is None:
            weight, norms = self.weight.values, self.inverse_norm.values
            return StreamedRows(weight, norms, self.centers, host=self, update=columns)
        stages = [rows.stage for rows in before if isinstance(rows, FetchedRows)]
        stage = stages[0] if len(stages) == 1 else self.staging.combine(self._rows_of(selected), stages)
        if columns is not None:
            self.staging.complete(stage, columns.values())
        return self._rows_in(stage, selected, update=columns)

    def new_state(self, dtypes: Mapping[str, torch.dtype], rounding: Rounding) -> "HostState":
        """Tables of zeros in host memory, which are fetched and written back with their rows."""
        tables: dict[str, RowState] = {}
        columns: dict[str, Column] = {}
        rows, dim = self.parameter.shape
        for name, dtype in dtypes.items():
            check_state_dtype(dtype)
            columns[name] = values = self.memory.table(name, rows, dim, dtype)
            scale = None
            if dtype == torch.int8:
                columns[scale_name(name)] = self.memory.numbers(scale_name(name), rows, torch.float32)
                scale = columns[scale_name(name)].values
            tables[name] = RowState.over(values.values, scale, rounding)
        self._state_columns = columns
        return HostState(self, tables, columns)

    @property
    def prefetches(self) -> bool:
        """Always true."""
        return True

    def prefetch(self, key: int, labels: Tensor, classes: Tensor) -> None:
        """Begin to fetch ``classes``, which training batch ``key`` with these labels (B,) of all ranks selects."""
        stage = self.staging.fetch(self._rows_of(classes), self._columns(training=True))
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

    def settle(self) -> None:
        """Wait until every update is stored."""
        self.staging.settle()

    def row_shard(self, local: Tensor, column: Column | None = None) -> TensorShard:
        """A tensor with one row per row of the table, for a checkpoint to save or to load into."""
        self._prefetched.clear()
        self.settle()
        return TensorShard.of_rows(
            local, self.first_row, self.total_rows, column.release if column is not None else None
        )

    def weight_shard(self) -> TensorShard:
        """The rows themselves, for a checkpoint."""
        return self.row_shard(self.parameter.detach(), self.weight)

    def _stored_inverse_norm(self) -> Tensor:
        return self.inverse_norm.values

    def _discard_norms(self) -> None:
        if self.journal is not None and self.journal.step is not None:
            raise UsageError(
                "head.weight was written to, which its journal does not hold: a table with savepoints changes through "
                "its optimizer alone; give head.roll_back(step)"
            )
        self._prefetched.clear()
        self.settle()

    def _renew_norms(self, rows: slice) -> None:
        stage = self.fetched_now(rows)
        renew_norms(self._rows_in(stage), slice(0, stage.count))
        self.inverse_norm.write(rows, stage.columns[self.inverse_norm].cpu())

    def fetched_now(self, rows: slice | Tensor, columns: Iterable[Column] = ()) -> Stage:
        """Rows with weights, norms and further columns, up to date."""
        return self.staging.ready(self.staging.fetch(rows, [self.weight, self.inverse_norm, *columns]))

    def _columns(self, training: bool) -> list[Column]:
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
        self._host, self.columns = table, columns

    def of(self, chunk: Chunk) -> dict[str, RowState]:
        """The fetched copies that ``chunk.index`` selects rows of; they were fetched with the chunk's rows."""
        rows = chunk.table
        assert isinstance(rows, FetchedRows)
        copies = rows.stage.columns
        return {
            name: RowState.over(
                copies[self.columns[name]],
                copies[self.columns[scale_name(name)]] if table.scale is not None else None,
                table.rounding,
            )
            for name, table in self.tables.items()
        }

    def _row_shard(self, name: str, tensor: Tensor) -> TensorShard:
        return self._host.row_shard(tensor, self.columns[name])


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

    @property
    def is_copy(self) -> bool:
        """Always true."""
        return True

    def positions(self, local_labels: Tensor) -> Tensor:
        """Index of each label (B,) among the fetched classes, −1 where it is not one of them."""
        assert self.classes is not None
        if self.classes.numel() == 0:
            return torch.full_like(local_labels, -1)
        index = torch.searchsorted(self.classes, local_labels).clamp(max=self.classes.numel() - 1)
        return torch.where(self.classes[index] == local_labels, index, -1)

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

    @property
    def is_streamed(self) -> bool:
        """Always true."""
        return True

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
