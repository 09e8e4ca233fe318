"""Fonts of the system: which are installed, the one that stands for each typeface, and the characters that it has.

Fonts are looked for in the system's folders and matplotlib's alone; a specification names a font and never a path.
"""

import importlib.util
import logging
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.errors import UsageError
from plsc.nearest import did_you_mean

_FOLDERS = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"))
_SUFFIXES = (".ttf", ".ttc", ".otf", ".otc")
_REGULAR_WEIGHT, _REGULAR_WIDTH = 400, 5  # of the table OS/2
PACKAGES = (
    "fonts-hanazono fonts-babelstone-han fonts-ipamj-mincho fonts-arphic-ukai fonts-arphic-uming fonts-wqy-zenhei "
    "fonts-horai-umefont fonts-noto-cjk"
)


@dataclass(frozen=True)
class Font:
    """A font file; of a collection, its first font.

    Attributes:
        path: the file.
        family: its name, as "Noto Sans CJK JP".
        oddity: how far it is from a regular style, by (slant, weight, width, length of the family's name).
    """

    path: Path
    family: str
    oddity: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.stem

    @property
    def typeface(self) -> str:
        """The family without the short words that tell of spacing, weight or region, as "Noto Sans CJK"."""
        return " ".join(word for word in self.family.split() if len(word) > 2) or self.family


@cache
def installed_fonts() -> tuple[Font, ...]:
    """Every font of the system that can be read, regular ones first; of files of one name, the first found."""
    found: dict[str, Font] = {}
    for path in _font_files():
        font = None if path.stem in found else _read(path)
        if font is not None:
            found[font.name] = font
    return tuple(sorted(found.values(), key=lambda font: (font.oddity, font.name)))


@cache
def typefaces() -> tuple[Font, ...]:
    """The most regular font of each typeface, by name."""
    chosen: dict[str, Font] = {}
    for font in installed_fonts():
        chosen.setdefault(font.typeface, font)
    return tuple(sorted(chosen.values(), key=lambda font: font.name))


def named_fonts(choice: str, spec: str) -> tuple[Font, ...]:
    """Return the fonts that ``choice`` names.

    Args:
        choice: "A+B", by a file's name without suffix or a family; "-A+B", every typeface's font but these; "" leaves
            none out.
        spec: named by errors.

    Raises:
        UsageError: there is no such font.
    """
    names = [name for name in choice.removeprefix("-").split("+") if choice]
    chosen = [_named(name, spec) for name in names]
    if choice and not choice.startswith("-"):
        return tuple(dict.fromkeys(chosen))
    return tuple(font for font in typefaces() if font not in chosen)


@cache
def characters_of(font: Font) -> NDArray[np.int64]:
    """The code points (n,) that ``font`` has a drawing of, in their order; none of a damaged font."""
    try:
        with _opened(font.path) as tables:
            codes: dict[int, str] = tables.getBestCmap() or {}
            if "loca" in tables:
                starts, number = np.asarray(tables["loca"].locations), tables.getReverseGlyphMap()
                blank = starts[1:] == starts[:-1]  # a glyph of no bytes
                codes = {code: glyph for code, glyph in codes.items() if not blank[number[glyph]]}
    except _damage():
        codes = {}
    return np.array(sorted(codes), dtype=np.int64)


def how_many_have(fonts: Iterable[Font]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the code points (n,) that any of ``fonts`` has, in their order, and how many have each (n,)."""
    codes = [np.empty(0, dtype=np.int64), *(characters_of(font) for font in fonts)]
    found, counts = np.unique(np.concatenate(codes), return_counts=True)
    return found, counts.astype(np.int64)


def _named(name: str, spec: str) -> Font:
    wanted = name.strip().casefold()
    for font in installed_fonts():
        if wanted in (font.name.casefold(), font.family.casefold(), font.typeface.casefold()):
            return font
    near = did_you_mean(name, [font.name for font in installed_fonts()])
    raise UsageError(f"{spec}: no font {name!r} is installed{near or f'; apt-get install {PACKAGES}'}")


def _font_files() -> list[Path]:
    """Files of fonts in their order, each once though links lead to it, and none outside of the folders."""
    folders = [folder for folder in _FOLDERS if folder.is_dir()]
    found = {path.resolve() for folder in folders for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES}
    inside = sorted(path for path in found if path.is_file() and any(path.is_relative_to(top) for top in folders))
    matplotlib = importlib.util.find_spec("matplotlib")
    places = (matplotlib.submodule_search_locations or []) if matplotlib else []
    # Its other fonts are TeX's, whose code points are not Unicode's.
    return inside + [path for place in places for path in sorted(Path(place).glob("mpl-data/fonts/ttf/DejaVu*.ttf"))]


def _read(path: Path) -> Font | None:
    """The font of a file; None of a damaged one, or one without outlines."""
    try:
        with _opened(path) as tables:
            names, style = tables["name"], tables["OS/2"]
            family = names.getDebugName(16) or names.getDebugName(1) or path.stem
            weight, width = abs(style.usWeightClass - _REGULAR_WEIGHT), abs(style.usWidthClass - _REGULAR_WIDTH)
            has_outlines = any(outlines in tables for outlines in ("glyf", "CFF ", "CFF2"))
    except _damage():
        return None
    return Font(path, family, (style.fsSelection & 1, weight, width, len(family))) if has_outlines else None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    # The file is opened here: fontTools leaves one open that it cannot read.
    with path.open("rb") as file, _font_tools().TTFont(file, fontNumber=0, lazy=True) as tables:
        yield tables


def _damage() -> tuple[type[Exception], ...]:
    """What fontTools raises of a damaged font."""
    return (_font_tools().TTLibError, LookupError, OSError, ValueError, AssertionError, struct.error)


def _font_tools() -> Any:
    try:
        import fontTools.ttLib
    except ImportError:
        raise UsageError("glyphs: finds characters of fonts by a package; pip install fonttools") from None
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns of dates, which nothing here reads
    return fontTools.ttLib
