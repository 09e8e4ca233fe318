"""ZeRO stage 1: the optimizer's state is spread over the ranks; weights and gradients are whole on each.

(Rajbhandari et al., ZeRO, SC 2020, section 5.1.) Each weight is stepped by one rank, which then broadcasts it. So
optimizers that look at a whole layer (LARS, LAMB, Muon, Adafactor) work as they are, and results are those of data
parallelism bit for bit.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.base import Groups
from plsc.parallel.strategies.ddp import DataParallel


class ZeroOptimizer(DataParallel):
    """Data parallelism with torch's ZeroRedundancyOptimizer."""

    def describe(self) -> str:
        """How the backbone lies on the ranks, in words for a run's first lines."""
        return f"optimizer state in {self.mesh.world_size} parts (zero1)"

    @classmethod
    def stepped_weights(cls, sizes: Sequence[int], data_ranks: int) -> list[list[int]]:
        """See :meth:`Strategy.stepped_weights`: torch gives the largest first, to the rank that has least."""
        loads = [(0, rank) for rank in range(data_ranks)]
        parts: list[list[int]] = [[] for _ in loads]
        for place in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            load, rank = loads[0]
            parts[rank].append(place)
            heapq.heapreplace(loads, (load + sizes[place], rank))
        return parts

    def optimizer(self, make: Callable[[Groups], torch.optim.Optimizer], groups: Groups) -> torch.optim.Optimizer:
        """Make the optimizer of all weights, which leaves on this rank those that are its to step."""
        optimizer = super().optimizer(make, groups)
        return optimizer if self.mesh.world_size == 1 else _ShardedOptimizer(optimizer, self.mesh)

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's weights."""
        return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Let every rank write the states that it alone has."""
        return name.startswith("optimizer.") or super().writes(name, tensor)


class _ShardedOptimizer(ZeroRedundancyOptimizer):
    """torch's, made of an optimizer of all weights; the device's verdict on a step goes on to the one within."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        super().__init__(
            [{**group, "params": list(group["params"])} for group in optimizer.param_groups],
            optimizer_class=lambda mine, **_: _restricted(optimizer, mine),  # type: ignore[arg-type]
            process_group=mesh.group,
            # few broadcasts; the buckets would lose the memory format of channels_last
            parameters_as_bucket_view=all(weight.is_contiguous() for weight in weights),
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.optim, "_step_supports_amp_scaling", False))

    @property
    def found_inf(self) -> Any:
        """Where the step is skipped, as torch's fused optimizers take it."""
        return self.optim.found_inf

    @found_inf.setter
    def found_inf(self, flag: Any) -> None:
        self.optim.found_inf = flag

    @found_inf.deleter
    def found_inf(self) -> None:
        del self.optim.found_inf


def _restricted(optimizer: torch.optim.Optimizer, groups: Groups) -> torch.optim.Optimizer:
    """Take all weights out of ``optimizer`` but those of ``groups``, which are its own groups in their order."""
    for group, mine in zip(optimizer.param_groups, groups, strict=True):
        for weight in set(group["params"]).difference(mine["params"]):
            optimizer.state.pop(weight, None)
        group["params"] = mine["params"]
    return optimizer
