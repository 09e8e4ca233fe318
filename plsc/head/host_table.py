"""A class table in host memory as the passes see it: rows fetched to the compute device, in part or chunk by chunk."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.head.host_memory import Column, HostMemory
from plsc.head.norms import renew_norms
from plsc.head.staging import Stage, Staging
from plsc.losses.class_rows import Chunk, ClassRows


class HostTable:
    """One rank's rows in host memory, their 1/norms, and the way to and from the device that computes.

    Args:
        memory: where it is kept.
        rows, dim: its shape.
        dtype: of the weights.
        centers: rows per class.
        device: where the passes compute.

    Attributes:
        state: the optimizer's columns by name, fetched along with the weights.
    """

    def __init__(
        self, memory: HostMemory, rows: int, dim: int, dtype: torch.dtype, centers: int, device: torch.device
    ) -> None:
        self.memory, self.centers, self.device = memory, centers, device
        self.weight = memory.table("weight", rows, dim, dtype)
        self.inverse_norm = memory.numbers(rows, torch.promote_types(dtype, torch.float32))
        self.state: Mapping[str, Column] = {}
        self.staging = Staging(device)
        self._announced: deque[_Announced] = deque()

    def renew_norms(self, rows: slice) -> None:
        """Recompute 1/‖W‖ of consecutive rows from their stored values, on the device."""
        stage = self.staging.ready(self.staging.fetch(rows, [self.weight, self.inverse_norm]))
        renew_norms(self._held(stage), slice(0, stage.count))
        self.inverse_norm.write(rows, stage.columns[self.inverse_norm].cpu())

    def visited(self, classes: Tensor | None, *, learning: bool = False) -> ClassRows:
        """The rows of local ``classes`` (sorted, n), fetched now; of all (None), fetched as the pass comes to them.

        Where an update may follow (``learning``), the optimizer's state comes along.
        """
        if classes is None:
            return StreamedRows(self.weight.values, self.inverse_norm.values, self.centers, host=self)
        return self._fetched(self.staging.fetch(self._rows_of(classes), self._columns(learning)), classes)

    def visited_again(
        self, classes: Tensor | None, former: list[ClassRows], update: Mapping[str, Column] | None
    ) -> ClassRows:
        """The rows for a second pass after first ones over ``former``; written back where ``update`` is given.

        ``update`` holds the columns of the optimizer whose step it is.
        """
        if classes is None:
            weight, norms = self.weight.values, self.inverse_norm.values
            return StreamedRows(weight, norms, self.centers, host=self, update=update)
        stages = [rows.stage for rows in former if isinstance(rows, FetchedRows)]
        stage = stages[0] if len(stages) == 1 else self.staging.combine(self._rows_of(classes), stages)
        if update is not None:
            self.staging.complete(stage, update.values())
        return self._held(stage, classes, update=update)

    def announce(self, key: int, labels: Tensor, classes: Tensor) -> None:
        """Begin to fetch the ``classes`` that the step ``key`` with these labels (B,) of all ranks will visit."""
        stage = self.staging.fetch(self._rows_of(classes), self._columns(learning=True))
        self._announced.append(_Announced(key, labels, classes, stage))

    @property
    def announced(self) -> int:
        """How many steps were announced and have not begun."""
        return len(self._announced)

    def take_announced(self, key: int, labels: Tensor) -> "FetchedRows | None":
        """What was announced for this step; None, and all announcements are forgotten, where it was another step."""
        if not self._announced:
            return None
        first = self._announced.popleft()
        if first.key != key or not torch.equal(first.labels, labels):
            self._announced.clear()
            return None
        return self._fetched(first.stage, first.classes)

    def settle(self, *, forget: bool = False) -> None:
        """Wait for all updates to land; ``forget`` what was fetched ahead where someone else may write to the table."""
        if forget:
            self._announced.clear()
        self.staging.settle()

    def fetched_now(self, rows: slice | Tensor, columns: Iterable[Column] = ()) -> Stage:
        """Rows with weights, norms and further columns, up to date."""
        return self.staging.ready(self.staging.fetch(rows, [self.weight, self.inverse_norm, *columns]))

    def _columns(self, learning: bool) -> list[Column]:
        return [self.weight, self.inverse_norm, *(self.state.values() if learning else ())]

    def _rows_of(self, classes: Tensor) -> Tensor:
        return ClassRows(self.weight.values, self.inverse_norm.values, self.centers).rows_of(classes)

    def _fetched(self, stage: Stage, classes: Tensor) -> "FetchedRows":
        return self._held(self.staging.ready(stage), classes)

    def _held(
        self, stage: Stage, classes: Tensor | None = None, update: Mapping[str, Column] | None = None
    ) -> "FetchedRows":
        weight, norms = stage.columns[self.weight], stage.columns[self.inverse_norm]
        return FetchedRows(weight, norms, self.centers, stage=stage, classes=classes, host=self, update=update)


@dataclass(frozen=True)
class _Announced:
    key: int
    labels: Tensor
    classes: Tensor
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class FetchedRows(ClassRows):
    """Copies of some rows: those of local ``classes`` (sorted), of which a pass visits all.

    With ``update``, they are written back once a pass over them has ended.
    """

    stage: Stage
    classes: Tensor | None
    host: HostTable
    update: Mapping[str, Column] | None = None

    def positions(self, local_labels: Tensor) -> Tensor:
        """Where each label (B,) stands among the visited classes, −1 where it does not."""
        assert self.classes is not None
        if self.classes.numel() == 0:
            return torch.full_like(local_labels, -1)
        place = torch.searchsorted(self.classes, local_labels).clamp(max=self.classes.numel() - 1)
        return torch.where(self.classes[place] == local_labels, place, -1)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The visited classes in order, ``size`` at a time."""
        yield from super().chunks(size)
        if self.update is not None:
            self.host.staging.write_back(self.stage)

    def local_rows(self, index: slice | Tensor) -> Tensor:
        """The numbers that rows ``index`` have in this rank's shard."""
        rows = self.stage.rows
        if isinstance(rows, Tensor):
            return rows[index]
        return ClassRows.local_rows(self, index) + int(rows.start)

    def state(self, name: str) -> Tensor:
        """The updating optimizer's column ``name`` for these rows, (n,) or (n, D)."""
        assert self.update is not None
        return self.stage.columns[self.update[name]]


@dataclass(frozen=True, kw_only=True)
class StreamedRows(ClassRows):
    """The whole table, which passes by in chunks: the next one is fetched while one is computed with.

    ``weight`` and ``inverse_norm`` are the host's. With ``update``, each chunk is written back behind the next.
    """

    host: HostTable
    update: Mapping[str, Column] | None = None

    def picked(self, index: Tensor) -> ClassRows:
        """Rows ``index`` (n,) alone, on the compute device, in that order."""
        return self.host._held(self.host.fetched_now(index))

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The classes in order, ``size`` at a time, each chunk's rows in a table of their own."""
        staging = self.host.staging
        columns = [self.host.weight, self.host.inverse_norm, *(self.update or {}).values()]
        starts = iter(range(0, self.num_classes, size))
        upcoming = self._fetch(next(starts, None), size, columns)
        for start in range(0, self.num_classes, size):
            assert upcoming is not None
            stage = staging.ready(upcoming)
            upcoming = self._fetch(next(starts, None), size, columns)
            stop = min(start + size, self.num_classes)
            table = self.host._held(stage, update=self.update)
            yield Chunk(start, stop, slice(0, stage.count), table)
            if self.update is not None:
                staging.write_back(stage)

    def _fetch(self, start: int | None, size: int, columns: list[Column]) -> Stage | None:
        if start is None:
            return None
        rows = self.row_index(start, min(start + size, self.num_classes))
        return self.host.staging.fetch(rows, columns)
