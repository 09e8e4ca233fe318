"""Parameter groups: patterns, layer-wise decay against BEiT's rule, and what has no layers."""

from typing import Any

import pytest
import torch
from torch import nn

from plsc import models
from plsc.errors import UsageError
from plsc.optim.backbone_optimizers import Hyperparameters, make_backbone_optimizer
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
    with pytest.raises(UsageError, match=r'"\*\.biass" fits no weight of the backbone; .* as 0\.weight, 0\.bias'):
        parameter_groups(nn.Sequential(nn.Linear(2, 2)), 0.1, no_decay=["*.biass"])
