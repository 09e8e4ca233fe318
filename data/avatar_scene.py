"""A stack of polygons on a head: built facing the viewer, turned by the pose, filled from back to front.

Points are complex numbers, x + iy, in head units (see data/avatar_traits.py).
"""

from __future__ import annotations

from math import cos, sin
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plsc.data.avatar_traits import Colour, Conditions

if TYPE_CHECKING:
    from PIL import Image

Points = npt.NDArray[np.complexfloating[Any, Any]]
Reals = npt.NDArray[np.floating[Any]]

_FACE_DEPTH = 0.62

ANGLES: Reals = np.arange(40) * (2 * np.pi / 40)
COS: Reals = np.cos(ANGLES)
SIN: Reals = np.sin(ANGLES)
T: Reals = np.linspace(-1.0, 1.0, 13)  # the parameter of open curves
BULGE: Reals = 1 - T**2
_ROUND = (COS[::2].copy(), 1j * SIN[::2])
_DOT = (COS[::5].copy(), 1j * SIN[::5])


def oval(x: float, y: float, rx: float, ry: float) -> Points:
    return rx * _ROUND[0] + ry * _ROUND[1] + complex(x, y)


def dot(x: float, y: float, rx: float, ry: float) -> Points:
    """An oval for small things, of fewer vertices."""
    return rx * _DOT[0] + ry * _DOT[1] + complex(x, y)


def polygon(*points: tuple[float, float]) -> Points:
    return np.array([complex(x, y) for x, y in points])


def between(x: Reals, upper: Reals, lower: Reals) -> Points:
    """The area between two curves over the same x."""
    return np.concatenate([x + 1j * upper, (x + 1j * lower)[::-1]])


def band(x: Reals, y: Reals | float, half: Reals | float) -> Points:
    """The area between y − half and y + half."""
    middle, rise = x + 1j * y, 1j * half
    return np.concatenate([middle - rise, (middle + rise)[::-1]])


class Scene:
    """Shapes in painting order, each a polygon with a colour and a depth."""

    def __init__(self, face_width: float) -> None:
        self._face_width = face_width
        self._shapes: list[Points] = []
        self._colours: list[Colour] = []
        self._lifts: list[float] = []
        self._depths: list[float] = []

    def add(self, shape: Points, colour: Colour, lift: float = 0.0) -> None:
        """Adds a shape that lies `lift` before the face's curved surface."""
        self._shapes.append(shape)
        self._colours.append(colour)
        self._lifts.append(lift)
        self._depths.append(_FACE_DEPTH)

    def add_flat(self, shape: Points, colour: Colour, z: float) -> None:
        """Adds a shape in the plane at depth z; the ears lie near z = 0, the tip of the nose near 0.8."""
        self._shapes.append(shape)
        self._colours.append(colour)
        self._lifts.append(z)
        self._depths.append(0.0)

    def paint(self, canvas: Image.Image, conditions: Conditions) -> None:
        """Turns all shapes by the pose and fills them on the square canvas."""
        from PIL import ImageDraw

        flat = self._projected(conditions, canvas.width)
        draw = ImageDraw.Draw(canvas)
        start = 0
        for shape, colour in zip(self._shapes, self._colours, strict=True):
            end = start + 2 * len(shape)
            draw.polygon(flat[start:end], fill=colour)
            start = end

    def _projected(self, c: Conditions, width: int) -> list[int]:
        """All vertices x, y, x, y … in canvas pixels: the orthographic projection of the turned head.

        Rounding to whole pixels hides the last digits of sin and cos, in which machines may differ.
        """
        points = np.concatenate(self._shapes)
        sizes = [len(shape) for shape in self._shapes]
        x, y = points.real, points.imag
        surface = np.sqrt(np.maximum(0.0, 1 - (x / (1.02 * self._face_width)) ** 2 - 0.5 * y * y))
        z = np.repeat(self._depths, sizes) * surface + np.repeat(self._lifts, sizes)
        turned_x = x * cos(c.yaw) + z * sin(c.yaw)
        depth = z * cos(c.yaw) - x * sin(c.yaw)
        turned = turned_x + 1j * (y * cos(c.pitch) + depth * sin(c.pitch))
        half = width / 2
        shift = complex(c.shift_x, c.shift_y)
        placed = (turned * complex(cos(c.roll), sin(c.roll)) + shift) * (half / c.scale)
        pixels: list[int] = np.rint(placed.view(np.float64) + half).astype(np.int64).tolist()
        return pixels
