"""Hair, and what may hide an avatar's face: masks, glasses, hats and hands."""

import numpy as np

from plsc.data.avatar_scene import ANGLES, BULGE, COS, SIN, Points, Reals, Scene, T, band, between, dot, oval
from plsc.data.avatar_traits import Colour, Conditions, Traits, mix, shade

_WHITE: Colour = (250, 248, 244)
_DARK_GLASS: Colour = (34, 36, 44)
_SQUARE: Points = np.sign(COS) * np.abs(COS) ** 0.45 + 0.85j * np.sign(SIN) * np.abs(SIN) ** 0.45
_RING: Points = COS + 1j * SIN
_ARC_X, _ARC_Y = np.sin(np.pi / 2 * T), -np.cos(np.pi / 2 * T)


def add_back_hair(scene: Scene, t: Traits) -> None:
    """Hair behind the head."""
    width, height = t.face_width + t.hair_volume, t.face_height + t.hair_volume
    if t.hair_style in ("long", "bob"):
        length = t.hair_length if t.hair_style == "long" else 0.4 + 0.3 * t.hair_length
        x = np.sign(COS) * np.abs(COS) ** 0.6 * (width + 0.08)
        waves = 1 + t.hair_waves * np.sin(t.hair_frequency * ANGLES + t.hair_phase)
        scene.add_flat((x + 1j * SIN * np.where(SIN > 0, length, height)) * waves, t.hair_below, -0.25)
    elif t.hair_style == "curly":
        curls = 1 + 0.05 * np.sin(ANGLES * 10 + t.hair_phase)
        scene.add_flat(((width + 0.12) * COS + 1j * height * SIN - 0.2j) * curls, t.hair_below, -0.15)
    elif t.hair_style == "bun":
        size = 0.2 + t.hair_volume
        knot = oval(t.hair_part * 0.5, -t.face_height - 0.12, size, size * 0.9)
        scene.add_flat(knot, t.hair_below, -0.3)


def add_front_hair(scene: Scene, t: Traits) -> None:
    """The cap of hair between the outline of the skull and the hairline, with a streak of light."""
    if t.hair_style == "bald":
        return
    volume = 0.05 if t.hair_style == "cropped" else t.hair_volume
    temples = 0.05 if t.hair_style in ("long", "bob", "curly") else -0.12
    crown = (t.face_width * 1.01 + 0.5 * volume) * _ARC_X + 1j * (t.face_height + volume) * _ARC_Y
    crown = (crown + 1j * temples * T**6) * (1 + _crown_pattern(t))
    scene.add(np.concatenate([crown, _hairline(t)[::-1]]), t.hair, 0.03)
    if t.hair_style not in ("cropped", "spiky"):
        streak = band(0.45 * T - 0.15, -0.78 * t.face_height - 0.12 * BULGE, 0.03 * BULGE)
        scene.add(streak, mix(t.hair, _WHITE, 0.22), 0.08)


def _crown_pattern(t: Traits) -> Reals:
    """How far the hair's outer edge stands out, relative (13,)."""
    if t.hair_style == "spiky":
        return np.asarray(0.12 * (np.arange(13) % 2) * (1 - 0.6 * np.abs(T)))
    if t.hair_style == "curly":
        return np.asarray(0.06 + 0.05 * np.sin(9.0 * T + t.hair_phase))
    return np.asarray(t.hair_waves * 0.5 * np.sin(t.hair_frequency * T + t.hair_phase))


def _hairline(t: Traits) -> Points:
    """The edge of the hair on the forehead, from temple to temple (13,)."""
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


def add_occlusions(scene: Scene, t: Traits, c: Conditions, outline: Points) -> None:
    """The mask, glasses, hat and hand that the conditions ask for."""
    if c.mask:
        jaw = outline[SIN >= 0.2]
        ridge = 0.93 * t.face_width * T + 1j * (0.16 + 0.05 * T**2)
        scene.add(np.concatenate([ridge[::-1], jaw[::-1]]), mix(c.accessory, _WHITE, 0.4), 0.1)
    if c.glasses != "none":
        _add_glasses(scene, t, c)
    if c.hat != "none":
        _add_hat(scene, t, c)
    if c.hand != "none":
        _add_hand(scene, t, c)


def _add_glasses(scene: Scene, t: Traits, c: Conditions) -> None:
    frame, r = shade(c.accessory, 0.55), c.glasses_size
    scene.add(band(t.face_width * T, t.eye_y - 0.02, 0.018), frame, 0.06)
    lens = _RING if c.glasses == "round" else _SQUARE
    for side in (-1, 1):
        x, y = side * max(t.eye_gap, r + 0.03), t.eye_y + 0.02
        if c.glasses == "dark":
            scene.add(r * lens + complex(x, y), _DARK_GLASS, 0.1)
            scene.add(dot(x - 0.4 * r, y - 0.4 * r, 0.25 * r, 0.12 * r), (96, 104, 120), 0.1)
        else:
            rim = np.concatenate([lens, lens[:1], 0.84 * lens[:1], 0.84 * lens[::-1]])
            scene.add(r * rim + complex(x, y), frame, 0.1)


def _add_hat(scene: Scene, t: Traits, c: Conditions) -> None:
    brim, width = t.hairline - 0.02, t.face_width + 0.1
    dome = width * _ARC_X + 1j * (brim + _ARC_Y * (t.face_height + 0.24 + brim))
    scene.add(dome, c.accessory, 0.06)
    if c.hat == "beanie":
        scene.add(band(width * T, brim - 0.06 * BULGE, 0.1), shade(c.accessory, 0.78), 0.1)
        scene.add_flat(oval(0.0, -t.face_height - 0.26, 0.16, 0.16), shade(c.accessory, 1.15), -0.1)
    else:
        peak = between(0.95 * width * T, brim - 0.07 * BULGE, brim + 0.02 + 0.09 * BULGE)
        scene.add(peak, shade(c.accessory, 0.7), 0.3)


def _add_hand(scene: Scene, t: Traits, c: Conditions) -> None:
    """A palm and four fingers before the chin or a cheek."""
    skin, line = shade(t.skin, 0.95), shade(t.skin, 0.72)
    side = 1.0 if c.hand_place > 0 else -1.0
    x, y = (0.25 * c.hand_place, 1.05) if c.hand == "chin" else (side * t.face_width * 0.85, 0.62)
    scene.add(oval(x, y + 0.35, 0.34, 0.4), skin, 0.3)
    for finger in range(4):
        tip = oval(x + (finger - 1.5) * 0.16, y, 0.085, 0.3 - 0.03 * abs(finger - 1.3))
        scene.add(tip, line, 0.3)
        scene.add(tip + complex(-0.012, 0.012), skin, 0.3)
