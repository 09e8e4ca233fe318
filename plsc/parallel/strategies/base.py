"""The strategies of the backbone: how its weights lie on the ranks, and how a step goes through them.

A strategy wraps the backbone by one of torch's engines and says which part of each weight this rank holds. The trainer
works with these parts alone: the optimizer steps them, the norm of the gradient counts each number once, a checkpoint
stores them with their place in the whole, so that a run goes on under any other strategy.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh
from plsc.parallel.step_timeline import exchange_after_backward
from plsc.parallel.strategies.layout import Layout
from plsc.parallel.tensor_shard import Block, TensorShard

if TYPE_CHECKING:
    from plsc.parallel.strategies.ddp import GradientExchange  # which imports this module

Loss = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
Groups = list[dict[str, Any]]


class Slice(NamedTuple):
    """``rows`` rows of a rank's part of a weight, the first of which is at ``offsets`` of the whole weight."""

    rows: int
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight of the backbone, or the part of one that this rank holds.

    Attributes:
        name: the weight's, in the whole backbone.
        place: its place among the trained weights of the whole backbone; None where it is not trained.
        parameter: what the optimizer steps; dense, without DTensor.
        shape: of the whole weight.
        slices: of ``parameter`` along its first dimension, one behind the other, as they lie in the whole weight;
            None: it is the whole.
        copies: how many ranks of the run hold the very same numbers.
    """

    name: str
    place: int | None
    parameter: nn.Parameter
    shape: torch.Size
    slices: Sequence[Slice] | None = None
    copies: int = 1

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the checkpoint's handle of a tensor with the rows of ``parameter``: itself if these are all.

        Rows may be of another length than those of the weight, but then whole.
        """
        if self.slices is None:
            return tensor
        parts, shape = tensor.detach().split([rows for rows, _ in self.slices]), self.shape
        starts = [offsets for _, offsets in self.slices]
        if tensor.shape != self.parameter.shape:
            shape = torch.Size((self.shape[0], *tensor.shape[1:]))
            starts = [(first, *[0] * (tensor.dim() - 1)) for first, *_ in starts]
        return TensorShard(shape, [Block(part, start) for part, start in zip(parts, starts, strict=True)])


class BatchCounters:
    """Counts a training pass in all batch normalisations of a backbone together.

    torch's layers each add 1 to a number on the device: IResNet-50 has 79 such launches in a pass. The sums are the
    same where every layer runs once in a pass, as backbones say by ``norms_run_once``. Of others, and of layers whose
    momentum is None, which read the counter, nothing is changed.
    """

    def __init__(self, backbone: nn.Module) -> None:
        modules = backbone.modules() if getattr(backbone, "norms_run_once", False) else ()
        self._norms = [layer for layer in modules if isinstance(layer, _BatchNorm) and layer.momentum is not None]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Count the pass within; one that raises does not count."""
        counting = [norm for norm in self._norms if norm.training and norm.num_batches_tracked is not None]
        counters = [cast(Tensor, norm.num_batches_tracked) for norm in counting]
        for norm in counting:
            norm.num_batches_tracked = None
        try:
            yield
        finally:
            for norm, counter in zip(counting, counters, strict=True):
                norm.num_batches_tracked = counter
        if counters:
            torch._foreach_add_(counters, 1)


@dataclass(frozen=True)
class Wrapping:
    """What a strategy may need to wrap a backbone.

    Attributes:
        autocast: makes the context of a forward pass, in the precision of the run.
        compile: compiles a module; None: it is not to be compiled.
        exchange: how ranks exchange the gradients of replicas.
        bucket_mb: MiB of gradients that DDP exchanges together; None: its default.
        reduce_dtype: in which sharded gradients are summed; None: their own.
        offload: keep parameters, gradients and optimizer state in host memory.
        least_images: of a rank's training pass. Batch normalisation of the rank's own images takes two; that of all
            ranks' takes one, and would count a second.
    """

    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    compile: Callable[[nn.Module], nn.Module] | None = None
    exchange: "GradientExchange | None" = None
    bucket_mb: float | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    least_images: int = 2


class Strategy:
    """One rank's side of a strategy; this one for backbones of which every rank holds the whole.

    Attributes:
        mesh: all ranks.
        data_rank, data_ranks: this rank's number among those that read different images, and how many these are.
        peers: the ranks that hold the same layers, and see different images: running statistics are averaged there.
        head_mesh: the ranks that hold the class table, among which this one computes losses; None on a rank that does
            neither.
        is_replicated: every rank holds all weights, and the same gradients after the backward pass.
        steps_on_device: the optimizer may leave it to the device whether a step goes through.
        micro_batches: in which a batch comes to the head.
        has_own_passes: an engine takes micro-batches forward and back, so that no pass can be left out.
        steps_alone: no collective is in a step: this rank computes losses by a class table of its own.
        prefetches: the head may be told of a batch beforehand, as it comes to it in one piece.
        template: the backbone as it was made, without its weights, on the meta device.
        backbone, net: the backbone, and what is called.
        weights: of the backbone, in its order, those that this rank holds.
    """

    is_replicated = True
    steps_on_device = True
    micro_batches = 1
    has_own_passes = False
    prefetches = True
    steps_alone = False

    def __init__(self, layout: Layout) -> None:
        self.mesh, self.peers = layout.stage, layout.peers
        self.head_mesh: Mesh | None = layout.stage
        self.data_rank, self.data_ranks = layout.stage.rank, layout.stage.world_size

    @classmethod
    def gathering_passes(cls, data_ranks: int, pp: int) -> int:
        """Say, to ``plsc plan`` too, in how many passes of a batch an engine gathers weights and then sums onto shards.

        Args:
            data_ranks: that see different images.
            pp: ranks of a pipeline; 1: none.

        Returns:
            1, the weights stay for the backward pass; 2, they are gathered again; 0, no engine does.
        """
        return 0

    @classmethod
    def stepped_weights(cls, sizes: Sequence[int], data_ranks: int) -> list[list[int]]:
        """Say, for ``plsc plan``, which weights each rank steps and gives to the others.

        Args:
            sizes: bytes of the trained weights.
            data_ranks: that see different images.

        Returns:
            Places in ``sizes`` by rank; a single list where each rank steps all that it holds.
        """
        return [list(range(len(sizes)))]

    def describe(self) -> str:
        """How the backbone lies on the ranks, in words for a run's first lines; empty: it is whole on each."""
        return ""

    def wrap(self, backbone: nn.Module, template: nn.Module, wrapping: Wrapping) -> nn.Module:
        """Place ``backbone`` over the ranks, which all call.

        Args:
            backbone: whole, with the same weights on every rank, on the mesh's device.
            template: the same on the meta device, as it is evaluated and exported.
            wrapping: the run's wishes.

        Returns:
            What :meth:`forward_backward` calls.
        """
        shapes = {name: weight.shape for name, weight in backbone.named_parameters()}
        trained = (name for name, weight in backbone.named_parameters() if weight.requires_grad)
        places = {name: place for place, name in enumerate(trained)}
        self.backbone, self.template, self.wrapping = backbone, template, wrapping
        self.split(backbone)
        self.net = self.place_backbone(backbone)
        self._counters = BatchCounters(self.backbone)
        self.weights = [
            self.place_weight(name, places.get(name), weight, shapes[name])
            for name, weight in self.backbone.named_parameters()
        ]
        return self.net

    def split(self, backbone: nn.Module) -> None:
        """Split single layers of the whole backbone over ranks, in place."""

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Wrap the backbone, or a stage of it; returns what is called."""
        return backbone

    def place_weight(self, name: str, place: int | None, weight: nn.Parameter, shape: torch.Size) -> Weight:
        """Describe a weight of the wrapped backbone. ``shape`` is the whole weight's."""
        return Weight(name, place, weight, shape, copies=self.mesh.world_size)

    # The optimizer.

    def optimizer(self, make: Callable[[Groups], torch.optim.Optimizer], groups: Groups) -> torch.optim.Optimizer:
        """Make the optimizer of this rank's parts.

        Args:
            make: makes it of parameter groups.
            groups: as torch's optimizers take them, but with names of weights in ``params``.
        """
        held = {weight.name: weight.parameter for weight in self.weights}
        mine = [{**group, "params": [held[name] for name in group["params"] if name in held]} for group in groups]
        return make([group for group in mine if group["params"]])

    def local_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that holds this rank's states."""
        return optimizer

    @property
    def trained(self) -> list[Weight]:
        """The weights of the optimizer."""
        return [weight for weight in self.weights if weight.place is not None]

    @property
    def size(self) -> int:
        """The number of parameters of the whole backbone."""
        return sum(weight.numel() for weight in self.template.parameters())

    # A step.

    def warm_up(self, images: Callable[[], Tensor]) -> None:
        """Prepare for the first step, perhaps by a pass over ``images()`` whose gradients are thrown away."""

    def forward_backward(
        self, images: Callable[[], Tensor], labels: Tensor, sizes: Sequence[int], loss: Loss, *, last: bool
    ) -> None:
        """Take a micro-batch through backbone and loss, and back; gradients add up.

        Args:
            images: returns this rank's, (B, 3, H, W). Called once, so that nothing else keeps them alive.
            labels: (b,) on the CPU; B may be greater, by images that reach no loss.
            sizes: samples of the micro-batch on each data rank.
            loss: returns what is to be differentiated, of embeddings (B, D), labels (b,) and the samples of each rank
                of the head.
            last: whether the gradients are exchanged after this micro-batch.
        """
        with self.exchanges_gradients(last):
            embeddings = self.embeddings_of(images)
            value = self.loss_of(loss, embeddings, labels, sizes)
            exchange_after_backward(value)
            value.backward()

    def embeddings_of(self, images: Callable[[], Tensor]) -> Tensor:
        """Take ``images()`` through the backbone, in the precision of the run."""
        with self.wrapping.autocast(), self._counters.together():
            return cast(Tensor, self.net(images()))

    def loss_of(self, loss: Loss, embeddings: Tensor, labels: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return ``loss`` of this rank's share of a micro-batch's embeddings; arguments as in forward_backward()."""
        return loss(embeddings, labels, sizes)

    def head_share(self, labels: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return the labels that this rank gives to the head, and how many each rank does."""
        return labels, sizes

    def exchanges_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Enter a micro-batch whose gradients are exchanged if ``last``, and else kept on the rank."""
        return nullcontext()

    def from_head(self, value: Tensor) -> Tensor:
        """Return a number that the ranks of :attr:`head_mesh` have on all ranks, which all call; perhaps in place."""
        return value

    def collect_gradients(self) -> None:
        """Give :attr:`weights` the gradients of the backward passes, where the engine keeps them elsewhere."""

    def zero_grad(self) -> None:
        """Forget all gradients, of the engine's weights and of :attr:`weights`."""
        if not self.is_replicated:  # an engine has weights of its own; to look for all takes the host long
            self.net.zero_grad()
        for weight in self.weights:
            weight.parameter.grad = None

    # The state.

    def parts(self) -> dict[str, Tensor]:
        """This rank's parts of the backbone's state_dict, by name: weights and running statistics, not copied."""
        tensors = {weight.name: weight.parameter.detach() for weight in self.weights}
        for name, buffer in _stored_buffers(self.backbone):
            tensors[name] = buffer.detach()
        return tensors

    def stored(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``parts``, laid out as :meth:`parts`, as a checkpoint stores and loads them."""
        weights = {weight.name: weight for weight in self.weights}
        return {name: weights[name].stored(part) if name in weights else part for name, part in parts.items()}

    def writes(self, name: str, tensor: Tensor) -> bool:
        """Return whether this rank writes a tensor of the backbone or its optimizer into checkpoints.

        torch drops what several ranks would write.
        """
        return isinstance(tensor, TensorShard) or self.mesh.is_main

    def gather(self, weight: Weight, part: Tensor) -> Tensor:
        """Return the whole weight on every rank, of the ranks' parts; all ranks call."""
        return part

    def whole(self, parts: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return the backbone with whole weights on every rank; all ranks call.

        Args:
            parts: of another set of weights, laid out as :meth:`parts`; None: those that are trained.
        """
        if parts is None and self.is_replicated:
            return self.backbone
        model = copy.deepcopy(self.template).requires_grad_(False)
        tensors = self.whole_tensors(self.parts() if parts is None else parts)
        own = dict(self.backbone.named_buffers())
        missing = {name: own[name] for name, _ in model.named_buffers() if name not in tensors}
        for name, tensor in {**tensors, **missing}.items():
            _assign(model, name, tensor)
        return model

    def whole_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the backbone's whole state_dict on every rank; all ranks call."""
        weights = {weight.name: weight for weight in self.weights}
        return {name: self.gather(weights[name], part) if name in weights else part for name, part in parts.items()}

    def average_buffers(self, average: Mapping[str, Tensor] | None = None) -> None:
        """Set running statistics to the mean over the ranks; each rank has seen its own samples alone.

        The means are taken in float64: those of equal float32 numbers are these numbers on any number of ranks.

        Args:
            average: a moving average, laid out as :meth:`parts`, whose statistics are set likewise.
        """
        averaged = [(average or {}).get(name) for name, _ in _stored_buffers(self.backbone)]
        both = [*self.backbone.buffers(), *(buffer for buffer in averaged if buffer is not None)]
        buffers = [buffer for buffer in both if buffer.is_floating_point()]
        if self.peers.world_size == 1 or not buffers:
            return
        flat = all_reduce_sum(torch.cat([buffer.flatten().double() for buffer in buffers]), self.peers)
        means = (flat / self.peers.world_size).split([buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def _stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state_dict holds, without asking for one: sharded modules would prepare theirs."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    is_parameter = attribute in owner._parameters
    setattr(owner, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
