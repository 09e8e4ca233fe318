"""Single rows of tables in Lance, in any process.

pylance's threads do not live on in a forked process: a read there crashes now and then, or never returns. So a process
that was forked from one that has used it lets a process of its own read (:mod:`plsc.data.object_requests`). That one
imports pylance and nothing of plsc.
"""

import functools
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plsc.data.object_requests import HelperProcess

_user: int | None = None  # the process in which pylance's threads run, or ran before it was forked
_helpers: dict[int, "HelperProcess"] = {}  # of a process


def open_lance(place: str, version: int | None) -> Any:
    """Open a version of the table at an absolute path or URL; None is the newest."""
    global _user
    import lance

    _user = _user or os.getpid()
    warnings.filterwarnings("ignore", "lance is not fork-safe")  # of each fork
    return lance.dataset(place, version=version)


def is_forked() -> bool:
    """Whether this process was forked from one that has used pylance."""
    return _user not in (None, os.getpid())


def read_row(table: Any, column: str, is_blob: bool, row: int, most: int) -> Any:
    """The value of a row; of a blob the first ``most`` bytes."""
    if not is_blob:
        return table.take([row], columns=[column]).column(0)[0].as_py()
    blob = table.take_blobs(column, indices=[row])[0]
    return None if blob is None else blob.read(most)


def read_elsewhere(place: str, version: int, column: str, is_blob: bool, row: int, most: int) -> Any:
    """The value of a row, read by a process of its own; :class:`ValueError` where it cannot be read."""
    from plsc.data import object_requests

    process = os.getpid()
    helper = _helpers.get(process) or object_requests.HelperProcess(__file__)
    _helpers[process] = helper
    try:
        is_error, answer = helper.call(row_at.__name__, (place, version, column, is_blob, row, most))
    except BaseException as error:  # an answer may be under way that nobody waits for
        helper.end()
        del _helpers[process]
        if isinstance(error, EOFError | OSError):
            raise ValueError("the process that reads the table has ended") from None
        raise
    if is_error:
        raise ValueError(*answer)
    return answer


@functools.lru_cache(maxsize=16)
def _opened(place: str, version: int) -> Any:
    return open_lance(place, version)


def row_at(place: str, version: int, *args: Any) -> Any:
    """What :func:`read_elsewhere` asks for; a failed assertion of pylance's is no Exception."""
    try:
        return read_row(_opened(place, version), *args)
    except BaseException as error:
        raise ValueError(str(error)) from None


REQUESTS = (row_at,)
