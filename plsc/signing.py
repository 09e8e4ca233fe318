"""Signatures: who made a checkpoint, an embedding set, an index or an export, by ed25519 (RFC 8032).

A manifest's hashes tell damage, and anybody can write them anew. A signature tells who wrote them. It stands beside
what it signs: ``manifest.json.sig`` beside a folder's manifest, which holds the hash of every other file, and
``FILE.sig`` beside a single file. Both are JSON::

    {"format": "plsc signature", "version": 1, "key": KEY_ID, "signature": BASE64}

What is signed is the line ``plsc signature 1`` and the canonical JSON (sorted keys, no spaces) of the manifest, or of
``{"bytes", "sha256"}`` of the file. Keys are PEM files, as ``openssl genpkey -algorithm ed25519`` writes them.
"""

import base64
import binascii
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import MANIFEST, canonical_json, describe_files, manifest_value, read_json, write_json
from plsc.progress import note

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = "plsc signature"
VERSION = 1
SUFFIX = ".sig"
VERIFY_KEY = "PLSC_VERIFY_KEY"  # of the environment: the file of the public key that everything read must be signed by
_LARGEST_KEY = 1 << 16


def load_private_key(path: Path) -> "Ed25519PrivateKey":
    """Read a private key, and warn on standard error of one that others may read.

    Raises:
        UsageError: there is no such file, it is no ed25519 key in PEM, or the package cryptography is missing.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _key_bytes(path)
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError):  # TypeError: it is encrypted
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is no private key of ed25519 without a password; openssl genpkey -algorithm ed25519")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        note(f"plsc: warning: others may read the key {path} (mode {mode:04o}): chmod 600 {path}")
    return key


def load_public_key(path: Path) -> "Ed25519PublicKey":
    """Read a public key; raises as :func:`load_private_key`."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    content = _key_bytes(path)
    try:
        key = load_pem_public_key(content)
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is no public key of ed25519; openssl pkey -in KEY -pubout -out {path}")
    return key


def sign(path: Path, key: "Ed25519PrivateKey") -> Path:
    """Sign a folder by its manifest, or a file; returns the signature's path. Whether all is sound is the caller's."""
    signature = key.sign(_signed_bytes(path))
    target = signature_path(path)
    content = {"format": FORMAT, "version": VERSION, "key": _key_id(key.public_key())}
    write_json(target, {**content, "signature": base64.b64encode(signature).decode()})
    return target


def verify_signature(path: Path, key: "Ed25519PublicKey") -> None:
    """Raise :class:`IntegrityError` unless the folder or file ``path`` is signed by ``key``.

    Of a folder this vouches for the manifest; the files are those that the manifest describes once they are hashed.
    """
    from cryptography.exceptions import InvalidSignature

    signature = signature_path(path)
    if not signature.is_file():
        raise IntegrityError(f"{path} is not signed: there is no {signature}")
    content = read_json(signature, _LARGEST_KEY)
    try:
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(content["format"])
        value = base64.b64decode(content["signature"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise IntegrityError(f"{signature} is no signature of plsc; sign {path} again") from None
    try:
        key.verify(value, _signed_bytes(path))
    except InvalidSignature:
        raise IntegrityError(
            f"{path} was changed after it was signed, or is signed by another key than {_key_id(key)}"
        ) from None


def require_signed(path: Path) -> None:
    """Verify ``path`` by the key that :data:`VERIFY_KEY` names; nothing is asked for where it is unset."""
    named = os.environ.get(VERIFY_KEY)
    if named:
        verify_signature(path, load_public_key(Path(named)))


def signature_path(path: Path) -> Path:
    """Return the path of the signature of a folder or a file."""
    signed = path / MANIFEST if path.is_dir() else path
    return signed.with_name(signed.name + SUFFIX)


def _signed_bytes(path: Path) -> bytes:
    content: Any
    if path.is_dir():
        content = read_json(path / MANIFEST)
        if not isinstance(content, dict):
            raise DataError(f"{path / MANIFEST} is no manifest")
        manifest_value(path, content, "files", dict)
    elif path.is_file():
        (content,) = describe_files(path.parent, [path.name]).values()
    else:
        raise UsageError(f"there is no {path}")
    try:
        return f"{FORMAT} {VERSION}\n{canonical_json(content)}".encode()
    except ValueError:
        raise IntegrityError(f"{path / MANIFEST} is no sound manifest") from None


def _key_id(key: "Ed25519PublicKey") -> str:
    """The first 16 digits of the SHA-256 of the public key's 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _key_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise UsageError(f"there is no key {path}; openssl genpkey -algorithm ed25519 makes one")
    with path.open("rb") as file:
        return file.read(_LARGEST_KEY)


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError("signatures need the package cryptography: pip install 'plsc-torch[signing]'") from None
