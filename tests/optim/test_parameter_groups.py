"""Parameter groups: patterns, layer-wise decay against BEiT's rule, and what has no layers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from plsc import models
from plsc.errors import UsageError
from plsc.optim.backbone_optimizers import BACKBONE_OPTIMIZERS, Hyperparameters, make_backbone_optimizer
from plsc.optim.parameter_groups import parameter_groups


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return models.create(name, embedding_dim=16, image_size=32, **options)


def of_each_weight(backbone: nn.Module, key: str, **options: Any) -> dict[str, Any]:
    """The group's value of each trained weight, by name."""
    groups = parameter_groups(backbone, 2.0, **options)
    values = {id(weight): group.get(key) for group in groups for weight in group["params"]}
    names = [(name, weight) for name, weight in backbone.named_parameters() if weight.requires_grad]
    assert sum(len(group["params"]) for group in groups) == len(names) == len(values)
    return {name: values[id(weight)] for name, weight in names}


@pytest.mark.parametrize(
    ("backbone", "prefix", "depth"), [("vit_tiny", "", 12), ("vit_base", "", 24), ("timm:test_vit", "trunk.", 6)]
)
def test_rates_fall_from_block_to_block(backbone: str, prefix: str, depth: int) -> None:
    found = of_each_weight(on_meta(backbone), "lr", layer_decay=0.75)
    for name, lr in found.items():
        part = name.removeprefix(prefix).split(".")
        if part[0] == "blocks":
            layer = int(part[1]) + 1  # BEiT numbers the patches 0 and the blocks from 1
        else:
            layer = 0 if part[0] in ("patch_embed", "pos_embed", "cls_token") else depth + 1
        assert lr == pytest.approx(2.0 * 0.75 ** (depth + 1 - layer)), name
    assert len({round(lr, 12) for lr in found.values()}) == depth + 2


def test_the_first_group_has_the_whole_rate() -> None:
    groups = parameter_groups(on_meta("vit_tiny"), 2.0, layer_decay=0.5, no_decay=["*norm*"])
    rates = [group["lr"] for group in groups]
    assert rates[0] == 2.0
    assert rates == sorted(rates, reverse=True)


def test_patterns_are_kept_from_decay() -> None:
    found = of_each_weight(on_meta("iresnet18"), "weight_decay", no_decay=["*.bias", "*bn?.weight"])
    assert {name for name, decay in found.items() if decay == 0.0} == {
        name for name in found if name.endswith(".bias") or name.split(".")[-2] in ("bn1", "bn2", "bn3")
    }
    assert {decay for name, decay in found.items() if "conv" in name} == {None}


def test_without_patterns_and_decay_there_is_one_group_in_order() -> None:
    backbone = on_meta("mobilefacenet")
    (group,) = parameter_groups(backbone, 0.3)
    assert all(a is b for a, b in zip(group["params"], backbone.parameters(), strict=True))
    assert set(group) == {"params", "lr"}


def test_what_decays_is_what_lars_adapts() -> None:
    layer = nn.Linear(4, 3)
    groups = parameter_groups(layer, 0.1, no_decay=["bias"])
    optimizer = make_backbone_optimizer("lars", groups, Hyperparameters(0.1, weight_decay=0.5, momentum=0.0))
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    for weight in layer.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.testing.assert_close(layer.bias.detach(), before["bias"] - 0.1)
    w = before["weight"]
    ratio = 1e-3 * w.norm() / (torch.ones(3, 4).norm() + 0.5 * w.norm())
    torch.testing.assert_close(layer.weight.detach(), w - 0.1 * ratio * (1 + 0.5 * w))


@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet", "timm:test_resnet", "timm:test_efficientnet"])
def test_layers_decay_in_vits_alone(name: str) -> None:
    with pytest.raises(UsageError, match=r"optim\.layer_decay needs a backbone .* take vit_small"):
        parameter_groups(on_meta(name), 0.1, layer_decay=0.9)


def test_a_pattern_that_fits_nothing_is_named() -> None:
    for key, options in {"no_decay": {"no_decay": ["*.biass"]}, "groups": {"patterns": [("*.biass", {})]}}.items():
        message = rf'optim\.{key}: "\*\.biass" fits no weight of the backbone; the nearest are 0\.bias, 0\.weight'
        with pytest.raises(UsageError, match=message):
            parameter_groups(nn.Sequential(nn.Linear(2, 2)), 0.1, **options)


@pytest.mark.parametrize("optimizer", BACKBONE_OPTIMIZERS)
def test_groups_step_as_optimizers_of_their_own(optimizer: str) -> None:
    """Of several patterns the last that gives a key counts; no_decay comes before them, layer_decay multiplies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.LayerNorm(4)).double()
    twin = copy.deepcopy(model)
    patterns: list[tuple[str, dict[str, float]]] = [
        ("0.*", {"lr_scale": 0.5, "weight_decay": 0.2}),
        ("*.bias", {"weight_decay": 0.3}),
        ("2.bias", {"lr_scale": 4.0}),
        ("0.bias", {"lr_scale": 2.0}),
    ]
    expected = {
        "0.weight": (0.01, 0.2), "0.bias": (0.04, 0.3),
        "1.weight": (0.02, 0.1), "1.bias": (0.02, 0.3),
        "2.weight": (0.02, 0.0), "2.bias": (0.08, 0.3),
    }  # fmt: skip
    values = Hyperparameters(0.02, weight_decay=0.1)
    groups = parameter_groups(model, 0.02, no_decay=["2.*"], patterns=patterns)
    together = make_backbone_optimizer(optimizer, groups, values)
    alone = [
        make_backbone_optimizer(
            optimizer, [{"params": [w], "lr": expected[n][0], "weight_decay": expected[n][1]}], values
        )
        for n, w in twin.named_parameters()
    ]
    for _ in range(3):
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for each in (together, *alone):
            each.step()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_patterns_and_layers_multiply() -> None:
    plain = of_each_weight(on_meta("vit_tiny"), "lr", layer_decay=0.5)
    found = of_each_weight(on_meta("vit_tiny"), "lr", layer_decay=0.5, patterns=[("blocks.0.*", {"lr_scale": 0.1})])
    for name, lr in found.items():
        assert lr == pytest.approx(plain[name] * (0.1 if name.startswith("blocks.0.") else 1.0)), name
