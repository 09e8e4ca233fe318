"""Text files from elsewhere: no line and no file is read that is longer than what its form has.

A file without ends of lines would otherwise come into memory whole, as text of up to four bytes for each of its own.
"""

import io
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import DataError
from plsc.regular_files import open_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST_LINE = 1 << 16  # bytes; a path has up to 4,096
DEEPEST_KEY = 8  # parts: a.b.c has three

# Strings and comments, in which a dot is none of a key's, as tomllib ends them; those that the text ends within end
# there. All repeats are possessive: each letter is looked at once.
_PIECE = re.compile(
    r"""(?P<skipped>\#[^\n]*+
        |\"{3}(?:[^"\\]|\\.|"(?!""))*+"{0,5}
        |'{3}(?:[^']|'(?!''))*+'{0,5}
        |"(?:[^"\\\n]|\\.)*+"?
        |'[^'\n]*+'?)
      |(?P<dot>\.)
      |[=,\[\]{}\n]   # what no key goes on behind""",
    re.VERBOSE | re.DOTALL,
)

_INTEGERS_AT_ONCE = 1 << 24  # bytes of their text
_LONGEST_INTEGERS = 1 << 10  # bytes of a line of integers


def text_lines(path: Path, errors: str = "strict") -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line, without its end; a byte order mark at the beginning is left out.

    Args:
        path: the file.
        errors: how bytes that are not UTF-8 are decoded, as for :meth:`bytes.decode`.

    Raises:
        DataError: a line is longer than :data:`LONGEST_LINE` bytes, or no UTF-8; it is no regular file.
    """
    with open_regular(path) as file:
        number = 0
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise DataError(f"{path} line {number} has more than {LONGEST_LINE:,} bytes; it is no list")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8", errors).rstrip("\r\n")
            except UnicodeDecodeError:
                raise not_utf8(path, number) from None


def not_utf8(path: Path, number: int) -> DataError:
    """The error about line ``number`` of ``path``."""
    return DataError(f"{path} line {number} is not UTF-8 text; save it as UTF-8")


def read_text(path: Path, largest: int) -> str:
    """Read a file of UTF-8 whole.

    Raises:
        DataError: it has more than ``largest`` bytes, is a pipe or a device, or no UTF-8.
        OSError: it is missing, or cannot be read.
    """
    try:
        with io.TextIOWrapper(open_regular(path, largest=largest), encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None


def read_integers(path: Path, columns: int) -> "NDArray[np.int64]":
    """Read lines of ``columns`` integers, separated by blanks or tabs, as int64 (lines, columns).

    What 64 bits do not hold becomes the largest or least number that they do.

    Raises:
        DataError: the file is empty, or a line holds anything else.
    """
    import numpy as np  # here: commands read text before they need it

    parts: list[NDArray[np.int64]] = []
    with open_regular(path) as file:
        rest = b""
        while block := file.read(_INTEGERS_AT_ONCE):
            whole, end, rest = (rest + block).rpartition(b"\n")
            if len(rest) > _LONGEST_INTEGERS or (not end and len(block) == _INTEGERS_AT_ONCE):
                raise _not_integers(path, columns)
            parts.append(_integers(whole, columns, path))
        parts.append(_integers(rest, columns, path))
    numbers = np.concatenate(parts)
    if not len(numbers):
        raise _not_integers(path, columns)
    return numbers


def _integers(text: bytes, columns: int, path: Path) -> "NDArray[np.int64]":
    """Parse whole lines; numpy's own reader of tables takes ten times as long."""
    import numpy as np

    if not text.strip():
        return np.empty((0, columns), dtype=np.int64)
    lines = sum(1 for line in text.split(b"\n") if line.strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            numbers: NDArray[np.int64] = np.fromstring(text.decode("ascii"), dtype=np.int64, sep=" ")
    except (ValueError, DeprecationWarning):
        raise _not_integers(path, columns) from None
    if len(numbers) != lines * columns:
        raise _not_integers(path, columns)
    return numbers.reshape(-1, columns)


def _not_integers(path: Path, columns: int) -> DataError:
    return DataError(f"{path} is damaged: each line has to hold {columns} whole numbers")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML in linear time: tomllib's grows with the square of a key's depth, so that is counted first.

    Raises:
        ValueError: it is none, or a key has more than :data:`DEEPEST_KEY` parts.
        RecursionError: its values lie too deep in each other.
    """
    dots = 0
    for piece in _PIECE.finditer(text):
        if piece["dot"]:
            dots += 1
            if dots == DEEPEST_KEY:
                raise ValueError(f"a key has more than {DEEPEST_KEY} parts")
        elif piece["skipped"] is None:
            dots = 0
    return tomllib.loads(text)
