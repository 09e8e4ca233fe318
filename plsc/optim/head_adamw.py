"""AdamW on the class table, fused with the softmax's second pass."""

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.head.low_precision import Dice, Rounding, RowState
from plsc.head.sharded_head import ShardedHead
from plsc.optim.head_optimizer import HeadOptimizer


class HeadAdamW(HeadOptimizer):
    """torch.optim.AdamW's arithmetic (Loshchilov & Hutter, ICLR 2019) on a :class:`plsc.ShardedHead`.

    Only rows that took part in the step are read or written. The first moment is kept in the head's
    ``momentum_dtype``. The second spans too many orders of magnitude for int8: it is bfloat16 where the first is
    bfloat16 or int8.

    Args:
        head: its table, and its ``momentum_dtype``, which may not be None.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the second moment's root.
        weight_decay: decoupled; W shrinks by lr·weight_decay.
        rounding: how low-precision weights and state are stored; "nearest" exists to show what it breaks.

    Raises:
        UsageError: a value out of range, or a head without a ``momentum_dtype``.
    """

    def __init__(
        self,
        head: ShardedHead,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rounding: Rounding = "stochastic",
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas lie in [0, 1), not {betas}")
        if head.momentum_dtype is None:
            raise UsageError("AdamW keeps moments; give the head a momentum_dtype")
        super().__init__(head, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}, rounding)
        low = head.momentum_dtype in (torch.bfloat16, torch.int8)
        self.tables["first_moment"] = self._table("first_moment", head.momentum_dtype)
        self.tables["second_moment"] = self._table("second_moment", torch.bfloat16 if low else head.momentum_dtype)

    def _rows_updated(
        self,
        weight: Tensor,
        gradient: Tensor,
        tables: dict[str, RowState],
        index: slice | Tensor,
        dice: Dice | None,
    ) -> None:
        group = self.param_groups[0]
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        wide = gradient.dtype
        first = tables["first_moment"].read(index, wide).lerp_(gradient, 1 - beta1)
        second = tables["second_moment"].read(index, wide).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        tables["first_moment"].write(index, first, dice)
        tables["second_moment"].write(index, second, dice)
        weight.mul_(1 - lr * group["weight_decay"])
        size = lr / (1 - beta1**self.steps)
        root = (second / (1 - beta2**self.steps)).sqrt_().add_(group["eps"])
        weight.addcdiv_(first, root, value=-size)
