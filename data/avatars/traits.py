"""Traits of an avatar and conditions of a picture of it, drawn from keyed random numbers.

Traits depend on the identity's index alone; conditions on the pair (identity, image). Every number comes from
`random.Random.random()`, whose sequence Python guarantees for a given integer seed on every machine.

Lengths are in head units: the head is about 2 high, x grows to the viewer's right, y grows downward,
and (0, 0) lies between the eyes and the tip of the nose. Angles are in radians.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TypeVar

Colour = tuple[int, int, int]
T = TypeVar("T")

# Styles that show more of a person come more often.
HAIR_STYLES = (
    "bald",
    "cropped",
    "spiky",
    "bun",
    "swept",
    "swept",
    "fringe",
    "fringe",
    "curly",
    "curly",
    "bob",
    "bob",
    "long",
    "long",
)
BEARD_STYLES = ("none", "none", "none", "none", "moustache", "goatee", "full", "stubble")

_SKINS: Sequence[Colour] = (
    (255, 226, 205),
    (248, 209, 178),
    (237, 190, 150),
    (222, 168, 122),
    (198, 140, 96),
    (166, 111, 73),
    (125, 80, 52),
    (90, 58, 42),
)
_HAIRS: Sequence[Colour] = (
    (34, 28, 32),
    (62, 42, 34),
    (96, 62, 40),
    (140, 90, 52),
    (190, 136, 76),
    (226, 188, 120),
    (176, 74, 40),
    (200, 104, 58),
    (150, 150, 156),
    (216, 214, 212),
    (92, 78, 150),
    (60, 120, 140),
    (206, 98, 136),
)
_IRISES: Sequence[Colour] = (
    (70, 44, 28),
    (104, 66, 36),
    (122, 104, 54),
    (78, 120, 84),
    (80, 130, 170),
    (112, 128, 140),
)
_LIPS: Sequence[Colour] = ((196, 62, 76), (168, 48, 92), (214, 96, 84), (120, 44, 60))
_CLOTHES: Sequence[Colour] = (
    (222, 84, 78),
    (240, 160, 70),
    (248, 208, 96),
    (94, 168, 110),
    (70, 150, 160),
    (74, 110, 180),
    (120, 90, 160),
    (220, 130, 160),
    (240, 238, 232),
    (60, 64, 76),
    (140, 120, 100),
    (160, 190, 210),
)


class KeyedRandom:
    """A sequence of random numbers that is a pure function of its key."""

    def __init__(self, *key: int) -> None:
        seed = 0
        for part in key:
            seed = (seed << 64) | part
        self._next = Random(seed).random

    def between(self, low: float, high: float) -> float:
        """Draw uniformly from [low, high)."""
        return low + (high - low) * self._next()

    def bell(self, mean: float, spread: float) -> float:
        """Draw from a bell shape on mean ± 2·spread, of standard deviation 2/3·spread."""
        return mean + spread * (2.0 / 1.5) * (self._next() + self._next() + self._next() - 1.5)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._next() < probability

    def one_of(self, choices: Sequence[T]) -> T:
        """Draw one of the choices uniformly."""
        return choices[int(self._next() * len(choices))]

    def along(self, palette: Sequence[Colour], jitter: float) -> Colour:
        """Draw a colour between two neighbours of a palette, each channel moved by up to ±jitter."""
        position = self._next() * (len(palette) - 1)
        low = palette[int(position)]
        high = palette[int(position) + 1]
        return self._jittered(mix(low, high, position - int(position)), jitter)

    def near(self, palette: Sequence[Colour], jitter: float) -> Colour:
        """Draw a colour of a palette, each channel moved by up to ±jitter."""
        return self._jittered(self.one_of(palette), jitter)

    def _jittered(self, colour: Colour, jitter: float) -> Colour:
        r, g, b = (min(255, max(0, round(c + self.between(-jitter, jitter)))) for c in colour)
        return (r, g, b)


def mix(a: Colour, b: Colour, share_of_b: float) -> Colour:
    """Interpolate between two colours."""
    t = share_of_b
    return (
        round(a[0] + (b[0] - a[0]) * t),
        round(a[1] + (b[1] - a[1]) * t),
        round(a[2] + (b[2] - a[2]) * t),
    )


def shade(colour: Colour, factor: float) -> Colour:
    """Return the colour in more (factor > 1) or less light."""
    return (
        min(255, round(colour[0] * factor)),
        min(255, round(colour[1] * factor)),
        min(255, round(colour[2] * factor)),
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an identity, the same in every picture of it."""

    skin: Colour
    face_width: float  # half width at the cheeks
    face_height: float  # half height
    jaw_width: float  # share of face_width that is left near the chin
    jaw_square: float  # 0 pointed … 1 square
    forehead_width: float  # share of face_width at the top
    ear_size: float
    ear_y: float
    eye_gap: float  # from the middle to an eye's centre
    eye_y: float
    eye_width: float
    eye_height: float
    eye_tilt: float
    iris: Colour
    iris_size: float  # share of the eye's height
    lid: float  # share of the eye that the upper lid covers
    lashes: float
    brow_height: float  # above the eye's centre
    brow_length: float
    brow_thickness: float
    brow_arch: float
    brow_tilt: float
    nose_length: float
    nose_width: float
    nose_bridge: float
    nose_roundness: float
    mouth_y: float
    mouth_width: float
    upper_lip: float
    lower_lip: float
    mouth_curve: float  # > 0: the corners point up at rest
    lips: Colour
    hair: Colour
    hair_below: Colour  # hair behind the head and at its ends
    brows: Colour
    hair_style: str
    hair_volume: float
    hairline: float  # y of the hairline in the middle of the forehead
    hairline_arch: float
    hair_part: float  # x of the parting
    hair_waves: float
    hair_frequency: float
    hair_phase: float
    hair_length: float  # y where long hair ends
    beard_style: str
    beard_length: float
    blush: float
    freckles: tuple[tuple[float, float], ...]
    mole: tuple[float, float] | None
    scar: tuple[float, float, float] | None  # x, y, slope


@dataclass(frozen=True, slots=True)
class Conditions:
    """Properties of a single picture."""

    yaw: float
    pitch: float
    roll: float
    scale: float  # head units from the picture's middle to its edge
    shift_x: float
    shift_y: float
    smile: float
    mouth_open: float
    eye_open: float
    gaze_x: float
    gaze_y: float
    brow_raise: float
    brow_frown: float
    background: Colour
    background_accent: Colour
    background_style: str
    background_position: float
    clothes: Colour
    collar: str
    accessory: Colour
    glasses: str
    glasses_size: float
    hat: str
    hand: str
    hand_position: float
    mask: bool
    light_side: float  # -1 from the left … 1 from the right
    light_x: float  # brightness slope over the picture, per half width
    light_y: float
    gain: tuple[float, float, float]
    contrast: float
    blur: float  # radius in thousandths of the picture's width
    noise: float  # standard deviation in grey levels
    noise_offset: int
    quality: int  # JPEG


@lru_cache(maxsize=4096)
def traits_of(identity: int) -> Traits:
    """Draw the traits of the identity with this index (>= 0)."""
    d = KeyedRandom(identity, 1)
    skin = d.along(_SKINS, 6)
    hair = d.near(_HAIRS, 14)
    style = d.one_of(HAIR_STYLES)
    return Traits(
        skin=skin,
        face_width=d.between(0.64, 0.92),
        face_height=d.between(0.9, 1.12),
        jaw_width=d.between(0.45, 1.0),
        jaw_square=d.between(0.0, 1.0),
        forehead_width=d.between(0.86, 1.02),
        ear_size=d.between(0.12, 0.25),
        ear_y=d.between(-0.06, 0.12),
        eye_gap=d.between(0.25, 0.38),
        eye_y=d.between(-0.16, 0.06),
        eye_width=d.between(0.12, 0.21),
        eye_height=d.between(0.08, 0.18),
        eye_tilt=d.between(-0.28, 0.28),
        iris=d.near(_IRISES, 12),
        iris_size=d.between(0.68, 1.0),
        lid=d.between(0.0, 0.42),
        lashes=d.between(0.0, 1.0),
        brow_height=d.between(0.17, 0.31),
        brow_length=d.between(0.12, 0.22),
        brow_thickness=d.between(0.015, 0.08),
        brow_arch=d.between(0.0, 0.1),
        brow_tilt=d.between(-0.07, 0.07),
        nose_length=d.between(0.16, 0.42),
        nose_width=d.between(0.07, 0.22),
        nose_bridge=d.between(0.02, 0.08),
        nose_roundness=d.between(0.0, 1.0),
        mouth_y=d.between(0.5, 0.64),
        mouth_width=d.between(0.16, 0.38),
        upper_lip=d.between(0.02, 0.085),
        lower_lip=d.between(0.03, 0.1),
        mouth_curve=d.between(-0.35, 0.6),
        lips=mix(shade(skin, 0.86), d.one_of(_LIPS), d.between(0.25, 0.9)),
        hair=hair,
        hair_below=shade(hair, 0.72) if d.chance(0.6) else d.near(_HAIRS, 14),
        brows=mix(shade(hair, 0.72), d.near(_HAIRS, 10), d.between(0.0, 0.5)),
        hair_style=style,
        hair_volume=d.between(0.05, 0.3),
        hairline=d.between(-0.78, -0.36),
        hairline_arch=d.between(-0.1, 0.5),
        hair_part=d.between(-0.5, 0.5),
        hair_waves=d.between(0.0, 0.09),
        hair_frequency=d.between(3.0, 12.0),
        hair_phase=d.between(0.0, 6.28),
        hair_length=d.between(0.55, 1.5),
        beard_style=d.one_of(BEARD_STYLES),
        beard_length=d.between(0.0, 0.25),
        blush=d.between(0.0, 0.45),
        freckles=_freckles(d),
        mole=(d.between(-0.5, 0.5), d.between(0.15, 0.75)) if d.chance(0.35) else None,
        scar=(d.between(-0.5, 0.5), d.between(-0.4, 0.5), d.between(-1.5, 1.5)) if d.chance(0.15) else None,
    )


def _freckles(d: KeyedRandom) -> tuple[tuple[float, float], ...]:
    if not d.chance(0.25):
        return ()
    return tuple((d.between(-0.5, 0.5), d.between(0.1, 0.4)) for _ in range(14))


def conditions_of(identity: int, image: int) -> Conditions:
    """Draw the conditions of one picture (both indices >= 0)."""
    d = KeyedRandom(identity, image, 2)
    return Conditions(
        yaw=d.bell(0.0, 0.17),
        pitch=d.bell(0.0, 0.1),
        roll=d.bell(0.0, 0.06),
        scale=d.between(1.2, 1.36),
        shift_x=d.bell(0.0, 0.05),
        shift_y=d.bell(0.06, 0.05),
        smile=d.bell(0.25, 0.4),
        mouth_open=max(0.0, d.between(-0.12, 0.16)),
        eye_open=0.12 if d.chance(0.05) else d.between(0.7, 1.12),
        gaze_x=d.between(-0.35, 0.35),
        gaze_y=d.between(-0.2, 0.2),
        brow_raise=d.bell(0.0, 0.03),
        brow_frown=d.bell(0.0, 0.03),
        background=d.near(_CLOTHES, 40),
        background_accent=d.near(_CLOTHES, 40),
        background_style=d.one_of(("plain", "disc", "split", "stripes")),
        background_position=d.between(-1.0, 1.0),
        clothes=d.near(_CLOTHES, 25),
        collar=d.one_of(("round", "vee", "shirt", "scarf")),
        accessory=d.near(_CLOTHES, 25),
        glasses=_weighted(d, (("none", 0.84), ("round", 0.08), ("square", 0.06), ("dark", 0.02))),
        glasses_size=d.between(0.18, 0.25),
        hat=_weighted(d, (("none", 0.95), ("cap", 0.025), ("beanie", 0.025))),
        hand=_weighted(d, (("none", 0.94), ("chin", 0.04), ("cheek", 0.02))),
        hand_position=d.between(-1.0, 1.0),
        mask=d.chance(0.01),
        light_side=d.between(-1.0, 1.0),
        light_x=d.bell(0.0, 0.15),
        light_y=d.bell(-0.04, 0.12),
        gain=_gain(d),
        contrast=d.between(0.85, 1.1),
        blur=d.between(2.0, 8.0) if d.chance(0.2) else 0.0,
        noise=d.between(0.0, 7.0),
        noise_offset=int(d.between(0, 1 << 20)),
        quality=int(d.between(35, 96)),
    )


def _gain(d: KeyedRandom) -> tuple[float, float, float]:
    """Draw the gain per channel: exposure times colour cast."""
    exposure = d.between(0.78, 1.14)
    warmth = d.bell(0.0, 0.05)
    tint = d.bell(0.0, 0.03)
    return (exposure * (1 + warmth), exposure * (1 + tint), exposure * (1 - warmth))


def _weighted(d: KeyedRandom, choices: Sequence[tuple[str, float]]) -> str:
    """Draw one of the names, by probabilities that sum to 1."""
    remaining = d.between(0.0, 1.0)
    for name, probability in choices:
        remaining -= probability
        if remaining < 0:
            return name
    return choices[0][0]
