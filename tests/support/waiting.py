"""Waiting in tests for what happens by itself, and holding up what would happen too soon."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Until ``condition`` holds; :class:`AssertionError` if it does not in time, which is for a busy machine."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came about"
        time.sleep(0.01)


@contextmanager
def held_up(owner: Any, method: str) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Make calls of ``owner``'s method wait for the event, or the block's end; the semaphore counts those that came."""
    original, came, go_on = getattr(owner, method), threading.Semaphore(0), threading.Event()

    def wait(*args: Any, **options: Any) -> Any:
        came.release()
        assert go_on.wait(60)
        return original(*args, **options)

    setattr(owner, method, wait)
    try:
        yield came, go_on
    finally:
        go_on.set()
        setattr(owner, method, original)
