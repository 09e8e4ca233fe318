"""Replicas of the backbone whose weights differ between averages: each rank's own weights and optimizer's state."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.ddp import GradientExchange, in_memory_order


class ReplicaWeights(GradientExchange):
    """The base of exchanges under which ranks step by themselves for a while.

    A rank's own weights take the place of gradients that it has not sent yet. torch's model averagers would return
    weights laid out row by row, leave out those without a gradient, and wait for the device.

    Args:
        mesh: all ranks, several.
        module: the backbone, on the mesh's device, with the same weights on every rank.
    """

    keeps_state = True

    def __init__(self, mesh: Mesh, module: nn.Module) -> None:
        super().__init__(mesh, module)
        self._parameters = list(module.parameters())
        self._optimizer: torch.optim.Optimizer | None = None
        self._own: dict[nn.Parameter, Tensor] = {}  # this rank's weights, while the parameters hold the average
        self._step = 0

    def take_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember ``optimizer``, whose state belongs to the rank's own weights."""
        self._optimizer = optimizer

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters hold the average over all ranks until the block ends."""
        if not self.replicas_differ:
            yield
            return
        self._own = {parameter: parameter.detach().clone() for parameter in self._trained}
        self.average(self._trained)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in self._own.items():
                    parameter.copy_(own)
            self._own = {}

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Set dense tensors of one dtype to their averages over all ranks."""
        targets = list(tensors)
        write_flat(all_reduce_sum(flat(targets), self._mesh).div_(self._mesh.world_size), targets)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """This rank's weights and their optimizer's state, by the weight's place among the trained; none if all agree.

        Numbers of steps are equal on all ranks, and are left out.
        """
        if not self.replicas_differ:
            return {}
        tensors: dict[str, Tensor] = {}
        for index, weight in enumerate(self._trained):
            tensors[f"{index}.weight"] = self._own.get(weight, weight.detach()).contiguous()
            state = {} if self._optimizer is None else self._optimizer.state.get(weight, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    tensors[f"{index}.optimizer.{name}"] = value.contiguous()
        return tensors

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        """Take over a rank's weights, whose state ``optimizer`` has; they stay as they are where there are none."""
        self._optimizer = optimizer
        for index, weight in enumerate(self._trained):
            if f"{index}.weight" in tensors:
                weight.copy_(tensors[f"{index}.weight"])
                self.replicas_differ = True


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([in_memory_order(tensor.detach()) for tensor in tensors])


def write_flat(flat: Tensor, tensors: Iterable[Tensor]) -> None:
    targets = [in_memory_order(tensor.detach()) for tensor in tensors]
    torch._foreach_copy_(targets, flat.split([target.numel() for target in targets]))
