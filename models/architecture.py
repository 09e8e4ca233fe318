"""Which backbone a bare state_dict belongs to, read from its key names and shapes."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from plsc.errors import DataError
from plsc.models import iresnet, mobilefacenet, resnet8, vit
from plsc.models.backbone import Backbone
from plsc.models.registry import create


class Architecture(NamedTuple):
    """The arguments of :func:`plsc.models.create`."""

    name: str
    embedding_dim: int
    image_size: int
    options: dict[str, Any]

    def build(self) -> Backbone:
        """A new backbone of this architecture."""
        return create(self.name, embedding_dim=self.embedding_dim, image_size=self.image_size, **self.options)


def infer(state: Mapping[str, Tensor], origin: str) -> Architecture:
    """The architecture of ``state`` (arcface_torch's key names); a :class:`DataError` names ``origin``."""
    try:
        if "layer1.0.prelu.weight" in state:
            return _iresnet(state)
        if "conv_sep.layers.0.weight" in state:
            return _mobilefacenet(state)
        if "blocks.0.residual.0.weight" in state:
            return _resnet8(state)
        if "patch_embed.proj.weight" in state and "feature.0.weight" in state:
            return _vit(state)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{origin} is no complete state_dict: it lacks or misshapes {error}") from None
    except StopIteration:
        raise DataError(f"{origin} holds a backbone of a depth or width that is not known here") from None
    first = ", ".join(list(state)[:3])
    raise DataError(
        f"{origin} holds none of the known architectures (its keys begin {first}); "
        "name the architecture, or give a state_dict of iresnet, mobilefacenet or vit"
    )


def _iresnet(state: Mapping[str, Tensor]) -> Architecture:
    blocks = tuple(_count(state, rf"layer{stage}\.(\d+)\.") for stage in (1, 2, 3, 4))
    name = next(name for name, known in iresnet.BLOCKS.items() if known == blocks)
    embedding_dim, flat = state["fc.weight"].shape
    return Architecture(name, embedding_dim, 16 * math.isqrt(flat // iresnet.WIDTHS[-1]), {})


def _mobilefacenet(state: Mapping[str, Tensor]) -> Architecture:
    scale = state["layers.0.layers.0.weight"].shape[0] // 64
    blocks = _count(state, r"layers\.3\.layers\.(\d+)\.")
    shapes = mobilefacenet.SHAPES.items()
    name = next(name for name, known in shapes if known.scale == scale and known.blocks[1] == blocks)
    embedding_dim = state["features.layers.2.weight"].shape[0]
    return Architecture(name, embedding_dim, 16 * state["features.layers.0.layers.0.weight"].shape[-1], {})


def _resnet8(state: Mapping[str, Tensor]) -> Architecture:
    embedding_dim, flat = state["embed.1.weight"].shape
    return Architecture("resnet8", embedding_dim, 16 * math.isqrt(flat // resnet8.WIDTHS[-1]), {})


def _vit(state: Mapping[str, Tensor]) -> Architecture:
    dim, _, patch, _ = state["patch_embed.proj.weight"].shape
    shape = vit.Shape(dim, _count(state, r"blocks\.(\d+)\."))
    name = next(name for name, known in vit.SHAPES.items() if known == shape)
    side = math.isqrt(state["pos_embed"].shape[1])
    # The sizes whose whole patches number side x side; only multiples of 16 are sizes at all.
    image_size = next(size for size in range(side * patch, (side + 1) * patch) if size % 16 == 0)
    options = {} if patch == vit.default_patch(image_size) else {"patch_size": patch}
    return Architecture(name, state["feature.2.weight"].shape[0], image_size, options)


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    found = [int(match[1]) for key in state if (match := re.match(pattern, key))]
    return max(found, default=-1) + 1
