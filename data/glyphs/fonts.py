"""Fonts of the system: which are installed, the one that stands for each typeface, and the characters that it has.

Fonts are looked for in the system's folders and matplotlib's alone; a specification names a font and never a path.
"""

import importlib.util
import logging
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
# Words at the end of a family's name that tell a cut of a typeface from the others.
_is_cut = re.compile(
    r"thin|hairline|((extra|ultra|demi|semi)?(light|bold|condensed|expanded))|book|regular|normal|medium|heavy|black|narrow"
    r"|italic|oblique",
    re.IGNORECASE,
).fullmatch
_MOST_FACES = 64  # of a collection that are looked at
_LISTED = 8  # fonts in an error
_CODE_POINTS = 0x110000
# Debian's packages of Han fonts: a font of each, and megabytes to download.
PACKAGES = {
    "fonts-hanazono": ("HanaMinA", 22.3),
    "fonts-babelstone-han": ("BabelStoneHan", 11.3),
    "fonts-ipamj-mincho": ("ipamjm", 25.2),
    "fonts-arphic-ukai": ("ukai", 8.4),
    "fonts-arphic-uming": ("uming", 7.9),
    "fonts-wqy-zenhei": ("wqy-zenhei", 7.5),
    "fonts-horai-umefont": ("ume-tgo4", 6.9),
    "fonts-noto-cjk": ("NotoSansCJK-Regular", 56.5),
}
_KNOWN = {font.casefold() for font, _ in PACKAGES.values()} | {"hanaminb", "ume-tmo3", "notoserifcjk-regular"}


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
        """The family without words that tell of spacing, weight or region, as "Noto Sans CJK"."""
        return _typeface(self.family)


def _typeface(family: str) -> str:
    words = family.split()
    while len(words) > 1 and _is_cut(words[-1]):
        words.pop()
    return " ".join(word for word in words if len(word) > 2) or family


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
        choice: "A+B", by a file's name without suffix or a family; "-A+B", the fonts of all typefaces but those that
            these, or any font of a collection's, are cuts of; "" leaves none out.
        spec: named by errors.

    Raises:
        UsageError: there is no such font.
    """
    names = [name for name in choice.removeprefix("-").split("+") if choice]
    if choice and not choice.startswith("-"):
        return tuple(dict.fromkeys(_named(name, spec) for name in names))
    held_out = {typeface for name in names for typeface in _typefaces_named(name, spec)}
    return tuple(font for font in typefaces() if held_out.isdisjoint(map(_typeface, _families(font))))


def missing_packages() -> str:
    """What brings the Han fonts that are not installed: "apt-get install A B (34 MB)"; "" where all are."""
    installed = {font.name for font in installed_fonts()}
    missing = {name: size for name, (font, size) in PACKAGES.items() if font not in installed}
    return f"apt-get install {' '.join(missing)} ({sum(missing.values()):.0f} MB)" if missing else ""


@cache
def characters_of(font: Font) -> NDArray[np.int64]:
    """The code points (n,) that ``font`` has a drawing of, in their order; none of a damaged font."""
    try:
        with _opened(font.path) as tables:
            if _lists_too_many(tables.reader["cmap"]):
                raise ValueError("a table of characters that repeats itself")
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
    raise _not_installed(name, spec)


def _typefaces_named(name: str, spec: str) -> set[str]:
    """The typefaces of the fonts of a name, also of one inside of a collection."""
    wanted, found = name.strip().casefold(), set[str]()
    for font in installed_fonts():
        families = _families(font)
        typefaces_in = set(map(_typeface, families))
        if wanted in map(str.casefold, (font.name, *families, *typefaces_in)):
            found |= typefaces_in
    if not found:
        raise _not_installed(name, spec)
    return found


def _not_installed(name: str, spec: str) -> UsageError:
    packages = missing_packages()
    known = {font.name: (font.name, font.family, font.typeface) for font in installed_fonts()}
    near = "" if packages and name.strip().casefold() in _KNOWN else did_you_mean(name, known)
    some = ", ".join(font.name for font in typefaces()[:_LISTED])
    hint = near or f"; {packages or f'there are {some}, …'}"
    return UsageError(f"{spec}: no font {name!r} is installed{hint}")


@cache
def _families(font: Font) -> tuple[str, ...]:
    """The families of the fonts in a file: one, or those of a collection."""
    with font.path.open("rb") as file:
        is_collection = file.read(4) == b"ttcf"
    families = [font.family]
    with suppress(*_damage()):  # there are no more
        for number in range(1, _MOST_FACES if is_collection else 1):
            with _opened(font.path, number) as tables:
                families.append(_family(tables) or font.family)
    return tuple(families)


def _lists_too_many(cmap: bytes) -> bool:
    """Whether a table of characters lists more code points than there are: fontTools makes an object of each."""
    (subtables,) = struct.unpack_from(">H", cmap, 2)
    for place in range(8, 8 + 8 * subtables, 8):
        (start,) = struct.unpack_from(">I", cmap, place)
        (form,) = struct.unpack_from(">H", cmap, start)
        if form == 4:
            segments = struct.unpack_from(">H", cmap, start + 6)[0] // 2
            first, last = (np.frombuffer(cmap, ">u2", segments, start + at) for at in (16 + 2 * segments, 14))
        elif form in (12, 13):
            (groups,) = struct.unpack_from(">I", cmap, start + 12)
            first, last = np.frombuffer(cmap, ">u4", 3 * groups, start + 16).reshape(-1, 3).T[:2]
        else:
            continue
        if (last.astype(np.int64) - first + 1).clip(0).sum() > _CODE_POINTS:
            return True
    return False


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
            style = tables["OS/2"]
            family = _family(tables) or path.stem
            weight, width = abs(style.usWeightClass - _REGULAR_WEIGHT), abs(style.usWidthClass - _REGULAR_WIDTH)
            has_outlines = any(outlines in tables for outlines in ("glyf", "CFF ", "CFF2"))
    except _damage():
        return None
    return Font(path, family, (style.fsSelection & 1, weight, width, len(family))) if has_outlines else None


def _family(tables: Any) -> str | None:
    names = tables["name"]
    family: str | None = names.getDebugName(16) or names.getDebugName(1)
    return family


@contextmanager
def _opened(path: Path, number: int = 0) -> Iterator[Any]:
    # The file is opened here: fontTools leaves one open that it cannot read.
    with path.open("rb") as file, _font_tools().TTFont(file, fontNumber=number, lazy=True) as tables:
        yield tables


def _damage() -> tuple[type[Exception], ...]:
    """What fontTools raises of a damaged font."""
    return (_font_tools().TTLibError, LookupError, OSError, ValueError, MemoryError, AssertionError, struct.error)


def _font_tools() -> Any:
    try:
        import fontTools.ttLib
    except ImportError:
        raise UsageError("glyphs: finds characters of fonts by a package; pip install fonttools") from None
    logging.getLogger("fontTools").setLevel(logging.CRITICAL)  # it tells of each damaged name; they are passed over
    return fontTools.ttLib
