"""Any model of timm as a backbone: its features, a linear layer, batch normalisation."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from plsc.errors import UsageError
from plsc.models.backbone import Backbone, in_full_precision
from plsc.models.registry import TIMM_PREFIX, Builder, nearest


class TimmBackbone(Backbone):
    """``trunk`` is timm's model without classifier; ``fc`` and ``features`` make (B, D) of its features."""

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        image_size: int,
        gradient_checkpointing: bool,
        options: dict[str, Any],
    ) -> None:
        super().__init__(name, embedding_dim, image_size)
        self.trunk = _trunk(name, image_size, options)
        if gradient_checkpointing:
            self.trunk.set_grad_checkpointing(True)
        self.fc = nn.Linear(int(self.trunk.head_hidden_size), embedding_dim, bias=False)
        self.features = nn.BatchNorm1d(embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, D); ``fc`` and ``features`` run in fp32 even under autocast."""
        return in_full_precision(self._embed, self.trunk(x), self.fc.weight.dtype)

    def _embed(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.features(self.fc(x)))


def timm_builder(name: str) -> Builder:
    """The builder of timm's ``name``; :class:`UsageError` with the nearest right name if timm has none."""
    import timm

    if not timm.is_model(name):
        hint = nearest(name, timm.list_models())
        raise UsageError(f"timm has no model {name!r}{hint}; timm.list_models() lists them all")
    return partial(_build, f"{TIMM_PREFIX}{name}")


def _build(
    name: str, embedding_dim: int, image_size: int, *, gradient_checkpointing: bool = False, **options: Any
) -> Backbone:
    return TimmBackbone(name, embedding_dim, image_size, gradient_checkpointing, options)


def _trunk(name: str, image_size: int, options: dict[str, Any]) -> Any:
    import timm

    create = partial(timm.create_model, name.removeprefix(TIMM_PREFIX), num_classes=0)
    try:
        try:
            return create(img_size=image_size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return create(**options)  # a fully convolutional model: it takes any size as it comes
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"timm cannot build {name} for {image_size}x{image_size} images: {error}") from None
