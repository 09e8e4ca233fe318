"""Sealed manifests: JSON that carries the hash of its own content, so that a flipped bit in it is noticed
too.

The seal is the SHA-256 of the manifest without its ``seal`` key, as JSON with sorted keys and no spaces.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from plsc.errors import DataError, IntegrityError
from plsc.files import MANIFEST, atomic_write, read_json

Manifest = dict[str, Any]


def digest(content: Manifest) -> str:
    """The SHA-256 of ``content`` in its canonical JSON form, in hexadecimal."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(folder: Path, content: Manifest) -> None:
    """Write ``folder/manifest.json`` with its seal, atomically."""
    with atomic_write(folder / MANIFEST) as tmp_path:
        tmp_path.write_text(_text({**content, "seal": digest(content)}), encoding="utf-8")


def read_manifest(folder: Path, format_name: str, version: int) -> Manifest:
    """Read ``folder/manifest.json`` without its seal.

    Raises :class:`DataError` if it is missing, of another format or of another version, and
    :class:`IntegrityError` if it is not, byte for byte, what was sealed.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} is no {format_name}: it has no {MANIFEST}")
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except ValueError as error:
        raise IntegrityError(f"{path} is corrupt: {error}; use another copy") from None
    if not isinstance(content, dict) or "seal" not in content or "format" not in content:
        raise DataError(f"{folder} is no {format_name}: its {MANIFEST} describes something else")
    sealed = {name: value for name, value in content.items() if name != "seal"}
    if content["seal"] != digest(sealed) or text != _text(content):
        raise IntegrityError(f"{path} is corrupt (its content is not what was sealed); use another copy")
    if sealed["format"] != format_name:
        raise DataError(f"{folder} is no {format_name}: it is a {sealed['format']}")
    if sealed["version"] != version:
        raise DataError(f"{folder} is of version {sealed['version']}; this plsc reads a {format_name} of {version}")
    return sealed


def holds_manifest(folder: Path, format_name: str) -> bool:
    """Whether ``folder`` says that it is a ``format_name``, whatever its state."""
    try:
        content = read_json(folder / MANIFEST)
    except DataError:
        return False
    return isinstance(content, dict) and content.get("format") == format_name


def _text(content: Manifest) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
