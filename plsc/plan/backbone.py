"""Profile of a backbone: bytes kept, FLOPs and traffic of a forward and a backward pass, from a run on fake tensors."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plsc.models.recompute_budget import LiveBytes
from plsc.train.components import AUTOCAST_DTYPES

_PRECISIONS = {dtype: name for name, dtype in AUTOCAST_DTYPES.items()}


@dataclass(frozen=True)
class Operation:
    """One operation: the precision it computes in, its FLOPs (0 unless a product), the bytes it reads and writes."""

    precision: str
    flops: int
    traffic: int


@dataclass(frozen=True)
class BackboneProfile:
    """A backbone at a batch, in bytes.

    ``weights`` and ``trainable`` parameters, the ``largest`` of these, ``buffers``; ``activations`` are what the
    forward pass keeps, images included; ``peak`` is the most that both passes hold above weights and buffers.
    With gradients kept, ``peak`` has them; without, each is gone once it is whole (they lie in buckets elsewhere).
    """

    images: int
    weights: int
    trainable: int
    largest: int
    buffers: int
    activations: int
    peak: int
    operations: tuple[Operation, ...]

    @property
    def flops(self) -> int:
        """Of all products, forward and backward; an addition counts as well as a multiplication."""
        return sum(operation.flops for operation in self.operations)


def profile_backbone(
    backbone: nn.Module, images: int, image_size: int, precision: str, *, keep_gradients: bool
) -> BackboneProfile:
    """Run ``backbone`` forward and backward on fake tensors: as long as its Python takes, no memory, any batch."""
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        fake = copy.deepcopy(backbone)
    fake.train()
    if not keep_gradients:
        for parameter in fake.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget_gradient)
    weights = [(p.nbytes, p.requires_grad) for p in fake.parameters()]
    with mode, Ledger(fake) as ledger:
        x = torch.empty(images, 3, image_size, image_size)
        dtype = AUTOCAST_DTYPES.get(precision)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            embeddings = fake(x)
        del x  # a step keeps no images but what the backbone saves of them
        embeddings = embeddings.float()
        activations = ledger.live
        embeddings.backward(torch.empty_like(embeddings))
    trainable = [size for size, learns in weights if learns]
    return BackboneProfile(
        images,
        sum(size for size, _ in weights),
        sum(trainable),
        max(trainable, default=0),
        sum(buffer.nbytes for buffer in fake.buffers()),
        activations,
        ledger.peak,
        tuple(ledger.operations),
    )


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class Ledger(LiveBytes):
    """Counts the bytes of the storages that operations make while they live, and what each operation costs."""

    def __init__(self, known: nn.Module) -> None:
        super().__init__(known)
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and record its outputs."""
        before = self.flops
        out = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not func.is_view and outputs:
            self.operations.append(_operation(func, self.flops - before, inputs, outputs))
        return out


def _operation(func: Any, flops: int, inputs: list[Tensor], outputs: list[Tensor]) -> Operation:
    traffic = sum(_bytes(tensor) for tensor in (*inputs, *outputs))
    if func._overloadpacket in (torch.ops.aten.empty, torch.ops.aten.detach, torch.ops.aten.empty_like):
        traffic = 0
    return Operation(_PRECISIONS.get((inputs or outputs)[0].dtype, "fp32"), flops, traffic)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory: elements of a broadcast view count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
