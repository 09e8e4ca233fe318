"""Labels of Han characters from Unihan, the Unicode Character Database's part on them (package unicode-data).

Properties are described in Unicode Standard Annex 38: https://www.unicode.org/reports/tr38/
"""

import bz2
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plsc.errors import UsageError
from plsc.nearest import did_you_mean

CHARACTER = "character"
_FOLDER = Path("/usr/share/unicode")
_FILES = ("DictionaryLikeData", "IRGSources", "RadicalStrokeCounts", "Readings")
_TONES = "\u0300\u0301\u0304\u030c"  # of Pinyin; the two dots of ü stay


def _without_tone(reading: str) -> str:
    letters = unicodedata.normalize("NFD", reading)
    return unicodedata.normalize("NFC", "".join(letter for letter in letters if letter not in _TONES))


def _radical(value: str) -> str:
    """The radical's number, of "9.5" or, where its simplified form is meant, "9'.5"."""
    return value.partition(".")[0].rstrip("'")


# By the label's name: Unihan's property, and what its first value says.
LABELS: dict[str, tuple[str, Callable[[str], str]]] = {
    "radical": ("kRSUnicode", _radical),
    "strokes": ("kTotalStrokes", str),
    "reading": ("kMandarin", _without_tone),
    "on": ("kJapaneseOn", str.lower),
}


def parse_labels(text: str, spec: str) -> tuple[str, ...]:
    """Parse "character+radical+strokes" into its names.

    Raises:
        UsageError: a name is unknown, twice there, or the first is not "character".
    """
    names = tuple(text.split("+"))
    for name in names:
        if name not in (CHARACTER, *LABELS):
            near = did_you_mean(name, (CHARACTER, *LABELS))
            raise UsageError(f"{spec}: labels are {', '.join((CHARACTER, *LABELS))}, not {name!r}{near}")
    if names[0] != CHARACTER or len(set(names)) < len(names):
        raise UsageError(f"{spec}: labels begin with {CHARACTER}, and each is there once")
    return names


def label_columns(codes: NDArray[np.int64], labels: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return classes of characters by ``labels``, numbered after the characters' own.

    Args:
        codes: code points (C,), whose own classes are 0 … C-1.
        labels: names of :data:`LABELS`.

    Returns:
        int64 (C, len(labels)), -1 where Unihan says nothing, and the names of the classes from C on: of each label the
        values that occur, in their order.

    Raises:
        UsageError: Unihan is not installed.
    """
    columns, names = [np.empty((len(codes), 0), dtype=np.int64)], list[str]()
    for label in labels:
        name, first_value = LABELS[label]
        said = _unihan()[name]
        values = [first_value(said[code].split()[0]) if code in said else "" for code in codes.tolist()]
        known = sorted({value for value in values if value}, key=lambda value: (len(value) * value.isdigit(), value))
        number = {value: len(codes) + len(names) + index for index, value in enumerate(known)}
        columns.append(np.array([[number.get(value, -1)] for value in values], dtype=np.int64))
        names += [f"{label} {value}" for value in known]
    return np.concatenate(columns, axis=1), names


@cache
def _unihan() -> dict[str, dict[int, str]]:
    """The values of the properties of :data:`LABELS`, by code point; which file holds one differs between versions."""
    found: dict[str, dict[int, str]] = {name: {} for name, _ in LABELS.values()}
    for path in (path for part in _FILES for path in sorted(_FOLDER.glob(f"Unihan_{part}.txt*"))):
        with bz2.open(path, "rt", encoding="utf-8") if path.suffix == ".bz2" else path.open(encoding="utf-8") as lines:
            for line in lines:
                code, _, rest = line.partition("\t")
                name, _, value = rest.partition("\t")
                if name in found:
                    found[name][int(code.removeprefix("U+"), 16)] = value
    if not all(found.values()):
        raise UsageError(f"{_FOLDER} holds no whole Unihan; apt-get install unicode-data brings it")
    return found
