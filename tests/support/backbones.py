"""Backbones whose answers mean something without training, and images to ask them."""

from typing import Any

import torch
from torch import Tensor

import plsc.models


def trained_a_little(name: str, size: int, dim: int, **options: Any) -> plsc.models.Backbone:
    """A backbone in evaluation mode with running statistics of data: fresh ones leave its answers without meaning."""
    torch.manual_seed(1)
    model = plsc.models.create(name, embedding_dim=dim, image_size=size, **options).train()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.9
    with torch.no_grad():
        for seed in range(2):
            model(values(6, size, seed))
    return model.eval()


def values(count: int, size: int, seed: int = 0) -> Tensor:
    """Noise (count, 3, size, size) in [-1, 1), as backbones take it."""
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def pictures(count: int, size: int) -> Tensor:
    """Noise uint8 (count, 3, size, size)."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
