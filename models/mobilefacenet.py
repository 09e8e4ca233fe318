"""MobileFaceNet (Chen et al., CCBR 2018) in arcface_torch's widths, and its large variant.

Inverted residuals with PReLU; a global depthwise convolution weighs the positions of the last map, which is not
averaged. Modules have arcface_torch's names, so that its published state_dicts load unchanged.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plsc.models.backbone import (
    Architecture,
    Backbone,
    PReLU,
    count_blocks,
    in_full_precision,
    last_map,
    register_family,
)
from plsc.models.preprocessing import ImageSize
from plsc.models.recompute import Segment


class Shape(NamedTuple):
    """Number of blocks at 1/2, 1/4, 1/8 and 1/16 of the input's size, and the factor on the widths 64 and 128."""

    blocks: tuple[int, int, int, int]
    scale: int


SHAPES = {
    "mobilefacenet": Shape((1, 4, 6, 2), 2),  # 2.06 M parameters at 112x112 and D = 512
    "mobilefacenet_large": Shape((2, 8, 12, 4), 4),  # twice as wide and as deep
}
LAST_CHANNELS = 512
PROJECTION_GAIN = 8.0  # initial norm of the rows of the last linear layer


class StridedDepthwise(nn.Conv2d):
    """A depthwise convolution that computes in fp32 on CPUs, also under autocast: same parameters.

    PyTorch's bf16 gradient of a strided depthwise convolution takes a slow path on CPUs. With it, a bf16 training step
    takes 1.6 times as long (benchmarks/cpu_layers.py).
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H', W')."""
        if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(self.weight.dtype))


class GroupedConvolution(nn.Conv2d):
    """A convolution of few channels per group, trained on CPUs as one of wider groups: same parameters.

    oneDNN has fast paths for depthwise convolutions and for groups that fill a vector, and none in between. The groups
    are joined into wider ones by a block-diagonal weight, whose zeros cost less than the slow path: without this, a
    bf16 training step takes 1.1 times as long (benchmarks/cpu_layers.py).
    """

    MIN_CHANNELS = 16  # per group, from which oneDNN is fast

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        joined = math.gcd(self.groups, max(1, self.MIN_CHANNELS // self.weight.shape[1]))
        trains = self.training and torch.is_grad_enabled() and x.device.type == "cpu"
        if not trains or joined == 1 or not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)
        weight = _block_diagonal(self.weight, self.groups, joined)
        groups, padding = self.groups // joined, cast(tuple[int, int], self.padding)
        return functional.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, groups)


def _block_diagonal(weight: Tensor, groups: int, joined: int) -> Tensor:
    """(K, C/groups, h, w) -> (K, joined·C/groups, h, w): each output channel's filter at its group's inputs."""
    outputs, per_group, height, width = weight.shape
    filters = weight.permute(0, 2, 3, 1)  # channels-last, so that the gradient has the weight's strides, as DDP expects
    blocks = filters.reshape(groups // joined, joined, outputs // groups, height, width, 1, per_group)
    identity = torch.eye(joined, dtype=weight.dtype, device=weight.device).view(1, joined, 1, 1, 1, joined, 1)
    return (blocks * identity).reshape(outputs, height, width, joined * per_group).permute(0, 3, 1, 2)


class Layers(nn.Module):
    """A sequence in the attribute ``layers``, which is part of the published key names."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in order."""
        return cast(Tensor, self.layers(x))


class InvertedResidual(Layers):
    """1x1 to ``hidden`` channels, 3x3 depthwise, 1x1 back; with ``residual`` the input is added."""

    def __init__(self, channels_in: int, channels: int, hidden: int, *, stride: int, residual: bool) -> None:
        super().__init__(
            _convolution(channels_in, hidden, 1),
            _convolution(hidden, hidden, 3, stride=stride, padding=1, groups=hidden),
            _linear_convolution(hidden, channels, 1),
        )
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        y = super().forward(x)
        return x + y if self.residual else y


class MobileFaceNet(Backbone):
    """Inverted residuals by ``SHAPES[name]``, 1x1 convolution to 512 channels, global depthwise convolution."""

    norms_run_once = True

    def __init__(self, name: str, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__(name, embedding_dim, image_size)
        blocks, scale = SHAPES[name]
        narrow, wide = 64 * scale, 128 * scale
        second: nn.Module = _convolution(narrow, narrow, 3, padding=1, groups=64)
        if blocks[0] > 1:
            second = _residuals(narrow, 128, blocks[0])
        self.layers = nn.ModuleList(
            [
                _convolution(3, narrow, 3, stride=2, padding=1),
                second,
                InvertedResidual(narrow, narrow, 128, stride=2, residual=False),
                _residuals(narrow, 128, blocks[1]),
                InvertedResidual(narrow, wide, 256, stride=2, residual=False),
                _residuals(wide, 256, blocks[2]),
                InvertedResidual(wide, wide, 512, stride=2, residual=False),
                _residuals(wide, 256, blocks[3]),
            ]
        )
        self.conv_sep = _convolution(wide, LAST_CHANNELS, 1)
        self.features = Layers(
            _linear_convolution(LAST_CHANNELS, LAST_CHANNELS, last_map(image_size), groups=LAST_CHANNELS),
            nn.Flatten(),
            nn.Linear(LAST_CHANNELS, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Batch normalisation follows, so this matrix's scale determines only its effective learning rate. An orthogonal
        # one of large norm stays close to a projection that preserves all features; a small one soon preserves only
        # what separates the training classes, and unseen classes need the rest (Omniglot, six epochs: rank-1 0.747 at
        # D = 512, where Kaiming initialisation had 0.722 at D = 256).
        projection = cast(nn.Linear, self.features.layers[2])
        nn.init.orthogonal_(projection.weight, gain=PROJECTION_GAIN)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D); ``conv_sep`` and ``features`` run in fp32 even under autocast."""
        for layer in self.layers:
            x = layer(x)
        dtype = cast(nn.Conv2d, self.conv_sep.layers[0]).weight.dtype
        return in_full_precision(x, dtype, self.conv_sep, self.features)

    def segments(self) -> list[Segment]:
        """Return the inverted residuals, and the convolutions before them."""
        first = [
            layer for layer in self.layers[:2] if not any(isinstance(m, InvertedResidual) for m in layer.modules())
        ]
        blocks = [module for module in self.layers.modules() if isinstance(module, InvertedResidual)]
        return [Segment(module) for module in (*first, *blocks)]


def _linear_convolution(
    channels_in: int,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Layers:
    layer: type[nn.Conv2d] = nn.Conv2d if groups in (1, channels_in) else GroupedConvolution
    if groups == channels_in and stride > 1:
        layer = StridedDepthwise
    convolution = layer(channels_in, channels, kernel, stride=stride, padding=padding, groups=groups, bias=False)
    return Layers(convolution, nn.BatchNorm2d(channels))


def _convolution(channels_in: int, channels: int, kernel: int, **options: int) -> Layers:
    return Layers(*_linear_convolution(channels_in, channels, kernel, **options).layers, PReLU(channels))


def _residuals(channels: int, hidden: int, count: int) -> Layers:
    blocks = [InvertedResidual(channels, channels, hidden, stride=1, residual=True) for _ in range(count)]
    return Layers(*blocks)


def _infer(state: Mapping[str, Tensor]) -> Architecture:
    scale = state["layers.0.layers.0.weight"].shape[0] // 64
    blocks = count_blocks(state, r"layers\.3\.layers\.(\d+)\.")
    name = next(name for name, shape in SHAPES.items() if shape.scale == scale and shape.blocks[1] == blocks)
    embedding_dim = state["features.layers.2.weight"].shape[0]
    return Architecture(name, embedding_dim, 16 * state["features.layers.0.layers.0.weight"].shape[-1], {})


register_family(MobileFaceNet, SHAPES, _infer, ("conv_sep.layers.0.weight",))
