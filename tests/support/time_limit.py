"""A limit on the time of each test: one that hangs fails, and the tests after it run."""

import contextlib
import faulthandler
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

LIMIT_SECONDS = 300.0  # the pool of ranks gives up before this, and says more


@contextlib.contextmanager
def time_limit(seconds: float = LIMIT_SECONDS) -> Iterator[None]:
    """Fail the test after ``seconds`` with the stacks of this process; processes that it started itself see to theirs.

    The alarm interrupts waits in Python. Where the main thread is stuck in C, pytest's faulthandler_timeout ends the
    run instead.
    """

    def expire(*_: Any) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            pytest.fail(f"the test has taken {seconds:g} s; its threads are here:\n{file.read()}", pytrace=False)

    if threading.current_thread() is not threading.main_thread():  # where Python sets no handlers
        yield
        return
    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
