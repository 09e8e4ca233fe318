"""The class table of a rank: its rows and their 1/norms, which of them a pass visits, and where they come from.

:class:`ClassRows` is what a pass sees, cut into :class:`Chunk`. :class:`ClassTable` is the storage behind it, on the
device that computes; :class:`plsc.head.host_table.HostTable` lies elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from plsc.head.kept_rows import KeptRows
from plsc.head.low_precision import Rounding, RowState
from plsc.head.sampling import places_in
from plsc.parallel.tensor_shard import TensorShard

SMALLEST_NORM = 1e-12  # lower bound of the norms that rows and embeddings are divided by
NORM_BLOCK_ROWS = 4096  # rows whose norms are computed at a time, as float64 copies
_NORM_ROWS = 65536  # rows whose norms are renewed at a time, to avoid a second copy of the table
_SEEDED_ROWS = 1024  # rows that share one generator of initial values

_CPU_CHUNK_BYTES = 4 << 20  # of one float32 (classes, B) block, to stay in the cache
_GPU_CHUNK_BYTES = 1 << 30  # of all scratch of a chunk: 146k classes at B = D = 512, so that the host is ahead
_GPU_CHUNK_STEP = 1024  # a multiple of every kernel's block, so that sums over classes group alike in every chunk
OVERLAPPED_CHUNKS = 8  # the sum of the last one is waited for


def default_chunk_size(batch: int, dim: int, centers: int, device_type: str) -> int:
    """Default classes per chunk for ``batch`` samples: as many as keep a chunk's scratch within the device's budget."""
    if device_type == "cuda":
        logits, gradients = 6 * batch, 8 * dim  # float32 and bfloat16; float32, this chunk's and the last one's
        fitting = _GPU_CHUNK_BYTES // ((logits + gradients) * centers)
        return max(fitting // _GPU_CHUNK_STEP, 1) * _GPU_CHUNK_STEP
    return max(_CPU_CHUNK_BYTES // (4 * max(batch, dim // 2) * centers), 256)


def overlapped_chunk_size(largest: int, classes: int) -> int:
    """Classes per chunk where a chunk is summed over replicas while the next is computed: that needs several chunks.

    Args:
        largest: classes per chunk that fit.
        classes: that a pass visits.
    """
    share = -(-classes // OVERLAPPED_CHUNKS)
    return min(largest, -(-share // _GPU_CHUNK_STEP) * _GPU_CHUNK_STEP)


@dataclass(frozen=True)
class Chunk:
    """Some consecutive classes of those that a pass visits: positions [start, stop), and their rows of the table.

    ``index`` selects the rows in ``table``. The rows themselves are read on first use, since kernels that take the
    table and the index need no copy of them.
    """

    start: int
    stop: int
    index: slice | Tensor
    table: "ClassRows"

    def parts(self, rows: int) -> "Iterator[tuple[slice, Chunk]]":
        """The chunk cut into pieces of at most ``rows`` rows of one class each, and where they are in the chunk."""
        if isinstance(self.index, Tensor):
            first, count = 0, len(self.index)
        else:
            first, stop, _ = self.index.indices(self.table.weight.shape[0])
            count = stop - first
        for start in range(0, count, max(rows, 1)):
            part = slice(start, min(start + rows, count))
            index = self.index[part] if isinstance(self.index, Tensor) else slice(first + part.start, first + part.stop)
            yield part, Chunk(self.start + part.start, self.start + part.stop, index, self.table)

    @cached_property
    def weight(self) -> Tensor:
        """The chunk's rows (n·K, D): a view of consecutive rows, a copy of scattered ones."""
        return self.table.weight[self.index]

    @cached_property
    def inverse_norm(self) -> Tensor:
        """Their 1/norms (n·K,)."""
        return self.table.inverse_norm[self.index]

    @property
    def local_rows(self) -> Tensor:
        """The rows' numbers (n·K,) in this rank's shard, which differ from ``index`` where ``table`` is a copy."""
        return self.table.local_rows(self.index)


@dataclass(frozen=True)
class ClassRows:
    """A rank's class table: ``weight`` (C_local·K, D) with 1/norms (C_local·K,), K sub-centres to a class.

    ``selected`` are the local classes that take part, sorted (int64), or None for all of them.
    """

    weight: Tensor
    inverse_norm: Tensor
    centers: int = 1
    selected: Tensor | None = None

    is_copy: ClassVar[bool] = False  # whether rows lie elsewhere than in the shard: their numbers are local_rows()
    is_streamed: ClassVar[bool] = False  # whether each chunk is copied to the device for itself: chunks must be small

    @property
    def num_classes(self) -> int:
        """The number of classes that a pass visits."""
        return self.weight.shape[0] // self.centers if self.selected is None else self.selected.numel()

    def positions(self, local_labels: Tensor) -> Tensor:
        """Index of each label (B,) among the selected classes, −1 where it is not one of them, or of another shard."""
        if self.selected is not None:
            return places_in(self.selected, local_labels)
        return torch.where((local_labels >= 0) & (local_labels < self.num_classes), local_labels, -1)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The selected classes in order, ``size`` at a time."""
        for start in range(0, self.num_classes, size):
            stop = min(start + size, self.num_classes)
            yield Chunk(start, stop, self.row_index(start, stop), self)

    def row_index(self, start: int, stop: int) -> slice | Tensor:
        """The table rows of the classes at positions [start, stop)."""
        if self.selected is None:
            return slice(start * self.centers, stop * self.centers)
        return self.rows_of(self.selected[start:stop])

    def picked(self, index: Tensor) -> "ClassRows":
        """Rows ``index`` (n,) alone, in that order."""
        return ClassRows(self.weight[index], self.inverse_norm[index], self.centers)

    def local_rows(self, index: slice | Tensor) -> Tensor:
        """The numbers that rows ``index`` of ``weight`` have in this rank's shard."""
        if isinstance(index, Tensor):
            return index
        start, stop, _ = index.indices(self.weight.shape[0])
        return torch.arange(start, stop, device=self.weight.device)

    def rows_of(self, classes: Tensor) -> Tensor:
        """The table rows (n·K,) of local classes (n,)."""
        if self.centers == 1:
            return classes
        return (classes[:, None] * self.centers + torch.arange(self.centers, device=classes.device)).flatten()


def renew_norms(table: ClassRows, index: slice | Tensor) -> None:
    """Recompute 1/‖W‖ of rows ``index`` of ``table`` from their stored values.

    Sums are taken in float64 and then rounded, as the updates' kernels do. The float32 norm is then the same in
    whatever order they are summed, and a resumed run goes on as one that never stopped.
    """
    rows = table.weight[index]
    # one allocation for all results: small ones between the float64 copies would fragment the heap
    norms = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    for part, out in zip(rows.split(NORM_BLOCK_ROWS), norms.split(NORM_BLOCK_ROWS), strict=True):
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float64, out=out)
    table.inverse_norm[index] = norms.to(table.inverse_norm.dtype).clamp_(min=SMALLEST_NORM).reciprocal_()


def class_range(num_classes: int, rank: int, world_size: int) -> tuple[int, int]:
    """(first, last + 1) of a rank's classes: contiguous, the first C mod W ranks own one more. May be empty."""
    share, rest = divmod(num_classes, world_size)
    first = rank * share + min(rank, rest)
    return first, first + share + (rank < rest)


def fill_normal(weight: Tensor, first_row: int, seed: int, std: float = 0.01) -> None:
    """Fill rows [first_row, …) of the global table with N(0, std²), in place, a block at a time.

    A row's values depend on the seed and its global number alone, so that every number of ranks starts from the same
    table, and no two ranks from the same rows.
    """
    for rows, values in normal_rows(weight.shape, first_row, seed, weight.device, std):
        weight[rows] = values.to(weight.dtype)


def normal_rows(
    shape: tuple[int, ...], first_row: int, seed: int, device: torch.device, std: float = 0.01
) -> Iterator[tuple[slice, Tensor]]:
    """:func:`fill_normal`'s values for a table (n, D) = ``shape``, in float32 on ``device``, some rows at a time."""
    stop = first_row + shape[0]
    for block in range(first_row // _SEEDED_ROWS, -(-stop // _SEEDED_ROWS)):
        generator = torch.Generator(device).manual_seed(
            (seed * 0x9E3779B97F4A7C15 + block * 0xD1B54A32D192ED03) % 2**63
        )
        low = block * _SEEDED_ROWS
        values = torch.randn(_SEEDED_ROWS, shape[1], generator=generator, device=device) * std
        start, end = max(low, first_row), min(low + _SEEDED_ROWS, stop)
        yield slice(start - first_row, end - first_row), values[start - low : end - low]


StateKind = TypeVar("StateKind", bound="OptimizerState")


class OptimizerState:
    """An optimizer's tables beside the rows of a :class:`ClassTable`, each (rows, D), by name."""

    def __init__(self, table: "ClassTable", tables: Mapping[str, RowState]) -> None:
        self.tables = dict(tables)
        self._table = table

    def of(self, chunk: Chunk) -> dict[str, RowState]:
        """The tables that ``chunk.index`` selects rows of."""
        return self.tables

    def use(self, rows: int) -> None:
        """Let the first ``rows`` of the tables' memory be theirs."""
        for state in self.tables.values():
            state.use(rows)

    def row_shards(self) -> dict[str, TensorShard]:
        """Everything that a checkpoint stores, by name."""
        return {
            name: self._table.row_shard(tensor, name)
            for key, state in self.tables.items()
            for name, tensor in state.tensors(key).items()
        }


@dataclass(frozen=True)
class TableShape:
    """This rank's part of the table.

    Attributes:
        rows: number of its rows, ``centers`` to a class.
        dim: D.
        first_row: the first row's number in the global table.
        total_rows: of the global table.
        centers: rows per class.
        seed: of the first values.
        capacity: rows that memory is reserved for, where there may come to be more than ``rows``.
    """

    rows: int
    dim: int
    first_row: int
    total_rows: int
    centers: int
    seed: int
    capacity: int = 0

    @property
    def reserved(self) -> int:
        """Rows that memory is reserved for."""
        return max(self.rows, self.capacity)

    @property
    def num_classes(self) -> int:
        """Of all ranks."""
        return self.total_rows // self.centers


class ClassTable:
    """A rank's rows (rows, D), and what an optimizer keeps beside them, in the memory that computation reads.

    Rows begin as N(0, 0.01²), from the seed and their global numbers. Tables whose rows are copied to the device that
    computes derive from this one.

    Args:
        shape: of the rows.
        weight: the reserved rows, of which the first are the table's. Writing into them through :attr:`parameter`
            counts as a write from outside.
        requires_grad: of the parameter.

    Attributes:
        parameter: the rows as the module's parameter. Of a host table, updates may still be on their way to it.
        is_resident: whether computation reads and writes the rows in place.
        outlives_run: whether its files keep the rows of all shards for a later process, those in reserve too.
        stored_at: the first row's number in a checkpoint, and all rows there. Of a table that grows it is not
            ``shape``'s, whose numbers stay as they are while the shards before this one grow.
        kept: rows that no update changes; None: there is none.
    """

    is_resident = True
    outlives_run = False
    kept: KeptRows | None = None

    def __init__(self, shape: TableShape, weight: Tensor, *, requires_grad: bool = False) -> None:
        self._reserved = weight if shape.capacity else None
        self._states: list[OptimizerState] = []  # that are resized with the rows
        self.parameter = nn.Parameter(weight[: shape.rows], requires_grad=requires_grad)
        self.shape, self.first_row, self.centers = shape, shape.first_row, shape.centers
        self.stored_at = shape.first_row, shape.total_rows
        self._inverse_norm = self._reserved_norms = torch.empty(0)
        self._norm_version = -1

    @classmethod
    def made(cls, shape: TableShape, dtype: torch.dtype, device: torch.device, *, requires_grad: bool) -> "ClassTable":
        """A table with its first values on ``device``."""
        weight = torch.empty(shape.reserved, shape.dim, dtype=dtype, device=device)
        if device.type != "meta":
            fill_normal(weight[: shape.rows], shape.first_row, shape.seed)
        return cls(shape, weight, requires_grad=requires_grad)

    @property
    def version(self) -> int:
        """A number that changes with every update and with every write from outside."""
        return self.parameter._version

    def inverse_norms(self) -> Tensor:
        """1/‖W‖ (rows,) in float32 (float64 for float64 tables), renewed if the rows were written to."""
        self.wait_written()
        self.notice_writes()
        return self._inverse_norm

    @torch.inference_mode(False)  # norms that are made in it could not be renewed outside of it
    @torch.no_grad()
    def notice_writes(self) -> None:
        """Renew all norms, and forget what was fetched ahead, if the rows were written to from outside."""
        if self._norm_version == self.parameter._version:
            return
        self._discard_norms()
        for start in range(0, self.shape.rows, _NORM_ROWS):
            self._renew_norms(slice(start, min(start + _NORM_ROWS, self.shape.rows)))
        self.norms_are_current()

    def norms_are_current(self) -> None:
        """Record that the norms of all rows written so far are renewed; called after an update."""
        self._norm_version = self.parameter._version

    def rows(self, selected: Tensor | None, *, training: bool = False) -> ClassRows:
        """The rows of local classes ``selected`` (sorted; None: all) for pass 1. ``training``: an update may follow."""
        self.notice_writes()
        return ClassRows(self.parameter.detach(), self._inverse_norm, self.centers, selected)

    def rows_again(self, selected: Tensor | None, before: list[ClassRows], update: OptimizerState | None) -> ClassRows:
        """The rows for pass 2, after passes 1 over ``before``. ``update``: the state that is updated with them."""
        return self.rows(selected)

    def new_state(self, dtypes: Mapping[str, torch.dtype], rounding: Rounding) -> OptimizerState:
        """Tables of zeros for an optimizer, stored as and where the rows are."""
        shape, device = self.shape, self.parameter.device
        tables = {
            name: RowState(shape.rows, shape.dim, dtype, device, rounding, shape.capacity)
            for name, dtype in dtypes.items()
        }
        return self._following(OptimizerState(self, tables))

    def row_shard(self, local: Tensor, name: str = "weight") -> TensorShard:
        """The tensor ``name``, with a row per row of the table, as its part of the global one, for a checkpoint."""
        return TensorShard.of_rows(local, *self.stored_at)

    def resize(self, rows: int) -> None:
        """Let the first ``rows`` of the reserved rows be the table's, of the optimizers' too.

        No row moves, and no memory is allocated: those that come in hold anything until :meth:`row_tensors` are
        written to. Nothing may wait for an update.
        """
        self.forget_prefetched()
        self.wait_written()
        self.notice_writes()
        self.shape = replace(self.shape, rows=rows)
        self._use(rows)
        for state in self._states:
            state.use(rows)
        self.norms_are_current()

    def row_tensors(self) -> list[Tensor]:
        """Weights, 1/norms and optimizers' tables, each with a row or a number for each row, to be changed in place.

        :meth:`will_change` is to be called before that, and :meth:`norms_are_current` after it.
        """
        states = [table.tensors(name).values() for state in self._states for name, table in state.tables.items()]
        return [self.parameter.detach(), self._inverse_norm, *(tensor for tensors in states for tensor in tensors)]

    def will_change(self, rows: Tensor) -> None:
        """Take note that ``rows`` (n,) of :meth:`row_tensors` are about to change."""

    def _use(self, rows: int) -> None:
        assert self._reserved is not None
        self._inverse_norm, self.parameter.data = self._reserved_norms[:rows], self._reserved[:rows]

    def _following(self, state: StateKind) -> StateKind:
        """``state``, whose size is the table's from now on."""
        if self.shape.capacity:
            state.use(self.shape.rows)
            self._states.append(state)
        return state

    def wait_written(self) -> None:
        """Wait until every update is stored in :attr:`parameter`."""

    def prefetch(self, key: int, labels: Tensor, classes: Tensor) -> None:
        """Begin to fetch the rows of ``classes`` for the training batch ``key``, with ``labels`` (B,) of all ranks."""

    @property
    def num_prefetched(self) -> int:
        """Batches that were prefetched and have not begun."""
        return 0

    def forget_prefetched(self) -> None:
        """Discard what was prefetched."""

    def take_prefetched(self, key: int, labels: Tensor) -> tuple[Tensor, ClassRows] | None:
        """Take the classes and rows that were prefetched for this batch; None if there are none, or another batch's."""
        return None

    def _discard_norms(self) -> None:
        weight = self.parameter
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._reserved_norms = torch.empty(self.shape.reserved, dtype=dtype, device=weight.device)
        self._inverse_norm = self._reserved_norms[: self.shape.rows]

    def _renew_norms(self, rows: slice) -> None:
        renew_norms(ClassRows(self.parameter.detach(), self._inverse_norm), rows)
