"""The key names and shapes of arcface_torch's published state_dicts, described here independently of the modules.

Each description below is the published layout spelled out from the outside: stages, counts and shapes.
"""

import pytest
import torch

import plsc.models

Layout = dict[str, tuple[int, ...]]

STATISTICS = ("weight", "bias", "running_mean", "running_var")
IRESNETS = {
    "iresnet18": ((2, 2, 2, 2), 187, 24.0),
    "iresnet34": ((3, 4, 6, 3), 331, 34.1),
    "iresnet50": ((3, 4, 14, 3), 475, 43.6),
    "iresnet100": ((3, 13, 30, 3), 925, 65.2),
    "iresnet200": ((6, 26, 60, 6), 1807, 118.8),
}
VITS = {"vit_tiny": (256, 12), "vit_small": (512, 12), "vit_base": (512, 24), "vit_large": (768, 24)}


def norm(prefix: str, channels: int) -> Layout:
    return {f"{prefix}.{key}": (channels,) for key in STATISTICS} | {f"{prefix}.num_batches_tracked": ()}


def iresnet_layout(blocks: tuple[int, ...], dim: int, side: int) -> Layout:
    layout: Layout = {"conv1.weight": (64, 3, 3, 3), **norm("bn1", 64), "prelu.weight": (64,)}
    before = 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True), start=1):
        for i in range(count):
            name, given = f"layer{stage}.{i}", before if i == 0 else width
            layout |= norm(f"{name}.bn1", given) | {f"{name}.conv1.weight": (width, given, 3, 3)}
            layout |= norm(f"{name}.bn2", width) | {f"{name}.prelu.weight": (width,)}
            layout |= {f"{name}.conv2.weight": (width, width, 3, 3)} | norm(f"{name}.bn3", width)
            if i == 0:
                layout |= {f"{name}.downsample.0.weight": (width, given, 1, 1)} | norm(f"{name}.downsample.1", width)
        before = width
    layout |= norm("bn2", 512) | {"fc.weight": (dim, 512 * side * side), "fc.bias": (dim,)}
    return layout | norm("features", dim)


def conv(prefix: str, shape: tuple[int, ...], *, prelu: bool = True) -> Layout:
    layout = {f"{prefix}.layers.0.weight": shape} | norm(f"{prefix}.layers.1", shape[0])
    return layout | ({f"{prefix}.layers.2.weight": (shape[0],)} if prelu else {})


def inverted(prefix: str, given: int, hidden: int, width: int) -> Layout:
    inner = f"{prefix}.layers"
    return (
        conv(f"{inner}.0", (hidden, given, 1, 1))
        | conv(f"{inner}.1", (hidden, 1, 3, 3))
        | conv(f"{inner}.2", (width, hidden, 1, 1), prelu=False)
    )


def residuals(prefix: str, count: int, width: int, hidden: int) -> Layout:
    layout: Layout = {}
    for i in range(count):
        layout |= inverted(f"{prefix}.layers.{i}", width, hidden, width)
    return layout


def mobilefacenet_layout(blocks: tuple[int, ...], scale: int, dim: int, side: int) -> Layout:
    narrow, wide = 64 * scale, 128 * scale
    layout = conv("layers.0", (narrow, 3, 3, 3))
    layout |= (
        conv("layers.1", (narrow, narrow // 64, 3, 3))
        if blocks[0] == 1
        else residuals("layers.1", blocks[0], narrow, 128)
    )
    layout |= inverted("layers.2", narrow, 128, narrow) | residuals("layers.3", blocks[1], narrow, 128)
    layout |= inverted("layers.4", narrow, 256, wide) | residuals("layers.5", blocks[2], wide, 256)
    layout |= inverted("layers.6", wide, 512, wide) | residuals("layers.7", blocks[3], wide, 256)
    layout |= conv("conv_sep", (512, wide, 1, 1)) | conv("features.layers.0", (512, 1, side, side), prelu=False)
    return layout | {"features.layers.2.weight": (dim, 512)} | norm("features.layers.3", dim)


def vit_layout(width: int, depth: int, dim: int, tokens: int, patch: int) -> Layout:
    layout: Layout = {"pos_embed": (1, tokens, width), "mask_token": (1, 1, width)}
    layout |= {"patch_embed.proj.weight": (width, 3, patch, patch), "patch_embed.proj.bias": (width,)}
    for i in range(depth):
        for key in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.proj.bias", "mlp.fc2.bias"):
            layout[f"blocks.{i}.{key}"] = (width,)
        layout[f"blocks.{i}.attn.qkv.weight"] = (3 * width, width)
        layout[f"blocks.{i}.attn.proj.weight"] = (width, width)
        layout[f"blocks.{i}.mlp.fc1.weight"] = (4 * width, width)
        layout[f"blocks.{i}.mlp.fc1.bias"] = (4 * width,)
        layout[f"blocks.{i}.mlp.fc2.weight"] = (width, 4 * width)
    layout |= {"norm.weight": (width,), "norm.bias": (width,), "feature.0.weight": (width, width * tokens)}
    return layout | norm("feature.1", width) | {"feature.2.weight": (dim, width)} | norm("feature.3", dim)


def built(name: str, dim: int = 512, size: int = 112) -> plsc.models.Backbone:
    with torch.device("meta"):
        return plsc.models.create(name, embedding_dim=dim, image_size=size)


def layout_of(model: torch.nn.Module) -> Layout:
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def millions(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


@pytest.mark.parametrize("name", IRESNETS)
def test_iresnet_has_the_published_keys_shapes_and_counts(name: str) -> None:
    blocks, keys, parameters = IRESNETS[name]
    model = built(name)
    assert layout_of(model) == iresnet_layout(blocks, 512, 7)
    assert len(model.state_dict()) == keys
    assert millions(model) == pytest.approx(parameters, abs=0.05)
    assert layout_of(built(name, 128, 48)) == iresnet_layout(blocks, 128, 3)


def test_iresnet_features_are_fixed_at_one_and_every_norm_has_the_published_eps() -> None:
    model = plsc.models.create("iresnet18", image_size=32)
    assert not model.features.weight.requires_grad
    assert torch.equal(model.features.weight, torch.ones(512))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert {norm.eps for norm in norms} == {1e-5}
    assert model.layer1[0].conv1.weight.std().item() == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(
    ("name", "blocks", "scale"),
    [
        ("mobilefacenet", (1, 4, 6, 2), 2),
        ("mobilefacenet_large", (2, 8, 12, 4), 4),
    ],
)
def test_mobilefacenet_has_the_published_keys_and_shapes(name: str, blocks: tuple[int, ...], scale: int) -> None:
    assert layout_of(built(name)) == mobilefacenet_layout(blocks, scale, 512, 7)
    assert layout_of(built(name, 256, 64)) == mobilefacenet_layout(blocks, scale, 256, 4)


def test_mobilefacenet_has_the_published_number_of_parameters() -> None:
    assert millions(built("mobilefacenet")) == pytest.approx(2.06, abs=0.005)


@pytest.mark.parametrize("name", VITS)
def test_vit_has_the_published_keys_and_shapes_at_112_and_whole_patches_elsewhere(name: str) -> None:
    assert layout_of(built(name)) == vit_layout(*VITS[name], 512, 144, 9)
    assert layout_of(built(name, 128, 48)) == vit_layout(*VITS[name], 128, 36, 8)
