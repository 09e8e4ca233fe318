"""Bearer tokens and roles: a TOML file of names, roles and the SHA-256 of each secret, which itself is stored nowhere.

[[token]]
name = "camera-1"
role = "read"
sha256 = "64 hexadecimal digits"
created = "2026-11-21T08:00:00Z"
"""

import hashlib
import hmac
import json
import re
import secrets
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from plsc.errors import ConflictError, DataError, NotFoundError, UsageError
from plsc.files import atomic_write

Role = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = ("read", "write", "admin")  # each includes those before it

_PREFIX = "plsc_"  # lets scanners of published code recognise a leaked secret
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_KEYS = {"name", "role", "sha256", "created"}
_REREAD_SECONDS = 1.0


@dataclass(frozen=True)
class Token:
    """A caller: ``name`` appears in the audit log, ``sha256`` is that of the secret, in hexadecimal."""

    name: str
    role: Role
    sha256: str
    created: str


def includes(role: Role, required: Role) -> bool:
    """True if ``role`` allows what needs ``required``."""
    return ROLES.index(role) >= ROLES.index(required)


def read_tokens(path: Path) -> list[Token]:
    """Read a token file.

    Raises:
        UsageError: there is no such file.
        DataError: its content is not a token file.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no token file {path}; make it with plsc tokens add NAME --role admin") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}") from None
    entries = content.pop("token", [])
    if content or not isinstance(entries, list):
        raise DataError(f"{path} holds more than [[token]] tables; keep those alone")
    tokens = [_token(path, entry) for entry in entries]
    names = [token.name for token in tokens]
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a token twice; give each its own name")
    return tokens


def add_token(path: Path, name: str, role: str) -> str:
    """Add a token and return its secret; the file is created if need be, readable by its owner alone."""
    if role not in ROLES:
        raise UsageError(f"a role is one of {', '.join(ROLES)}, not {role!r}")
    if not _NAME.fullmatch(name):
        raise UsageError(f"a token's name is 1 to 64 letters, digits, _ - or ., beginning with a letter, not {name!r}")
    tokens = read_tokens(path) if path.exists() else []
    if any(token.name == name for token in tokens):
        raise ConflictError(f"{path} has a token {name} already; remove it first, or choose another name")
    secret = _PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    _write(path, [*tokens, Token(name, role, _digest(secret.encode()), created)])
    return secret


def remove_token(path: Path, name: str) -> None:
    """Remove a token; a running service follows within a second."""
    tokens = read_tokens(path)
    if all(token.name != name for token in tokens):
        raise NotFoundError(f"{path} has no token {name}; plsc tokens list shows those it has")
    _write(path, [token for token in tokens if token.name != name])


class TokenBook:
    """The tokens of a file, reread when it changes: a removed token is refused without a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp = self._reported = _stamp(path)
        self._tokens: Sequence[Token] = read_tokens(path)
        self._checked = time.monotonic()

    def find(self, secret: bytes) -> Token | None:
        """The token with this secret, or None; takes the same time for every secret."""
        self._reload_if_changed()
        digest = _digest(secret)
        found = None
        for token in self._tokens:
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found

    def _reload_if_changed(self) -> None:
        with self._lock:
            if time.monotonic() - self._checked < _REREAD_SECONDS:
                return
            self._checked = time.monotonic()
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            try:
                self._tokens = read_tokens(self._path)
                self._stamp = stamp  # only now: a file that cannot be read at the moment is tried again
            except (DataError, UsageError) as error:  # a half-edited file must neither open nor close the doors
                if stamp != self._reported:
                    print(f"plsc serve: the tokens read before stay in force: {error}", file=sys.stderr, flush=True)
                self._reported = stamp


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _token(path: Path, entry: Any) -> Token:
    if not isinstance(entry, dict) or set(entry) != _KEYS or not all(isinstance(v, str) for v in entry.values()):
        raise DataError(f"{path}: a [[token]] has the strings {', '.join(sorted(_KEYS))} and nothing else")
    if entry["role"] not in ROLES or not _NAME.fullmatch(entry["name"]):
        raise DataError(f"{path}: {ascii(entry['name'])[:80]} is no usable name, or its role is not one of {ROLES}")
    if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        raise DataError(f"{path}: sha256 of {entry['name']} is not 64 hexadecimal digits in lower case")
    return Token(**entry)


def _write(path: Path, tokens: list[Token]) -> None:
    tables = [
        "\n".join(["[[token]]", *(f"{key} = {json.dumps(value)}" for key, value in vars(token).items())])
        for token in tokens
    ]
    with atomic_write(path) as tmp_path:
        tmp_path.touch(mode=0o600)
        tmp_path.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
