"""Drawing of an avatar: polygons on a head, facing the viewer, rotated by the pose, filled from back to front.

Points are complex numbers, x + iy, in head units (see data/avatars/traits.py). From top to bottom: shapes and their
painting; the whole drawing; body and face; hair; accessories that occlude the face.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import cos, sin
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plsc.data.avatars.traits import Colour, Conditions, Traits, mix, shade

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
    """Return an axis-parallel ellipse around (x, y)."""
    return rx * _ROUND[0] + ry * _ROUND[1] + complex(x, y)


def dot(x: float, y: float, rx: float, ry: float) -> Points:
    """Return an oval of fewer vertices, for small features."""
    return rx * _DOT[0] + ry * _DOT[1] + complex(x, y)


def polygon(*points: tuple[float, float]) -> Points:
    """Return the polygon with these vertices (x, y)."""
    return np.array([complex(x, y) for x, y in points])


def between(x: Reals, upper: Reals, lower: Reals) -> Points:
    """Return the area between two curves over the same x."""
    return np.concatenate([x + 1j * upper, (x + 1j * lower)[::-1]])


def band(x: Reals, y: Reals | float, half: Reals | float) -> Points:
    """Return the area between y − half and y + half."""
    middle, rise = x + 1j * y, 1j * half
    return np.concatenate([middle - rise, (middle + rise)[::-1]])


class Shape(NamedTuple):
    """A polygon with its colour, ``lift`` in front of a surface: the face's, or of ``depth`` 0 a plane.

    The ears lie near z = 0, the tip of the nose near 0.8.
    """

    points: Points
    colour: Colour
    lift: float = 0.0
    depth: float = _FACE_DEPTH


def flat(points: Points, colour: Colour, z: float) -> Shape:
    """Return a shape in the plane at depth z."""
    return Shape(points, colour, z, 0.0)


def paint(canvas: Image.Image, shapes: Sequence[Shape], face_width: float, conditions: Conditions) -> None:
    """Rotate the shapes by the pose and fill them in their order on the square canvas."""
    from PIL import ImageDraw

    corners = _projected(shapes, face_width, conditions, canvas.width)
    draw = ImageDraw.Draw(canvas)
    start = 0
    for shape in shapes:
        end = start + 2 * len(shape.points)
        draw.polygon(corners[start:end], fill=shape.colour)
        start = end


def _projected(shapes: Sequence[Shape], face_width: float, c: Conditions, width: int) -> list[int]:
    """Return all vertices x, y, x, y … in canvas pixels: the orthographic projection of the rotated head."""
    outlines, _, lifts, depths = zip(*shapes, strict=True)
    points = np.concatenate(outlines)
    sizes = [len(outline) for outline in outlines]
    x, y = points.real, points.imag
    surface = np.sqrt(np.maximum(0.0, 1 - (x / (1.02 * face_width)) ** 2 - 0.5 * y * y))
    z = np.repeat(depths, sizes) * surface + np.repeat(lifts, sizes)
    rotated_x = x * cos(c.yaw) + z * sin(c.yaw)
    depth = z * cos(c.yaw) - x * sin(c.yaw)
    rotated = rotated_x + 1j * (y * cos(c.pitch) + depth * sin(c.pitch))
    half = width / 2
    shift = complex(c.shift_x, c.shift_y)
    projected = (rotated * complex(cos(c.roll), sin(c.roll)) + shift) * (half / c.scale)
    # Rounding to whole pixels hides the last digits of sin and cos, in which machines may differ.
    pixels: list[int] = np.rint(projected.view(np.float64) + half).astype(np.int64).tolist()
    return pixels


_WHITE: Colour = (250, 248, 244)
_DARK_GLASS: Colour = (34, 36, 44)
_SQUARE: Points = np.sign(COS) * np.abs(COS) ** 0.45 + 0.85j * np.sign(SIN) * np.abs(SIN) ** 0.45
_RING: Points = COS + 1j * SIN
_ARC_X, _ARC_Y = np.sin(np.pi / 2 * T), -np.cos(np.pi / 2 * T)
_LASHES: Colour = (38, 26, 30)
_PUPIL: Colour = (16, 12, 14)
_MOUTH: Colour = (92, 26, 34)


def draw_avatar(traits: Traits, conditions: Conditions, width: int) -> Image.Image:
    """Draw an avatar as RGB, `width` pixels square, with hard edges and even light."""
    from PIL import Image

    canvas = Image.new("RGB", (width, width), conditions.background)
    _paint_background(canvas, conditions)
    paint(canvas, list(_shapes(traits, conditions)), traits.face_width, conditions)
    return canvas


def _shapes(t: Traits, c: Conditions) -> Iterator[Shape]:
    """Yield all shapes from back to front."""
    outline = _face_outline(t)
    yield from _back_hair(t)
    yield from _body(t, c)
    yield from _head(t, c, outline)
    yield from _beard(t, outline)
    yield from _nose(t, c)
    yield from _mouth(t, c)
    for side in (-1, 1):
        yield from _eye(t, c, side)
    yield from _front_hair(t)
    for side in (-1, 1):
        yield from _brow(t, c, side)
    yield from _accessories(t, c, outline)


def _paint_background(canvas: Image.Image, c: Conditions) -> None:
    from PIL import ImageDraw

    draw, width, position = ImageDraw.Draw(canvas), canvas.width, c.background_position
    accent = mix(c.background, c.background_accent, 0.7)
    if c.background_style == "disc":
        x, y, r = round(width * (0.5 + 0.3 * position)), width // 2, round(width * 0.45)
        draw.ellipse((x - r, y - r, x + r, y + r), fill=accent)
    elif c.background_style == "split":
        x, slope = round(width * (0.5 + 0.35 * position)), round(width * 0.3 * position)
        draw.polygon((x + slope, 0, width, 0, width, width, x - slope, width), fill=accent)
    elif c.background_style == "stripes":
        step = round(width * (0.16 + 0.06 * position))
        for left in range(0, width, 2 * step):
            draw.rectangle((left, 0, left + step, width), fill=accent)


def _face_outline(t: Traits) -> Points:
    """Return the face's contour (40,): an ellipse that tapers to the jaw and to the forehead."""
    down, up = np.maximum(SIN, 0.0), np.maximum(-SIN, 0.0)
    power = 1 - 0.35 * t.jaw_square
    x = np.where(SIN > 0, np.sign(COS) * np.abs(COS) ** power, COS)
    x *= (1 - (1 - t.jaw_width) * down**1.5) * (1 - (1 - t.forehead_width) * up)
    return t.face_width * x + 1j * t.face_height * SIN


def _body(t: Traits, c: Conditions) -> Iterator[Shape]:
    neck = 0.32 + 0.3 * (t.face_width - 0.66) + 0.1 * t.jaw_square
    skin = shade(t.skin, 0.86)
    column = polygon((-neck, 0.3), (neck, 0.3), (neck * 1.15, 1.6), (-neck * 1.15, 1.6))
    yield flat(column, skin, -0.3)
    yield flat(oval(0.0, t.face_height - 0.1, neck * 1.02, 0.3), shade(t.skin, 0.7), -0.3)
    yield flat(oval(0.0, 2.1, 1.35, 0.98), c.clothes, -0.4)
    dark = shade(c.clothes, 0.78)
    if c.collar == "round":
        yield flat(oval(0.0, 1.2, neck * 1.3, 0.2), dark, -0.3)
        yield flat(oval(0.0, 1.17, neck * 1.15, 0.15), skin, -0.3)
    elif c.collar == "vee":
        yield flat(polygon((-neck * 1.2, 1.1), (neck * 1.2, 1.1), (0.0, 1.62)), skin, -0.3)
    elif c.collar == "shirt":
        for side in (-1, 1):
            tip, shoulder = (side * 0.28, 1.62), (side * neck * 1.7, 1.25)
            leaf = polygon((0.0, 1.42), (side * neck * 1.2, 1.02), shoulder, tip)
            yield flat(leaf, shade(c.clothes, 1.15), -0.2)
    else:
        yield flat(oval(0.0, 1.22, neck * 1.5, 0.2), c.accessory, -0.2)


def _head(t: Traits, c: Conditions, outline: Points) -> Iterator[Shape]:
    """Add ears, the face with a shadow on the side away from the light, and marks on the skin."""
    for side in (-1, 1):
        x = side * t.face_width * 0.98
        yield Shape(oval(x, t.ear_y, t.ear_size * 0.6, t.ear_size), shade(t.skin, 0.86), -0.08)
        yield Shape(oval(x, t.ear_y, t.ear_size * 0.3, t.ear_size * 0.6), shade(t.skin, 0.74), -0.08)
    yield Shape(outline, shade(t.skin, 0.86))
    lit = 1.0 - 0.1 * abs(c.light_side)
    sheet = lit * outline.real + 0.97j * outline.imag
    yield Shape(sheet + complex(0.09 * t.face_width * c.light_side, -0.02), t.skin)
    cheek = mix(t.skin, (232, 92, 88), 0.5 * t.blush)
    for side in (-1, 1):
        yield Shape(oval(side * t.face_width * 0.6, 0.34, 0.17, 0.11), cheek)
    yield from _marks(t)


def _marks(t: Traits) -> Iterator[Shape]:
    spot = mix(t.skin, (120, 62, 36), 0.45)
    for x, y in t.freckles:
        yield Shape(dot(x, y, 0.018, 0.018), spot)
    if t.mole is not None:
        yield Shape(dot(*t.mole, 0.035, 0.035), mix(t.skin, (50, 26, 20), 0.8))
    if t.scar is not None:
        x, y, slope = t.scar
        reach = 0.12 * T
        yield Shape(band(x + reach, y + slope * reach, 0.018 * BULGE), mix(t.skin, (250, 190, 180), 0.6))


def _beard(t: Traits, outline: Points) -> Iterator[Shape]:
    if t.beard_style in ("full", "stubble"):
        full = t.beard_style == "full"
        jaw = outline[SIN >= -0.01]
        edge = jaw + 1j * (t.beard_length if full else 0.0) * np.maximum(0.0, jaw.imag)
        cheeks = 0.86 * t.face_width * T + 1j * (0.1 + 0.4 * (1 - T**6))
        yield Shape(np.concatenate([edge, cheeks]), t.hair if full else mix(t.skin, t.hair, 0.18))
    if t.beard_style == "goatee":
        chin = oval(0.0, t.face_height * 0.9, t.mouth_width * 0.8, 0.16 + t.beard_length * 0.8)
        yield Shape(chin, t.hair)
    if t.beard_style in ("full", "moustache", "goatee"):
        y = t.mouth_y - 0.1 + 0.1 * T**2
        yield Shape(band(1.15 * t.mouth_width * T, y, 0.02 + 0.05 * BULGE), t.hair, 0.05)


def _nose(t: Traits, c: Conditions) -> Iterator[Shape]:
    bottom = t.eye_y + 0.1 + t.nose_length
    dark = -1.0 if c.light_side > 0 else 1.0
    w, r = t.nose_width, t.nose_roundness
    foot, edge = (dark * w, bottom), (dark * t.nose_bridge, bottom - 0.12)
    yield Shape(polygon((dark * t.nose_bridge, t.eye_y), edge, foot, (0.0, bottom)), shade(t.skin, 0.85), 0.1)
    yield Shape(oval(0.0, bottom - 0.03, w * (0.55 + 0.4 * r), 0.05 + 0.05 * r), shade(t.skin, 0.93), 0.16)
    for side in (-1, 1):
        yield Shape(dot(side * w * 0.55, bottom + 0.015, 0.036, 0.018), shade(t.skin, 0.55), 0.1)
    yield Shape(dot(-dark * w * 0.2, bottom - 0.06, w * 0.25, 0.03), mix(t.skin, _WHITE, 0.45), 0.18)


def _mouth(t: Traits, c: Conditions) -> Iterator[Shape]:
    x = t.mouth_width * (1 + 0.15 * c.smile) * T
    middle = t.mouth_y - 0.13 * (t.mouth_curve * 0.6 + c.smile) * (T**2 - 0.45)
    roof, floor = middle - 0.3 * c.mouth_open * BULGE, middle + c.mouth_open * BULGE
    bow = 1 - 0.35 * np.maximum(0.0, 1 - np.abs(T) * 4)
    yield Shape(between(x, roof - t.upper_lip * BULGE * bow, floor + t.lower_lip * BULGE), t.lips, 0.04)
    if c.mouth_open > 0.03:
        yield Shape(between(0.94 * x, roof, floor), _MOUTH, 0.03)
        teeth = np.minimum(0.45 * c.mouth_open * BULGE, 0.055)
        yield Shape(between(0.85 * x, roof, roof + teeth), _WHITE, 0.03)
    else:
        yield Shape(band(x, middle, 0.008 + 0.008 * BULGE), shade(t.lips, 0.55), 0.04)


def _eye(t: Traits, c: Conditions, side: int) -> Iterator[Shape]:
    """Add the white, iris, pupil, glint and lids of one eye; side 1 is the viewer's right."""
    height = t.eye_height * c.eye_open
    x = side * t.eye_gap + t.eye_width * T
    middle = t.eye_y - side * t.eye_tilt * t.eye_width * T
    upper = middle - height * BULGE
    almond = between(x, upper, middle + 0.75 * height * BULGE)
    yield Shape(almond + 0.02j, shade(t.skin, 0.8))
    if c.eye_open > 0.3:
        yield Shape(almond, _WHITE)
        yield from _iris(t, c, side)
    edge = upper + t.lid * 1.7 * height * BULGE
    yield Shape(between(x, upper - 0.02, edge), shade(t.skin, 0.88))
    yield Shape(band(x, edge, 0.012 + 0.016 * t.lashes * BULGE), _LASHES)
    if t.lashes > 0.55:
        corner, y = side * (t.eye_gap + t.eye_width), t.eye_y - t.eye_tilt * t.eye_width
        lash = polygon((corner - side * 0.05, y - 0.02), (corner, y + 0.01), (corner + side * 0.06, y - 0.07))
        yield Shape(lash, _LASHES)


def _iris(t: Traits, c: Conditions, side: int) -> Iterator[Shape]:
    height = t.eye_height * c.eye_open
    radius = min(t.iris_size * t.eye_height * 0.8, 0.8 * height)
    x = side * t.eye_gap + c.gaze_x * t.eye_width * 0.7
    y = t.eye_y + c.gaze_y * height * 0.5
    yield Shape(oval(x, y, radius, radius), t.iris)
    yield Shape(dot(x, y, 0.5 * radius, 0.5 * radius), _PUPIL)
    yield Shape(dot(x + 0.3 * radius, y - 0.35 * radius, 0.24 * radius, 0.24 * radius), _WHITE)


def _brow(t: Traits, c: Conditions, side: int) -> Iterator[Shape]:
    x = side * (t.eye_gap + 0.01) + t.brow_length * T
    slope = -side * (t.brow_tilt + c.brow_frown) * T
    y = t.eye_y - t.brow_height - c.brow_raise + slope - t.brow_arch * (BULGE - 0.5)
    taper = t.brow_thickness * (0.75 - 0.4 * side * T) * (1 - 0.5 * T**4)
    yield Shape(band(x, y, taper), t.brows, 0.02)


def _back_hair(t: Traits) -> Iterator[Shape]:
    """Add the hair behind the head."""
    width, height = t.face_width + t.hair_volume, t.face_height + t.hair_volume
    if t.hair_style in ("long", "bob"):
        length = t.hair_length if t.hair_style == "long" else 0.4 + 0.3 * t.hair_length
        x = np.sign(COS) * np.abs(COS) ** 0.6 * (width + 0.08)
        waves = 1 + t.hair_waves * np.sin(t.hair_frequency * ANGLES + t.hair_phase)
        yield flat((x + 1j * SIN * np.where(SIN > 0, length, height)) * waves, t.hair_below, -0.25)
    elif t.hair_style == "curly":
        curls = 1 + 0.05 * np.sin(ANGLES * 10 + t.hair_phase)
        yield flat(((width + 0.12) * COS + 1j * height * SIN - 0.2j) * curls, t.hair_below, -0.15)
    elif t.hair_style == "bun":
        size = 0.2 + t.hair_volume
        knot = oval(t.hair_part * 0.5, -t.face_height - 0.12, size, size * 0.9)
        yield flat(knot, t.hair_below, -0.3)


def _front_hair(t: Traits) -> Iterator[Shape]:
    """Add the cap of hair between the outline of the skull and the hairline, with a highlight."""
    if t.hair_style == "bald":
        return
    volume = 0.05 if t.hair_style == "cropped" else t.hair_volume
    temples = 0.05 if t.hair_style in ("long", "bob", "curly") else -0.12
    crown = (t.face_width * 1.01 + 0.5 * volume) * _ARC_X + 1j * (t.face_height + volume) * _ARC_Y
    crown = (crown + 1j * temples * T**6) * (1 + _crown_pattern(t))
    yield Shape(np.concatenate([crown, _hairline(t)[::-1]]), t.hair, 0.03)
    if t.hair_style not in ("cropped", "spiky"):
        streak = band(0.45 * T - 0.15, -0.78 * t.face_height - 0.12 * BULGE, 0.03 * BULGE)
        yield Shape(streak, mix(t.hair, _WHITE, 0.22), 0.08)


def _crown_pattern(t: Traits) -> Reals:
    """Return the relative offset of the hair's outer edge (13,)."""
    if t.hair_style == "spiky":
        return np.asarray(0.12 * (np.arange(13) % 2) * (1 - 0.6 * np.abs(T)))
    if t.hair_style == "curly":
        return np.asarray(0.06 + 0.05 * np.sin(9.0 * T + t.hair_phase))
    return np.asarray(t.hair_waves * 0.5 * np.sin(t.hair_frequency * T + t.hair_phase))


def _hairline(t: Traits) -> Points:
    """Return the edge of the hair on the forehead, from temple to temple (13,)."""
    side = T**4
    if t.hair_style == "swept":
        y = t.hairline + 0.25 * np.abs(T - t.hair_part)
    elif t.hair_style == "fringe":
        y = t.hairline + 0.16 + t.hair_waves * np.sin(t.hair_frequency * 2 * T + t.hair_phase)
    elif t.hair_style in ("long", "bob"):
        y = t.hairline - 0.1 + 0.55 * np.abs(T - 0.7 * t.hair_part) ** 1.5
    elif t.hair_style == "curly":
        y = t.hairline + 0.05 * np.sin(8 * T + t.hair_phase)
    else:
        y = t.hairline + 0.3 * t.hairline_arch * T**2
    return np.asarray(t.face_width * T + 1j * (y * (1 - side) - 0.02 * side))


def _accessories(t: Traits, c: Conditions, outline: Points) -> Iterator[Shape]:
    """Add the mask, glasses, hat and hand that the conditions prescribe."""
    if c.mask:
        jaw = outline[SIN >= 0.2]
        ridge = 0.93 * t.face_width * T + 1j * (0.16 + 0.05 * T**2)
        yield Shape(np.concatenate([ridge[::-1], jaw[::-1]]), mix(c.accessory, _WHITE, 0.4), 0.1)
    if c.glasses != "none":
        yield from _glasses(t, c)
    if c.hat != "none":
        yield from _hat(t, c)
    if c.hand != "none":
        yield from _hand(t, c)


def _glasses(t: Traits, c: Conditions) -> Iterator[Shape]:
    frame, r = shade(c.accessory, 0.55), c.glasses_size
    yield Shape(band(t.face_width * T, t.eye_y - 0.02, 0.018), frame, 0.06)
    lens = _RING if c.glasses == "round" else _SQUARE
    for side in (-1, 1):
        x, y = side * max(t.eye_gap, r + 0.03), t.eye_y + 0.02
        if c.glasses == "dark":
            yield Shape(r * lens + complex(x, y), _DARK_GLASS, 0.1)
            yield Shape(dot(x - 0.4 * r, y - 0.4 * r, 0.25 * r, 0.12 * r), (96, 104, 120), 0.1)
        else:
            rim = np.concatenate([lens, lens[:1], 0.84 * lens[:1], 0.84 * lens[::-1]])
            yield Shape(r * rim + complex(x, y), frame, 0.1)


def _hat(t: Traits, c: Conditions) -> Iterator[Shape]:
    brim, width = t.hairline - 0.02, t.face_width + 0.1
    dome = width * _ARC_X + 1j * (brim + _ARC_Y * (t.face_height + 0.24 + brim))
    yield Shape(dome, c.accessory, 0.06)
    if c.hat == "beanie":
        yield Shape(band(width * T, brim - 0.06 * BULGE, 0.1), shade(c.accessory, 0.78), 0.1)
        yield flat(oval(0.0, -t.face_height - 0.26, 0.16, 0.16), shade(c.accessory, 1.15), -0.1)
    else:
        peak = between(0.95 * width * T, brim - 0.07 * BULGE, brim + 0.02 + 0.09 * BULGE)
        yield Shape(peak, shade(c.accessory, 0.7), 0.3)


def _hand(t: Traits, c: Conditions) -> Iterator[Shape]:
    """Add a palm and four fingers in front of the chin or a cheek."""
    skin, line = shade(t.skin, 0.95), shade(t.skin, 0.72)
    side = 1.0 if c.hand_position > 0 else -1.0
    x, y = (0.25 * c.hand_position, 1.05) if c.hand == "chin" else (side * t.face_width * 0.85, 0.62)
    yield Shape(oval(x, y + 0.35, 0.34, 0.4), skin, 0.3)
    for finger in range(4):
        tip = oval(x + (finger - 1.5) * 0.16, y, 0.085, 0.3 - 0.03 * abs(finger - 1.3))
        yield Shape(tip, line, 0.3)
        yield Shape(tip + complex(-0.012, 0.012), skin, 0.3)
