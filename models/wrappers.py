"""Backbones around other networks: any model of timm (``timm:NAME``), and rotation test-time augmentation."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import UsageError, first_line
from plsc.models.backbone import Backbone, Builder, create, in_full_precision, register_prefix
from plsc.models.preprocessing import ImageSize, check_square, size_text
from plsc.nearest import did_you_mean

TIMM_PREFIX = "timm:"
# The prefix of the name and that of the keys are in model files, so they keep these words.
ROTATION_PREFIX, ROTATION_KEYS = "turned:", "upright."
ROTATIONS = 4


class TimmBackbone(Backbone):
    """A model of timm without its classifier (``trunk``), then a linear layer and batch normalisation."""

    def __init__(self, name: str, embedding_dim: int, image_size: ImageSize, **options: Any) -> None:
        super().__init__(name, embedding_dim, image_size)
        self.trunk, _ = timm_model(name, image_size, options)
        self.fc = nn.Linear(int(self.trunk.head_hidden_size), embedding_dim, bias=False)
        self.features = nn.BatchNorm1d(embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, D); ``fc`` and ``features`` run in fp32 even under autocast."""
        return in_full_precision(self.trunk(x), self.fc.weight.dtype, self.fc, self.features)


def timm_builder(name: str) -> Builder:
    """Return the builder of timm's ``name``; :class:`UsageError` with the nearest name if timm has none."""
    import timm

    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise UsageError(f"timm has no model {name!r}{hint}; timm.list_models() lists them all")
    return partial(TimmBackbone, f"{TIMM_PREFIX}{name}")


def timm_model(
    name: str, image_size: ImageSize, options: dict[str, Any], num_classes: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Create timm's model ``timm:NAME`` with fresh weights.

    Returns:
        The model, and the arguments beside the number of classes that it was created with.

    Raises:
        UsageError: timm refuses the size or the options.
    """
    import timm

    create_model = partial(timm.create_model, name.removeprefix(TIMM_PREFIX), num_classes=num_classes)
    sized = {"img_size": image_size, **options}
    try:
        try:
            return create_model(**sized), sized
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return create_model(**options), dict(options)  # a fully convolutional model, which takes any size
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(
            f"timm cannot build {name} for images of {size_text(image_size)}: {first_line(error)}"
        ) from None


class RotationTTA(Backbone):
    """Rotation test-time augmentation: embeddings of an image rotated by 0, 90, 180 and 270 degrees, concatenated.

    Training with ``data.rotation_classes`` separates the four rotations of a class, so each view judges the class by
    other features, and the cosine of two concatenated embeddings averages the four. It costs four forward passes, and
    embeddings of four times the length.

    Args:
        upright: the backbone, (B, 3, H, W) -> (B, D).
    """

    def __init__(self, upright: Backbone) -> None:
        check_square(upright.image_size, "rotation TTA")
        super().__init__(ROTATION_PREFIX + upright.name, ROTATIONS * upright.embedding_dim, upright.image_size)
        self.preprocessing = upright.preprocessing
        self.upright = upright
        self.options = upright.options
        self.training = upright.training

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 4 D)."""
        transposed = x.transpose(2, 3)
        views = (x, transposed.flip(2), x.flip(2, 3), transposed.flip(3))  # torch.rot90, in operations that ONNX has
        return torch.cat([self.upright(view) for view in views], dim=1)


def _build_rotation(name: str, embedding_dim: int, image_size: ImageSize, **options: Any) -> Backbone:
    if embedding_dim % ROTATIONS:
        raise UsageError(
            f"embedding_dim is {embedding_dim}; {ROTATION_PREFIX}{name} concatenates {ROTATIONS} embeddings, "
            f"so it has to be a multiple of {ROTATIONS}"
        )
    return RotationTTA(create(name, embedding_dim=embedding_dim // ROTATIONS, image_size=image_size, **options))


register_prefix(TIMM_PREFIX, timm_builder)
register_prefix(ROTATION_PREFIX, lambda name: partial(_build_rotation, name))
