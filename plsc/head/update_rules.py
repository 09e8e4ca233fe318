"""The arithmetic of the head's optimizers on some rows, and what it needs beside their gradient.

Backends compute a rule with :meth:`UpdateRule.apply`, or with a kernel of their own for the rule's type.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plsc.head.low_precision import Rounding


class UpdateRule(ABC):
    """One step of an optimizer, as a function of rows, gradient and state."""

    @abstractmethod
    def apply(self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Update copies of rows and of their state, each (n, D) float32 or float64, in place.

        Args:
            weight: the rows.
            gradient: of the same dtype. May be overwritten.
            state: rows of the optimizer's tables by name. What is rounded afterwards is not what the step took: the
                noise of rounding has mean zero.
        """


@dataclass(frozen=True)
class UpdateKind:
    """What decides how an optimizer's updates are computed.

    Attributes:
        rule: the arithmetic; its numbers do not matter, which terms it has does.
        state_dtypes: of the optimizer's tables, by name.
        rounding: of low-precision weights and state.
    """

    rule: UpdateRule
    state_dtypes: Mapping[str, torch.dtype]
    rounding: Rounding = "stochastic"

    def has_state_in(self, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Return whether all tables are stored in some of ``dtypes``."""
        return all(dtype in dtypes for dtype in self.state_dtypes.values())


@dataclass(frozen=True)
class Update:
    """One step over all chunks.

    Attributes:
        rule: the arithmetic.
        factor: multiplies every gradient.
        rounding: of low-precision weights and state.
        seed, step: key the random bits, along with the rows' global numbers.
        first_row: the shard's first row in the global table.
        skip: float32 scalar on the device that computes. Where it is not 0, rows, state and norms stay as they are,
            bit for bit; None where the update goes through. Nobody may wait for it.
    """

    rule: UpdateRule
    factor: float
    rounding: Rounding
    seed: int
    step: int
    first_row: int
    skip: Tensor | None = None


@dataclass(frozen=True)
class SgdRule(UpdateRule):
    """torch.optim.SGD: m = μm + g + λW, W −= lr·m. The state is "momentum", or none where ``momentum`` is 0."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool

    def apply(self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UpdateRule.apply`."""
        step = gradient.add_(weight, alpha=self.weight_decay) if self.weight_decay else gradient
        if "momentum" in state:
            buffer = state["momentum"].mul_(self.momentum).add_(step)
            step = step.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
        weight.add_(step, alpha=-self.lr)


@dataclass(frozen=True)
class AdamWRule(UpdateRule):
    """torch.optim.AdamW (Loshchilov & Hutter, ICLR 2019). The state is "first_moment" and "second_moment".

    ``step`` counts from 1, for the correction of the moments' bias.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def apply(self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UpdateRule.apply`."""
        first = state["first_moment"].lerp_(gradient, 1 - self.beta1)
        second = state["second_moment"].mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        weight.mul_(1 - self.lr * self.weight_decay)
        size = self.lr / (1 - self.beta1**self.step)
        root = (second / (1 - self.beta2**self.step)).sqrt_().add_(self.eps)
        weight.addcdiv_(first, root, value=-size)
