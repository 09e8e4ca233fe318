"""Traits of an avatar and conditions of a picture of it, drawn from keyed random numbers.

Traits depend on the identity's index alone; conditions on the pair (identity, image). Every number comes from
`random.Random.random()`, whose sequence Python guarantees for a given integer seed on every machine. Each field says
how it is drawn, and fields are drawn in their order: another order gives other avatars.

Lengths are in head units: the head is about 2 high, x grows to the viewer's right, y grows downward,
and (0, 0) lies between the eyes and the tip of the nose. Angles are in radians.
"""

# ruff: noqa: RUF009 (calls in the classes' bodies make fields, not values)

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from random import Random
from typing import Any, TypeVar

Colour = tuple[int, ...]  # red, green, blue
T = TypeVar("T")


def _palette(codes: str) -> Sequence[Colour]:
    """Return the colours of these codes, in hexadecimal."""
    return [tuple(bytes.fromhex(code)) for code in codes.split()]


# Styles that show more of a person come more often.
_FULL_HAIR = ("swept", "fringe", "curly", "bob", "long")
_HAIR_STYLES = ("bald", "cropped", "spiky", "bun", *(style for style in _FULL_HAIR for _ in range(2)))
_SKINS = _palette("ffe2cd f8d1b2 edbe96 dea87a c68c60 a66f49 7d5034 5a3a2a")
_HAIRS = _palette("221c20 3e2a22 603e28 8c5a34 be884c e2bc78 b04a28 c8683a 96969c d8d6d4 5c4e96 3c788c ce6288")
_IRISES = _palette("462c1c 684224 7a6836 4e7854 5082aa 70808c")
_LIPS = _palette("c43e4c a8305c d66054 782c3c")
_CLOTHES = _palette("de544e f0a046 f8d060 5ea86e 4696a0 4a6eb4 785aa0 dc82a0 f0eee8 3c404c 8c7864 a0bed2")


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
        low, high = palette[int(position) : int(position) + 2]
        return self._jittered(mix(low, high, position - int(position)), jitter)

    def near(self, palette: Sequence[Colour], jitter: float) -> Colour:
        """Draw a colour of a palette, each channel moved by up to ±jitter."""
        return self._jittered(self.one_of(palette), jitter)

    def weighted(self, **probabilities: float) -> str:
        """Draw one of the names, by probabilities that sum to 1."""
        remaining = self._next()
        for name, probability in probabilities.items():
            remaining -= probability
            if remaining < 0:
                return name
        return next(iter(probabilities))

    def _jittered(self, colour: Colour, jitter: float) -> Colour:
        return tuple(min(255, max(0, round(channel + self.between(-jitter, jitter)))) for channel in colour)


def mix(a: Colour, b: Colour, share_of_b: float) -> Colour:
    """Interpolate between two colours."""
    return tuple(round(x + (y - x) * share_of_b) for x, y in zip(a, b, strict=True))


def shade(colour: Colour, factor: float) -> Colour:
    """Return the colour in more (factor > 1) or less light."""
    return tuple(min(255, round(channel * factor)) for channel in colour)


def _drawn(draw: Callable[[KeyedRandom, Mapping[str, Any]], object]) -> Any:
    """A field that is drawn by ``draw``, given the fields before it."""
    return field(metadata={"draw": draw})


def _between(low: float, high: float) -> Any:
    return _drawn(lambda d, _: d.between(low, high))


def _bell(mean: float, spread: float) -> Any:
    return _drawn(lambda d, _: d.bell(mean, spread))


def _one_of(*choices: str) -> Any:
    return _drawn(lambda d, _: d.one_of(choices))


def _near(palette: Sequence[Colour], jitter: float) -> Any:
    return _drawn(lambda d, _: d.near(palette, jitter))


def _weighted(**probabilities: float) -> Any:
    return _drawn(lambda d, _: d.weighted(**probabilities))


def _draw(kind: type[T], d: KeyedRandom) -> T:
    drawn: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]  # both kinds are dataclasses
        drawn[entry.name] = entry.metadata["draw"](d, drawn)
    return kind(**drawn)


def _gain(d: KeyedRandom) -> tuple[float, float, float]:
    """Draw the gain per channel: exposure times colour cast."""
    exposure = d.between(0.78, 1.14)
    warmth = d.bell(0.0, 0.05)
    tint = d.bell(0.0, 0.03)
    return (exposure * (1 + warmth), exposure * (1 + tint), exposure * (1 - warmth))


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an identity, the same in every picture of it."""

    skin: Colour = _drawn(lambda d, _: d.along(_SKINS, 6))
    hair: Colour = _near(_HAIRS, 14)
    hair_style: str = _one_of(*_HAIR_STYLES)
    face_width: float = _between(0.64, 0.92)  # half width at the cheeks
    face_height: float = _between(0.9, 1.12)  # half height
    jaw_width: float = _between(0.45, 1.0)  # share of face_width that is left near the chin
    jaw_square: float = _between(0.0, 1.0)  # 0 pointed … 1 square
    forehead_width: float = _between(0.86, 1.02)  # share of face_width at the top
    ear_size: float = _between(0.12, 0.25)
    ear_y: float = _between(-0.06, 0.12)
    eye_gap: float = _between(0.25, 0.38)  # from the middle to an eye's centre
    eye_y: float = _between(-0.16, 0.06)
    eye_width: float = _between(0.12, 0.21)
    eye_height: float = _between(0.08, 0.18)
    eye_tilt: float = _between(-0.28, 0.28)
    iris: Colour = _near(_IRISES, 12)
    iris_size: float = _between(0.68, 1.0)  # share of the eye's height
    lid: float = _between(0.0, 0.42)  # share of the eye that the upper lid covers
    lashes: float = _between(0.0, 1.0)
    brow_height: float = _between(0.17, 0.31)  # above the eye's centre
    brow_length: float = _between(0.12, 0.22)
    brow_thickness: float = _between(0.015, 0.08)
    brow_arch: float = _between(0.0, 0.1)
    brow_tilt: float = _between(-0.07, 0.07)
    nose_length: float = _between(0.16, 0.42)
    nose_width: float = _between(0.07, 0.22)
    nose_bridge: float = _between(0.02, 0.08)
    nose_roundness: float = _between(0.0, 1.0)
    mouth_y: float = _between(0.5, 0.64)
    mouth_width: float = _between(0.16, 0.38)
    upper_lip: float = _between(0.02, 0.085)
    lower_lip: float = _between(0.03, 0.1)
    mouth_curve: float = _between(-0.35, 0.6)  # > 0: the corners point up at rest
    lips: Colour = _drawn(lambda d, t: mix(shade(t["skin"], 0.86), d.one_of(_LIPS), d.between(0.25, 0.9)))
    # hair behind the head and at its ends
    hair_below: Colour = _drawn(lambda d, t: shade(t["hair"], 0.72) if d.chance(0.6) else d.near(_HAIRS, 14))
    brows: Colour = _drawn(lambda d, t: mix(shade(t["hair"], 0.72), d.near(_HAIRS, 10), d.between(0.0, 0.5)))
    hair_volume: float = _between(0.05, 0.3)
    hairline: float = _between(-0.78, -0.36)  # y of the hairline in the middle of the forehead
    hairline_arch: float = _between(-0.1, 0.5)
    hair_part: float = _between(-0.5, 0.5)  # x of the parting
    hair_waves: float = _between(0.0, 0.09)
    hair_frequency: float = _between(3.0, 12.0)
    hair_phase: float = _between(0.0, 6.28)
    hair_length: float = _between(0.55, 1.5)  # y where long hair ends
    beard_style: str = _one_of("none", "none", "none", "none", "moustache", "goatee", "full", "stubble")
    beard_length: float = _between(0.0, 0.25)
    blush: float = _between(0.0, 0.45)
    freckles: Sequence[tuple[float, float]] = _drawn(
        lambda d, _: tuple((d.between(-0.5, 0.5), d.between(0.1, 0.4)) for _ in range(14 if d.chance(0.25) else 0))
    )
    mole: tuple[float, float] | None = _drawn(
        lambda d, _: (d.between(-0.5, 0.5), d.between(0.15, 0.75)) if d.chance(0.35) else None
    )
    scar: tuple[float, float, float] | None = _drawn(
        lambda d, _: (d.between(-0.5, 0.5), d.between(-0.4, 0.5), d.between(-1.5, 1.5)) if d.chance(0.15) else None
    )  # x, y, slope


@dataclass(frozen=True, slots=True)
class Conditions:
    """Properties of a single picture."""

    yaw: float = _bell(0.0, 0.17)
    pitch: float = _bell(0.0, 0.1)
    roll: float = _bell(0.0, 0.06)
    scale: float = _between(1.2, 1.36)  # head units from the picture's middle to its edge
    shift_x: float = _bell(0.0, 0.05)
    shift_y: float = _bell(0.06, 0.05)
    smile: float = _bell(0.25, 0.4)
    mouth_open: float = _drawn(lambda d, _: max(0.0, d.between(-0.12, 0.16)))
    eye_open: float = _drawn(lambda d, _: 0.12 if d.chance(0.05) else d.between(0.7, 1.12))
    gaze_x: float = _between(-0.35, 0.35)
    gaze_y: float = _between(-0.2, 0.2)
    brow_raise: float = _bell(0.0, 0.03)
    brow_frown: float = _bell(0.0, 0.03)
    background: Colour = _near(_CLOTHES, 40)
    background_accent: Colour = _near(_CLOTHES, 40)
    background_style: str = _one_of("plain", "disc", "split", "stripes")
    background_position: float = _between(-1.0, 1.0)
    clothes: Colour = _near(_CLOTHES, 25)
    collar: str = _one_of("round", "vee", "shirt", "scarf")
    accessory: Colour = _near(_CLOTHES, 25)
    glasses: str = _weighted(none=0.84, round=0.08, square=0.06, dark=0.02)
    glasses_size: float = _between(0.18, 0.25)
    hat: str = _weighted(none=0.95, cap=0.025, beanie=0.025)
    hand: str = _weighted(none=0.94, chin=0.04, cheek=0.02)
    hand_position: float = _between(-1.0, 1.0)
    mask: bool = _drawn(lambda d, _: d.chance(0.01))
    light_side: float = _between(-1.0, 1.0)  # -1 from the left … 1 from the right
    light_x: float = _bell(0.0, 0.15)  # brightness slope over the picture, per half width
    light_y: float = _bell(-0.04, 0.12)
    gain: tuple[float, float, float] = _drawn(lambda d, _: _gain(d))
    contrast: float = _between(0.85, 1.1)
    # radius in thousandths of the picture's width
    blur: float = _drawn(lambda d, _: d.between(2.0, 8.0) if d.chance(0.2) else 0.0)
    noise: float = _between(0.0, 7.0)  # standard deviation in grey levels
    noise_offset: int = _drawn(lambda d, _: int(d.between(0, 1 << 20)))
    quality: int = _drawn(lambda d, _: int(d.between(35, 96)))  # JPEG


@lru_cache(maxsize=4096)
def traits_of(identity: int) -> Traits:
    """Draw the traits of the identity with this index (>= 0)."""
    return _draw(Traits, KeyedRandom(identity, 1))


def conditions_of(identity: int, image: int) -> Conditions:
    """Draw the conditions of one picture (both indices >= 0)."""
    return _draw(Conditions, KeyedRandom(identity, image, 2))
