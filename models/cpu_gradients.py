"""Layers that are PyTorch's own but for the speed of their gradients on CPUs; same parameters, same results.

PyTorch's CPU kernel for PReLU's gradient does not vectorise, and its bf16 gradient of a strided depthwise
convolution takes a slow path: together they are more than half of a MobileFaceNet's training step. Of what is
left, convolutions with two channels a group and the 1x1 convolutions' weight gradients were a third.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PReLU(nn.PReLU):
    """max(x, 0) + weight · min(x, 0), with a weight per channel: (B, C, H, W) -> (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.PReLU`."""
        learns = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if learns and x.device.type == "cpu" and x.dim() == 4:
            return cast(Tensor, _ChannelPReLU.apply(x, self.weight))
        return super().forward(x)


class _ChannelPReLU(torch.autograd.Function):
    """PReLU whose backward pass is a few vectorised passes over the map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.prelu(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        positive = torch.ops.aten.threshold_backward(grad, x, 0)  # the gradient where x > 0
        negative = grad - positive
        grad_weight = (negative * x).sum((0, 2, 3), dtype=weight.dtype).sum_to_size(weight.shape)
        slope = weight.to(x.dtype).view(1, -1, 1, 1)
        return torch.addcmul(positive, negative, slope), grad_weight


class StridedDepthwise(nn.Conv2d):
    """A depthwise convolution that computes in its weights' precision on CPUs, also inside an autocast region."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Conv2d`."""
        if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(self.weight.dtype))


class Pointwise(nn.Conv2d):
    """A 1x1 convolution that trains on CPUs as the matrix product it is, where maps are channels-last."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Conv2d`."""
        if not _trains_on_cpu(self, x):
            return super().forward(x)
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)  # by this way its gradient is channels-last, too
        return F.linear(x.permute(0, 2, 3, 1), weight, self.bias).permute(0, 3, 1, 2)


class FewPerGroup(nn.Conv2d):
    """A convolution of few channels a group, which trains on CPUs as one of wider groups padded with zeros.

    oneDNN has fast paths for depthwise convolutions and for groups that fill a vector, and none in between.
    """

    WIDE = 16  # channels a group, the narrowest that is quick

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Conv2d`."""
        joined = self._groups_to_join()
        if not _trains_on_cpu(self, x) or joined == 1:
            return super().forward(x)
        weight, padding = _block_diagonal(self.weight, self.groups, joined), cast(Any, self.padding)
        return F.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups // joined)

    def _groups_to_join(self) -> int:
        return math.gcd(self.groups, max(1, self.WIDE // self.weight.shape[1]))


def _trains_on_cpu(layer: nn.Module, x: Tensor) -> bool:
    learns = layer.training and torch.is_grad_enabled()
    return learns and x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last)


def _block_diagonal(weight: Tensor, groups: int, joined: int) -> Tensor:
    """(K, C/groups, h, w) -> (K, joined·C/groups, h, w): each output channel's filter at its group's inputs."""
    outputs, per_group, height, width = weight.shape
    filters = weight.permute(0, 2, 3, 1)  # channels-last, as its gradient is then
    blocks = filters.reshape(groups // joined, joined, outputs // groups, height, width, 1, per_group)
    mine = torch.eye(joined, dtype=weight.dtype, device=weight.device).view(1, joined, 1, 1, 1, joined, 1)
    return (blocks * mine).reshape(outputs, height, width, joined * per_group).permute(0, 3, 1, 2)
