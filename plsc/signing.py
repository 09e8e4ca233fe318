"""Signatures: who made a checkpoint, an embedding set, an index, a model or a calibration, by ed25519 (RFC 8032).

A manifest's hashes tell damage, and anybody can write them anew. A signature tells who wrote them. It stands beside
what it signs: ``manifest.json.sig`` beside a folder's manifest, which holds the hash of every other file, and
``FILE.sig`` beside a single file. Both are JSON::

    {"format": "plsc signature", "version": 2, "key": KEY_ID, "kind", "name", "counter", "signature": BASE64}

What is signed is the line ``plsc signature 2`` and the canonical JSON (sorted keys, no spaces) of ``{"kind", "name",
"counter", "content"}``: the content is the manifest without its seal, or ``{"bytes", "sha256"}`` of the file. Kind and
name, the file's or folder's own, keep another signed thing from passing for this one. The counter, the seconds since
1970 unless the signer says another, keeps an older one from passing for the newest: a reader may set the lowest that it
takes. Keys are PEM files, as ``openssl genpkey -algorithm ed25519`` writes them.

A reader verifies the very bytes that it parses: a file is opened once, and a manifest parsed once.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from plsc.errors import DataError, IntegrityError, UsageError
from plsc.files import (
    MANIFEST,
    SEAL,
    Manifest,
    canonical_json,
    describe_content,
    describe_open_file,
    file_state,
    manifest_value,
    read_json,
    write_json,
)
from plsc.progress import note
from plsc.regular_files import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = "plsc signature"
VERSION = 2
SUFFIX = ".sig"
# Of the environment: the file of the public key that everything read must be signed by, …
VERIFY_KEY = "PLSC_VERIFY_KEY"
VERIFY_FROM = "PLSC_VERIFY_FROM"  # … and the lowest counter that is taken: N, or NAME=N of one name, by commas
CALIBRATION, CHECKPOINT, MODEL = "calibration", "checkpoint", "model"  # kinds; an embedding set's and index's are
_FOLDER_KINDS = {"plsc embedding set": "embedding set", "plsc index": "index", 1: CHECKPOINT}  # by manifests' formats
_LARGEST_KEY = 1 << 16


def load_private_key(path: Path) -> "Ed25519PrivateKey":
    """Read a private key, and warn on standard error of one that others may read.

    Raises:
        UsageError: there is no such file, it is no ed25519 key in PEM, or the package cryptography is missing.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _parsed(path, lambda content: load_pem_private_key(content, None))
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

    key = _parsed(path, load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is no public key of ed25519; openssl pkey -in KEY -pubout -out {path}")
    return key


def sign(path: Path, key: "Ed25519PrivateKey", kind: str | None = None, counter: int | None = None) -> Path:
    """Sign a folder by its manifest, or a file; whether all is sound is the caller's to know.

    Args:
        path: the folder or file.
        key: the private key.
        kind: of a file; None: :data:`MODEL`. A folder's manifest says its own.
        counter: at least 0; None: the time, in seconds since 1970.

    Returns:
        The signature's path.

    Raises:
        UsageError: there is no such file.
        DataError, IntegrityError: the folder's manifest is none that is signed.
    """
    if path.is_dir():
        content = read_json(path / MANIFEST)
        kind = _FOLDER_KINDS.get(content.get("format")) if isinstance(content, dict) else None
        if kind is None:
            raise DataError(f"{path} is no checkpoint, embedding set or index, which are what is signed")
        manifest_value(path, content, "files", dict)
    elif path.is_file():
        with path.open("rb") as file:
            content = describe_open_file(file)
    else:
        raise UsageError(f"there is no {path}")
    about = {"kind": kind or MODEL, "name": _name(path), "counter": int(time.time()) if counter is None else counter}
    signature = key.sign(_signed_bytes(path, about, content))
    head = {"format": FORMAT, "version": VERSION, "key": _key_id(key.public_key()), **about}
    target = signature_path(path)
    write_json(target, {**head, "signature": base64.b64encode(signature).decode()})
    return target


def is_asked_for() -> bool:
    """True where everything that is read has to be signed."""
    return bool(os.environ.get(VERIFY_KEY))


def require_signed(path: Path, kind: str, content: Manifest) -> None:
    """Verify ``content`` by the key that :data:`VERIFY_KEY` names; nothing is asked for where it is unset.

    Of a folder this vouches for the manifest; the files are those that the manifest describes once they are hashed.

    Args:
        path: the folder or file that was read.
        kind: what it is read as.
        content: the manifest that was parsed, or the description of the file's bytes.

    Raises:
        IntegrityError: it is not signed by this key as this kind, under this name, and with a counter that is taken.
    """
    if not is_asked_for():
        return
    key = load_public_key(Path(os.environ[VERIFY_KEY]))
    signature = signature_path(path)
    about, value = _read_signature(path, signature)
    _verify(path, key, value, _signed_bytes(path, about, content))
    if about["kind"] != kind:
        raise IntegrityError(f"{path} is signed as {about['kind']!r}, and is read as {kind!r}; use another file")
    if about["name"] != _name(path):
        raise IntegrityError(f"{path} was signed under the name {about['name']}: call it that, or sign it again")
    if about["counter"] < (lowest := _lowest_counter(about["name"])):
        raise IntegrityError(
            f"{path} is older than what is taken: it was signed with the counter {about['counter']}, and {lowest} is "
            f"the lowest ({VERIFY_FROM}); use the newest"
        )


@contextmanager
def open_signed(path: Path, kind: str) -> Iterator[BinaryIO]:
    """Open a file for reading, verified where a signature is asked for: whoever exchanges it, the block reads this one.

    Raises:
        DataError: it is missing, or no regular file.
        IntegrityError: as :func:`require_signed`; or it was written while it was read.
    """
    with _opened(path) as file:
        state = file_state(file)
        if is_asked_for():
            require_signed(path, kind, describe_open_file(file))
            file.seek(0)
        yield file
        if is_asked_for() and file_state(file) != state:
            raise IntegrityError(f"{path} was written while it was read; read it again")


def read_signed(path: Path, kind: str, largest: int | None = None) -> bytes:
    """Read a file once, and verify those bytes where a signature is asked for.

    Raises:
        DataError: it is missing, no regular file, or has more than ``largest`` bytes.
        IntegrityError: as :func:`require_signed`.
    """
    with _opened(path, largest) as file:
        content = file.read()
    if is_asked_for():
        require_signed(path, kind, describe_content(content))
    return content


def _opened(path: Path, largest: int | None = None) -> BinaryIO:
    try:
        return open_regular(path, largest=largest)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def signature_path(path: Path) -> Path:
    """Return the path of the signature of a folder or a file."""
    signed = path / MANIFEST if path.is_dir() else path
    return signed.with_name(signed.name + SUFFIX)


def _read_signature(path: Path, signature: Path) -> tuple[dict[str, Any], bytes]:
    """What the signature says of kind, name and counter, and its 64 bytes."""
    if not signature.is_file():
        raise IntegrityError(f"{path} is not signed: there is no {signature}")
    content = read_json(signature, _LARGEST_KEY)
    try:
        if content["format"] != FORMAT:
            raise ValueError(content["format"])
        if content["version"] != VERSION:
            raise IntegrityError(
                f"{signature} is of version {content['version']!r:.20}, which does not cover kind, name and counter as "
                f"{VERSION} does; sign {path} again"
            )
        about = {name: content[name] for name in ("kind", "name", "counter")}
        if [type(value) for value in about.values()] != [str, str, int]:
            raise TypeError(about)
        return about, base64.b64decode(content["signature"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise IntegrityError(f"{signature} is no signature of plsc; sign {path} again") from None


def _verify(path: Path, key: "Ed25519PublicKey", signature: bytes, signed: bytes) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, signed)
    except InvalidSignature:
        raise IntegrityError(
            f"{path} was changed after it was signed, or is signed by another key than {_key_id(key)}"
        ) from None


def _lowest_counter(name: str) -> int:
    """The lowest counter that is taken of what is called ``name``."""
    lowest = {}
    for entry in filter(None, os.environ.get(VERIFY_FROM, "").split(",")):
        named, _, number = entry.rpartition("=")
        if not number.isdecimal():
            raise UsageError(f"{VERIFY_FROM} holds {entry!r}: give a whole number, or NAME=N, separated by commas")
        lowest[named] = int(number)
    return lowest.get(name, lowest.get("", 0))


def _name(path: Path) -> str:
    """The name that the file or folder was asked for by: a link does not lend its target's."""
    return os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119 (pathlib keeps "..", or follows links)


def _signed_bytes(path: Path, about: dict[str, Any], content: Manifest) -> bytes:
    unsealed = {name: value for name, value in content.items() if name != SEAL}
    try:
        return f"{FORMAT} {VERSION}\n{canonical_json({**about, 'content': unsealed})}".encode()
    except ValueError:
        raise IntegrityError(f"{path / MANIFEST} is no sound manifest") from None


def _key_id(key: "Ed25519PublicKey") -> str:
    """The first 16 digits of the SHA-256 of the public key's 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _parsed(path: Path, parse: Callable[[bytes], object]) -> object:
    """The key in a PEM file; None where it is none, or is encrypted."""
    if not path.is_file():
        raise UsageError(f"there is no key {path}; openssl genpkey -algorithm ed25519 makes one")
    with path.open("rb") as file, contextlib.suppress(ValueError, TypeError):  # TypeError: it is encrypted
        return parse(file.read(_LARGEST_KEY))
    return None


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError("signatures need the package cryptography: pip install 'plsc-torch[signing]'") from None
