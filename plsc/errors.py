"""Exceptions whose message is one line for a person: the problem and its fix, never a traceback."""

import re
import reprlib

_PASSWORD = re.compile(r"(password\s*=\s*)('(?:\\.|[^'])*'|[^\s&]+)", re.IGNORECASE)
_USER_OF_URL = re.compile(r"://\S*@")


class PlscError(Exception):
    """A failure that a person can fix. Its message is one line: the problem, and the fix."""

    exit_code = 1


class UsageError(PlscError, ValueError):
    """The request itself is wrong: a command's arguments, a config key, a name that does not exist."""

    exit_code = 2


class DataError(PlscError):
    """A file or a record is missing, truncated, corrupt or of the wrong kind."""


class LabelError(PlscError, ValueError):
    """A class label lies outside [0, num_classes)."""


class IntegrityError(PlscError):
    """A stored file is not the one that its manifest describes."""


class NotFoundError(UsageError):
    """The request names something that does not exist: a collection, a person, a face, a snapshot."""


class ConflictError(UsageError):
    """The request would create something that exists already, or contradicts what is stored."""


class PreconditionError(ConflictError):
    """The request was made for a state of a thing that it is not in: somebody else changed it since."""


class StorageError(PlscError):
    """The store cannot write any more (a full or read-only disk, a lost connection); no change was applied in part."""


class DeadlineError(PlscError):
    """The time that was allowed passed before there was a result; nothing was changed."""


def first_line(error: BaseException) -> str:
    """The message of a foreign error (a library's, often many lines), cut to one line of at most 200 characters."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def masked(text: str) -> str:
    """``text`` without the passwords of addresses in it: those of ``password=…``, and what stands before @ in a URL."""
    return _USER_OF_URL.sub("://***@", _PASSWORD.sub(r"\1***", text))


def quoted(value: object) -> str:
    """The beginning of a value that somebody gave, in ASCII, for a message; the rest is not written out."""
    if isinstance(value, str):
        value = value[:80]
    elif isinstance(value, dict | list | tuple):
        return reprlib.repr(value).encode("ascii", "backslashreplace").decode()[:80]
    return ascii(value)[:80]
