"""Accepting connections: one between two looks at those that are open, and slowly where strangers come and go.

uvloop accepts all that wait at once, and goes on while others come: a few who connect and leave again would keep it
from everybody whose connection is open. Here they keep out those who come anew, at worst.
"""

import asyncio
import socket
from collections.abc import Callable

_PAUSE_SECONDS = 0.01  # between two connections while newcomers owe time
_NO_FILES_SECONDS = 1.0  # until there may be file descriptors again


class Door:
    """Accepts connections of a listening socket until it is closed.

    Args:
        make: makes a connection's protocol.
        owes: True while connections that said nothing of worth have taken too much time.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol], owes: Callable[[], bool]) -> None:
        self._listener, self._make, self._owes = listener, make, owes
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accept no more."""
        if self._pause is None:
            self._loop.remove_reader(self._listener)
        else:
            self._pause.cancel()

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._open)

    def _accept(self) -> None:
        try:
            wire, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._wait(_NO_FILES_SECONDS)
            return
        task = self._loop.create_task(self._start(wire))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        if self._owes():
            self._wait(_PAUSE_SECONDS)

    async def _start(self, wire: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, wire)
        except OSError:  # the caller has left
            wire.close()
