"""Amounts of memory as people write them: 4GB is 4·10^9 bytes, 4GiB is 4·2^30."""

import re
from collections.abc import Mapping

from plsc.errors import UsageError

UNITS: Mapping[str, float] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:e\+?\d+)?)\s*([a-z]*)\s*")


def parse_memory(
    text: str,
    option: str,
    *,
    units: Mapping[str, float] = UNITS,
    examples: str = "4GB, 500MiB or 4e9 (bytes)",
) -> int:
    """Read an amount of memory.

    Args:
        text: a number with or without a unit, in any case: ``4GB``, ``1.5 GiB``, ``4e9``.
        option: the option that it was given for, named in errors.
        units: bytes of each unit in lower case, where they are not the usual ones.
        examples: of what can be written, for the error.

    Returns:
        Bytes.

    Raises:
        UsageError: anything else, or zero.
    """
    match = _AMOUNT.fullmatch(text.lower())
    if not match or match[2] not in units or float(match[1]) <= 0:
        raise UsageError(f"{option} {text!r} is no amount of memory; write {examples}")
    return int(float(match[1]) * units[match[2]])
