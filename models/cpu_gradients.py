"""Layers that are PyTorch's own but for the speed of their gradients on CPUs; same parameters, same results.

PyTorch's CPU kernel for PReLU's gradient does not vectorise, and its bf16 gradient of a strided depthwise
convolution takes a slow path: together they are more than half of a MobileFaceNet's training step.
"""

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
