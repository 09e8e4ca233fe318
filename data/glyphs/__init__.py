"""Built-in data: characters drawn from the system's fonts, a real classification of up to 93,000 classes.

`glyphs:han:least_fonts=3:variants=4` are the Han characters that three of the installed typefaces have, each drawn four
times by each of these. Picture v of a character by a font is a pure function of (character, font, v, size), whichever
process draws it. fonts.py finds the fonts; unihan.py has further labels of a character; the drawing is here.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, cos, radians, sin
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.data.avatars.traits import KeyedRandom
from plsc.data.dataset import ImageDataset, PackedStringColumn
from plsc.data.glyphs.fonts import (
    Font,
    characters_of,
    how_many_have,
    missing_packages,
    named_fonts,
    typefaces,
)
from plsc.data.glyphs.unihan import CHARACTER, label_columns, parse_labels
from plsc.data.identity import file_stamps
from plsc.data.transforms import sample_keys
from plsc.errors import DataError, UsageError
from plsc.models.preprocessing import ImageSize, height_and_width
from plsc.nearest import did_you_mean

if TYPE_CHECKING:
    from PIL import ImageFont

DEFAULT_SIZE = 64
MIN_SIZE, MAX_SIZE = 16, 512
MAX_IMAGES = 1_000_000_000
SEED = 20260315
UNSEEN_SHARE = 10  # one character in so many is unseen
BLOCKS = {
    # CJK Unified Ideographs and their extensions A to J.
    "han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x2A6DF), (0x2A700, 0x2EE5D), (0x30000, 0x33479)),
    "kana": ((0x3041, 0x3096), (0x30A1, 0x30FA)),
}
FORM = (
    "glyphs:BLOCK[:fonts=A+B|-A+B][:least_fonts=N][:characters=N][:variants=N][:part=seen|unseen]"
    "[:labels=character+radical+strokes+reading]"
)
_KEYS = tuple(re.findall(r":(\w+)=", FORM))
_RANGE = re.compile(r"([0-9A-Fa-f]{1,6})(?:-([0-9A-Fa-f]{1,6}))?", re.ASCII)
_COUNT = re.compile(r"[1-9]\d{0,8}", re.ASCII)
_OVERSAMPLING = 2
_LARGEST_GLYPH = 20  # sides of a picture; in Debian's Han fonts and DejaVu's the widest have 2
_AMOUNTS = np.arange(256) / 255


@dataclass(frozen=True)
class GlyphSpec:
    """What a specification names.

    Attributes:
        text: the specification.
        ranges: first and last code points.
        fonts: as :func:`plsc.data.glyphs.fonts.named_fonts` takes it.
        least_fonts: number of installed typefaces that must have a character, whichever of them draw; 0: one of those
            that draw.
        characters: number of characters to take, the first of a seeded order; 0: all.
        variants: pictures of a character by each font.
        part: "seen", nine characters in ten; "unseen", the others; "": all.
        labels: names of the labels of a picture, as :func:`plsc.data.glyphs.unihan.parse_labels` has them.
    """

    text: str
    ranges: tuple[tuple[int, int], ...]
    fonts: str
    least_fonts: int
    characters: int
    variants: int
    part: str
    labels: tuple[str, ...]


def parse_spec(spec: str) -> GlyphSpec:
    """Parse :data:`FORM`; UsageError where ``spec`` is something else."""
    kind, _, rest = spec.partition(":")
    block, *settings = rest.split(":")
    if kind != "glyphs" or not block:
        raise UsageError(f"{spec!r} is not {FORM}, as in glyphs:han:least_fonts=3:variants=4")
    given: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if name not in _KEYS:
            near = did_you_mean(name, _KEYS) or f"; the form is {FORM}"
            raise UsageError(f"{spec}: there is no key {name!r}{near}")
        if not equals or not value or name in given:
            raise UsageError(f"{spec}: {name} takes one value, once; the form is {FORM}")
        given[name] = value
    counts = {name: _count(given, name, spec) for name in ("least_fonts", "characters", "variants")}
    part = given.get("part", "")
    if part not in ("", "seen", "unseen"):
        raise UsageError(f"{spec}: part is seen or unseen, not {part!r}{did_you_mean(part, ('seen', 'unseen'))}")
    return GlyphSpec(
        spec,
        tuple(code_range for name in block.split("+") for code_range in _ranges(name, spec)),
        given.get("fonts", ""),
        counts["least_fonts"],
        counts["characters"],
        counts["variants"] or 1,
        part,
        parse_labels(given.get("labels", CHARACTER), spec),
    )


def _count(given: dict[str, str], name: str, spec: str) -> int:
    if name in given and _COUNT.fullmatch(given[name]) is None:
        raise UsageError(f"{spec}: {name} takes a number of at least 1, not {given[name]!r}")
    return int(given.get(name, 0))


def _ranges(name: str, spec: str) -> tuple[tuple[int, int], ...]:
    if name in BLOCKS:
        return BLOCKS[name]
    match = _RANGE.fullmatch(name)
    if match is None:
        near = did_you_mean(name, tuple(BLOCKS))
        raise UsageError(f"{spec}: a block is {', '.join(BLOCKS)} or a range as 4E00-9FFF, not {name!r}{near}")
    first, last = (int(code or match[1], 16) for code in match.groups())
    return ((first, last),)


def open_glyphs(spec: str, image_size: ImageSize | None = DEFAULT_SIZE) -> GlyphDataset:
    """Open the data set that `spec` describes (see :data:`FORM`); `image_size` None is 64."""
    return GlyphDataset(parse_spec(spec), image_size=DEFAULT_SIZE if image_size is None else image_size)


class GlyphDataset(ImageDataset):
    """Pictures of characters, in the order of their code points, then of the fonts' names, then of their numbers.

    ``labels`` are int64 (N,), the characters' classes; with K labels a picture (N, K), classes of one joint space (the
    characters' first, then each label's in the order of ``labels=``), -1 where a character has none.

    Raises:
        UsageError: a font is not installed, no character is left, there are more than 10⁹ pictures, or the size is out
            of range.
    """

    def __init__(self, spec: GlyphSpec, *, image_size: ImageSize = DEFAULT_SIZE) -> None:
        sides = height_and_width(image_size)
        if not MIN_SIZE <= min(sides) <= max(sides) <= MAX_SIZE:
            raise UsageError(f"{spec.text}: image_size {image_size} is not between {MIN_SIZE} and {MAX_SIZE}")
        fonts = named_fonts(spec.fonts, spec.text)
        codes = _selected(spec, fonts)
        has = np.stack([np.isin(codes, characters_of(font)) for font in fonts], axis=1) if fonts else codes[:, None] < 0
        codes, has = codes[has.any(axis=1)], has[has.any(axis=1)]
        if not len(codes):
            packages = missing_packages()
            needed = f"; {packages} brings Han fonts" if packages else ""
            raise UsageError(f"{spec.text}: no character is left that so many installed fonts have{needed}")
        characters, drawn_by = np.nonzero(has)
        if len(characters) * spec.variants > MAX_IMAGES:
            raise UsageError(f"{spec.text}: at most {MAX_IMAGES:,} pictures are allowed; use fewer variants")
        columns, further = label_columns(codes, spec.labels[1:])
        classes = np.concatenate([np.arange(len(codes))[:, None], columns], axis=1)
        labels = classes[characters].repeat(spec.variants, axis=0)
        names = PackedStringColumn.of([*(f"U+{code:04X} {chr(code)}" for code in codes.tolist()), *further])
        super().__init__(spec.text, labels if len(spec.labels) > 1 else labels[:, 0], names, image_size)
        self.fonts, self.variants = fonts, spec.variants
        self._codes, self._drawn_by = codes[characters], drawn_by.astype(np.int32)

    def picture(self, index: int) -> torch.Tensor:
        """Draw picture `index`: a square with the longer side of ``image_size``, grey in three channels."""
        code, font, variant = self._drawing(index)
        pixels = draw_glyph(font.path, code, variant, max(height_and_width(self.image_size or DEFAULT_SIZE)))
        return torch.from_numpy(np.repeat(pixels[None], 3, axis=0))

    def key(self, index: int) -> str:
        """Return `U+CODE/FONT/VARIANT`."""
        code, font, variant = self._drawing(index)
        return f"U+{code:04X}/{font.name}/{variant}"

    def stamps(self, start: int, stop: int) -> bytes:
        """Return the sizes and times of the fonts' files."""
        return file_stamps([str(font.path) for font in self.fonts])

    def _drawing(self, index: int) -> tuple[int, Font, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source} has no picture {index}; there are {len(self)}")
        pair, variant = divmod(int(index), self.variants)
        return int(self._codes[pair]), self.fonts[self._drawn_by[pair]], variant


def _selected(spec: GlyphSpec, fonts: tuple[Font, ...]) -> NDArray[np.int64]:
    """Code points (C,) of ``spec``, in their order. Each has its part and its place whatever fonts there are."""
    codes, counts = how_many_have(typefaces() if spec.least_fonts else fonts)
    inside = np.zeros(len(codes), dtype=np.bool_)
    for first, last in spec.ranges:
        inside |= (first <= codes) & (codes <= last)
    codes = codes[inside & (counts >= spec.least_fonts)]
    if spec.part:
        unseen = sample_keys(codes, seed=SEED, epoch=0) % np.uint64(UNSEEN_SHARE) == 0
        codes = codes[unseen == (spec.part == "unseen")]
    if spec.characters:
        order = np.argsort(sample_keys(codes, seed=SEED, epoch=1), kind="stable")
        codes = np.sort(codes[order[: spec.characters]])
    return codes


def draw_glyph(font: Path, code: int, variant: int, side: int) -> NDArray[np.uint8]:
    """Draw one character, uint8 grey (side, side), dark on light: a pure function of its arguments and the font's file.

    The square of the font's em takes most of the picture, so that small letters stay small; the glyph lies in the
    middle, and is scaled down where it would not fit.

    Raises:
        DataError: the font cannot be read, or has no drawing of the character.
    """
    from PIL import Image, ImageDraw, ImageFilter

    random = KeyedRandom(SEED, zlib.crc32(font.stem.encode()), code, variant)
    blur = _OVERSAMPLING * random.between(0, 0.012) * side
    edge = ceil(blur) + 2  # of paper, into which the outermost strokes fade
    try:
        face = _face(str(font), round(0.86 * side * _OVERSAMPLING))
        left, top, right, bottom = (int(limit) for limit in face.getbbox(chr(code), anchor="ls"))
        if right <= left or bottom <= top:
            raise DataError(f"{font} has no drawing of U+{code:04X}; leave the font out")
        if max(right - left, bottom - top) > _LARGEST_GLYPH * side * _OVERSAMPLING:
            raise DataError(f"{font} draws U+{code:04X} outside of its em; leave the font out")
        glyph = Image.new("L", (right - left + 2 * edge, bottom - top + 2 * edge))
        ImageDraw.Draw(glyph).text((edge - left, edge - top), chr(code), 255, font=face, anchor="ls")
    except OSError as error:
        raise DataError(f"{font} cannot draw U+{code:04X}: {error}; leave the font out") from None
    glyph = glyph.filter(ImageFilter.BoxBlur(blur + (_OVERSAMPLING - 1) / 2))  # at least over a pixel of the picture
    back = _distortion(random, glyph.size, side)
    ink = np.asarray(glyph.transform((side, side), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR))
    return np.take(_levels(random), ink)


@lru_cache(maxsize=64)
def _face(font: str, size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    # Raqm would join letters and reorder them.
    return ImageFont.truetype(font, size, layout_engine=ImageFont.Layout.BASIC)


def _distortion(random: KeyedRandom, glyph: tuple[int, int], side: int) -> tuple[float, ...]:
    """Draw a rotation, shear, scale and shift; return the map from the picture (side, side) back to the ``glyph``."""
    angle, shear = radians(random.bell(0, 7)), random.bell(0, 0.14)
    across, down = (random.between(0.86, 1.06) / _OVERSAMPLING for _ in range(2))
    turn, lean = cos(angle), sin(angle)
    # [[a, b], [c, d]]: the scales, then the shear, then the rotation. numpy would take longer than all the rest.
    a, b, c, d = turn * across, (turn * shear - lean) * down, lean * across, (lean * shear + turn) * down
    width, height = abs(a) * glyph[0] + abs(b) * glyph[1], abs(c) * glyph[0] + abs(d) * glyph[1]
    shrink = min(1.0, side / max(width, height))
    x, y = (
        side / 2 + min((side - shrink * extent) / 2, 0.05 * side) * random.between(-1, 1) for extent in (width, height)
    )
    divisor = shrink * (a * d - b * c)
    a, b, c, d = d / divisor, -b / divisor, -c / divisor, a / divisor
    return (a, b, glyph[0] / 2 - a * x - b * y, c, d, glyph[1] / 2 - c * x - d * y)


def _levels(random: KeyedRandom) -> NDArray[np.uint8]:
    """Draw the grey (256,) of each amount of ink: levels of paper and ink, and how heavy the strokes are."""
    paper, ink, weight = random.between(190, 255), random.between(0, 90), random.between(0.6, 1.5)
    return np.round(paper + (ink - paper) * _AMOUNTS**weight).astype(np.uint8)
