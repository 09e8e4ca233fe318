"""Waiting in tests for what happens by itself, and holding up what would happen too soon."""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_GIVEN = set[int]()


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Until ``condition`` holds; :class:`AssertionError` if it does not in time, which is for a busy machine."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came about"
        time.sleep(0.01)


def free_port() -> int:
    """A port for a server that is yet to start: the system gives those below 32,768 to nobody by itself."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise AssertionError("no port is free")


@contextmanager
def held_up(owner: Any, method: str) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Make calls of ``owner``'s method wait for the event, or the block's end; the semaphore counts those that came."""
    original, came, go_on = getattr(owner, method), threading.Semaphore(0), threading.Event()

    def wait(*args: Any, **options: Any) -> Any:
        came.release()
        assert go_on.wait(120)
        return original(*args, **options)

    setattr(owner, method, wait)
    try:
        yield came, go_on
    finally:
        go_on.set()
        setattr(owner, method, original)


@contextmanager
def serving(
    arguments: list[str], *, python: Any = sys.executable, audits: bool = False, **options: Any
) -> Iterator[str]:
    """``plsc`` with these arguments in a process of its own on a free port; gives its address once it serves.

    Args:
        arguments: of ``plsc``.
        python: the interpreter.
        audits: the store is no folder, whose service writes its audit log to stderr; else it is silent.
        options: of the process, as ``cwd``.
    """
    command = [python, "-m", "plsc.tools.entry", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving at http://127.0.0.1:" in line, process.communicate()
        yield line.split()[2].rstrip(":")
    finally:
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert (out, bool(err), process.returncode) == ("", audits, 0), err
