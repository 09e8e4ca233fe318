"""The preprocessing contract of a backbone: size, resizing and normalisation of the images that it takes, and its id.

A model file and an export hold it, and training, evaluation, embedding and the service apply it, so that weights always
see the pixels that they were trained on. Two embeddings may be compared only if the same weights saw pixels that were
prepared in the same way: :func:`contract_id` stands for both, and every embedding set, index and gallery carries it.
:func:`picture_warnings` tells pictures that are no crops like those that the weights were trained on.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsc.errors import DataError, UsageError, quoted
from plsc.progress import counted

# By default backbones take (x - PIXEL_MEAN) / PIXEL_STD of pixel values 0 to 255, arcface_torch's (x/255 - 0.5)/0.5.
PIXEL_MEAN = PIXEL_STD = 127.5
BILINEAR = "bilinear"
INTERPOLATIONS = (BILINEAR, "bicubic")
DEFAULT_SIZE = 112
CONTRACT_DIGITS = 16
LARGEST_SIDE = 1024  # pixels of the images that a model from elsewhere asks for; memory and time grow with them …
LARGEST_SIDE_ALLOWED = "PLSC_LARGEST_IMAGE"  # … of the environment: the number that takes its place
MAX_SIDE_RATIO = 1.1  # longer side / shorter side of a square picture; crops by hand miss square by a few pixels
MAX_STRETCH = 1.5  # of a picture towards a model's oblong shape; detectors' boxes of bodies differ as much
MAX_SCALE = 2.0  # side / model's side, and its inverse, within which resizing keeps the face's share of the picture
MIN_DEVIATION = 4.0  # standard deviation of a channel, of 255 levels; crops of faces in poor light have 15 and more
_SAMPLES = 32  # rows and columns that the deviation is taken of, so that a large picture costs no more than a crop

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


def check_side(size: ImageSize, path: Path) -> None:
    """Refuse the image size of a model from elsewhere, ``path``, that is larger than the user allows: DataError."""
    allowed = os.environ.get(LARGEST_SIDE_ALLOWED) or str(LARGEST_SIDE)
    if re.fullmatch(r"[0-9]{1,9}", allowed) is None:
        raise UsageError(f"{LARGEST_SIDE_ALLOWED} is {quoted(allowed)}; it takes a number of pixels")
    largest, side = int(allowed), max(height_and_width(size))
    if side > largest:
        raise DataError(
            f"{path} takes images of {quoted(side)} pixels a side, and a model from elsewhere takes up to {largest:,}; "
            f"set {LARGEST_SIDE_ALLOWED} to their side where you trust its maker"
        )


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


def resize_image(image: Tensor, size: ImageSize, interpolation: str = BILINEAR) -> Tensor:
    """Resize uint8 (3, H, W) to (3, *size), antialiased, stretching it where its shape is another.

    Args:
        image: the picture.
        size: the side of a square, or (height, width).
        interpolation: one of :data:`INTERPOLATIONS`.
    """
    sides = height_and_width(size)
    if image.shape[-2:] == sides:
        return image
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    resized: Tensor = functional.resize(image, list(sides), InterpolationMode(interpolation), antialias=True)
    return resized


class PictureWarning(NamedTuple):
    """A reason to doubt that a picture is a crop like those that the model was trained on.

    Attributes:
        code: "not_square", "wrong_shape", "wrong_size" or "uniform".
        message: for people, without the picture's name: "3000x2000 pixels are not square".
    """

    code: Literal["not_square", "wrong_shape", "wrong_size", "uniform"]
    message: str


def picture_warnings(picture: Tensor, image_size: ImageSize) -> list[PictureWarning]:
    """Look for signs that a picture is no aligned crop: an embedding of it has no meaning, but looks like any other.

    - ``not_square``: the longer side exceeds 1.1 times the shorter; resizing distorts the face.
    - ``wrong_shape``, of oblong models in its place: resizing stretches the picture by more than 1.5.
    - ``wrong_size``: of a picture in the model's shape, a side of more than twice or less than half of the model's.
      Aligned crops are stored at about the model's size; a larger picture mostly shows more than the face.
    - ``uniform``: no channel deviates by more than 4 of 255 levels (standard deviation over 32x32 pixels).

    A crop of the model's size, or up to twice or half of it, gives no warning unless it is uniform.

    Args:
        picture: uint8 (3, H, W) on the CPU, as decoded, before it is resized.
        image_size: of the model's images: the side of squares in pixels, or (height, width).

    Returns:
        The warnings; empty for a picture without a sign.
    """
    height, width = picture.shape[-2:]
    model_height, model_width = height_and_width(image_size)
    stretch = max(height * model_width / (width * model_height), width * model_height / (height * model_width))
    ours, models = f"{width}x{height} pixels", f"the model's {model_width}x{model_height}"
    warnings = []
    if model_height == model_width and stretch > MAX_SIDE_RATIO:
        warnings.append(PictureWarning("not_square", f"{ours} are not square"))
    elif stretch > MAX_STRETCH:
        warnings.append(PictureWarning("wrong_shape", f"{ours} (width x height) are of another shape than {models}"))
    elif not 1 / MAX_SCALE <= max(height, width) / max(model_height, model_width) <= MAX_SCALE:
        warnings.append(PictureWarning("wrong_size", f"{ours} are far from {models}"))
    sample = picture[:, :: max(height // _SAMPLES, 1), :: max(width // _SAMPLES, 1)].flatten(1).numpy()
    if sample.std(axis=1, dtype=np.float32).max() <= MIN_DEVIATION:
        warnings.append(PictureWarning("uniform", "it is nearly uniform"))
    return warnings


def warning_summary(count: int, total: int, name: str, message: str) -> str:
    """Format warnings of ``count`` pictures among ``total`` as one line, which names the first and its message."""
    return (
        f"warning: {count:,} of {counted(total, 'picture')} may not be cropped as the model expects, so that scores "
        f"mean little; the first, {name}: {message} (docs/faces.md)"
    )


def contract_id(preprocessing: Preprocessing, weights_digest: str) -> str:
    """Id of a model's embeddings: 16 hexadecimal digits over preprocessing and weights."""
    size, interpolation = preprocessing.image_size, preprocessing.interpolation
    resizing = "" if interpolation == BILINEAR else f" {interpolation}"  # so that earlier models keep their ids
    text = f"RGB {size} {preprocessing.mean} {preprocessing.std}{resizing} {weights_digest}"
    return hashlib.sha256(text.encode()).hexdigest()[:CONTRACT_DIGITS]


def stated_contract(
    path: Path, stated: Mapping[str, Any], format_name: str, fingerprint: str, preprocessing: Preprocessing
) -> str:
    """The id that the export wrote into the file, if its graph is still the one that it was written for; else its own.

    Args:
        path: the file.
        stated: its metadata.
        format_name: of our exports.
        fingerprint: of its graph and weights.
        preprocessing: of its images.

    Raises:
        DataError: the export wrote none.
    """
    if stated.get("format") == format_name and stated.get("fingerprint") == fingerprint:
        if "contract_id" not in stated:
            raise DataError(f"{path} has incomplete metadata: it has no contract_id; export it again")
        return str(stated["contract_id"])
    return contract_id(preprocessing, fingerprint)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over keys, types, shapes and bytes of a state_dict, independent of its order and its file."""
    digest = hashlib.sha256()
    for key in sorted(state):
        tensor = state[key].detach().cpu().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
