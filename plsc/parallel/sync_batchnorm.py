"""Batch normalisation over the global batch, on any device (torch's own SyncBatchNorm computes on GPUs only)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from plsc.parallel.wide_gradients import WideGradients


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are those of all ranks' samples together; ranks may hold unequal batches.

    Takes (B, C) or (B, C, …). Sums run in float64, so that how the batch is split does not show in the last bits.
    Communication per layer: 2C + 1 float64 numbers forward, 2C backward.
    """

    mesh: Mesh
    wide_gradients: "WideGradients | None" = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes (B, C, …), not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (B, C, …); in eval mode this is ordinary batch normalisation."""
        if not self.training:
            return super().forward(input)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self)
        self._update_running(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def convert_sync_batchnorm(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Replace every BatchNorm in ``module`` by :class:`SyncBatchNorm`, keeping its parameters, buffers and keys."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module, mesh)
    for name, child in module.named_children():
        replaced = convert_sync_batchnorm(child, mesh)
        if replaced is not child:
            setattr(module, name, replaced)
    return module


def _converted(old: _BatchNorm, mesh: Mesh) -> SyncBatchNorm:
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
        wide = torch.promote_types(x.dtype, torch.float32)
        here = x.new_tensor([x.numel() / max(x.shape[1], 1)], dtype=torch.float64)
        totals = all_reduce_sum(torch.cat([x.sum(axes, dtype=torch.float64), here]), mesh)
        count, mean = totals[-1], totals[:-1] / totals[-1]
        centred = x.to(wide) - _spread(mean.to(wide), x)
        # the second moment about the global mean: E[x²] − mean² would cancel
        variance = all_reduce_sum(centred.square().sum(axes, dtype=torch.float64), mesh) / count
        inverse = (variance + layer.eps).rsqrt().to(wide)
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
        mine = torch.stack([grad32.sum(axes, dtype=torch.float64), (grad32 * hat).sum(axes, dtype=torch.float64)])
        grad_bias, grad_weight = mine.clone()
        layer: SyncBatchNorm = ctx.layer
        if layer.wide_gradients is not None:
            layer.wide_gradients.add(layer.weight, grad_weight)
            layer.wide_gradients.add(layer.bias, grad_bias)
        totals = (all_reduce_sum(mine, layer.mesh) / count).to(hat.dtype)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        inner = grad32 - _spread(totals[0], grad) - hat * _spread(totals[1], grad)
        grad_x = (_spread(scale, grad) * inner).to(grad.dtype)
        return (
            grad_x,
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(hat.dtype) if layer.bias is not None else None,
            None,
        )


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))
