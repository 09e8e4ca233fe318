"""The preprocessing contract of a backbone: size, resizing and normalisation of the images that it takes.

A model file, an export and the id of a model's embeddings hold it, and training, evaluation, embedding and the service
apply it, so that weights always see the pixels that they were trained on.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from plsc.errors import UsageError

# By default backbones take (x - PIXEL_MEAN) / PIXEL_STD of pixel values 0 to 255, arcface_torch's (x/255 - 0.5)/0.5.
PIXEL_MEAN = PIXEL_STD = 127.5
BILINEAR = "bilinear"
INTERPOLATIONS = (BILINEAR, "bicubic")
DEFAULT_SIZE = 112

ImageSize = int | tuple[int, int]  # side of a square, or height and width, in pixels
Channels = float | tuple[float, ...]  # one number for all channels, or one each for red, green and blue


def height_and_width(size: ImageSize) -> tuple[int, int]:
    """Return (height, width) of an image size."""
    return (size, size) if isinstance(size, int) else size


def image_size(value: Any) -> ImageSize:
    """Check an image size given by a user or a file; a pair of equal numbers becomes one number.

    Raises:
        UsageError: it is neither a positive whole number nor a pair of them.
    """
    sides = list(value) if isinstance(value, list | tuple) else [value]
    whole = all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in sides)
    if not whole or len(sides) > 2 or not sides:
        shown = list(value) if isinstance(value, tuple) else value
        raise UsageError(f"image_size is {shown!r}; it takes one number of pixels, or [height, width]")
    return sides[0] if sides[0] == sides[-1] else (sides[0], sides[1])


def size_text(size: ImageSize) -> str:
    """Format an image size for people: ``112x112``, or ``256x128 (height x width)``."""
    height, width = height_and_width(size)
    return f"{height}x{width}" + ("" if height == width else " (height x width)")


def check_square(size: ImageSize, what: str) -> int:
    """Return the side of a square; :class:`UsageError` if ``size`` is none, which ``what`` needs."""
    if not isinstance(size, int):
        raise UsageError(f"{what} needs square images, and image_size is {list(size)}; give one number")
    return size


@dataclass(frozen=True)
class Preprocessing:
    """RGB images of ``image_size``, resized by ``interpolation`` with antialiasing, as (x - mean)/std.

    Attributes:
        image_size: the side of a square, or (height, width).
        mean: of pixel values 0 to 255: one number, or a number per channel.
        std: likewise.
        interpolation: one of :data:`INTERPOLATIONS`; pictures of ``image_size`` are not resized.
    """

    image_size: ImageSize = DEFAULT_SIZE
    mean: Channels = PIXEL_MEAN
    std: Channels = PIXEL_STD
    interpolation: str = BILINEAR

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", image_size(self.image_size))
        object.__setattr__(self, "mean", _channels("mean", self.mean))
        object.__setattr__(self, "std", _channels("std", self.std))
        if min(_listed(self.std)) <= 0:
            raise UsageError(f"std is {self.std}; it divides, so it has to be positive")
        if self.interpolation not in INTERPOLATIONS:
            known = " or ".join(INTERPOLATIONS)
            raise UsageError(f"interpolation is {self.interpolation!r}; images are resized by {known} here")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, height, width)."""
        return (3, *height_and_width(self.image_size))

    def __call__(self, images_u8: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> float32 of the same shape, on the same device."""
        return normalize(images_u8, self.mean, self.std)

    def to_dict(self) -> dict[str, Any]:
        """Return the contract as a file holds it in JSON."""
        return {**asdict(self), "channels": "RGB"}

    def metadata(self) -> dict[str, str]:
        """Return it for metadata of texts alone: numbers and lists of them as JSON."""
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.to_dict().items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], size: ImageSize | None = None) -> "Preprocessing":
        """Read what :meth:`to_dict` or :meth:`metadata` gave; what is missing has the default value.

        Args:
            metadata: of the file.
            size: the image size where the file itself determines it; None: that of the metadata.

        Raises:
            UsageError, ValueError, TypeError: the values are none.
        """
        default = cls()
        return cls(
            _from_json(metadata.get("image_size", default.image_size)) if size is None else size,
            _from_json(metadata.get("mean", default.mean)),
            _from_json(metadata.get("std", default.std)),
            metadata.get("interpolation", default.interpolation),
        )

    def describe(self) -> str:
        """Describe the contract in a line."""
        return f"{size_text(self.image_size)}, {self.normalisation()}, {self.interpolation}"

    def normalisation(self) -> str:
        """Describe mean and std."""
        return f"mean {_shown(self.mean)}, std {_shown(self.std)}"


def normalize(images: Tensor, mean: Channels = PIXEL_MEAN, std: Channels = PIXEL_STD) -> Tensor:
    """Normalise pixels as models expect them: (x - mean) / std, by default in [-1, 1].

    The only definition of it: training, evaluation, embedding, the exports' checks and the service share its bits.

    Args:
        images: uint8 (B, 3, H, W), or, where mean and std are numbers, any other shape, of values 0 to 255.
        mean: subtracted from each value; a number, or one per channel.
        std: divides the difference; likewise.

    Returns:
        float32 of the same shape and memory format, on the same device; ``images`` stay as they are.
    """
    # Each value is the float32 nearest to the true quotient: with whole or half means the difference is exact, and one
    # division rounds once. The divisor is a tensor because torch multiplies by the reciprocal of a Python number on
    # CUDA, which is a bit off.
    subtrahend = _per_channel(mean, images) if isinstance(mean, tuple) else mean
    return images.to(torch.float32, copy=True).sub_(subtrahend).div_(_per_channel(std, images))


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _per_channel(values: Channels, images: Tensor) -> Tensor:
    if not isinstance(values, tuple):
        return torch.full((), values, dtype=torch.float32, device=images.device)
    return torch.tensor(values, dtype=torch.float32, device=images.device).view(-1, 1, 1)


def _listed(values: Channels) -> tuple[float, ...]:
    return values if isinstance(values, tuple) else (values,)


def _channels(name: str, value: Any) -> Channels:
    """Check a mean or std; three equal numbers become one."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    real = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if len(numbers) not in (1, 3) or not real or not all(map(math.isfinite, numbers)):
        raise UsageError(f"{name} is {value!r}; it takes one finite number, or three: of red, green and blue")
    return float(numbers[0]) if len(set(numbers)) == 1 else tuple(map(float, numbers))


def _shown(values: Channels) -> str:
    return "/".join(f"{value:.6g}" for value in _listed(values))
