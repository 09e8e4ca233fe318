"""SGD with momentum and decay on the class table, fused with the softmax's second pass."""

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head import triton_update
from plsc.head.low_precision import Dice, Rounding, RowState
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
        table, state = chunk.table, self._tables_of(chunk).get("momentum")
        on_triton = triton_update.supports(table.weight, state)
        if not on_triton and not (self.rounding == "stochastic" and kernels.fits_update(table.weight, _values(state))):
            return super()._update_chunk(chunk, unit_gradient, factor)
        group = self.param_groups[0]
        options = {
            "factor": factor,
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
            "key": key_of(self.head.seed, self.steps),
            "numbers": chunk.local_rows,
            "first_number": self.head.first_row,
        }
        if on_triton:
            rows = table.weight, table.inverse_norm, chunk.index
            return triton_update.update_rows(*rows, unit_gradient, state, rounding=self.rounding, **options)
        visited = kernels.Table.visiting(table.weight, table.inverse_norm, chunk.index)
        scale = state.scale if state is not None else None
        return kernels.sgd(visited, unit_gradient, state=_values(state), state_scale=scale, **options)

    def _rows_updated(
        self,
        weight: Tensor,
        gradient: Tensor,
        tables: dict[str, RowState],
        index: slice | Tensor,
        dice: Dice | None,
    ) -> None:
        group = self.param_groups[0]
        lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        step = gradient.add_(weight, alpha=decay) if decay else gradient
        if "momentum" in tables:
            buffer = tables["momentum"].read(index, torch.promote_types(gradient.dtype, torch.float32))
            buffer.mul_(momentum).add_(step)
            tables["momentum"].write(index, buffer, dice)
            step = step.add_(buffer, alpha=momentum) if group["nesterov"] else buffer
        weight.add_(step, alpha=-lr)


def _values(state: RowState | None) -> Tensor | None:
    return None if state is None else state.values
