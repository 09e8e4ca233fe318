"""TOML in time linear in its length: tomllib's grows with the square of a key's depth, so that is counted first."""

import re
import tomllib
from typing import Any

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


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

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
