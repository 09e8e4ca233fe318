"""Data parallelism of the backbone: every rank holds all of it and averages its gradients."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from plsc.errors import UsageError
from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.gradient_compression import GradientExchange
from plsc.parallel.mesh import Mesh, require_mesh
from plsc.parallel.strategies.base import Strategy

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel  # late where it is used: it takes long to import


class Float64Gradients(GradientExchange):
    """Float64 weight gradients of this rank, kept from the layers that sum them until DDP exchanges them.

    For :func:`plsc.parallel.sync_batchnorm.sum_gradients_in_float64`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._sums: dict[Tensor, Tensor] = {}

    def register(self, net: "DistributedDataParallel") -> None:
        """Register :meth:`exchange`."""
        net.register_comm_hook(self, Float64Gradients.exchange)

    def in_float64(self, parameter: Tensor) -> Tensor:
        """Return ``parameter`` in float64, whose gradient joins the next exchange."""
        wide = parameter.double()
        if wide.requires_grad:
            wide.register_hook(partial(self.add, parameter))
        return wide

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add ``gradient``, float64, to the next exchange. With one rank there is none, and nothing is kept."""
        if self.mesh.world_size == 1:
            return
        before = self._sums.get(parameter)
        self._sums[parameter] = gradient if before is None else before + gradient

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket over the ranks in float64 (a DDP communication hook). Moves 2·8 bytes per weight.

        Parameters whose layers do not sum in float64 are added as they came.
        """
        pairs = [
            (parameter, _as_laid_out(gradient, parameter))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        local = [self._sums.pop(parameter, gradient).double().flatten() for parameter, gradient in pairs]
        total = all_reduce_sum(torch.cat(local), self.mesh)
        for (_, gradient), part in zip(pairs, total.split([each.numel() for each in local]), strict=True):
            gradient.copy_(part.view(gradient.shape))
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    def embeddings(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        """Return embeddings in float64 while training, so that their gradient comes in float64 (a forward hook).

        The head multiplies that gradient by the number of ranks. The factor is divided out here, before anything is
        rounded: a gradient three times as large rounds differently. Hence :meth:`exchange` takes sums, not means.
        """
        if not (module.training and output.requires_grad):
            return output
        embeddings_f64 = output.double()
        embeddings_f64.register_hook(lambda gradient: gradient / self.mesh.world_size)
        return embeddings_f64


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
            with self.wrapping.autocast():
                embeddings = self.net(images())
            (embeddings.sum() * 0).backward()
            self.zero_grad()

    def exchanges_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Let DDP exchange gradients once per step, with the last micro-batch."""
        if last or self.mesh.world_size == 1:
            return nullcontext()
        local: AbstractContextManager[None] = self.net.no_sync()  # type: ignore[operator]
        return local


def data_parallel(
    module: nn.Module, mesh: Mesh, exchange: GradientExchange | None = None, bucket_mb: float | None = None
) -> nn.Module:
    """Move ``module`` to the mesh's device and average its gradients over the ranks (DDP).

    The class head returns embedding gradients multiplied by the number of ranks, so that DDP's average gives what
    one process on the concatenated batch would compute, whatever each rank's share of it. Buffers are rank 0's at
    the start and stay each rank's own after that, as with ``broadcast_buffers=False``.

    Args:
        module: maps (B, 3, H, W) to (B, D).
        mesh: the ranks.
        exchange: how the ranks exchange gradients in place of DDP's all-reduce; where ``module``'s layers sum in
            float64, what :func:`plsc.parallel.sync_batchnorm.sum_gradients_in_float64` returned.
        bucket_mb: MiB of gradients that are exchanged together, while the backward pass goes on; None: DDP's default
            (25, the first bucket 1).

    Returns:
        ``module`` itself where there is one rank, else the DDP wrapper (``.module`` is the original).

    Raises:
        UsageError: ``module`` is no module, or ``mesh`` no mesh.
    """
    require_mesh(mesh)
    if not isinstance(module, nn.Module):
        raise UsageError(f"data_parallel takes a torch.nn.Module, not {module!r}")
    module = module.to(mesh.device)
    if mesh.world_size == 1:
        return module
    from torch.nn.parallel import DistributedDataParallel  # late: it takes long to import

    ids = [mesh.device.index] if mesh.device.type == "cuda" else None
    with warnings.catch_warnings():  # its successor also synchronises at the start, which costs nothing to leave out
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


def _as_laid_out(flat: Tensor, parameter: Tensor) -> Tensor:
    """View a gradient with its parameter's strides (channels last, say): DDP lays it out so, but shows it row-major."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())
