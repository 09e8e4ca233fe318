"""Photographs an avatar's drawing: light, colour cast, blur, sensor noise and JPEG."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plsc.data.avatar_drawing import draw_avatar
from plsc.data.avatar_traits import Conditions, conditions_of, traits_of

if TYPE_CHECKING:
    from PIL import Image

MIN_SIZE, MAX_SIZE = 16, 512
_NOISE_LENGTH = 1 << 20  # more than the numbers of the largest picture


def render_avatar(identity: int, image: int, size: int) -> npt.NDArray[np.uint8]:
    """One picture, uint8 RGB (size, size, 3): a pure function of both indices and the size."""
    conditions = conditions_of(identity, image)
    oversampling = 2 if size >= 96 else 3
    drawing = draw_avatar(traits_of(identity), conditions, size * oversampling).reduce(oversampling)
    return photograph(drawing, conditions)


def photograph(drawing: Image.Image, c: Conditions) -> npt.NDArray[np.uint8]:
    """The drawing (S, S) as a camera saw it: uint8 RGB (S, S, 3)."""
    from PIL import Image, ImageFilter

    if c.blur:
        drawing = drawing.filter(ImageFilter.BoxBlur(c.blur / 1000 * drawing.width))
    lit = Image.fromarray(_lit(np.asarray(drawing), c))
    file = BytesIO()
    lit.save(file, "JPEG", quality=c.quality)
    return np.array(Image.open(file))


def _lit(pixels: npt.NDArray[np.uint8], c: Conditions) -> npt.NDArray[np.uint8]:
    """Contrast, a brightness slope, the gain of each channel, and noise."""
    side = len(pixels)
    place = np.linspace(-1.0, 1.0, side, dtype=np.float32)
    gain = np.float32(c.contrast) * np.array(c.gain, np.float32)
    # Rows of 3·S numbers: numpy is slow over a last axis of three channels.
    across = np.multiply.outer(1 + np.float32(c.light_x) * place, gain).ravel()
    down = np.multiply.outer(np.float32(c.light_y) * place, np.tile(gain, side))
    down += across
    level = pixels.reshape(side, 3 * side) * down
    level += np.float32(118 * (1 - c.contrast))
    start = c.noise_place % (_NOISE_LENGTH - level.size)
    grain = _noise()[start : start + level.size].reshape(level.shape)
    level += np.multiply(grain, np.float32(c.noise), out=down)
    np.clip(level, 0, 255, out=level)
    exposed: npt.NDArray[np.uint8] = level.astype(np.uint8).reshape(side, side, 3)
    return exposed


@lru_cache(maxsize=1)
def _noise() -> npt.NDArray[np.float32]:
    """Bell-shaped numbers of standard deviation 1, read from a place that each picture's key chooses."""
    words = np.random.Philox(key=20190516).random_raw(_NOISE_LENGTH)
    total = sum((words >> shift & 255).astype(np.float32) for shift in (0, 8, 16, 24))
    return np.asarray((total - 510) / 147.8, np.float32)
