"""Built-in data: any number of procedural identities, drawn as faces.

`avatars:2000x30@1000` are identities 1000 … 2999 with 30 pictures each. Picture k of identity i is a pure function of
(i, k, size): the same in any data set, on every machine and in any order. traits.py draws the random numbers,
drawing.py the face; the camera (light, colour cast, blur, sensor noise, JPEG) is here.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from plsc.data.avatars.drawing import draw_avatar
from plsc.data.avatars.traits import Conditions, conditions_of, traits_of
from plsc.data.dataset import ComputedStrings, ImageDataset
from plsc.errors import UsageError
from plsc.models.preprocessing import ImageSize, height_and_width

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_SIZE = 112
MIN_SIZE, MAX_SIZE = 16, 512
_NOISE_LENGTH = 1 << 20  # more than the values of the largest picture
MAX_IMAGES = 1_000_000_000
_SPEC = re.compile(r"avatars:(\d{1,15})x(\d{1,15})(?:@(\d{1,15}))?", re.ASCII)


def parse_spec(spec: str) -> tuple[int, int, int]:
    """Parse `avatars:IDSxIMAGES[@FIRST]` into (identities, images per identity, index of the first identity)."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} is not avatars:IDSxIMAGES[@FIRST], as in avatars:2000x30@1000")
    identities, images, first = (int(number or 0) for number in match.groups())
    return identities, images, first


def open_avatars(spec: str, image_size: ImageSize | None = DEFAULT_SIZE) -> AvatarDataset:
    """Open the data set that `spec` describes (see `parse_spec`); `image_size` None is 112."""
    identities, images, first = parse_spec(spec)
    size = DEFAULT_SIZE if image_size is None else image_size
    return AvatarDataset(identities, images, first=first, image_size=size)


class AvatarDataset(ImageDataset):
    """`images_per_identity` pictures of each of the identities first, first + 1, …, in this order.

    Raises:
        UsageError: a count is not positive, there are more than 10⁹ pictures, or the size is out of range.
    """

    def __init__(
        self, num_identities: int, images_per_identity: int, *, first: int = 0, image_size: ImageSize = DEFAULT_SIZE
    ) -> None:
        source = f"avatars:{num_identities}x{images_per_identity}" + (f"@{first}" if first else "")
        if num_identities < 1 or images_per_identity < 1 or first < 0:
            raise UsageError(f"{source}: identities and images must be at least 1, and the first at least 0")
        if num_identities * images_per_identity > MAX_IMAGES:
            raise UsageError(f"{source}: at most {MAX_IMAGES:,} pictures are allowed; use fewer")
        sides = height_and_width(image_size)
        if not MIN_SIZE <= min(sides) <= max(sides) <= MAX_SIZE:
            raise UsageError(f"{source}: image_size {image_size} is not between {MIN_SIZE} and {MAX_SIZE}")
        labels = np.repeat(np.arange(num_identities, dtype=np.int64), images_per_identity)
        names = ComputedStrings(num_identities, partial(_class_name, first))
        super().__init__(source, labels, names, image_size)
        self.first = first
        self.images_per_identity = images_per_identity

    def picture(self, index: int) -> torch.Tensor:
        """Draw picture `index`: a square with the longer side of ``image_size``."""
        side = max(height_and_width(self.image_size or DEFAULT_SIZE))
        pixels = render_avatar(*self._identity_and_image(index), side)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def key(self, index: int) -> str:
        """Return `avatar-IDENTITY/IMAGE`, with the identity's index among all avatars."""
        identity, image = self._identity_and_image(index)
        return f"avatar-{identity}/{image}"

    def sample_ids(self, start: int, stop: int) -> list[str]:
        """Return the keys of pictures [start, stop)."""
        first, each = self.first, self.images_per_identity
        return [f"avatar-{first + index // each}/{index % each}" for index in range(start, stop)]

    def _identity_and_image(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source} has no picture {index}; there are {len(self)}")
        label, image = divmod(int(index), self.images_per_identity)
        return self.first + label, image


def _class_name(first: int, label: int) -> str:
    return f"avatar-{first + label}"


def render_avatar(identity: int, image: int, size: int) -> npt.NDArray[np.uint8]:
    """Render one picture, uint8 RGB (size, size, 3): a pure function of both indices and the size."""
    conditions = conditions_of(identity, image)
    oversampling = 2 if size >= 96 else 3
    drawing = draw_avatar(traits_of(identity), conditions, size * oversampling).reduce(oversampling)
    return photograph(drawing, conditions)


def photograph(drawing: Image.Image, c: Conditions) -> npt.NDArray[np.uint8]:
    """Photograph the drawing (S, S) under the conditions ``c``: uint8 RGB (S, S, 3)."""
    from PIL import Image, ImageFilter

    if c.blur:
        drawing = drawing.filter(ImageFilter.BoxBlur(c.blur / 1000 * drawing.width))
    lit = Image.fromarray(_expose(np.asarray(drawing), c))
    file = BytesIO()
    lit.save(file, "JPEG", quality=c.quality)
    return np.array(Image.open(file))


def _expose(pixels: npt.NDArray[np.uint8], c: Conditions) -> npt.NDArray[np.uint8]:
    """Apply contrast, a brightness slope, the gain of each channel, and noise."""
    side = len(pixels)
    position = np.linspace(-1.0, 1.0, side, dtype=np.float32)
    gain = np.float32(c.contrast) * np.array(c.gain, np.float32)
    # Rows of 3·S numbers, because numpy is slow over a last axis of three channels.
    across = np.multiply.outer(1 + np.float32(c.light_x) * position, gain).ravel()
    down = np.multiply.outer(np.float32(c.light_y) * position, np.tile(gain, side))
    down += across
    level = pixels.reshape(side, 3 * side) * down
    level += np.float32(118 * (1 - c.contrast))
    start = c.noise_offset % (_NOISE_LENGTH - level.size)
    grain = _noise()[start : start + level.size].reshape(level.shape)
    level += np.multiply(grain, np.float32(c.noise), out=down)
    np.clip(level, 0, 255, out=level)
    exposed: npt.NDArray[np.uint8] = level.astype(np.uint8).reshape(side, side, 3)
    return exposed


@lru_cache(maxsize=1)
def _noise() -> npt.NDArray[np.float32]:
    """Return bell-shaped numbers of standard deviation 1; each picture reads them from an offset of its own."""
    words = np.random.Philox(key=20190516).random_raw(_NOISE_LENGTH)
    total = sum((words >> shift & 255).astype(np.float32) for shift in (0, 8, 16, 24))
    return np.asarray((total - 510) / 147.8, np.float32)
