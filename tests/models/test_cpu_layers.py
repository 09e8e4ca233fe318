"""The layers with faster gradients on CPUs compute what PyTorch's own do."""

import copy

import pytest
import torch
from torch import nn

from plsc.models import create
from plsc.models.backbone import PReLU
from plsc.models.mobilefacenet import GroupedConvolution, StridedDepthwise


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of x and gradients of the parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prelu_is_that_of_torch(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    x = torch.randn(3, 5, 4, 6, dtype=dtype).contiguous(memory_format=memory_format)
    x[0, 0, 0, :3] = torch.tensor([0.0, 1e-30, -1e-30])
    ours, torchs = PReLU(5).to(dtype), nn.PReLU(5).to(dtype)
    with torch.no_grad():
        torchs.weight.copy_(ours.weight.uniform_(-0.5, 1.0))
    for a, b in zip(gradients(ours, x), gradients(torchs, x), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_prelu_under_autocast_keeps_its_weight_in_float32() -> None:
    layer, x = PReLU(4), torch.randn(2, 4, 3, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, x.float().clamp(max=0).sum((0, 2, 3)), rtol=2e-2, atol=2e-2)


def test_prelu_of_one_shared_weight_and_of_vectors() -> None:
    for ours, shape in ((PReLU(), (2, 3, 4, 4)), (PReLU(3), (5, 3))):
        x, torchs = torch.randn(shape), nn.PReLU(ours.num_parameters)
        for a, b in zip(gradients(ours, x), gradients(torchs, x), strict=True):
            torch.testing.assert_close(a, b)


def test_strided_depthwise_is_that_of_torch_and_float32_under_autocast() -> None:
    ours = StridedDepthwise(6, 6, 3, stride=2, padding=1, groups=6, bias=False)
    torchs = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False)
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 8, 8)
    expected = gradients(torchs, x)
    for a, b in zip(gradients(copy.deepcopy(ours), x), expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(gradients(ours, x), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("channels", "outputs", "groups"), [(12, 24, 6), (128, 128, 64), (6, 6, 1), (40, 40, 2), (10, 5, 5)]
)
def test_convolution_of_few_channels_a_group_is_that_of_torch(
    channels: int, outputs: int, groups: int, memory_format: torch.memory_format
) -> None:
    ours = GroupedConvolution(channels, outputs, 3, stride=2, padding=1, groups=groups).double()
    torchs = nn.Conv2d(channels, outputs, 3, stride=2, padding=1, groups=groups).double()
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(2, channels, 5, 6).double().contiguous(memory_format=memory_format)
    for a, b in zip(gradients(ours, x), gradients(torchs, x), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))


def test_gradients_lie_in_memory_as_their_weights_do() -> None:
    """Else DistributedDataParallel copies them, and warns."""
    layer = GroupedConvolution(12, 24, 3, padding=1, groups=6).to(memory_format=torch.channels_last)
    strides: list[tuple[int, ...]] = []
    layer.weight.register_hook(lambda grad: strides.append(grad.stride()))
    layer(torch.randn(2, 12, 5, 3).contiguous(memory_format=torch.channels_last)).sum().backward()
    assert strides == [layer.weight.stride()]


@pytest.mark.parametrize("name", ["mobilefacenet", "iresnet18"])
def test_backbones_use_them(name: str) -> None:
    modules = list(create(name, embedding_dim=8, image_size=32).modules())
    assert not [m for m in modules if type(m) is nn.PReLU]
    assert not [m for m in modules if type(m) is nn.Conv2d and m.groups == m.in_channels and m.stride == (2, 2)]
