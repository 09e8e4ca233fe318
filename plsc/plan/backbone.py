"""Profile of a backbone: bytes kept, FLOPs and traffic of a forward and a backward pass, from a run on fake tensors."""

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plsc.models.preprocessing import ImageSize, height_and_width
from plsc.models.recompute_budget import LiveBytes
from plsc.parallel.strategies.cuts import token_counts
from plsc.train.components import AUTOCAST_DTYPES, autocast_dtype

_PRECISIONS = {dtype: name for name, dtype in AUTOCAST_DTYPES.items()}


@dataclass(frozen=True)
class Operation:
    """One operation: the precision it computes in, its FLOPs (0 unless a product), the bytes it reads and writes.

    ``convolved`` of these bytes are images that a convolution reads and writes; ``is_winograd`` where its kernels are
    3x3 and its stride is 1.
    """

    precision: str
    flops: int
    traffic: int
    convolved: int = 0
    is_winograd: bool = False


@dataclass(frozen=True)
class Parameter:
    """A weight: its ``shape`` and bytes of a number; ``unit`` is the name of the Unit that it belongs to, or None."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    unit: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Unit:
    """A part whose weights fsdp gathers together; the blocks of a transformer are also what tp and pp divide.

    ``entered`` bytes are alive when its forward pass begins, ``kept`` more when it ends, of which ``split`` are made
    within attention and MLP, but for their inputs and outputs. ``output`` has so many bytes, ``input`` as the block's
    linear layers read it. ``forward`` are its operations in the profile's list. ``backward`` bytes at most come to
    those alive when its backward pass begins, all its weights' gradients among them.
    """

    name: str
    entered: int
    kept: int
    split: int
    input: int
    output: int
    forward: range
    backward: int = 0

    @property
    def is_block(self) -> bool:
        """True for a block of a transformer."""
        return "blocks" in self.name.split(".")


@dataclass(frozen=True, eq=False)
class BackboneProfile:
    """A backbone at a batch, in bytes.

    ``activations`` are what the forward pass keeps, images included; ``peak`` is the most that both passes hold above
    weights and buffers.
    With gradients kept, ``peak`` has them; without, each is gone once it is whole (they lie in buckets elsewhere).
    The first ``forward_operations`` are the forward pass's; ``parameters`` are in the module's order, ``units`` in that
    of the forward pass. ``tokens`` are :func:`plsc.parallel.strategies.cuts.token_counts`, ``embedding`` the
    names of what comes before the blocks.
    """

    images: int
    buffers: int
    activations: int
    peak: int
    operations: tuple[Operation, ...]
    forward_operations: int
    parameters: tuple[Parameter, ...]
    units: tuple[Unit, ...]
    tokens: tuple[int, ...] = ()
    embedding: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """The blocks of a transformer; none of other backbones."""
        return tuple(unit for unit in self.units if unit.is_block)

    @property
    def flops(self) -> int:
        """Of all products, forward and backward; an addition counts as well as a multiplication."""
        return sum(operation.flops for operation in self.operations)


def profile_backbone(
    backbone: nn.Module, images: int, image_size: ImageSize, precision: str, *, keep_gradients: bool
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
                parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    ledger = Ledger(fake)
    dtype = autocast_dtype(precision)
    watch = _UnitWatch(fake, ledger, (dtype or torch.float32).itemsize)
    with mode, ledger:
        x = torch.empty(images, 3, *height_and_width(image_size))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            embeddings = fake(x)
        del x  # a step keeps no images but what the backbone saves of them
        embeddings = embeddings.float()
        activations, forward_operations = ledger.live, len(ledger.operations)
        embeddings.backward(torch.empty_like(embeddings))
        watch.end_backward()
    buffers, operations = sum(buffer.nbytes for buffer in fake.buffers()), tuple(ledger.operations)
    parameters, units = tuple(watch.parameters), tuple(watch.units.values())
    passes = (images, buffers, activations, ledger.peak, operations, forward_operations)
    return BackboneProfile(*passes, parameters, units, token_counts(backbone), getattr(backbone, "embedding", ()))


class _UnitWatch:
    """Notes what each unit of a backbone keeps in the first forward pass; ``width`` is that of a product's number."""

    def __init__(self, backbone: nn.Module, ledger: "Ledger", width: int) -> None:
        from plsc.parallel.strategies.fsdp import sharded_units  # late: it takes long to import

        self.units: dict[str, Unit] = {}
        self._ledger, self._width = ledger, width
        self._split, self._entered, self._start = 0, 0, 0
        self._before: list[int] = []
        self._in_backward, self._alive = "", 0  # the unit, and the bytes alive when its backward pass began
        names = {module: name for name, module in backbone.named_modules()}
        found = list(sharded_units(backbone))
        of_unit = {weight: names[unit] for unit in found for weight in unit.parameters()}
        self.parameters = [
            Parameter(name, tuple(weight.shape), weight.element_size(), weight.requires_grad, of_unit.get(weight))
            for name, weight in backbone.named_parameters()
        ]
        for weight, name in of_unit.items():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
        for unit in found:
            unit.register_forward_pre_hook(self._enter)
            for name, inner in unit.named_children():
                if name in ("attn", "mlp"):
                    inner.register_forward_pre_hook(self._enter_inner)
                    inner.register_forward_hook(self._leave_inner)
            unit.register_forward_hook(partial(self._leave, names[unit]))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._entered, self._start, self._split = self._ledger.live, len(self._ledger.operations), 0

    def _leave(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if name in self.units:  # computed again for the backward pass
            return
        kept = self._ledger.live - self._entered
        if output.requires_grad:
            output.register_hook(lambda gradient: self._begin_backward(name))
        inside = output.numel() * self._width
        done = range(self._start, len(self._ledger.operations))
        self.units[name] = Unit(name, self._entered, kept, self._split, inside, _bytes(output), done)

    def _begin_backward(self, name: str) -> None:
        self.end_backward()
        self._in_backward, self._alive = name, self._ledger.live
        self._ledger.begin_watch()

    def end_backward(self) -> None:
        """Note what the backward pass of the unit took that was last."""
        if self._in_backward:
            last = self.units[self._in_backward]
            self.units[self._in_backward] = replace(last, backward=self._ledger.watched - self._alive)

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        """Count a gradient of the unit to the end of its backward pass, also if it is forgotten."""
        if parameter.grad is None and name == self._in_backward:
            self._ledger.held += parameter.nbytes

    def _enter_inner(self, module: nn.Module, args: Any) -> None:
        self._before.append(self._ledger.live)

    def _leave_inner(self, module: nn.Module, args: Any, output: Tensor) -> None:
        made = self._ledger.live - self._before.pop()
        self._split += max(made - _bytes(output) - args[0].numel() * self._width, 0)


class Ledger(LiveBytes):
    """Counts the bytes of the storages that operations make while they live, and what each operation costs."""

    def __init__(self, known: nn.Module) -> None:
        super().__init__(known)
        self.operations: list[Operation] = []
        self.held = self.watched = 0

    def begin_watch(self) -> None:
        """Let ``watched`` be the most bytes alive from now on, together with those ``held`` that are alive no more."""
        self.held, self.watched = 0, self.live

    def _enter(self, storage: torch.UntypedStorage) -> None:
        super()._enter(storage)
        self.watched = max(self.watched, self.live + self.held)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and record its outputs."""
        before = self.flops
        out = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not func.is_view and outputs:
            self.operations.append(_operation(func, self.flops - before, inputs, outputs, args))
        return out


def _operation(func: Any, flops: int, inputs: list[Tensor], outputs: list[Tensor], args: tuple[Any, ...]) -> Operation:
    traffic = sum(_bytes(tensor) for tensor in (*inputs, *outputs))
    if func._overloadpacket in (torch.ops.aten.empty, torch.ops.aten.detach, torch.ops.aten.empty_like):
        traffic = 0
    precision = _PRECISIONS.get((inputs or outputs)[0].dtype, "fp32")
    # where a convolution, or its backward pass, has its weight and its stride among its arguments
    place = {torch.ops.aten.convolution: 1, torch.ops.aten.convolution_backward: 2}.get(func._overloadpacket)
    if place is None:
        return Operation(precision, flops, traffic)
    weight, stride = args[place], args[place + 2]
    convolved = traffic - sum(_bytes(each) for each in (*inputs, *outputs) if each.shape == weight.shape)
    is_winograd = tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1}
    return Operation(precision, flops, traffic, convolved, is_winograd)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory: elements of a broadcast view count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
