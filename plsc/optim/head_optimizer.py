"""What the head's optimizers share: pass 2, each chunk's rows updated as soon as their gradient exists."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from plsc.errors import PlscError, UsageError
from plsc.head.host_memory import Column
from plsc.head.host_table import FetchedRows
from plsc.head.low_precision import Dice, Rounding, RowState, check_state_dtype, scale_name, store
from plsc.head.norms import renew_norms
from plsc.head.row_shard import RowShard
from plsc.head.sharded_head import ShardedHead
from plsc.losses.class_rows import Chunk
from plsc.losses.softmax import through_norm
from plsc.parallel.collectives import all_reduce_max, all_reduce_sum

_CPU_ROWS = 256  # updated at a time


class HeadOptimizer(torch.optim.Optimizer):
    """A torch Optimizer over one :class:`ShardedHead`'s table; learning-rate schedulers work on it.

    ``step()`` consumes the batches whose loss went through backward() since the last step. Where the loss or its
    derivative is not finite, it leaves weights, state and norms as they are, bit for bit, on every rank.

    Attributes:
        steps: updates made.
        skipped: whether the last step() left everything as it was.
    """

    # torch.amp.GradScaler then hands scale and found_inf over instead of looking for gradients in the parameters
    _step_supports_amp_scaling = True

    def __init__(self, head: ShardedHead, defaults: dict[str, Any], rounding: Rounding) -> None:
        if head.update != "fused":
            raise UsageError('the head was made with update="autograd"; use any torch optimizer on it, or "fused"')
        for name in ("lr", "weight_decay"):
            if not defaults[name] >= 0:
                raise UsageError(f"{name} must not be negative, but is {defaults[name]}")
        super().__init__([head.table], defaults)
        self.head, self.rounding = head, rounding
        self.steps = 0
        self.skipped = False
        self.tables: dict[str, RowState] = {}
        self._columns: dict[str, Column] = {}  # of the tables, where the head's table lies in host memory
        if head.host is not None:
            head.host.state = self._columns

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run pass 2 over the batches seen since the last step, and update every row that took part.

        Raises:
            PlscError: ``head.weight`` was written to between a batch's forward and this step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.head.pending:
            return loss
        self._check_version()
        self.skipped = not self._finite()
        if not self.skipped:
            self.steps += 1
            scale = getattr(self, "grad_scale", None)  # torch.amp.GradScaler sets it for the length of this call
            self._update(1.0 if scale is None else 1.0 / float(scale))
        self.head.pending.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the batches seen since the last step."""
        self.head.pending.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """‖∂loss/∂W‖ over all shards (float64 scalar), of the batches that wait for step(). Costs one more pass 2."""
        total = torch.zeros((), dtype=torch.float64, device=self.head.mesh.device)
        if self.head.pending:
            for chunk, gradient in self._unit_gradients():
                total += through_norm(gradient, chunk).double().square().sum()
        return all_reduce_sum(total, self.head.mesh.head).sqrt()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the gradient that step() will apply."""
        for pending in self.head.pending:
            assert pending.gradient is not None
            pending.gradient *= factor

    def gradients_are_finite(self) -> bool:
        """Whether step() would go through, the same on every rank. Every rank calls."""
        return self._finite()

    def sharded_state(self) -> dict[str, RowShard]:
        """State tables for torch.distributed.checkpoint, loadable at any number of ranks."""
        return {
            name: self.head.row_shard(tensor, self._columns.get(name))
            for key, table in self.tables.items()
            for name, tensor in table.tensors(key).items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and the number of steps; the tables are in :meth:`sharded_state`."""
        return {
            "steps": self.steps,
            "param_groups": [
                {name: value for name, value in group.items() if name != "params"} for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.steps = int(state_dict["steps"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def _rows_updated(
        self,
        weight: Tensor,
        gradient: Tensor,
        tables: dict[str, RowState],
        index: slice | Tensor,
        dice: Dice | None,
    ) -> None:
        """Change ``weight`` (n, D) in place by its ``gradient``, and rows ``index`` of ``tables``. For subclasses."""
        raise NotImplementedError

    def _update(self, factor: float) -> None:
        for chunk, gradient in self._unit_gradients(self._columns):
            self._update_chunk(chunk, gradient, factor)
        self.head.norms_are_current()

    def _tables_of(self, chunk: Chunk) -> dict[str, RowState]:
        """The state tables that ``chunk.index`` counts in: those of fetched rows were fetched with them."""
        rows = chunk.table
        if not isinstance(rows, FetchedRows):
            return self.tables
        return {
            name: RowState.over(
                rows.state(name), rows.state(scale_name(name)) if table.scale is not None else None, self.rounding
            )
            for name, table in self.tables.items()
        }

    def _update_chunk(self, chunk: Chunk, unit_gradient: Tensor, factor: float) -> None:
        """Update a chunk's rows, state and norms by ``factor`` times the gradient by its unit rows."""
        # Rows are independent of each other, and their update makes several float32 copies of them.
        for part, rows in chunk.parts(_CPU_ROWS if unit_gradient.device.type == "cpu" else len(unit_gradient)):
            self._update_rows(rows, unit_gradient[part], factor)

    def _update_rows(self, chunk: Chunk, unit_gradient: Tensor, factor: float) -> None:
        gradient = through_norm(unit_gradient, chunk).mul_(factor)
        dice = self._dice(chunk)
        weight = chunk.weight.to(gradient.dtype, copy=True)
        self._rows_updated(weight, gradient, self._tables_of(chunk), chunk.index, dice)
        low = dice.low if dice is not None else None
        store(chunk.table.weight, chunk.index, weight, low, self.rounding)
        renew_norms(chunk.table, chunk.index)

    def _unit_gradients(self, update: dict[str, Column] | None = None) -> Iterator[tuple[Chunk, Tensor]]:
        with torch.autocast(self.head.mesh.device.type, enabled=False):
            yield from self.head.gradient_chunks(self.head.pending, update)

    def _dice(self, chunk: Chunk) -> Dice | None:
        low_precision = (torch.bfloat16, torch.int8)
        if self.head.table.dtype not in low_precision and not any(
            table.values.dtype in low_precision for table in self.tables.values()
        ):
            return None
        rows = chunk.local_rows + self.head.first_row
        return Dice.throw(self.head.seed, self.steps, rows, self.head.dim)

    def _table(self, name: str, dtype: torch.dtype) -> RowState:
        """State of zeros beside the weights, wherever those lie."""
        (rows, columns), host = self.head.table.shape, self.head.host
        if host is None:
            return RowState(rows, columns, dtype, self.head.table.device, self.rounding)
        check_state_dtype(dtype)
        self._columns[name] = values = host.memory.table(name, rows, columns, dtype)
        if dtype != torch.int8:
            return RowState.over(values.values, None, self.rounding)
        self._columns[scale_name(name)] = scale = host.memory.numbers(rows, torch.float32)
        return RowState.over(values.values, scale.values, self.rounding)

    def _check_version(self) -> None:
        if any(pending.version != self.head.version for pending in self.head.pending):
            raise PlscError(
                "head.weight was written to between a loss and its step(); write after step() or zero_grad()"
            )

    def _finite(self) -> bool:
        """The verdict of all ranks: head groups see other samples. Moves 8 bytes, and waits for the device."""
        facts = [
            torch.stack([p.log_z.sum(), p.target_pull.sum(), cast(Tensor, p.gradient).double()])
            for p in self.head.pending
        ]
        bad = torch.tensor(float(getattr(self, "found_inf", 0.0)), device=self.head.mesh.device)
        if facts:
            bad += ~torch.isfinite(torch.stack(facts)).all()
        return not all_reduce_max(bad, self.head.mesh).item()
