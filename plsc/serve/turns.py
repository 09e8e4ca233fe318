"""Turns of unknown callers: strangers together get a small part of the event loop's time, however they spend it.

A refusal costs as much as an answer, and a connection that is refused at once is back at once. Here both wait for a
turn instead, which is paid for by the time that reading and answering took: a thousand connections that come again and
again become a thousand that wait, and dear requests are fewer than cheap ones.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from plsc.serve.access import Bucket
from plsc.serve.connections import Connection

_SAVED_SECONDS = 0.05  # of the loop's time, for answers at once: a page takes about twenty of a fifth of a millisecond
_EXPECTED_SECONDS = 0.0005  # of an answer, until its time is known
_UNSEEN_SECONDS = 0.0003  # of an answer, in the kernel and around the loop's steps
_TICK_SECONDS = 0.005


class Turns:
    """Lets unknown callers be answered one after the other, in turn by address. Used in one event loop.

    Args:
        part: of the event loop's time.
    """

    def __init__(self, part: float) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._seconds = Bucket(_SAVED_SECONDS, part)  # of the event loop's time
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, connection: Connection, answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer when it is the turn of ``connection``, unless it is lost by then."""
        await self._wait(connection)
        if connection.is_lost:
            return
        self._seconds.level -= _EXPECTED_SECONDS
        metered = _Metered(answer())
        try:
            await metered
        finally:
            spent, connection.seconds = connection.seconds + metered.seconds + _UNSEEN_SECONDS, 0.0
            self._seconds.level += _EXPECTED_SECONDS - spent

    async def _wait(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        if self._seconds.fill() > 0 and not self._waiting:
            return
        turn = loop.create_future()
        self._waiting.setdefault(connection.address, deque()).append(turn)
        connection.on_lost = lambda: _give(turn)
        if self._timer is None:
            self._timer = loop.call_later(_TICK_SECONDS, self._tick, loop)
        try:
            await turn
        finally:
            connection.on_lost = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        seconds = self._seconds.fill()
        while seconds > 0 and (turn := self._next()) is not None:
            seconds -= _EXPECTED_SECONDS
            _give(turn)
        self._timer = loop.call_later(_TICK_SECONDS, self._tick, loop) if self._waiting else None

    def _next(self) -> "asyncio.Future[None] | None":
        """Take the oldest that still waits, of the address whose turn it is; that address is the last then."""
        while self._waiting:
            address, turns = self._waiting.popitem(last=False)
            while turns and turns[0].done():
                turns.popleft()
            if turns:
                turn = turns.popleft()
                self._waiting[address] = turns
                return turn
        return None


class _Metered(Awaitable[None]):
    """Runs a coroutine, and measures the processor time of its own steps: what it waits for is not its time."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            begun = time.thread_time()
            try:
                awaited = step()
            except StopIteration:
                return
            finally:
                self.seconds += time.thread_time() - begun
            try:
                step = partial(self._coroutine.send, (yield awaited))
            except BaseException as error:  # thrown in here, for the coroutine
                step = partial(self._coroutine.throw, error)


def _give(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
