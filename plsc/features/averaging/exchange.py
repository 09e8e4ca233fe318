"""Averaging of the backbone's weights every few steps, in the place of its gradients at every step.

Each rank, or group of ranks, steps by its own gradients in between. What a step needs of the averages is what it needs
of a :class:`GradientExchange`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plsc.extensions import Registry
from plsc.features.averaging.config import AveragingConfig
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh, subgroup
from plsc.parallel.replica_weights import ReplicaWeights, flat, write_flat
from plsc.parallel.strategies.ddp import GradientExchange

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel  # late where it is used: it takes long to import


class ModelAveraging(ReplicaWeights):
    """Local SGD (Stich, ICLR 2019, arXiv:1805.09767): ranks step alone, and average their weights every few steps.

    With ``start_step`` it is post-local SGD (Lin et al., ICLR 2020, arXiv:1808.07217), with groups hierarchical local
    SGD (the same; Wang et al., 2020, arXiv:2010.12998). The optimizers' states stay each rank's own, as in torch's
    PostLocalSGDOptimizer. That wrapper itself would hide the optimizer from learning-rate schedulers, checkpoints and
    the verdict on a step, so weights are averaged after the step instead.

    Averages come at steps of fixed numbers, one that is skipped included: their mean stays what it was.

    Args:
        mesh: all ranks, several.
        module: the backbone, on the mesh's device, with the same weights on every rank.
        options: of the averages.

    Raises:
        UsageError: groups do not divide the ranks.
    """

    def __init__(
        self, mesh: Mesh, module: nn.Module, options: AveragingConfig, *, start_step: int = 0, group_period: int = 1
    ) -> None:
        options.check_world(mesh.world_size)
        super().__init__(mesh, module)
        self._period, self._start_step, self._group_period = options.period, start_step, group_period
        self._hook_state: Any = None
        ranks = options.group_ranks
        self._group = subgroup(mesh, ranks) if ranks > 1 else Mesh(0, 1, mesh.local_rank, mesh.device)

    def register(self, net: "DistributedDataParallel") -> None:
        """Register torch's hook for post-local SGD: gradients of all ranks, from ``start_step`` on of the group."""
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd

        averages = self._group.world_size > 1 and self._group_period == 1
        group = self._group.group if averages else None
        self._hook_state = post_local_sgd.PostLocalSGDState(self._mesh.group, group, self._start_step, averages)
        net.register_comm_hook(self._hook_state, post_local_sgd.post_localSGD_hook)

    def begin(self, step: int) -> None:
        """Count the steps of the run, not of the process."""
        self._step = step
        self._hook_state.iter = step
        self.replicas_differ |= step >= self._start_step

    @torch.no_grad()
    def commit_or_undo(self, skip: Tensor) -> None:
        """Average the weights where it is time."""
        done = self._step + 1
        if self._is_due(done):
            mesh = self._mesh
        elif self._group_period > 1 and done % self._group_period == 0:
            mesh = self._group
        else:
            return
        share = flat(self._trained).div_(mesh.world_size)  # in one dtype and piece, whatever their memory formats
        write_flat(all_reduce_sum(share, mesh), self._trained)

    def _is_due(self, done: int) -> bool:
        """Return whether all ranks average after so many steps of the run."""
        since = done - self._start_step
        return since > 0 and since % self._period == 0

    def sent_bytes(self, parameters: Iterable[nn.Parameter], step: int) -> int:
        """Return the bytes that a rank contributes to the collectives of all ranks at a step; within groups, more."""
        sends = step < self._start_step or self._is_due(step + 1)
        return super().sent_bytes(parameters, step) if sends else 0


class DiLoCo(ModelAveraging):
    """DiLoCo (Douillard et al., 2023, arXiv:2311.08105): an outer optimizer steps by what the ranks have changed.

    After ``period`` steps from common weights θ, the mean over the ranks of θ − w is the gradient by which SGD with
    Nesterov's momentum moves θ, and all ranks go on from there with the states of their own (inner) optimizers. At
    outer_lr = 1 and outer_momentum = 0 that is local SGD.
    """

    def __init__(self, mesh: Mesh, module: nn.Module, options: AveragingConfig) -> None:
        super().__init__(mesh, module, options)
        self._common = {weight: nn.Parameter(weight.detach().clone()) for weight in self._parameters}
        lr, momentum = options.outer_lr, options.outer_momentum
        self._outer = torch.optim.SGD(self._common.values(), lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def commit_or_undo(self, skip: Tensor) -> None:
        """Take the outer step where it is time."""
        if not self._is_due(self._step + 1):
            return
        changes = {weight: self._common[weight] - weight for weight in self._trained}
        self.average(changes.values())
        for weight, change in changes.items():
            self._common[weight].grad = change
        self._outer.step()
        self._outer.zero_grad()
        for weight in changes:
            weight.copy_(self._common[weight])

    def state(self) -> dict[str, Tensor]:
        """Add the common weights and the outer momentum, which are equal on all ranks."""
        tensors = super().state()
        for index, weight in enumerate(self._trained if tensors else ()):
            common = self._common[weight]
            tensors[f"{index}.common"] = common.detach().contiguous()
            if "momentum_buffer" in self._outer.state[common]:
                tensors[f"{index}.outer"] = self._outer.state[common]["momentum_buffer"].contiguous()
        return tensors

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        """Take over the outer state too; where ``tensors`` has none, the restored weights are the common ones."""
        for index, weight in enumerate(self._trained):
            common = self._common[weight]
            common.copy_(tensors.get(f"{index}.common", weight.detach()))
            if f"{index}.outer" in tensors:
                momentum = torch.empty_like(weight).copy_(tensors[f"{index}.outer"])
                self._outer.state[common]["momentum_buffer"] = momentum
        super().restore(optimizer, tensors)


def _post_local_sgd(mesh: Mesh, module: nn.Module, options: AveragingConfig) -> ModelAveraging:
    return ModelAveraging(mesh, module, options, start_step=options.start_step)


def _hierarchical(mesh: Mesh, module: nn.Module, options: AveragingConfig) -> ModelAveraging:
    return ModelAveraging(mesh, module, options, group_period=options.group_period)


# Every kind by its name in the configuration, and those of installed packages.
AVERAGINGS: Registry[Callable[[Mesh, nn.Module, AveragingConfig], GradientExchange]] = Registry(
    "plsc.averagers",
    {
        "none": lambda mesh, module, options: GradientExchange(mesh, module),
        "local_sgd": ModelAveraging,
        "post_local_sgd": _post_local_sgd,
        "hierarchical": _hierarchical,
        "diloco": DiLoCo,
    },
    callable,
    "a function of (mesh, module, options) that returns a GradientExchange",
)


def model_averaging(options: AveragingConfig, module: nn.Module, mesh: Mesh) -> GradientExchange:
    """Return the averaging that ``options`` name in AVERAGINGS; with one rank there is none, whatever its name.

    Every rank calls, as groups are made.

    Raises:
        UsageError: groups do not divide the ranks.
    """
    if mesh.world_size == 1:
        return GradientExchange(mesh, module)
    return AVERAGINGS[options.name](mesh, module, options)
