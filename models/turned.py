"""A backbone that sees a picture in all four positions: for models whose classes are turned pictures, too."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.models.backbone import Backbone
from plsc.models.registry import TURNED_PREFIX, Builder, create

VIEWS = 4
UPRIGHT_KEYS = "upright."  # before the keys of the backbone inside


class TurnedViews(Backbone):
    """``upright``'s embeddings of a picture turned by 0, 90, 180 and 270 degrees, side by side: (B, 4 D).

    Training with ``data.turned_classes`` tells a letter's four positions apart, so each view is another opinion on the
    letter, and the cosine of two such rows weighs the four. Costs four passes, and rows of four times the length.
    """

    def __init__(self, upright: Backbone) -> None:
        super().__init__(TURNED_PREFIX + upright.name, VIEWS * upright.embedding_dim, upright.image_size)
        self.upright = upright
        self.options = upright.options
        self.training = upright.training

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, 4 D)."""
        across = x.transpose(2, 3)
        return torch.cat([self.upright(view) for view in (x, across.flip(2), x.flip(2, 3), across.flip(3))], dim=1)


def turned_builder(name: str) -> Builder:
    """The builder of ``turned:NAME`` over any backbone ``name``."""
    return partial(_build, name)


def _build(name: str, embedding_dim: int, image_size: int, **options: Any) -> Backbone:
    if embedding_dim % VIEWS:
        raise UsageError(
            f"embedding_dim is {embedding_dim}; {TURNED_PREFIX}{name} gives {VIEWS} rows side by side, "
            f"so it has to be a multiple of {VIEWS}"
        )
    return TurnedViews(create(name, embedding_dim=embedding_dim // VIEWS, image_size=image_size, **options))
