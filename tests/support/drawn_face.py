"""A drawn face that networks trained on photographs take for one."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

# Of the landmarks around the middle of the face, in half widths of it.
POINTS = np.array([[-0.4, -0.2], [0.4, -0.2], [0.0, 0.2], [-0.35, 0.65], [0.35, 0.65]])


def landmarks(x: float, y: float, radius: float) -> NDArray[np.float64]:
    """Those (5, 2) of the face around (x, y), in pixels."""
    return POINTS * radius + [x, y]


def photo(width: int, height: int, *faces: tuple[float, float, float]) -> torch.Tensor:
    """uint8 (3, height, width): grey, with faces at (x, y, half width)."""
    image = Image.new("RGB", (width, height), (110, 120, 130))
    for x, y, radius in faces:
        _draw(ImageDraw.Draw(image), x, y, radius)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _draw(pen: ImageDraw.ImageDraw, x: float, y: float, r: float) -> None:
    pen.ellipse([x - r, y - 1.3 * r, x + r, y + 1.3 * r], fill=(222, 184, 160))
    pen.chord([x - 1.05 * r, y - 1.4 * r, x + 1.05 * r, y], 190, 350, fill=(60, 40, 30))
    for side in (-1, 1):
        left, top = x + side * 0.4 * r, y - 0.2 * r
        pen.ellipse([left - 0.2 * r, top - 0.1 * r, left + 0.2 * r, top + 0.1 * r], fill=(245, 245, 245))
        pen.ellipse([left - 0.09 * r, top - 0.09 * r, left + 0.09 * r, top + 0.09 * r], fill=(40, 30, 30))
        brow = [left - 0.25 * r, top - 0.2 * r, left + 0.25 * r, top - 0.22 * r]
        pen.line(brow, fill=(60, 40, 30), width=max(1, int(0.07 * r)))
    pen.polygon([(x, y - 0.1 * r), (x - 0.15 * r, y + 0.3 * r), (x + 0.15 * r, y + 0.3 * r)], fill=(200, 155, 130))
    pen.ellipse([x - 0.35 * r, y + 0.55 * r, x + 0.35 * r, y + 0.75 * r], fill=(170, 80, 80))
