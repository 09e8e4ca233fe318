"""Keeps a test within its process: no processes, sockets, sleeps or signals, unless it has the mark ``live``.

What the machine does beside the tests can then not change what they find. Python's audit events tell of all of it,
whoever calls.
"""

import contextlib
import gc
import multiprocessing.process
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_CHECKOUT = f"{Path(__file__).parents[2]}{os.sep}"
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "multiprocessing.start"}
_SOCKETS = {"socket.bind", "socket.connect"}
_SIGNALS = {"os.kill", "os.killpg"}
_EVENTS = _STARTS | _SOCKETS | _SIGNALS | {"tests.sleep"}

_doors = threading.local()
_watched: list[str] | None = None  # what the running test did against the rule; None outside of such tests
_left = False  # whether a test that may do anything ran since the last that is watched


@contextlib.contextmanager
def hermetic() -> Iterator[None]:
    """Fail the test if the block starts a process, opens an Internet socket, sleeps or sends a signal.

    Threads are watched, too. Where one swallows the failure, the end of the block repeats it. What a live test left
    to the garbage collector ends before the block: a loader that is collected sends signals to its workers.
    """
    global _left, _watched
    _install()
    if _left:
        with harness():
            gc.collect()
        _left = False
    before, _watched = _watched, []
    try:
        yield
        if _watched:
            pytest.fail(_watched[0], pytrace=False)
    finally:
        _watched = before


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let a live test do anything."""
    global _left
    _left = True
    yield


@contextlib.contextmanager
def harness() -> Iterator[None]:
    """The door for what the suite itself needs, such as its pool of ranks: this thread may do anything."""
    before, _doors.open = getattr(_doors, "open", False), True
    try:
        yield
    finally:
        _doors.open = before


def _install() -> None:
    if getattr(_doors, "installed", False):
        return
    _doors.installed = True
    start, sleep = multiprocessing.process.BaseProcess.start, time.sleep

    def told_start(self: multiprocessing.process.BaseProcess) -> None:
        sys.audit("multiprocessing.start", type(self).__name__)
        start(self)

    def told_sleep(seconds: float) -> None:
        if seconds > 0 and sys._getframe(1).f_code.co_filename.startswith(_CHECKOUT):  # others may know why they do
            sys.audit("tests.sleep", seconds)
        sleep(seconds)

    # spawning raises no event of Python's, and sleeping none before Python 3.13
    multiprocessing.process.BaseProcess.start = told_start  # type: ignore[method-assign]
    time.sleep = told_sleep
    os.register_at_fork(after_in_child=_leave)
    sys.addaudithook(_heard)


def _leave() -> None:
    global _watched
    _watched = None


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS or _watched is None or getattr(_doors, "open", False):
        return
    if event in _SOCKETS and args[0].family not in (socket.AF_INET, socket.AF_INET6):
        return
    if event in _SIGNALS and args[1] == 0:  # asks only whether the process lives
        return
    about = args[-1:] if event in _SOCKETS else args[:2]
    _watched.append(f"{event}{about}: mark the test live, or do without (tests/support/hermetic.py)")
    pytest.fail(_watched[-1])
