"""Waiting in tests for what happens by itself."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Until ``condition`` holds; :class:`AssertionError` if it does not in time, which is for a busy machine."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came about"
        time.sleep(0.01)
