"""Turns on the event loop: strangers together get a small part of its time, and tokens share what there is.

A refusal costs as much as an answer, and a connection that is refused at once is back at once. Here strangers wait for
a turn instead, which is paid for by the time that reading and answering took: a thousand connections that come again
and again become a thousand that wait, and dear requests are fewer than cheap ones.

Tokens wait only where others are at work: then one that has taken more than its part goes on once the others have
caught up. It is fair queueing with the virtual time of generalized processor sharing (Parekh and Gallager, 1993).
"""

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plsc.serve.access import Bucket

if TYPE_CHECKING:
    from plsc.serve.connections import Connection

_SAVED_SECONDS = 0.05  # of the loop's time, for answers at once: a page takes about twenty of a fifth of a millisecond
_EXPECTED_SECONDS = 0.0005  # of an answer, until its time is known
_UNSEEN_SECONDS = 0.0003  # of an answer, in the kernel and around the loop's steps
_TICK_SECONDS = 0.005
_LEAD_SECONDS = 0.005  # that a token may be ahead
_LEAST_PART = 0.8  # of the time, that is shared even where less is taken: who waits must not wait for ever
_LATELY_SECONDS = 0.2
_FULL_PART, _NEARLY_PART = 0.75, 0.15  # of the loop's time and the processors', up to which there is enough for all
_FREE_PART, _CROWDED_PART = 0.9, 0.75  # of the time in which the loop's thread could run, that it has a processor
_PROCESSORS = os.cpu_count() or 1
_SCHEDULE = Path("/proc/thread-self/schedstat")
_IDLE_PART = 0.001  # of the time lately, below which a token is not at work
_KEPT_PART = 0.01  # of one that was alone: half a second passes until that is idle

Pay = Callable[[float], None]
_payer: ContextVar[Pay] = ContextVar("payer", default=lambda _: None)


def current_payer() -> Pay:
    """What counts seconds that threads and the device spend on the current request; called in the event loop."""
    return _payer.get()


class Turns:
    """Lets unknown callers be answered one after the other, in turn by address. Used in one event loop.

    Args:
        part: of the event loop's time.
    """

    def __init__(self, part: float) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._seconds = Bucket(_SAVED_SECONDS, part)  # of the event loop's time
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, connection: "Connection", answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer when it is the turn of ``connection``, unless it is lost by then."""
        await self._wait(connection)
        if connection.is_lost:
            return
        self._seconds.level -= _EXPECTED_SECONDS
        try:
            await _Metered(answer(), self._pay)
        finally:
            spent, connection.seconds = connection.seconds + _UNSEEN_SECONDS, 0.0
            self._seconds.level += _EXPECTED_SECONDS - spent

    def _pay(self, seconds: float) -> None:
        self._seconds.level -= seconds

    async def _wait(self, connection: "Connection") -> None:
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


class _Account:
    """What a token has taken.

    Attributes:
        spent: seconds, in the virtual time of all.
        taken: seconds since the last tick.
        used: part of the time, lately.
        waiting: what goes on at the token's turns.
    """

    __slots__ = ("spent", "taken", "used", "waiting")

    def __init__(self, spent: float) -> None:
        self.spent, self.taken, self.used = spent, 0.0, 0.0
        self.waiting: deque[Callable[[], None]] = deque()


class TokenTurns:
    """Lets each token have its part of the time while others are at work. Used in one event loop.

    Virtual time passes as slowly as tokens are many, of which one that takes a tenth of another counts for little. Who
    is further ahead of it than the lead waits. Nobody saves time for later.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._virtual, self._ticked = 0.0, 0.0
        self._looped, self._loop_used = 0.0, 0.0  # seconds since the last tick, and part of the time lately
        self._seen = (0, 0)  # nanoseconds that the loop's thread had a processor, and waited for one
        self._ran, self._waited = 0.0, 0.0  # the same, lately
        self._timer: asyncio.TimerHandle | None = None

    def charge(self, owner: str, seconds: float, fine: float = 0.0) -> None:
        """Count time of the event loop that a token took, and seconds besides that it has to wait for."""
        self._looped += seconds
        self.charge_beside(owner, seconds, fine)

    def charge_beside(self, owner: str, seconds: float, fine: float = 0.0) -> None:
        """Count time that threads, processes or the device took for a token."""
        account = self._account(owner)
        account.taken += seconds
        account.spent += seconds + fine

    def charge_reading(self, owner: str, connection: "Connection") -> None:
        """Count what reading of a connection took."""
        self.charge(owner, connection.seconds, connection.fine)
        connection.seconds = connection.fine = 0.0

    def must_wait(self, owner: str) -> bool:
        """True if a token is ahead of others who are at work."""
        account = self._accounts.get(owner)
        return self._timer is not None and account is not None and self._is_ahead(account)

    def when_due(self, owner: str, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` at the token's turn."""
        self._account(owner).waiting.append(go_on)

    async def take(self, owner: str, answer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Answer, each step at the token's turn: a hundred that began while it was alone must not all go on at once."""
        _payer.set(partial(self.charge_beside, owner))
        await _Metered(answer(), partial(self.charge, owner), partial(self._turn, owner))

    def _turn(self, owner: str) -> "asyncio.Future[None] | None":
        if not self.must_wait(owner):
            return None
        turn = asyncio.get_running_loop().create_future()
        self.when_due(owner, partial(_give, turn))
        return turn

    def _account(self, owner: str) -> _Account:
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account(self._virtual)
            if len(self._accounts) > 1 and self._timer is None:
                for each in self._accounts.values():
                    each.spent, each.taken = self._virtual, 0.0  # alone, a token took what it liked
                    each.used = _KEPT_PART  # which nobody measured: it is not gone because of one tick's silence
                self._ticked, self._seen = time.monotonic(), _schedule()
                self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        return account

    def _is_ahead(self, account: _Account) -> bool:
        return bool(account.waiting) or account.spent > self._virtual + _LEAD_SECONDS

    def _tick(self) -> None:
        now, accounts = time.monotonic(), self._accounts
        self._pass(max(now - self._ticked, 1e-6))
        self._ticked = now
        for owner, each in list(accounts.items()):
            each.spent = max(each.spent, self._virtual)
            while each.waiting and each.spent <= self._virtual + _LEAD_SECONDS:
                each.spent += _EXPECTED_SECONDS
                each.waiting.popleft()()
            if each.used < _IDLE_PART and not each.waiting and each.spent <= self._virtual:
                del accounts[owner]
        is_shared = len(accounts) > 1
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick) if is_shared else None
        for each in () if is_shared else accounts.values():
            while each.waiting:
                each.waiting.popleft()()

    def _pass(self, elapsed: float) -> None:
        """Let virtual time pass."""
        total, most, weight = 0.0, _PROCESSORS * elapsed, min(elapsed / _LATELY_SECONDS, 1.0)
        for each in self._accounts.values():
            taken = min(each.taken, most)  # the rest was taken before, and is told late
            each.taken -= taken
            each.used += weight * (taken / elapsed - each.used)
            total += taken
        self._loop_used += weight * (self._looped / elapsed - self._loop_used)
        self._looped = 0.0
        used = [each.used for each in self._accounts.values()]
        at_work = sum(used) ** 2 / max(sum(part * part for part in used), 1e-12)  # how many, by what each takes
        self._virtual += max(total, _LEAST_PART * elapsed) / max(at_work, 1.0)
        # What nobody takes is there for whoever wants it, as long as the loop and the processors are far from full.
        # Other programs' work counts too: it shows in how long the loop's thread waits for a processor.
        headroom = min(max((_FULL_PART - self._loop_used) / _NEARLY_PART, 0.0), 1.0) * self._freedom(weight)
        self._virtual += headroom * max(_FULL_PART * _PROCESSORS - sum(used), 0.0) * elapsed

    def _freedom(self, weight: float) -> float:
        """How freely the loop's thread finds a processor, from 0 to 1."""
        seen, former = _schedule(), self._seen
        self._seen = seen
        self._ran += weight * (seen[0] - former[0] - self._ran)
        self._waited += weight * (seen[1] - former[1] - self._waited)
        part = self._ran / (self._ran + self._waited) if self._ran > 0 else 1.0
        return min(max((part - _CROWDED_PART) / (_FREE_PART - _CROWDED_PART), 0.0), 1.0)


def _schedule() -> tuple[int, int]:
    """Nanoseconds that this thread had a processor, and waited for one; where the system does not tell, (0, 0)."""
    try:
        ran, waited, _ = _SCHEDULE.read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(ran), int(waited)


class _Metered(Awaitable[None]):
    """Runs a coroutine, and pays for the time of its own steps: what it waits for is not its time.

    Args:
        turn: makes what has to be waited for before the next step, or nothing.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        pay: Pay,
        turn: "Callable[[], asyncio.Future[None] | None]" = lambda: None,
    ) -> None:
        self._coroutine, self._pay, self._turn = coroutine, pay, turn

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                if (turn := self._turn()) is not None:
                    yield from turn
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            begun = time.perf_counter()
            try:
                awaited = step()
            except StopIteration:
                return
            finally:
                self._pay(time.perf_counter() - begun)
            try:
                step = partial(self._coroutine.send, (yield awaited))
            except BaseException as error:  # thrown in here, for the coroutine
                step = partial(self._coroutine.throw, error)


def _give(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
