"""Transfers of rows between a table in host memory and the compute device: prefetch, and write-back of updates.

One thread reads and one writes, so that both overlap with computation. Neither waits for the other: a fetch may read
a row whose update has not been stored yet. Such rows are forwarded: every :class:`Stage` records the updated stages
that were in flight when it was fetched, or were updated since, and copies their rows, oldest first, before it is used.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from plsc.head.host_memory import Column
from plsc.head.sampling import places_in

_BUFFER_BYTES = 16 << 20  # of the (pinned) buffer through which scattered rows are copied
_MAX_WRITES = 3  # stages being written back at a time: it bounds the memory of their copies


class Stage:
    """Copies on the compute device of some rows of the table.

    ``rows`` are their numbers: a slice, or int64 (n,) on the compute device, sorted if the stage is to be updated.
    """

    def __init__(self, rows: slice | Tensor, count: int) -> None:
        self.rows, self.count = rows, count
        self.columns: dict[Column, Tensor] = {}
        self.newer: list[Stage] = []
        self.transfers: list[Future[None]] = []

    def wait(self) -> None:
        """Wait for the copies in flight; raise what made one of them fail."""
        for future in self.transfers:
            future.result()
        self.transfers.clear()

    def overwrite_from(self, source: "Stage") -> None:
        """Overwrite the rows that are also in ``source`` with its copies."""
        if isinstance(self.rows, Tensor) and isinstance(source.rows, slice):
            self._choose_from(source, self.rows - source.rows.start)
            return
        here, there = common_rows(self.rows, source.rows)
        for column, values in self.columns.items():
            if column in source.columns:
                values[here] = source.columns[column][there]

    def _choose_from(self, source: "Stage", there: Tensor) -> None:
        """Take row ``there`` (n,) of ``source`` where it has it. Only the device knows how many: none is counted."""
        inside = (there >= 0) & (there < source.count)
        there = there.clamp(0, max(source.count - 1, 0))
        for column, values in self.columns.items():
            if column in source.columns and source.count:
                shape = (-1, *[1] * (values.dim() - 1))
                torch.where(inside.view(shape), source.columns[column][there], values, out=values)


def common_rows(rows: slice | Tensor, others: slice | Tensor) -> tuple[slice | Tensor, slice | Tensor]:
    """The positions in ``rows`` and in ``others`` of the rows in both; ``others``, if numbers, are sorted.

    Numbers among a slice are for :meth:`Stage.overwrite_from`.
    """
    if isinstance(others, slice):
        assert isinstance(rows, slice)
        first, stop = max(rows.start, others.start), min(rows.stop, others.stop)
        stop = max(first, stop)
        return slice(first - rows.start, stop - rows.start), slice(first - others.start, stop - others.start)
    if isinstance(rows, slice):
        there = torch.where((others >= rows.start) & (others < rows.stop))[0]
        return others[there] - rows.start, there
    places = places_in(others, rows)
    here = torch.where(places >= 0)[0]
    return here, places[here]


class Staging:
    """Fetches and writes back stages of rows for computations on ``device``. Not thread-safe.

    Attributes:
        updates: the number of stages written back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.updates = 0
        self._reader, self._writer = _Lane(device), _Lane(device)
        self._fetched: weakref.WeakSet[Stage] = weakref.WeakSet()
        self._in_flight: list[Stage] = []

    def fetch(self, rows: slice | Tensor, columns: Iterable[Column]) -> Stage:
        """Begin to copy rows of ``columns`` to the device; :meth:`ready` waits for it."""
        count = rows.stop - rows.start if isinstance(rows, slice) else rows.numel()
        stage = Stage(rows, count)
        self._prune()
        stage.newer = list(self._in_flight)
        stage.columns = {column: self._empty(column, count) for column in columns}
        stage.transfers.append(self._reader.submit(self._reader.load, rows, dict(stage.columns)))
        self._fetched.add(stage)
        return stage

    def ready(self, stage: Stage) -> Stage:
        """Wait for ``stage``, and apply all updates so far to it."""
        stage.wait()
        for source in stage.newer:
            stage.overwrite_from(source)
        stage.newer = []
        self._fetched.discard(stage)
        return stage

    def complete(self, stage: Stage, columns: Iterable[Column]) -> None:
        """Fetch those of ``columns`` that a ready ``stage`` lacks, and wait for them; keep its other copies."""
        missing = [column for column in columns if column not in stage.columns]
        if missing:
            stage.columns |= self.ready(self.fetch(stage.rows, missing)).columns

    def combine(self, rows: Tensor, stages: list[Stage]) -> Stage:
        """Assemble sorted ``rows`` from ready stages that together hold all of them, without reading host memory."""
        union = Stage(rows, rows.numel())
        for column in stages[0].columns.keys() & set.intersection(*(set(s.columns) for s in stages)):
            union.columns[column] = self._empty(column, union.count)
        for stage in stages:
            union.overwrite_from(stage)
        return union

    def write_back(self, stage: Stage) -> None:
        """Begin to store an updated stage's rows, which stages fetched before it will copy."""
        self.updates += 1
        for fetched in self._fetched:
            fetched.newer.append(stage)
        self._prune()
        if len(self._in_flight) >= _MAX_WRITES:
            self._in_flight[0].wait()
        stage.transfers.append(self._writer.submit(self._writer.store, stage.rows, dict(stage.columns)))
        self._in_flight.append(stage)

    def wait_written(self) -> None:
        """Wait until every update is stored."""
        for stage in self._in_flight:
            stage.wait()
        self._in_flight.clear()

    def _prune(self) -> None:
        while self._in_flight and all(future.done() for future in self._in_flight[0].transfers):
            self._in_flight.pop(0).wait()

    def _empty(self, column: Column, count: int) -> Tensor:
        return torch.empty(count, *column.values.shape[1:], dtype=column.values.dtype, device=self.device)


class _Lane:
    """A thread (on a GPU with a stream of its own) that copies rows in the order of submission.

    Consecutive rows of pinned memory are copied directly, scattered rows through a (pinned) buffer of bounded size. A
    task ends when its copies are complete, not when they are enqueued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1, "plsc-rows")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def submit(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        """Begin ``task`` once the work enqueued on the device so far is done."""
        if self._stream is None:
            return self._pool.submit(task, *arguments)
        submitted = torch.cuda.current_stream(self._device).record_event()
        return self._pool.submit(self._on_stream, submitted, task, arguments)

    def load(self, rows: slice | Tensor, columns: dict[Column, Tensor]) -> None:
        """Copy rows of the host's columns into the device's tensors (n, …)."""
        numbers = rows.cpu() if isinstance(rows, Tensor) else rows
        for column, copies in columns.items():
            if isinstance(numbers, slice) and column.pinned_rows:
                for host_rows, positions in column.pinned_parts(numbers):
                    copies[positions].copy_(column.values[host_rows], non_blocking=True)
                continue
            if isinstance(numbers, slice) and self._device.type == "cpu":
                column.read(numbers, copies)
                continue
            for part, piece, buffer in self._pieces(numbers, copies):
                column.read(part, buffer)
                piece.copy_(buffer, non_blocking=True)
                self._finish()

    def store(self, rows: slice | Tensor, columns: dict[Column, Tensor]) -> None:
        """Copy the device's tensors (n, …) into rows of the host's columns."""
        numbers = rows.cpu() if isinstance(rows, Tensor) else rows
        for column, copies in columns.items():
            if isinstance(numbers, slice) and column.pinned_rows:
                for host_rows, positions in column.pinned_parts(numbers):
                    column.values[host_rows].copy_(copies[positions], non_blocking=True)
                continue
            for part, piece, buffer in self._pieces(numbers, copies):
                buffer.copy_(piece, non_blocking=True)
                self._finish()
                column.write(part, buffer)

    def _on_stream(self, submitted: torch.cuda.Event, task: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        with torch.cuda.stream(self._stream):
            assert self._stream is not None
            self._stream.wait_event(submitted)
            task(*arguments)
            self._stream.synchronize()

    def _finish(self) -> None:
        """Wait until the buffer may be reused."""
        if self._stream is not None:
            self._stream.synchronize()

    def _pieces(self, rows: slice | Tensor, copies: Tensor) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """Yield (row numbers, their part of ``copies``, a host buffer of the same shape), buffer by buffer."""
        if copies.numel() == 0:
            return
        if self._memory.numel() == 0:
            self._memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)
        row_bytes = copies[0].nbytes
        size = max(_BUFFER_BYTES // row_bytes, 1)
        memory = self._memory if row_bytes <= _BUFFER_BYTES else torch.empty(row_bytes, dtype=torch.uint8)
        for start in range(0, len(copies), size):
            piece = copies[start : start + size]
            stop = start + len(piece)
            part = rows[start:stop] if isinstance(rows, Tensor) else slice(rows.start + start, rows.start + stop)
            yield part, piece, memory[: piece.nbytes].view(piece.dtype).view(piece.shape)
