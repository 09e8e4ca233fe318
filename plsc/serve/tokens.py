"""Bearer tokens: a TOML file of names, what each may do, and the SHA-256 of each secret, which is itself not stored.

A running service rereads the file when it changes, and refuses all tokens where it cannot be read.

[[token]]
name = "camera-1"
role = "search"
created = "2026-11-21T08:00:00Z"
allow = ["vectors"]                 # rights besides the role; none where it is left out
collections = ["staff"]             # all where it is left out
rates = ["searches=50/s"]           # the service's where it is left out
expires = "2027-01-01"              # never where it is left out
sha256 = "64 hexadecimal digits"

sha256 is the last key of a token: a file that is cut, at any byte, then holds each token whole, or without sha256, and
never one without what restricts it. A service takes no other order.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from plsc.errors import ConflictError, DataError, NotFoundError, UsageError
from plsc.files import atomic_write
from plsc.gallery.validation import COLLECTION_NAME, COLLECTION_NAME_RULE
from plsc.progress import note
from plsc.serve.access import RIGHTS, ROLES, Caller, Right, Role
from plsc.serve.errors import ApiError
from plsc.serve.limits import Clock, parse_rate_limits
from plsc.text_files import parse_toml, read_text

_PREFIX = "plsc_"  # lets scanners of published code recognise a leaked secret
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_NEEDED_KEYS = ("name", "role", "created", "sha256")
_LIST_KEYS = ("allow", "collections", "rates")
_LARGEST_FILE = 16 << 20  # bytes: 50,000 tokens
_REREAD_SECONDS = 1.0
_GRACE_SECONDS = 5.0  # an editor may write a file in two steps; a token that was removed must not profit for longer


@dataclass(frozen=True, kw_only=True)
class Token:
    """A caller: ``name`` appears in the audit log, ``sha256`` is that of the secret, in hexadecimal.

    A file has the attributes in this order.

    Attributes:
        allow: rights besides the role.
        collections: those it may know of; None is all.
        rates: limits as :func:`plsc.serve.limits.parse_rate_limits` reads them.
        expires: a date, or a time in ISO 8601, from which the token is refused; in UTC where it names no time zone.
    """

    name: str
    role: Role
    created: str
    allow: tuple[Right, ...] = ()
    collections: tuple[str, ...] | None = None
    rates: tuple[str, ...] = ()
    expires: str | None = None
    sha256: str

    @cached_property
    def caller(self) -> Caller:
        """Who calls with this token; an admin has every right."""
        rights = RIGHTS if self.role == "admin" else self.allow
        seen = None if self.collections is None else frozenset(self.collections)
        return Caller(self.name, self.role, frozenset(rights), seen, parse_rate_limits(self.rates))

    @cached_property
    def expiry(self) -> float:
        """The time from which the token is refused, in seconds since 1970."""
        return math.inf if self.expires is None else _parse_time(self.name, self.expires)


def read_tokens(path: Path, *, in_any_order: bool = False) -> list[Token]:
    """Read a token file.

    Args:
        path: the file.
        in_any_order: take what a former plsc, or a person, wrote with keys behind sha256: to write it anew.

    Raises:
        UsageError: there is no such file.
        DataError: its content is not a token file, or sha256 is not the last key of a token.
    """
    entries = _read_entries(path)
    try:
        tokens = [_checked(entry) for entry in entries]
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None
    names = [token.name for token in tokens]
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a token twice; give each its own name")
    for token, entry in zip(tokens, entries, strict=True):
        if list(entry)[-1] != "sha256" and not in_any_order:
            raise DataError(
                f"{path}: keys stand behind sha256 of {token.name}, so that it would have more rights if the file were "
                f"cut there; check what plsc tokens list shows, then plsc tokens change {token.name} puts all in order"
            )
    return tokens


def _read_entries(path: Path) -> list[Any]:
    try:
        content = parse_toml(read_text(path, _LARGEST_FILE))
    except FileNotFoundError:
        raise UsageError(f"there is no token file {path}; make it with plsc tokens add NAME --role admin") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}") from None
    entries = content.pop("token", [])
    if content or not isinstance(entries, list):
        raise DataError(f"{path} holds more than [[token]] tables; keep those alone")
    return entries


def add_token(path: Path, name: str, role: str, **options: Any) -> str:
    """Add a token and return its secret; the file is created if need be, readable by its owner alone.

    Args:
        options: further attributes of the :class:`Token`.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a token's name is 1 to 64 letters, digits, _ - or ., beginning with a letter, not {name!r}")
    tokens = read_tokens(path, in_any_order=True) if path.exists() else []
    if any(token.name == name for token in tokens):
        raise ConflictError(f"{path} has a token {name} already; remove it first, or choose another name")
    secret = _PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    added = {"name": name, "role": role, "sha256": _digest(secret.encode()), "created": created, **options}
    _write(path, [*tokens, _checked(added)])
    return secret


def change_token(path: Path, name: str, **changes: Any) -> Token:
    """Change what a token may do; its secret stays. ``changes`` are attributes of the :class:`Token`."""
    tokens = read_tokens(path, in_any_order=True)
    former = _find(path, tokens, name)
    changed = _checked({**asdict(former), **changes})
    _write(path, [changed if token is former else token for token in tokens])
    return changed


def remove_token(path: Path, name: str) -> None:
    """Remove a token; a running service follows within a second."""
    tokens = read_tokens(path, in_any_order=True)
    removed = _find(path, tokens, name)
    _write(path, [token for token in tokens if token is not removed])


def _find(path: Path, tokens: Sequence[Token], name: str) -> Token:
    for token in tokens:
        if token.name == name:
            return token
    raise NotFoundError(f"{path} has no token {name}; plsc tokens list shows those it has")


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def _checked(entry: Any) -> Token:
    """A token of a table's values; :class:`UsageError` names what is wrong."""
    if not isinstance(entry, dict) or not set(_NEEDED_KEYS) <= set(entry) <= {field.name for field in fields(Token)}:
        known = ", ".join(field.name for field in fields(Token))
        raise UsageError(f"a [[token]] has the keys {known}; {', '.join(_NEEDED_KEYS)} are needed")
    if not all(isinstance(entry[key], str) for key in _NEEDED_KEYS) or not _NAME.fullmatch(entry["name"]):
        raise UsageError(f"{ascii(entry['name'])[:80]} is no usable name, or the role, sha256 or created is no string")
    name = entry["name"]
    if entry["role"] not in ROLES:
        raise UsageError(f"the role of {name} is {ascii(entry['role'])[:80]}; a role is one of {', '.join(ROLES)}")
    if not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        raise UsageError(f"sha256 of {name} is not 64 hexadecimal digits in lower case")
    lists = {key: _strings(name, key, entry[key]) for key in _LIST_KEYS if entry.get(key) is not None}
    for right in lists.get("allow", ()):
        if right not in RIGHTS:
            raise UsageError(f"{name} may not be allowed {ascii(right)[:80]}; the rights are {' and '.join(RIGHTS)}")
    if lists.get("collections") == ():
        raise UsageError(f"{name} is for no collection; name some, or leave collections out for all")
    for collection in lists.get("collections", ()):
        if not re.fullmatch(COLLECTION_NAME, collection):
            raise UsageError(f"{COLLECTION_NAME_RULE}, unlike {ascii(collection)[:80]} of {name}")
    parse_rate_limits(lists.get("rates", ()))
    if entry.get("expires") is not None:
        _parse_time(name, entry["expires"])
    return Token(**{**entry, **lists})


def _parse_time(name: str, text: Any) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise UsageError(
            f"{name} expires at {ascii(text)[:80]}, which is no date; write 2027-01-01 or 2027-01-01T18:00Z"
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _strings(name: str, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{key} of {name} is no list of strings")
    return tuple(value)


def _write(path: Path, tokens: Sequence[Token]) -> None:
    tables = []
    for token in tokens:  # in TOML strings and lists of strings are written as JSON's; what is empty is left out
        given = {key: value for key, value in asdict(token).items() if value is not None and value != ()}
        tables.append("\n".join(["[[token]]", *(f"{key} = {json.dumps(value)}" for key, value in given.items())]))
    with atomic_write(path) as tmp_path:
        tmp_path.touch(mode=0o600)
        tmp_path.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


class TokenBook:
    """The tokens of a file, reread when it changes: a removed token is refused without a restart.

    Where the file is gone or cannot be read, the tokens read before stay in force for a few seconds; from then on all
    are refused, for nobody knows which of them were removed. A file descriptor is kept in reserve for reading.

    Raises:
        UsageError, DataError: see :func:`read_tokens`.
    """

    def __init__(self, path: Path, clock: Clock = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._reserve: int | None = None
        self._reported: tuple[int, ...] | None = None
        self._failing_since: float | None = None
        self._stamp = _stamp(path)
        self._tokens = self._read()
        self._checked = clock()
        self._warn_of_mode()

    def find(self, secret: bytes) -> Token | None:
        """The token with this secret, or None; :class:`ApiError` 503 where the file has been unreadable for a while."""
        if not self.is_current():
            raise ApiError(503, "the service cannot read its tokens, and refuses all of them until it can")
        return self._tokens.get(_digest(secret))  # of random secrets: how long this takes tells nothing of them

    def is_current(self) -> bool:
        """False if the file could not be read for so long that no token is taken."""
        with self._lock:
            if (now := self._clock()) - self._checked >= _REREAD_SECONDS:
                self._checked = now
                self._reread_if_changed()
            return self._failing_since is None or self._checked - self._failing_since < _GRACE_SECONDS

    def _reread_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp is None or stamp != self._stamp:
            try:
                self._tokens = self._read()
            except (DataError, UsageError) as error:
                self._report(stamp, error)
                return
            self._stamp = stamp
            self._warn_of_mode()
        self._failing_since = self._reported = None

    def _report(self, stamp: tuple[int, ...] | None, error: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = self._checked
        elif stamp == self._reported:
            return
        self._reported = stamp
        message = f"the tokens read before stay in force for {_GRACE_SECONDS:g} s, then all are refused: {error}"
        note(f"plsc serve: {message}")

    def _read(self) -> dict[str, Token]:
        """The tokens by the SHA-256 of their secrets."""
        if self._reserve is not None:
            os.close(self._reserve)  # for the file: there may be no other descriptor left
            self._reserve = None
        try:
            return {token.sha256: token for token in read_tokens(self._path)}
        finally:
            with contextlib.suppress(OSError):  # taken meanwhile; the next reading tries again
                self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _warn_of_mode(self) -> None:
        try:
            mode = stat.S_IMODE(self._path.stat().st_mode)
        except OSError:
            return
        if os.name == "posix" and mode & 0o077:
            message = f"{self._path} is open to others (mode {mode:04o}); close it: chmod 600 {self._path}"
            note(f"plsc serve: {message}")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode
