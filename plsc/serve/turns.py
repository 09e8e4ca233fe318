"""Turns of unknown callers: while known callers are at work, strangers together get a small part of the event loop.

A refusal costs as much as an answer, and a connection that is refused at once is back at once. Here both wait for a
turn instead: a thousand connections that come again and again become a thousand that wait.
"""

import asyncio
import math
from collections import OrderedDict, deque

from plsc.serve.connections import Connection

_BURST = 64  # answers at once: a page takes about twenty
_PER_SECOND = 150  # while known callers ask: at half a millisecond each, a thirteenth of the event loop
_PER_SECOND_ALONE = 500
_KNOWN_SECONDS = 1.0  # a known caller who has not asked for so long is not at work
_TICK_SECONDS = 0.005


class Turns:
    """Lets unknown callers be answered one after the other, in turn by address. Used in one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._level, self._filled = float(_BURST), 0.0
        self._known_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def known(self, now: float) -> None:
        """Say that a known caller asked at ``now`` (``time.monotonic()``)."""
        self._known_at = now

    async def wait(self, connection: Connection) -> None:
        """Wait for a turn of ``connection``, or until it is lost."""
        loop = asyncio.get_running_loop()
        self._fill(loop.time())
        if not self._waiting and self._level >= 1:
            self._level -= 1
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

    def _fill(self, now: float) -> None:
        rate = _PER_SECOND if now - self._known_at < _KNOWN_SECONDS else _PER_SECOND_ALONE
        self._level = min(self._level + (now - self._filled) * rate, _BURST)
        self._filled = now

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._fill(loop.time())
        while self._level >= 1 and (turn := self._next()) is not None:
            self._level -= 1
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


def _give(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
