"""Data parallelism of the backbone: every rank holds all of it and averages its gradients.

How ranks exchange them is a :class:`GradientExchange`; the kinds that compress are in
:mod:`plsc.parallel.gradient_compression`, the base of those under which ranks differ for a while in
:mod:`plsc.parallel.replica_weights`.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.futures import Future

from plsc.errors import UsageError
from plsc.parallel.collectives import broadcast
from plsc.parallel.mesh import Mesh, require_mesh, submesh
from plsc.parallel.strategies.base import Strategy
from plsc.parallel.strategies.layout import CUT_WEIGHTS, Layout, StrategyOptions

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel  # late where it is used: it takes long to import


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of all hooks, by the names of the keys of [parallel]; each reads those that it needs.

    Attributes:
        communicators: groups of the same ranks over which buckets of gradients go in turn.
        powersgd_rank: rank of PowerSGD's approximation of a gradient as a matrix.
        powersgd_start_step: the step, counted from 0, from which PowerSGD compresses.
        dgc_sparsity: share of a tensor's elements that Deep Gradient Compression does not send in a step.
        dgc_warmup_steps: steps over which the sparsity rises to that, in four stages.
        dgc_dense_below: tensors with fewer elements than this are sent whole.
        clip_norm: Deep Gradient Compression's bound on the norm of the ranks' gradients together; 0: none.
    """

    communicators: int = 1
    powersgd_rank: int = 1
    powersgd_start_step: int = 1000
    dgc_sparsity: float = 0.999
    dgc_warmup_steps: int = 0
    dgc_dense_below: int = 16384
    clip_norm: float = 0.0


@dataclass(frozen=True)
class PlannedExchange:
    """What ``plsc plan`` counts of an exchange: bytes of one rank in one step, after any warm-up.

    Attributes:
        sent: what the rank gives to the collectives, as :meth:`GradientExchange.sent_bytes` counts it.
        is_gathered: every rank takes what each other one sends, by an all-gather; else sums, by an all-reduce.
        words: the collective, in words.
        traffic: read and written on the device beside the collectives.
        kept: all the time, by what it is in words; less what it saves the optimizer.
        transient: from the exchange to the end of the step.
    """

    sent: int
    is_gathered: bool = False
    words: str = "all-reduce"
    traffic: int = 0
    kept: Mapping[str, int] = field(default_factory=dict)
    transient: int = 0


class GradientExchange:
    """DDP's own all-reduce in the gradients' precision; the base of those that compress.

    Args:
        mesh: the ranks that exchange.
        module: whose gradients or weights are exchanged, on the mesh's device already.
        options: of all hooks.

    Attributes:
        clipped_locally: the parameters whose gradients are clipped before the exchange, not after it.
        forgets: what a checkpoint does not hold of it, in words; empty: nothing.
        delays_gradients: parts of gradients wait on the rank for later steps, and whole ones are compressed.
        keeps_state: whether :meth:`state` may have tensors.
        keeps: of these, by the last part of their names, what nothing else takes over when a run goes on without this
            exchange, in words.
        replicas_differ: whether ranks may have different weights now.
    """

    clipped_locally: frozenset[nn.Parameter] = frozenset()
    forgets = ""
    delays_gradients = False
    keeps_state = False
    keeps: ClassVar[Mapping[str, str]] = {}
    replicas_differ = False

    def __init__(self, mesh: Mesh, module: nn.Module, options: ExchangeOptions | None = None) -> None:
        self._mesh, self._options = mesh, options or ExchangeOptions()

    def register(self, net: "DistributedDataParallel") -> None:
        """Make ``net`` exchange its gradients in this way."""
        if self._options.communicators > 1:
            self._register(net, "allreduce_hook")

    def _register(self, net: "DistributedDataParallel", hook: str) -> None:
        """Register one of torch's default hooks, which gets the communicators' groups in turn.

        Every rank fills its buckets in one order, so that a bucket goes over the same group on all of them.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        everyone = [range(self._mesh.world_size)]
        more = [submesh(self._mesh, everyone).group for _ in range(self._options.communicators - 1)]
        exchange: Callable[..., Future[Tensor]] = getattr(default_hooks, hook)

        def in_turn(groups: Sequence[ProcessGroup | None], bucket: GradBucket) -> Future[Tensor]:
            return exchange(groups[bucket.index() % len(groups)], bucket)

        net.register_comm_hook([self._mesh.group, *more], in_turn)

    def take_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over what the exchange computes in the optimizer's place."""

    def begin(self, step: int) -> None:
        """Begin the optimizer step of this number, counted from 0."""

    def agreed_stop(self, stop: int) -> int:
        """Return the signal that is to be voted on in this step, where ``stop`` is the one that this rank received."""
        return stop

    def commit_or_undo(self, skip: Tensor) -> None:
        """Keep what this step's exchange changed on the rank, or forget it where ``skip``, a scalar, is not 0."""

    def sent_bytes(self, parameters: Iterable[nn.Parameter], step: int) -> int:
        """Return the bytes that a rank contributes to the collectives of a step.

        An all-reduce moves twice as many per rank, in and out; an all-gather brings every other rank's.
        """
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)

    @classmethod
    def planned(cls, weights: Sequence[Tensor], options: ExchangeOptions, states: int) -> PlannedExchange:
        """Say what ``plsc plan`` counts; a class that does not say it is taken to send whole gradients.

        Args:
            weights: those that are trained, in float32 on the meta device.
            options: of the exchange.
            states: numbers that the optimizer keeps of each number of a weight.
        """
        return PlannedExchange(sum(weight.nbytes for weight in weights))

    def averaged(self) -> AbstractContextManager[None]:
        """Let the parameters hold the average over all ranks, where ranks have their own, until the block ends."""
        return nullcontext()

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Set tensors to their averages over all ranks, where ranks have their own."""

    def state(self) -> dict[str, Tensor]:
        """This rank's tensors that the next steps build on, by name."""
        return {}

    def figures(self) -> dict[str, float]:
        """Return what a line of metrics says of the exchange since the last one."""
        return {}

    def close(self) -> None:
        """End what runs beside training, whether the run ends well or not."""

    def restore(self, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
        """Take over ``tensors`` of :meth:`state`, and from a restored ``optimizer`` what :meth:`take_momentum` says."""


class DataParallel(Strategy):
    """Every rank holds the whole backbone, and all average their gradients (DistributedDataParallel)."""

    def place_backbone(self, backbone: nn.Module) -> nn.Module:
        """Wrap by DDP, and compile that."""
        wrapping = self.wrapping
        net = data_parallel(backbone, self.mesh, wrapping.exchange, wrapping.bucket_mb)
        return net if wrapping.compile is None else wrapping.compile(net)

    def warm_up(self, images: Callable[[], Tensor]) -> None:
        """Let DDP order its buckets now, by a pass whose gradients are zero.

        DDP reorders its buckets once, after its first backward pass. From three ranks on, the order in which gloo
        and NCCL sum a gradient depends on its offset in the bucket: a resumed run would differ from one that never
        stopped in the last bits of its first step.
        """
        if self.mesh.world_size > 2:
            embeddings = self.embeddings_of(images)
            (embeddings.sum() * 0).backward()
            self.zero_grad()

    def exchanges_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Let DDP exchange gradients once per step, with the last micro-batch."""
        if last or self.mesh.world_size == 1:
            return nullcontext()
        local: AbstractContextManager[None] = self.net.no_sync()  # type: ignore[operator]
        return local


def data_parallel(
    module: nn.Module,
    mesh: Mesh,
    exchange: GradientExchange | None = None,
    bucket_mb: float | None = None,
    *,
    strategy: str = "ddp",
    shard_ranks: int = 0,
) -> nn.Module:
    """Move ``module`` to the mesh's device and average its gradients over the ranks.

    The class head returns embedding gradients multiplied by the number of ranks, so that the average gives what
    one process on the concatenated batch would compute, whatever each rank's share of it. Parameters and buffers are
    rank 0's at the start; buffers stay each rank's own after that, as with DDP's ``broadcast_buffers=False``.

    Args:
        module: maps (B, 3, H, W) to (B, D).
        mesh: the ranks.
        exchange: ddp: how the ranks exchange gradients in place of DDP's all-reduce; where ``module``'s layers sum in
            float64, what :func:`plsc.parallel.sync_batchnorm.sum_gradients_in_float64` returned.
        bucket_mb: ddp: MiB of gradients that are exchanged together, while the backward pass goes on; None: DDP's
            default (25, the first bucket 1).
        strategy: "ddp": every rank holds the whole module (DistributedDataParallel). "fsdp": weights, gradients, and
            the state of an optimizer that is made afterwards, are cut over the ranks (FSDP2's ``fully_shard``), the
            blocks one by one. "zero2": the same, but the weights are gathered once for both passes. "hsdp": as fsdp,
            but over ``shard_ranks`` ranks, and those groups hold replicas.
        shard_ranks: hsdp: consecutive ranks that share one set of weights; 0: those of a machine.

    Returns:
        ``module`` itself where there is one rank. Else of ddp the wrapper (``.module`` is the original), and of the
        others ``module``, whose parameters are DTensors now.

    Raises:
        UsageError: ``module`` is no module, or ``mesh`` no mesh; there is no such strategy, or it takes no exchange;
            ``shard_ranks`` does not divide the number of ranks.
    """
    require_mesh(mesh)
    if not isinstance(module, nn.Module):
        raise UsageError(f"data_parallel takes a torch.nn.Module, not {module!r}")
    if strategy not in _WRAPPERS:
        raise UsageError(_no_wrapper(strategy))
    if strategy != "ddp" and (exchange is not None or bucket_mb is not None):
        raise UsageError(f'exchange and bucket_mb are DDP\'s, and strategy is "{strategy}": leave them out')
    options = StrategyOptions(strategy, shard_ranks)
    options.check_world(mesh.world_size)
    module = module.to(mesh.device)
    if mesh.world_size == 1:
        return module
    for buffer in module.buffers():
        broadcast(buffer, mesh)
    return _wrapped(module, mesh, exchange, bucket_mb) if strategy == "ddp" else _fully_sharded(module, mesh, options)


_WRAPPERS = ("ddp", *CUT_WEIGHTS)


def _no_wrapper(strategy: str) -> str:
    """Why no module is wrapped by a strategy of that name."""
    if strategy == "zero1":
        return (
            'strategy "zero1" is DDP with another optimizer: leave strategy out, and make the optimizer by '
            "torch.distributed.optim.ZeroRedundancyOptimizer"
        )
    return f"data_parallel has no strategy {strategy!r}; it is one of {', '.join(_WRAPPERS)}"


def _wrapped(
    module: nn.Module, mesh: Mesh, exchange: GradientExchange | None, bucket_mb: float | None
) -> "DistributedDataParallel":
    from torch.nn.parallel import DistributedDataParallel  # late: it takes long to import

    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    with warnings.catch_warnings():  # its successor sends buffers too, as data_parallel does
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        net = DistributedDataParallel(
            module,
            device_ids=ids,
            process_group=mesh.group,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
        )
    if exchange is not None:
        exchange.register(net)
    return net


def _fully_sharded(module: nn.Module, mesh: Mesh, options: StrategyOptions) -> nn.Module:
    from plsc.parallel.strategies.fsdp import shard_units  # late: it imports torch's engines

    module = module.to(memory_format=torch.contiguous_format)  # as it will be cut, and can be sent
    for weight in module.parameters():
        broadcast(weight.detach(), mesh)
    groups = Layout.of(options, mesh).along("replicate", "shard")
    return shard_units(module, mesh=groups, reshard_after_forward=False if options.name == "zero2" else None)


def in_memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor of any memory format as (numel,), as DDP's buckets lay its gradient out."""
    return tensor.as_strided((tensor.numel(),), (1,))
