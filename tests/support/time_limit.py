"""A limit on the time of each test: one that hangs fails, and the tests after it run."""

import contextlib
import faulthandler
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
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
    with alarm(signal.ITIMER_REAL, signal.SIGALRM, seconds, expire):
        yield


@contextlib.contextmanager
def alarm(timer: int, number: int, seconds: float, handler: Callable[..., None]) -> Iterator[None]:
    """Call ``handler`` by the signal ``number`` of a timer after ``seconds`` within the block."""
    before = signal.signal(number, handler)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
