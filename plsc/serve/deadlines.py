"""The deadlines of all who wait, kept by one timer: a timer for each costs more than the queue it waits in."""

import asyncio
import math
import time
from typing import Any

from plsc.serve.failures import Refusal


class Deadlines:
    """Used in one event loop, by its thread."""

    def __init__(self) -> None:
        self._deadlines: dict[asyncio.Future[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the timer goes off

    def add(self, future: "asyncio.Future[Any]", deadline: float) -> None:
        """Fail ``future`` with :class:`Refusal` 504 at ``deadline`` of ``time.monotonic()``, unless removed before."""
        self._deadlines[future] = deadline
        if deadline < self._due:
            self._set(future.get_loop(), deadline)

    def remove(self, future: "asyncio.Future[Any]") -> None:
        """``future`` waits no more; the timer, if it was set for it, goes off in vain."""
        del self._deadlines[future]

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_later(max(due - time.monotonic(), 0), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._due = None, math.inf
        now = time.monotonic()
        waiting = {future: deadline for future, deadline in self._deadlines.items() if not future.done()}
        for future, deadline in waiting.items():
            if deadline <= now:
                message = "the deadline passed before there was a result; allow more time, or ask for less"
                future.set_exception(Refusal(504, message))
        later = [deadline for deadline in waiting.values() if deadline > now]
        if later:
            self._set(loop, min(later))
