"""A moving average of the backbone's weights, which is often the better model to evaluate and to ship."""

import torch
from torch import Tensor, nn


class MovingAverage:
    """Keeps ``model``, a copy of the backbone, at decay·average + (1 − decay)·backbone after each step.

    The decay starts at 0.1 and rises to ``decay`` as (1 + n)/(10 + n) over the updates n, so that the random
    initial weights do not linger. Running statistics are averaged likewise.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, source: nn.Module) -> None:
        """Take in the weights of ``source``, a module with the same keys."""
        weight = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        averaged: list[Tensor] = []
        present: list[Tensor] = []
        values = source.state_dict()
        for name, old in self.model.state_dict().items():
            if old.is_floating_point():
                averaged.append(old)
                present.append(values[name])
            else:
                old.copy_(values[name])
        torch._foreach_lerp_(averaged, present, weight)
