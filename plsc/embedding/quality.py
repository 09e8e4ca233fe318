"""Quality gates: pictures too poor to be compared with later are not enrolled.

What a gate measures is a quality component in the words of ISO/IEC 29794-1; the gate refuses what lies below a number.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from plsc.errors import UsageError
from plsc.extensions import Registry, is_subclass

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


class QualityGate(ABC):
    """Refuses pictures whose quality is below ``least``.

    Args:
        least: the smallest quality that is taken, in the units of :meth:`quality`.
    """

    def __init__(self, least: float) -> None:
        self.least = least

    @abstractmethod
    def quality(self, pixels: Tensor, embedding: "NDArray[np.float32]") -> float:
        """Measure a picture; more is better.

        Args:
            pixels: what the model was given: uint8 RGB (3, H, W), aligned and resized.
            embedding: what it made of that: (D,) float32, not normalised.
        """


class Sharpness(QualityGate):
    """Variance of the grey picture's Laplacian (Pech-Pacheco et al., ICPR 2000): low where a picture is blurred."""

    def quality(self, pixels: Tensor, embedding: "NDArray[np.float32]") -> float:
        """The variance, of grey values from 0 to 255; at least 3 x 3 pixels."""
        grey = (pixels.float() * torch.tensor(_GREY).view(3, 1, 1)).sum(0)
        laplacian = torch.nn.functional.conv2d(grey[None, None], torch.tensor(_LAPLACIAN)[None, None])
        return float(laplacian.var(correction=0))


class EmbeddingNorm(QualityGate):
    """Length of the embedding, which grows with the picture's quality (Meng et al., MagFace, CVPR 2021)."""

    def quality(self, pixels: Tensor, embedding: "NDArray[np.float32]") -> float:
        """The Euclidean norm."""
        return float(np.linalg.norm(embedding.astype(np.float64)))


MEASURES: Mapping[str, QualityGate] = {"sharpness": Sharpness(0), "norm": EmbeddingNorm(0)}  # what any face is told of

QUALITY_GATES: Registry[type[QualityGate]] = Registry(
    "plsc.quality_gates",
    {"sharpness": Sharpness, "norm": EmbeddingNorm},
    is_subclass(QualityGate),
    "a subclass of plsc.embedding.quality.QualityGate",
)


def parse_quality_gates(texts: Sequence[str]) -> dict[str, QualityGate]:
    """The gates by their names, of ``NAME=LEAST`` each.

    Raises:
        UsageError: a text is none, or there is no such gate.
    """
    gates: dict[str, QualityGate] = {}
    for text in texts:
        name, _, number = text.partition("=")
        kind = QUALITY_GATES.find(name)
        if kind is None:
            raise UsageError(f"--quality-gate {text}: it is NAME=LEAST, of {', '.join(QUALITY_GATES.every_name())}")
        try:
            least = float(number)
        except ValueError:
            least = np.nan
        if not np.isfinite(least):
            raise UsageError(f"--quality-gate {text}: give the least quality as a number, such as {name}=10")
        gates[name] = kind(least)
    return gates


def poor_quality(
    gates: Mapping[str, QualityGate], pixels: Tensor, embedding: "NDArray[np.float32]"
) -> tuple[str, float] | None:
    """The first gate that refuses a picture, and the quality that it measured; None where all take it."""
    for name, gate in gates.items():
        quality = gate.quality(pixels, embedding)
        if not quality >= gate.least:
            return name, quality
    return None
