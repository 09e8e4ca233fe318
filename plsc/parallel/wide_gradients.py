"""Float32 layers whose sums run in float64, over samples and ranks: how a batch is split does not show in their bits.

The order of float32 sums, and so their rounding, hangs on how many samples a rank has. Training amplifies that:
rectifiers switch, and Adam makes full steps of gradients near zero. Weights and activations stay float32 here. For
CPUs, where float64 costs a few times float32 and no more.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from plsc.parallel.collectives import all_reduce_sum
from plsc.parallel.mesh import Mesh
from plsc.parallel.sync_batchnorm import SyncBatchNorm


class WideGradients:
    """This rank's float64 weight gradients, from the layers that sum them to the exchange with the other ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._sums: dict[Tensor, Tensor] = {}

    def add(self, parameter: Tensor | None, gradient: Tensor) -> None:
        """Count ``gradient``, float64, until the next exchange. One rank alone exchanges nothing and keeps nothing."""
        if self.mesh.world_size == 1 or parameter is None:
            return
        before = self._sums.get(parameter)
        self._sums[parameter] = gradient if before is None else before + gradient

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: the ranks' sum of a bucket, float64 until it is known. Moves 2·8 bytes a weight.

        Parameters whose layers do not sum in float64 are added as they came.
        """
        pairs = [
            (parameter, _as_laid_out(gradient, parameter))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        mine = [self._sums.pop(parameter, gradient).double().flatten() for parameter, gradient in pairs]
        total = all_reduce_sum(torch.cat(mine), self.mesh)
        for (_, gradient), part in zip(pairs, total.split([each.numel() for each in mine]), strict=True):
            gradient.copy_(part.view(gradient.shape))
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    def embeddings(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        """A forward hook: embeddings in float64 while training, so that their gradient comes in float64.

        It comes multiplied by the number of ranks, which is taken off before anything is rounded: gradients three
        times as large would round otherwise. Hence :meth:`exchange` takes sums, not means.
        """
        if not (module.training and output.requires_grad):
            return output
        wide = output.double()
        wide.register_hook(lambda gradient: gradient / self.mesh.world_size)
        return wide


def _as_laid_out(flat: Tensor, parameter: Tensor) -> Tensor:
    """DDP lays gradients out as their parameters are (channels last, say), but shows them row by row to its hooks."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())


def sum_gradients_in_float64(module: nn.Module, mesh: Mesh) -> WideGradients:
    """Let ``module``, float32 and on a CPU, sum its weights' gradients in float64, in place.

    That is every SyncBatchNorm, PReLU, Linear and Conv2d in one group; other layers keep float32 sums. In training its
    embeddings are float64. Parameters, buffers and keys stay. Give what is returned to :func:`plsc.data_parallel`.
    """
    wide = WideGradients(mesh)
    module.register_forward_hook(wide.embeddings)
    _convert_children(module, wide)
    return wide


def _convert_children(module: nn.Module, wide: WideGradients) -> None:
    for name, child in module.named_children():
        if isinstance(child, SyncBatchNorm):
            child.wide_gradients = wide
        elif type(child) is nn.Linear:
            setattr(module, name, _converted(child, _Linear, wide))
        elif type(child) is nn.Conv2d and _is_plain(child):
            setattr(module, name, _converted(child, _Conv2d, wide))
        elif isinstance(child, nn.PReLU):
            setattr(module, name, _converted(child, _PReLU, wide))
        _convert_children(child, wide)


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _converted(old: nn.Module, kind: "type[_Linear | _Conv2d | _PReLU]", wide: WideGradients) -> nn.Module:
    new = kind.__new__(kind)
    new.__dict__.update(old.__dict__)
    new.wide_gradients = wide
    return new


class _Linear(nn.Linear):
    """A linear layer in float64, rounded to float32: the order of a float32 product's sums hangs on the threads."""

    wide_gradients: WideGradients

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        result: Tensor = _LinearFunction.apply(x, self.weight, self.bias, self)
        return result


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _Linear = ctx.layer
        wide = grad.double()
        by_x = (wide @ weight.double()).to(x.dtype) if ctx.needs_input_grad[0] else None
        rows = wide.flatten(0, -2)
        by_weight = rows.t() @ x.double().flatten(0, -2)
        layer.wide_gradients.add(layer.weight, by_weight)
        by_bias = None
        if layer.bias is not None:
            by_bias = rows.sum(0)
            layer.wide_gradients.add(layer.bias, by_bias)
            by_bias = by_bias.to(weight.dtype)
        return by_x, by_weight.to(weight.dtype), by_bias, None


class _Conv2d(nn.Conv2d):
    """A convolution in float64, rounded to float32: which float32 algorithm is taken hangs on the batch's size."""

    wide_gradients: WideGradients

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        result: Tensor = _Conv2dFunction.apply(x, self.weight, self.bias, self)
        return result


class _Conv2dFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Conv2d) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        wide_bias = None if bias is None else bias.double()
        wide = F.conv2d(x.double(), weight.double(), wide_bias, layer.stride, layer.padding, layer.dilation)
        return wide.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _Conv2d = ctx.layer
        biases = None if layer.bias is None else [weight.shape[0]]
        by_x, by_weight, by_bias = torch.ops.aten.convolution_backward(
            grad.double(),
            x.double(),
            weight.double(),
            biases,
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            (0, 0),
            1,
            (ctx.needs_input_grad[0], True, layer.bias is not None),
        )
        layer.wide_gradients.add(layer.weight, by_weight)
        if layer.bias is not None:
            layer.wide_gradients.add(layer.bias, by_bias)
            by_bias = by_bias.to(weight.dtype)
        return None if by_x is None else by_x.to(x.dtype), by_weight.to(weight.dtype), by_bias, None


class _PReLU(nn.PReLU):
    """PReLU whose slopes' gradients are summed in float64."""

    wide_gradients: WideGradients

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        result: Tensor = _PReLUFunction.apply(x, self.weight, self)
        return result


class _PReLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _PReLU) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return F.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        layer: _PReLU = ctx.layer
        slope = weight.view(1, -1, *[1] * (x.dim() - 2)) if x.dim() > 1 else weight
        by_slope = (grad * x.clamp(max=0)).double()
        axes = [axis for axis in range(x.dim()) if axis != 1] if weight.numel() > 1 else list(range(x.dim()))
        by_weight = by_slope.sum(axes).view(weight.shape)
        layer.wide_gradients.add(layer.weight, by_weight)
        return torch.where(x > 0, grad, grad * slope), by_weight.to(weight.dtype), None
