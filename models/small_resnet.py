"""ResNet-8 and ResNet-7: eight or seven layers for small images, trained in minutes on a CPU.

A strided stem, then three basic blocks (He et al., 2016), each of which halves the map; the shortcut averages before
its 1x1 convolution ("ResNet-D", He et al., 2019). The last map is flattened, not averaged, which keeps its positions.
ResNet-7 leaves out the last convolution, on a map of 3x3 for images of 48 pixels: it has 61% of the weights, and
learns more in a short run.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from plsc.models.backbone import (
    Architecture,
    Backbone,
    in_full_precision,
    positions,
    register_family,
)
from plsc.models.preprocessing import ImageSize
from plsc.models.recompute import Segment

# 0.9 M and 1.5 M parameters at 48x48 and D = 128; the quickstart's has four fifths of the other's arithmetic.
NAMES = ("resnet7", "resnet8")
WIDTHS = (32, 64, 128, 256)


class StridedBlock(nn.Module):
    """Conv 3x3 of stride 2, conv 3x3 unless ``single``, plus the averaged input. (B, C, H, W) -> (B, C', H/2, W/2)."""

    def __init__(self, channels_in: int, channels: int, *, single: bool) -> None:
        super().__init__()
        second = () if single else (nn.ReLU(), *_convolution(channels, channels, 3))
        self.residual = nn.Sequential(*_convolution(channels_in, channels, 3, stride=2), *second)
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), *_convolution(channels_in, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual and the shortcut, then ReLU."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class SmallResNet(Backbone):
    """Stem, three blocks, one linear layer over all positions, batch normalisation.

    Args:
        name: one of :data:`NAMES`.
        embedding_dim: D.
        image_size: side in pixels, or (height, width).
    """

    norms_run_once = True

    def __init__(self, name: str, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__(name, embedding_dim, image_size)
        self.stem = nn.Sequential(*_convolution(3, WIDTHS[0], 3, stride=2), nn.ReLU())
        blocks = [StridedBlock(a, b, single=name == "resnet7" and b == WIDTHS[-1]) for a, b in pairwise(WIDTHS)]
        self.blocks = nn.Sequential(*blocks)
        self.embed = nn.Sequential(
            nn.Flatten(),
            nn.Linear(WIDTHS[-1] * positions(image_size), embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D); the linear layer runs in fp32 even under autocast."""
        x = self.blocks(self.stem(x))
        return in_full_precision(x, cast(nn.Linear, self.embed[1]).weight.dtype, self.embed)

    def segments(self) -> list[Segment]:
        """Return the stem and the blocks."""
        return [Segment(self.stem), *super().segments()]


def _convolution(channels_in: int, channels: int, kernel: int, *, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels)


def _infer(state: Mapping[str, Tensor]) -> Architecture:
    embedding_dim, flat = state["embed.1.weight"].shape
    name = "resnet8" if "blocks.2.residual.3.weight" in state else "resnet7"
    return Architecture(name, embedding_dim, 16 * math.isqrt(flat // WIDTHS[-1]), {})


register_family(SmallResNet, NAMES, _infer, ("blocks.0.residual.0.weight",))
