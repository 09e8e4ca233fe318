"""What a user did wrong, or what the world did to them: one line each, never a traceback."""


class PlscError(Exception):
    """A failure that a person can mend. Its message is one line: the thing, and the mend."""

    exit_code = 1


class UsageError(PlscError, ValueError):
    """The request itself is off: a command's arguments, a config key, a name that does not exist."""

    exit_code = 2


class DataError(PlscError):
    """A file or a record is missing, truncated, corrupt or of the wrong kind."""


class LabelError(PlscError, ValueError):
    """A class label lies outside [0, num_classes)."""


class IntegrityError(PlscError):
    """A stored file is not the one that its manifest describes."""


class NotFoundError(UsageError):
    """What the request names does not exist: a collection, a person, a face, a snapshot."""


class ConflictError(UsageError):
    """What the request would make exists already, or contradicts what is stored."""


class StorageError(PlscError):
    """The store cannot write any more (a full disk, a read-only one, a lost connection); nothing was half done."""


def first_line(error: BaseException) -> str:
    """The message of a foreign error (a library's, often many lines), cut to one line of at most 200 characters."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
