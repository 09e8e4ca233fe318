"""MobileFaceNet (Chen et al., 2018) in arcface_torch's widths, and its large variant.

Inverted residuals with PReLU; the last map is weighed position by position (global depthwise convolution)
rather than averaged. Modules carry arcface_torch's names, so its published state_dicts load as they are.
"""

from typing import NamedTuple, cast

from torch import Tensor, nn

from plsc.models.backbone import Backbone, in_full_precision
from plsc.models.cpu_gradients import FewPerGroup, Pointwise, PReLU, StridedDepthwise
from plsc.models.registry import register


class Shape(NamedTuple):
    """Blocks at 1/2, 1/4, 1/8 and 1/16 of the input's size, and the factor on the widths 64 and 128."""

    blocks: tuple[int, int, int, int]
    scale: int


SHAPES = {"mobilefacenet": Shape((1, 4, 6, 2), 2), "mobilefacenet_large": Shape((2, 8, 12, 4), 4)}
LAST_CHANNELS = 512
PROJECTION_GAIN = 8.0  # length of the rows of the last linear layer at the start


class Layers(nn.Module):
    """A sequence under the attribute ``layers``, which is part of the published key names."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The layers one after the other."""
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
    """Inverted residuals as ``SHAPES[name]`` says, 1x1 to 512 channels, the global depthwise convolution."""

    def __init__(self, name: str, embedding_dim: int, image_size: int) -> None:
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
            _linear_convolution(LAST_CHANNELS, LAST_CHANNELS, image_size // 16, groups=LAST_CHANNELS),
            nn.Flatten(),
            nn.Linear(LAST_CHANNELS, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim),
        )
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Batch normalisation follows, so this matrix's scale decides only how fast it turns. A long orthogonal one
        # stays near a projection that keeps all of the features; a short one soon keeps just what tells the training
        # classes apart, and unseen classes need the rest (Omniglot, six epochs: rank-1 0.747 at D = 512, where
        # Kaiming's weights had 0.722 at D = 256).
        projection = cast(nn.Linear, self.features.layers[2])
        nn.init.orthogonal_(projection.weight, gain=PROJECTION_GAIN)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, D); ``conv_sep`` and ``features`` run in fp32 even under autocast."""
        for layer in self.layers:
            x = layer(x)
        return in_full_precision(self._embed, x, self.conv_sep.layers[0].weight.dtype)  # type: ignore[arg-type]

    def _embed(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.features(self.conv_sep(x)))


def _linear_convolution(
    channels_in: int, channels: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> Layers:
    kind = _quickest(channels_in // groups, kernel, stride)
    convolution = kind(channels_in, channels, kernel, stride=stride, padding=padding, groups=groups, bias=False)
    return Layers(convolution, nn.BatchNorm2d(channels))


def _quickest(channels_per_group: int, kernel: int, stride: int) -> type[nn.Conv2d]:
    if kernel == 1:
        return Pointwise
    if channels_per_group == 1:
        return StridedDepthwise if stride > 1 else nn.Conv2d
    return FewPerGroup


def _convolution(
    channels_in: int, channels: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> Layers:
    linear = _linear_convolution(channels_in, channels, kernel, stride=stride, padding=padding, groups=groups)
    return Layers(*linear.layers, PReLU(channels))


def _residuals(channels: int, hidden: int, count: int) -> Layers:
    blocks = [InvertedResidual(channels, channels, hidden, stride=1, residual=True) for _ in range(count)]
    return Layers(*blocks)


@register
def mobilefacenet(embedding_dim: int, image_size: int) -> Backbone:
    """2.06 M parameters at 112x112 and D = 512."""
    return MobileFaceNet("mobilefacenet", embedding_dim, image_size)


@register
def mobilefacenet_large(embedding_dim: int, image_size: int) -> Backbone:
    """Twice as wide and as deep."""
    return MobileFaceNet("mobilefacenet_large", embedding_dim, image_size)
