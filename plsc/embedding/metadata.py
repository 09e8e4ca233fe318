"""Metadata of rows: a JSON object of each, in a string column of a folder, which is there where any row has some."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from plsc.data.dataset import ComputedStrings
from plsc.embedding.columns import open_strings, save_strings, string_files
from plsc.errors import IntegrityError

METADATA_FILES = frozenset(string_files("metadata"))

Metadata = Mapping[str, Any]


def save_metadata(folder: Path, rows: Iterable[Metadata]) -> list[str]:
    """Write the column; returns the names of its files."""
    save_strings(folder, "metadata", (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows))
    return sorted(METADATA_FILES)


def open_metadata(file: Callable[[str], BinaryIO], described: Mapping[str, Any], count: int) -> Sequence[str]:
    """Open the column of ``count`` rows, which have none where its files are not among those ``described``."""
    return (
        open_strings(file, "metadata", count) if described.keys() >= METADATA_FILES else ComputedStrings(count, _none)
    )


def read_metadata(column: Sequence[str], row: int, folder: Path) -> dict[str, Any]:
    """The metadata of a row of the column in ``folder``; IntegrityError where it is no JSON object."""
    try:
        found = json.loads(column[row])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise IntegrityError(f"{folder}: the metadata of row {row} is corrupt; use another copy")
    return found


def _none(row: int) -> str:
    return "{}"
