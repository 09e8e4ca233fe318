"""IResNet 18/34/50/100/200, the residual network of ArcFace (Deng et al., CVPR 2019, section 3.1).

Differences from torchvision's ResNet: the stem keeps the resolution, a block normalises before its first convolution
and has no activation after its sum, and the last map is flattened into a linear layer, not averaged. Modules have
arcface_torch's names, so that its published state_dicts load unchanged.
"""

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from plsc.models.backbone import (
    Architecture,
    Backbone,
    PReLU,
    count_blocks,
    in_full_precision,
    positions,
    register_family,
)
from plsc.models.preprocessing import ImageSize
from plsc.models.recompute import Segment

BLOCKS = {
    "iresnet18": (2, 2, 2, 2),  # 24.0 M parameters at 112x112 and D = 512
    "iresnet34": (3, 4, 6, 3),  # 34.1 M
    "iresnet50": (3, 4, 14, 3),  # 43.6 M
    "iresnet100": (3, 13, 30, 3),  # 65.2 M
    "iresnet200": (6, 26, 60, 6),  # 118.8 M
}
WIDTHS = (64, 128, 256, 512)


class IBasicBlock(nn.Module):
    """BN, conv 3x3, BN, PReLU, strided conv 3x3, BN; plus the input. (B, C, H, W) -> (B, C', H', W')."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.prelu = PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual branch to the (perhaps downsampled) input."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.conv1(self.bn1(x))
        y = self.conv2(self.prelu(self.bn2(y)))
        return cast(Tensor, self.bn3(y) + shortcut)


class IResNet(Backbone):
    """IResNet with ``BLOCKS[name]`` blocks per stage; ``dropout`` acts on the flattened last map."""

    norms_run_once = True

    def __init__(self, name: str, embedding_dim: int, image_size: ImageSize, *, dropout: float = 0.0) -> None:
        super().__init__(name, embedding_dim, image_size)
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.prelu = PReLU(WIDTHS[0])
        channels = (WIDTHS[0], *WIDTHS)
        stages = [_stage(channels[i], channels[i + 1], blocks) for i, blocks in enumerate(BLOCKS[name])]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.bn2 = nn.BatchNorm2d(WIDTHS[-1])
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(WIDTHS[-1] * positions(image_size), embedding_dim)
        self.features = nn.BatchNorm1d(embedding_dim)
        self.features.weight.requires_grad_(False)  # fixed at 1: the head normalises the embedding anyway
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D); ``fc`` and ``features`` run in fp32 even under autocast."""
        x = self._stem(x)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        x = self.dropout(torch.flatten(self.bn2(x), 1))
        return in_full_precision(x, self.fc.weight.dtype, self.fc, self.features)

    def segments(self) -> list[Segment]:
        """Return the stem, whose maps are the largest of all, and the blocks."""
        return [Segment(self, "_stem"), *super().segments()]

    def _stem(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.prelu(self.bn1(self.conv1(x))))


def _stage(channels_in: int, channels: int, blocks: int) -> nn.Sequential:
    first = IBasicBlock(channels_in, channels, stride=2)
    return nn.Sequential(first, *(IBasicBlock(channels, channels, stride=1) for _ in range(1, blocks)))


def _infer(state: Mapping[str, Tensor]) -> Architecture:
    blocks = tuple(count_blocks(state, rf"layer{stage}\.(\d+)\.") for stage in (1, 2, 3, 4))
    name = next(name for name, known in BLOCKS.items() if known == blocks)
    embedding_dim, flat = state["fc.weight"].shape
    return Architecture(name, embedding_dim, 16 * math.isqrt(flat // WIDTHS[-1]), {})


register_family(IResNet, BLOCKS, _infer, ("layer1.0.prelu.weight",))
