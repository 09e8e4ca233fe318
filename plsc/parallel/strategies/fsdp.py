"""Fully sharded data parallelism: weights, gradients and optimizer state are spread over the ranks (FSDP2).

(Zhao et al., PyTorch FSDP, VLDB 2023; ZeRO stage 3.) Every block's weights are gathered right before it computes, in
the forward and in the backward pass, while the block before it computes; its gradients are summed onto the ranks that
keep them. In the hybrid form the ranks of a node share one set of weights, and the nodes hold replicas: only gradients
travel between them, a share of each per rank (Zhao et al., section 3.2.2).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from plsc.parallel.strategies.base import Slice, Strategy, Weight
from plsc.parallel.strategies.layout import Layout

_LARGE = 1 << 20  # numbers of a single layer that are gathered on their own


class FullySharded(Strategy):
    """FSDP2's fully_shard over the layout's dimension "shard", with replicas of that along "replicate"."""

    is_replicated = False
    _name = "fsdp"
    _reshards_after_forward = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._layout = layout
        self._shards, self._replicas = layout.size("shard"), layout.size("replicate")
        self._sharded: dict[str, nn.Parameter] = {}

    @classmethod
    def gathering_passes(cls, data_ranks: int, pp: int) -> int:
        """See :meth:`Strategy.gathering_passes`."""
        # the micro-batches of a pipeline compute with the same weights, gathered once (torchtitan does the same)
        return 2 if pp == 1 and cls._reshards_after_forward else 1

    def describe(self) -> str:
        """How the backbone lies on the ranks, in words for a run's first lines."""
        name = f"hsdp, {self._replicas} replicas" if self._replicas > 1 else self._name
        return f"backbone in {self._shards} parts ({name}{', offloaded' if self.wrapping.offload else ''})"

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Shard each block, then what is left, in place."""
        wrapping, gathers = self.wrapping, self.gathering_passes(self.data_ranks, self._layout.size("pp"))
        self.steps_on_device = not wrapping.offload
        return shard_units(
            backbone,
            wrapping.compile is not None,
            mesh=self._layout.along("replicate", "shard"),
            reshard_after_forward=None if gathers == 2 else False,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=wrapping.reduce_dtype),
            offload_policy=self._offload_policy(),
        )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.wrapping.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda")

    def place_weight(self, name: str, place: int | None, weight: nn.Parameter, shape: torch.Size) -> Weight:
        """Take the rank's rows of a weight as a parameter of their own.

        They share memory with FSDP's, and DTensor stays out of the optimizer: its updates are element by element.
        """
        self._sharded[name] = weight
        sharded = cast(DTensor, weight.data)
        local = nn.Parameter(sharded.to_local(), requires_grad=weight.requires_grad)
        _, offsets = compute_local_shape_and_global_offset(shape, sharded.device_mesh, sharded.placements)
        return Weight(name, place, local, shape, [Slice(len(local), tuple(offsets))], self._replicas)

    def exchanges_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Keep whole gradients on the rank until the last micro-batch."""
        cast(FSDPModule, self.net).set_requires_gradient_sync(last)
        return nullcontext()

    def collect_gradients(self) -> None:
        """Give the rows of gradients to the parameters that the optimizer steps."""
        for weight in self.weights:
            if weight.parameter.requires_grad:
                gradient = self._sharded[weight.name].grad
                weight.parameter.grad = None if gradient is None else cast(DTensor, gradient).to_local()

    def gather(self, weight: Weight, part: Tensor) -> Tensor:
        """Return the whole of a weight on the mesh's device."""
        whole: Tensor = self.as_dtensor(weight, part).full_tensor()
        return whole

    def as_dtensor(self, weight: Weight, part: Tensor) -> DTensor:
        """Return this rank's part of a weight as torch's engine sees it, on the mesh's device."""
        sharded = cast(DTensor, self._sharded[weight.name].data)
        return DTensor.from_local(
            part.to(self.mesh.device),
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=weight.shape,
            stride=torch.empty(weight.shape, device="meta").stride(),
        )


class ShardedGradients(FullySharded):
    """ZeRO stage 2: gradients and optimizer state are spread, and weights are gathered once, for both passes.

    (Rajbhandari et al., ZeRO, SC 2020, section 5.2; FSDP's SHARD_GRAD_OP.) It moves as many bytes as data parallelism.
    Between steps the ranks keep their shares of the weights alone, which are all that the optimizer steps.
    """

    _name = "zero2"
    _reshards_after_forward = False


def shard_units(backbone: nn.Module, compiled: bool = False, **options: Any) -> nn.Module:
    """Shard each unit of ``backbone``, perhaps compiled, then what is left, in place, by fully_shard's ``options``."""
    backbone = backbone.to(memory_format=torch.contiguous_format)  # of channels_last FSDP takes the images only
    for unit in list(sharded_units(backbone)):
        if compiled:
            unit.compile()
        fully_shard(unit, **options)
    fully_shard(backbone, **options)
    return backbone


def sharded_units(backbone: nn.Module) -> Iterator[nn.Module]:
    """Find what is gathered together: the blocks of the deepest sequences of blocks, and single large layers.

    What is left, the stem and the last layers, is gathered for the whole of a step.
    """
    for module in backbone.children():
        if _is_sequence_of_blocks(module):
            yield from module.children()
        elif not list(module.children()) and sum(weight.numel() for weight in module.parameters()) >= _LARGE:
            yield module
        else:
            yield from sharded_units(module)


def _is_sequence_of_blocks(module: nn.Module) -> bool:
    """Return whether ``module`` is a sequence of modules that have parts themselves, none of them a sequence."""
    children = list(module.children())
    return isinstance(module, nn.Sequential | nn.ModuleList) and all(
        list(child.children()) and not isinstance(child, nn.Sequential | nn.ModuleList) for child in children
    )
