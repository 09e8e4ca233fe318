"""Single rows of tables in Lance, in any process.

pylance's threads do not live on in a forked process: a read there crashes now and then, or never returns. So a process
that was forked from one that has used it lets a process of its own read (:mod:`plsc.data.helper_process`).
"""

import functools
import os
import warnings
from typing import Any

_user: int | None = None  # the process in which pylance's threads run, or ran before it was forked


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
    from plsc.data.helper_process import CallError, call_elsewhere

    try:
        return call_elsewhere(__file__, row_at.__name__, place, version, column, is_blob, row, most)
    except CallError as error:
        raise ValueError(*error.args) from None
    except EOFError:
        raise ValueError("the process that reads the table has ended") from None


@functools.lru_cache(maxsize=16)
def _opened(place: str, version: int) -> Any:
    return open_lance(place, version)


def row_at(place: str, version: int, *args: Any) -> Any:
    """What :func:`read_elsewhere` asks for; a failed assertion of pylance's is no Exception."""
    try:
        return read_row(_opened(place, version), *args)
    except BaseException as error:
        raise ValueError(str(error)) from None


CALLED, FORESEEN = (row_at,), (ValueError,)  # of plsc/data/helper_process.py
