"""SGD with momentum and decay on the class table, fused with the softmax's second pass."""

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head import triton_update
from plsc.head.low_precision import Dice, Rounding
from plsc.head.random_bits import key_of
from plsc.head.sharded_head import ShardedHead
from plsc.losses.class_rows import Chunk
from plsc.native import kernels
from plsc.optim.head_optimizer import HeadOptimizer


class HeadSGD(HeadOptimizer):
    """torch.optim.SGD's arithmetic (m = μm + g + λW; W −= lr·m) on a :class:`plsc.ShardedHead`.

    Only rows that took part in the step are read or written: with sampling, the others keep weight and momentum.

    Args:
        head: its table, and its ``momentum_dtype``.
        lr: learning rate.
        momentum: μ; 0 keeps no state, as does ``momentum_dtype=None``.
        weight_decay: λ, coupled as in torch.optim.SGD.
        nesterov: look ahead by one step of momentum.
        rounding: how low-precision weights and state are stored; "nearest" exists to show what it breaks.

    Raises:
        UsageError: a value out of range, or momentum without a ``momentum_dtype``.
    """

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        rounding: Rounding = "stochastic",
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum lies in [0, 1), not {momentum}")
        if momentum and head.momentum_dtype is None:
            raise UsageError("the head keeps no momentum (momentum_dtype=None); pass momentum=0")
        if nesterov and not momentum:
            raise UsageError("nesterov needs momentum")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(head, defaults, rounding)
        if momentum and head.momentum_dtype is not None:
            self.tables["momentum"] = self._table("momentum", head.momentum_dtype)

    def _update_chunk(self, chunk: Chunk, unit_gradient: Tensor, factor: float) -> None:
        if triton_update.supports(chunk.table.weight, self.tables.get("momentum")):
            return self._update_chunk_by_triton(chunk, unit_gradient, factor)
        if self.rounding != "stochastic" or not kernels.fits_update(chunk.table.weight):
            return super()._update_chunk(chunk, unit_gradient, factor)
        state = self.tables.get("momentum")
        if state is not None and state.values.dtype == torch.float64:
            return super()._update_chunk(chunk, unit_gradient, factor)
        group = self.param_groups[0]
        return kernels.sgd(
            kernels.Table.visiting(chunk.table.weight, chunk.table.inverse_norm, chunk.index),
            unit_gradient,
            factor=factor,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            state=state.values if state is not None else None,
            state_scale=state.scale if state is not None else None,
            key=key_of(self.head.seed, self.steps),
            numbers=chunk.local_rows,
            first_number=self.head.first_row,
        )

    def _update_chunk_by_triton(self, chunk: Chunk, unit_gradient: Tensor, factor: float) -> None:
        group = self.param_groups[0]
        triton_update.update_rows(
            chunk.table.weight,
            chunk.table.inverse_norm,
            chunk.index,
            unit_gradient,
            self.tables.get("momentum"),
            factor=factor,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            rounding=self.rounding,
            key=key_of(self.head.seed, self.steps),
            numbers=chunk.local_rows,
            first_number=self.head.first_row,
        )

    def _rows_updated(
        self, weight: Tensor, gradient: Tensor, index: slice | Tensor, dice: Dice | None
    ) -> None:
        group = self.param_groups[0]
        lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        step = gradient.add_(weight, alpha=decay) if decay else gradient
        if "momentum" in self.tables:
            buffer = self.tables["momentum"].read(index, torch.promote_types(gradient.dtype, torch.float32))
            buffer.mul_(momentum).add_(step)
            self.tables["momentum"].write(index, buffer, dice)
            step = step.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
        weight.add_(step, alpha=-lr)
