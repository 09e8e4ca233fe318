"""Draws an avatar's background, body and face; data/avatar_wear.py adds hair, glasses, hats and hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plsc.data.avatar_scene import BULGE, COS, SIN, Points, Scene, T, band, between, dot, oval, polygon
from plsc.data.avatar_traits import Colour, Conditions, Traits, mix, shade
from plsc.data.avatar_wear import add_back_hair, add_front_hair, add_occlusions

if TYPE_CHECKING:
    from PIL import Image

_WHITE: Colour = (250, 248, 244)
_LASHES: Colour = (38, 26, 30)
_PUPIL: Colour = (16, 12, 14)
_MOUTH: Colour = (92, 26, 34)


def draw_avatar(traits: Traits, conditions: Conditions, width: int) -> Image.Image:
    """The RGB drawing, `width` pixels square, with hard edges and even light."""
    from PIL import Image

    canvas = Image.new("RGB", (width, width), conditions.background)
    _paint_background(canvas, conditions)
    scene = Scene(traits.face_width)
    outline = _face_outline(traits)
    add_back_hair(scene, traits)
    _add_body(scene, traits, conditions)
    _add_head(scene, traits, conditions, outline)
    _add_beard(scene, traits, outline)
    _add_nose(scene, traits, conditions)
    _add_mouth(scene, traits, conditions)
    for side in (-1, 1):
        _add_eye(scene, traits, conditions, side)
    add_front_hair(scene, traits)
    for side in (-1, 1):
        _add_brow(scene, traits, conditions, side)
    add_occlusions(scene, traits, conditions, outline)
    scene.paint(canvas, conditions)
    return canvas


def _paint_background(canvas: Image.Image, c: Conditions) -> None:
    from PIL import ImageDraw

    draw, width, place = ImageDraw.Draw(canvas), canvas.width, c.background_place
    accent = mix(c.background, c.background_accent, 0.7)
    if c.background_style == "disc":
        x, y, r = round(width * (0.5 + 0.3 * place)), width // 2, round(width * 0.45)
        draw.ellipse((x - r, y - r, x + r, y + r), fill=accent)
    elif c.background_style == "split":
        x, slope = round(width * (0.5 + 0.35 * place)), round(width * 0.3 * place)
        draw.polygon((x + slope, 0, width, 0, width, width, x - slope, width), fill=accent)
    elif c.background_style == "stripes":
        step = round(width * (0.16 + 0.06 * place))
        for left in range(0, width, 2 * step):
            draw.rectangle((left, 0, left + step, width), fill=accent)


def _face_outline(t: Traits) -> Points:
    """The face's contour (40,): an ellipse that tapers below to the jaw and above to the forehead."""
    down, up = np.maximum(SIN, 0.0), np.maximum(-SIN, 0.0)
    power = 1 - 0.35 * t.jaw_square
    x = np.where(SIN > 0, np.sign(COS) * np.abs(COS) ** power, COS)
    x *= (1 - (1 - t.jaw_width) * down**1.5) * (1 - (1 - t.forehead_width) * up)
    return t.face_width * x + 1j * t.face_height * SIN


def _add_body(scene: Scene, t: Traits, c: Conditions) -> None:
    neck = 0.32 + 0.3 * (t.face_width - 0.66) + 0.1 * t.jaw_square
    skin = shade(t.skin, 0.86)
    column = polygon((-neck, 0.3), (neck, 0.3), (neck * 1.15, 1.6), (-neck * 1.15, 1.6))
    scene.add_flat(column, skin, -0.3)
    scene.add_flat(oval(0.0, t.face_height - 0.1, neck * 1.02, 0.3), shade(t.skin, 0.7), -0.3)
    scene.add_flat(oval(0.0, 2.1, 1.35, 0.98), c.clothes, -0.4)
    dark = shade(c.clothes, 0.78)
    if c.collar == "round":
        scene.add_flat(oval(0.0, 1.2, neck * 1.3, 0.2), dark, -0.3)
        scene.add_flat(oval(0.0, 1.17, neck * 1.15, 0.15), skin, -0.3)
    elif c.collar == "vee":
        scene.add_flat(polygon((-neck * 1.2, 1.1), (neck * 1.2, 1.1), (0.0, 1.62)), skin, -0.3)
    elif c.collar == "shirt":
        for side in (-1, 1):
            tip, shoulder = (side * 0.28, 1.62), (side * neck * 1.7, 1.25)
            leaf = polygon((0.0, 1.42), (side * neck * 1.2, 1.02), shoulder, tip)
            scene.add_flat(leaf, shade(c.clothes, 1.15), -0.2)
    else:
        scene.add_flat(oval(0.0, 1.22, neck * 1.5, 0.2), c.accessory, -0.2)


def _add_head(scene: Scene, t: Traits, c: Conditions, outline: Points) -> None:
    """Ears, the face with a shadow on the side away from the light, and what lies on the skin."""
    for side in (-1, 1):
        x = side * t.face_width * 0.98
        scene.add(oval(x, t.ear_y, t.ear_size * 0.6, t.ear_size), shade(t.skin, 0.86), -0.08)
        scene.add(oval(x, t.ear_y, t.ear_size * 0.3, t.ear_size * 0.6), shade(t.skin, 0.74), -0.08)
    scene.add(outline, shade(t.skin, 0.86))
    lit = 1.0 - 0.1 * abs(c.light_side)
    sheet = lit * outline.real + 0.97j * outline.imag
    scene.add(sheet + complex(0.09 * t.face_width * c.light_side, -0.02), t.skin)
    cheek = mix(t.skin, (232, 92, 88), 0.5 * t.blush)
    for side in (-1, 1):
        scene.add(oval(side * t.face_width * 0.6, 0.34, 0.17, 0.11), cheek)
    _add_marks(scene, t)


def _add_marks(scene: Scene, t: Traits) -> None:
    spot = mix(t.skin, (120, 62, 36), 0.45)
    for x, y in t.freckles:
        scene.add(dot(x, y, 0.018, 0.018), spot)
    if t.mole is not None:
        scene.add(dot(*t.mole, 0.035, 0.035), mix(t.skin, (50, 26, 20), 0.8))
    if t.scar is not None:
        x, y, slope = t.scar
        reach = 0.12 * T
        scene.add(band(x + reach, y + slope * reach, 0.018 * BULGE), mix(t.skin, (250, 190, 180), 0.6))


def _add_beard(scene: Scene, t: Traits, outline: Points) -> None:
    if t.beard_style in ("full", "stubble"):
        full = t.beard_style == "full"
        jaw = outline[SIN >= -0.01]
        edge = jaw + 1j * (t.beard_length if full else 0.0) * np.maximum(0.0, jaw.imag)
        cheeks = 0.86 * t.face_width * T + 1j * (0.1 + 0.4 * (1 - T**6))
        scene.add(np.concatenate([edge, cheeks]), t.hair if full else mix(t.skin, t.hair, 0.18))
    if t.beard_style == "goatee":
        chin = oval(0.0, t.face_height * 0.9, t.mouth_width * 0.8, 0.16 + t.beard_length * 0.8)
        scene.add(chin, t.hair)
    if t.beard_style in ("full", "moustache", "goatee"):
        y = t.mouth_y - 0.1 + 0.1 * T**2
        scene.add(band(1.15 * t.mouth_width * T, y, 0.02 + 0.05 * BULGE), t.hair, 0.05)


def _add_nose(scene: Scene, t: Traits, c: Conditions) -> None:
    bottom = t.eye_y + 0.1 + t.nose_length
    dark = -1.0 if c.light_side > 0 else 1.0
    w, r = t.nose_width, t.nose_roundness
    foot, edge = (dark * w, bottom), (dark * t.nose_bridge, bottom - 0.12)
    scene.add(polygon((dark * t.nose_bridge, t.eye_y), edge, foot, (0.0, bottom)), shade(t.skin, 0.85), 0.1)
    scene.add(oval(0.0, bottom - 0.03, w * (0.55 + 0.4 * r), 0.05 + 0.05 * r), shade(t.skin, 0.93), 0.16)
    for side in (-1, 1):
        scene.add(dot(side * w * 0.55, bottom + 0.015, 0.036, 0.018), shade(t.skin, 0.55), 0.1)
    scene.add(dot(-dark * w * 0.2, bottom - 0.06, w * 0.25, 0.03), mix(t.skin, _WHITE, 0.45), 0.18)


def _add_mouth(scene: Scene, t: Traits, c: Conditions) -> None:
    x = t.mouth_width * (1 + 0.15 * c.smile) * T
    middle = t.mouth_y - 0.13 * (t.mouth_curve * 0.6 + c.smile) * (T**2 - 0.45)
    roof, floor = middle - 0.3 * c.mouth_open * BULGE, middle + c.mouth_open * BULGE
    bow = 1 - 0.35 * np.maximum(0.0, 1 - np.abs(T) * 4)
    scene.add(between(x, roof - t.upper_lip * BULGE * bow, floor + t.lower_lip * BULGE), t.lips, 0.04)
    if c.mouth_open > 0.03:
        scene.add(between(0.94 * x, roof, floor), _MOUTH, 0.03)
        teeth = np.minimum(0.45 * c.mouth_open * BULGE, 0.055)
        scene.add(between(0.85 * x, roof, roof + teeth), _WHITE, 0.03)
    else:
        scene.add(band(x, middle, 0.008 + 0.008 * BULGE), shade(t.lips, 0.55), 0.04)


def _add_eye(scene: Scene, t: Traits, c: Conditions, side: int) -> None:
    """The white, iris, pupil, glint and lids of one eye; side 1 is the viewer's right."""
    height = t.eye_height * c.eye_open
    x = side * t.eye_gap + t.eye_width * T
    middle = t.eye_y - side * t.eye_tilt * t.eye_width * T
    upper = middle - height * BULGE
    almond = between(x, upper, middle + 0.75 * height * BULGE)
    scene.add(almond + 0.02j, shade(t.skin, 0.8))
    if c.eye_open > 0.3:
        scene.add(almond, _WHITE)
        _add_iris(scene, t, c, side)
    edge = upper + t.lid * 1.7 * height * BULGE
    scene.add(between(x, upper - 0.02, edge), shade(t.skin, 0.88))
    scene.add(band(x, edge, 0.012 + 0.016 * t.lashes * BULGE), _LASHES)
    if t.lashes > 0.55:
        corner, y = side * (t.eye_gap + t.eye_width), t.eye_y - t.eye_tilt * t.eye_width
        lash = polygon((corner - side * 0.05, y - 0.02), (corner, y + 0.01), (corner + side * 0.06, y - 0.07))
        scene.add(lash, _LASHES)


def _add_iris(scene: Scene, t: Traits, c: Conditions, side: int) -> None:
    height = t.eye_height * c.eye_open
    radius = min(t.iris_size * t.eye_height * 0.8, 0.8 * height)
    x = side * t.eye_gap + c.gaze_x * t.eye_width * 0.7
    y = t.eye_y + c.gaze_y * height * 0.5
    scene.add(oval(x, y, radius, radius), t.iris)
    scene.add(dot(x, y, 0.5 * radius, 0.5 * radius), _PUPIL)
    scene.add(dot(x + 0.3 * radius, y - 0.35 * radius, 0.24 * radius, 0.24 * radius), _WHITE)


def _add_brow(scene: Scene, t: Traits, c: Conditions, side: int) -> None:
    x = side * (t.eye_gap + 0.01) + t.brow_length * T
    slope = -side * (t.brow_tilt + c.brow_frown) * T
    y = t.eye_y - t.brow_height - c.brow_raise + slope - t.brow_arch * (BULGE - 0.5)
    taper = t.brow_thickness * (0.75 - 0.4 * side * T) * (1 - 0.5 * T**4)
    scene.add(band(x, y, taper), t.brows, 0.02)
