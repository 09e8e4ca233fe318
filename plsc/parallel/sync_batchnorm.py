"""Layers that make the split of a batch over ranks invisible: synchronised batch normalisation, and float64 sums.

:class:`SyncBatchNorm` is for every run with ``sync_batchnorm``. torch.nn.SyncBatchNorm computes on GPUs only, and there
the host waits for the device three times per layer, to leave out ranks without samples.

:func:`sum_gradients_in_float64` serves one user: whoever verifies on CPUs that another number of ranks changes
nothing, by comparing losses to 1e-6 after tens of steps. The order of float32 sums, and so their rounding, depends on
how many samples a rank has, and training amplifies that: rectifiers switch, and Adam makes full steps of gradients
near zero. Without it such runs part by 0.3 after 20 steps, and a wrong gradient cannot be told from rounding. Weights
and activations stay float32. On a CPU it costs a few times float32's time; on GPUs, where float64 is slow, it is off.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm

from plsc.parallel.collectives import all_gather_equal, all_reduce_sum
from plsc.parallel.mesh import Mesh
from plsc.parallel.strategies.ddp import GradientExchange

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel  # late where it is used: it takes long to import

# The count of a rank without samples: it weighs nothing, and is not the 0 by which PyTorch's kernel would divide.
NO_SAMPLES = 2.0**-100


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are those of all ranks' samples together; ranks may hold unequal batches.

    Takes (B, C) or (B, C, …); B may be 0 on some ranks. On a CPU, sums run in float64, so that the split of the batch
    does not show in the last bits. Communication per layer: forward an all-reduce of C + 1 float64 numbers and one of
    C, on GPUs an all-gather of 2C + 1 float32 ones; backward an all-reduce of 2C.
    """

    mesh: Mesh
    float64_gradients: "Float64Gradients | None" = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes (B, C, …), not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (B, C, …); in eval mode this is ordinary batch normalisation."""
        if not self.training:
            return super().forward(input)
        momentum = self._count_batch()
        if self.mesh.device.type == "cuda":
            return _NormaliseOnGpu.apply(input, self.weight, self.bias, self, momentum)  # type: ignore[no-any-return]
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self)
        self._update_running(mean, variance, count, momentum)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _count_batch(self) -> float:
        """Count a batch; the weight of its statistics in the running ones."""
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor, momentum: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def convert_sync_batchnorm(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Replace every BatchNorm in ``module`` by :class:`SyncBatchNorm`, keeping its parameters, buffers and keys."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _to_sync_batchnorm(module, mesh)
    for name, child in module.named_children():
        replaced = convert_sync_batchnorm(child, mesh)
        if replaced is not child:
            setattr(module, name, replaced)
    return module


def _to_sync_batchnorm(old: _BatchNorm, mesh: Mesh) -> SyncBatchNorm:
    new = SyncBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, device="meta")
    new.mesh = mesh
    new.training = old.training
    new._parameters = old._parameters
    new._buffers = old._buffers
    return new


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes, mesh = [0, *range(2, x.dim())], layer.mesh
        dtype = torch.promote_types(x.dtype, torch.float32)
        here = x.new_tensor([x.numel() / max(x.shape[1], 1)], dtype=torch.float64)
        totals = all_reduce_sum(torch.cat([x.sum(axes, dtype=torch.float64), here]), mesh)
        count, mean = totals[-1], totals[:-1] / totals[-1]
        centred = x.to(dtype) - _spread(mean.to(dtype), x)
        # the second moment about the global mean: E[x²] − mean² would cancel
        variance = all_reduce_sum(centred.square().sum(axes, dtype=torch.float64), mesh) / count
        inverse = (variance + layer.eps).rsqrt().to(dtype)
        hat = centred * _spread(inverse, x)
        ctx.save_for_backward(hat, weight, inverse, count)
        ctx.layer = layer
        output = hat if weight is None else hat * _spread(weight.to(hat.dtype), x)
        if bias is not None:
            output = output + _spread(bias.to(hat.dtype), x)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hat, weight, inverse, count = ctx.saved_tensors
        axes = [0, *range(2, grad.dim())]
        grad32 = grad.to(hat.dtype)
        local = torch.stack([grad32.sum(axes, dtype=torch.float64), (grad32 * hat).sum(axes, dtype=torch.float64)])
        grad_bias, grad_weight = local.clone()
        layer: SyncBatchNorm = ctx.layer
        if layer.float64_gradients is not None:
            for parameter, gradient in ((layer.weight, grad_weight), (layer.bias, grad_bias)):
                if parameter is not None:
                    layer.float64_gradients.add(parameter, gradient)
        totals = (all_reduce_sum(local, layer.mesh) / count).to(hat.dtype)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        inner = grad32 - _spread(totals[0], grad) - hat * _spread(totals[1], grad)
        grad_x = (_spread(scale, grad) * inner).to(grad.dtype)
        return (
            grad_x,
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(hat.dtype) if layer.bias is not None else None,
            None,
        )


class _NormaliseOnGpu(torch.autograd.Function):
    """The kernels of torch.nn.SyncBatchNorm with the same collectives, and no wait of the host."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm, momentum: float
    ) -> Tensor:
        x, channels = x.contiguous(memory_format=_dense_format(x)), x.shape[1]
        if x.numel() > 0:
            mean, invstd = torch.batch_norm_stats(x, layer.eps)
            count = float(x.numel() // channels)
        else:
            mean = x.new_zeros(channels, dtype=torch.promote_types(x.dtype, torch.float32))
            invstd, count = torch.ones_like(mean), NO_SAMPLES
        local = torch.cat([mean, invstd, mean.new_full((1,), count)])
        means, invstds, counts = all_gather_equal(local, layer.mesh).split([channels, channels, 1], dim=1)
        counts = counts.squeeze(1)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            x,
            means,
            invstds,
            layer.running_mean,
            layer.running_var,
            momentum,
            layer.eps,
            counts if layer.running_mean is None else counts.to(layer.running_mean.dtype),
        )
        ctx.save_for_backward(x, weight, bias, mean, invstd, counts.to(torch.int32))
        ctx.mesh = layer.mesh
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, layer.eps) if x.numel() > 0 else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, invstd, counts = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        grad_x: Tensor | None = None
        grad_weight: Tensor | None
        grad_bias: Tensor | None
        if x.numel() > 0:
            grad = grad.contiguous(memory_format=_dense_format(x))
            sum_grad, sum_grad_x, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, invstd, weight, by_x, by_weight, by_bias
            )
        else:  # the collective is every rank's, and data parallelism wants a gradient of every parameter
            sum_grad, sum_grad_x = torch.zeros_like(mean), torch.zeros_like(mean)
            grad_weight = torch.zeros_like(weight) if by_weight else None
            grad_bias = torch.zeros_like(bias) if by_bias else None
        if by_x:
            totals = all_reduce_sum(torch.cat([sum_grad, sum_grad_x]), ctx.mesh)
            sum_grad, sum_grad_x = totals.split(len(mean))
            scale = None if weight is None else weight.to(mean.dtype)
            grad_x = grad
            if x.numel() > 0:
                grad_x = torch.batch_norm_backward_elemt(grad, x, mean, invstd, scale, sum_grad, sum_grad_x, counts)
        return grad_x, grad_weight if by_weight else None, grad_bias if by_bias else None, None, None


def _dense_format(x: Tensor) -> torch.memory_format:
    """The memory format in which kernels take ``x``: NHWC or NDHWC if it is so, else contiguous."""
    formats = torch.channels_last, torch.channels_last_3d
    return next((kind for kind in formats if x.is_contiguous(memory_format=kind)), torch.contiguous_format)


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))


class Float64Gradients(GradientExchange):
    """Float64 weight gradients of this rank, kept from the layers that sum them until DDP exchanges them."""

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


def _as_laid_out(flat: Tensor, parameter: Tensor) -> Tensor:
    """View a gradient with its parameter's strides (channels last, say): DDP lays it out so, but shows it row-major."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())


def sum_gradients_in_float64(module: nn.Module, mesh: Mesh) -> Float64Gradients:
    """Let ``module``, float32 and on a CPU, sum its weights' gradients in float64, in place.

    Every SyncBatchNorm, PReLU, Linear and Conv2d in one group does; other layers keep float32 sums. In training the
    embeddings are float64. Parameters, buffers and keys stay. Give the result to :func:`plsc.data_parallel`.
    """
    gradients = Float64Gradients(mesh)
    module.register_forward_hook(gradients.embeddings)
    _convert_children(module, gradients)
    return gradients


def _convert_children(module: nn.Module, gradients: Float64Gradients) -> None:
    for name, child in module.named_children():
        if isinstance(child, SyncBatchNorm):
            child.float64_gradients = gradients
        elif type(child) is nn.Linear:
            setattr(module, name, _converted(child, _Linear, gradients))
        elif type(child) is nn.Conv2d and _is_plain(child):
            setattr(module, name, _converted(child, _Conv2d, gradients))
        elif isinstance(child, nn.PReLU):
            setattr(module, name, _converted(child, _PReLU, gradients))
        _convert_children(child, gradients)


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _converted(old: nn.Module, kind: "type[_Linear | _Conv2d | _PReLU]", gradients: Float64Gradients) -> nn.Module:
    new = kind.__new__(kind)
    new.__dict__.update(old.__dict__)
    new.float64_gradients = gradients
    return new


class _Linear(nn.Linear):
    """A linear layer in float64, rounded to float32: a float32 product's order of sums depends on the threads."""

    float64_gradients: Float64Gradients

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        return F.linear(x.double(), *_in_float64(self)).to(x.dtype)


class _Conv2d(nn.Conv2d):
    """A convolution in float64, rounded to float32: the float32 algorithm depends on the batch's size."""

    float64_gradients: Float64Gradients

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        return F.conv2d(x.double(), *_in_float64(self), self.stride, self.padding, self.dilation).to(x.dtype)


def _in_float64(layer: _Linear | _Conv2d) -> tuple[Tensor, Tensor | None]:
    wide = layer.float64_gradients.in_float64
    return wide(layer.weight), None if layer.bias is None else wide(layer.bias)


class _PReLU(nn.PReLU):
    """PReLU whose slopes' gradients are summed in float64."""

    float64_gradients: Float64Gradients

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        slope = self.float64_gradients.in_float64(self.weight)
        slope = _spread(slope, x) if x.dim() > 1 else slope
        # spread in float32: its gradient is rounded there, element by element, and then summed in float64
        return torch.where(x > 0, x, x * slope.expand_as(x).to(x.dtype))
