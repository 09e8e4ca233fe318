"""Who may go next, and how much anyone may hold: the one place that the rest of the service asks.

A caller is a token; without tokens it is an address. Strangers, who have shown no good token, are one together. All
numbers are in :class:`plsc.serve.settings.Limits`.

- How often: a limit such as ``searches=600/m`` is a :class:`Bucket` of 600 that is filled evenly within a minute. What
  a request costs beyond one (a search of many queries) is known once its body is read, and taken then, below zero if
  need be. The headers follow draft-ietf-httpapi-ratelimit-headers-10.
- How much: what all share is :class:`Shared`: requests, bodies, answers, connections, rows that wait for the device.
- Who is next: what waits stands in a :class:`Line`, by caller, and callers take turns.
- When: :class:`Turns` gives each caller its part of the time. A refusal costs as much as an answer, and a connection
  that is refused at once is back at once: a thousand that come again and again become a thousand that wait.

Everything here is used in one event loop, unless its user has a lock.
"""

import asyncio
import math
import os
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from plsc.errors import UsageError

if TYPE_CHECKING:
    from plsc.serve.connections import Connection
    from plsc.serve.errors import ApiError
    from plsc.serve.settings import Limits

Kind = Literal["requests", "searches", "embeddings", "writes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Clock = Callable[[], float]  # seconds from some moment on
Item = TypeVar("Item")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_FORM = re.compile(rf"({'|'.join(KINDS)})=([1-9][0-9]{{0,8}})(?:/([smh]))?", re.ASCII)
_PROCESSORS = os.cpu_count() or 1
STRANGERS, HEALTH = "?", "?health"  # who ask without a good token, and for health: no token's names


@dataclass(frozen=True)
class RateLimit:
    """At most ``count`` of a kind in ``seconds``.

    Attributes:
        kind: "requests" are all, "searches" queries and comparisons, "embeddings" those that are given out, "writes"
            requests that change something, each person of an enrolment counted.
    """

    kind: Kind
    count: int
    seconds: int

    def __str__(self) -> str:
        """The form that :func:`parse_rate_limits` reads."""
        unit = next(unit for unit, seconds in _SECONDS.items() if seconds == self.seconds)
        return f"{self.kind}={self.count}/{unit}"


def parse_rate_limits(texts: Sequence[str]) -> tuple[RateLimit, ...]:
    """Limits written as KIND=N, KIND=N/s, KIND=N/m or KIND=N/h.

    Raises:
        UsageError: one that is written otherwise, or a kind that comes twice.
    """
    limits = []
    for text in texts:
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{ascii(text)[:80]} is no rate limit; write {', '.join(KINDS[:-1])} or {KINDS[-1]}, and how many a "
                "second, minute or hour: searches=50/s, embeddings=600/m"
            )
        kind = next(kind for kind in KINDS if kind == found[1])
        limits.append(RateLimit(kind, int(found[2]), _SECONDS[found[3] or "s"]))
    if len({limit.kind for limit in limits}) < len(limits):
        raise UsageError(f"{' '.join(texts)[:200]} limits a kind twice; give each kind one limit")
    return tuple(limits)


def effective_limits(own: Sequence[RateLimit], defaults: Sequence[RateLimit]) -> list[RateLimit]:
    """A token's own limits, and the service's of other kinds."""
    by_kind = {limit.kind: limit for limit in (*defaults, *own)}
    return [by_kind[kind] for kind in KINDS if kind in by_kind]


class Bucket:
    """A token bucket: it holds ``most``, is filled evenly by ``rate`` a second, and may be emptied below zero."""

    def __init__(self, most: float, rate: float, clock: Clock) -> None:
        self.level = self.most = float(most)
        self.rate, self._clock, self._filled = rate, clock, clock()

    def fill(self) -> float:
        """Add what has come since the last time; returns the level."""
        now = self._clock()
        self.level = min(self.level + (now - self._filled) * self.rate, self.most)
        self._filled = now
        return self.level

    def seconds_until(self, level: float) -> int:
        """Whole seconds until the bucket holds ``level``."""
        return max(math.ceil((level - self.level) / self.rate), 0)


class LimitBucket(Bucket):
    """What a caller has left of a limit, with its fields of headers."""

    def __init__(self, limit: RateLimit, clock: Clock) -> None:
        super().__init__(limit.count, limit.count / limit.seconds, clock)
        self.limit, self.policy = limit, f'"{limit.kind}";q={limit.count};w={limit.seconds}'

    def state(self) -> str:
        """What is left, and the seconds until there is more, or all."""
        remaining = max(int(self.level), 0)
        wait = self.seconds_until(self.limit.count if remaining else 1)
        return f'"{self.limit.kind}";r={remaining};t={wait}'

    def refusal(self, name: str) -> "ApiError":
        """The error for the token ``name``, "" without tokens, which has used it up."""
        wait = max(self.seconds_until(1), 1)
        headers = {"Retry-After": str(wait), "RateLimit-Policy": self.policy, "RateLimit": self.state()}
        whose = f"the token {name}" if name else "this machine"
        return _error(429, f"{whose} has used up its {self.limit}; ask again in {wait} s", headers)


Allowance = Sequence[LimitBucket]  # what a request draws on; the last one is that of its kind, if that is limited
_allowance: ContextVar[Allowance] = ContextVar("allowance", default=())


class RateLimiter:
    """The buckets of all callers, by the names of their tokens.

    Args:
        defaults: the limits of every caller, for kinds of which its token has none.
        throttled: called with the name and the kind of what was refused.
    """

    def __init__(self, defaults: Sequence[RateLimit], throttled: Callable[[str, str], None], clock: Clock) -> None:
        self._defaults, self._throttled, self._clock = tuple(defaults), throttled, clock
        self._callers: dict[str, tuple[Sequence[RateLimit], dict[Kind, LimitBucket]]] = {}

    def admit(self, name: str, own: Sequence[RateLimit], kind: Kind | None) -> Allowance:
        """Take one request of a kind; returns the buckets that the current request draws on, none if it is unlimited.

        Raises:
            ApiError: 429 where a bucket is empty; nothing is taken then.
        """
        _allowance.set(())  # where requests are pipelined, this one runs in the context of the one before
        if not own and not self._defaults:
            return ()
        limits, buckets = self._callers.get(name, (None, {}))
        if limits != own:  # a new caller, or a token that was changed
            buckets = {each.kind: LimitBucket(each, self._clock) for each in effective_limits(own, self._defaults)}
            self._callers[name] = own, buckets
        counted = [buckets[each] for each in ("requests", kind) if each in buckets]
        for bucket in counted:
            if bucket.fill() < 1:
                self._throttled(name, bucket.limit.kind)
                raise bucket.refusal(name)
        for bucket in counted:
            bucket.level -= 1
        _allowance.set(counted)
        return counted


def charge(count: int) -> None:
    """Count the current request as ``count`` of its kind, of which admission has taken one."""
    for bucket in _allowance.get()[-1:]:
        if bucket.limit.kind != "requests":
            bucket.level -= max(count - 1, 0)


def rate_headers(allowance: Allowance) -> list[tuple[bytes, bytes]]:
    """The RateLimit-Policy and RateLimit fields; none without limits."""
    if not allowance:
        return []
    policy = ", ".join(bucket.policy for bucket in allowance)
    state = ", ".join(bucket.state() for bucket in allowance)
    return [(b"ratelimit-policy", policy.encode()), (b"ratelimit", state.encode())]


class Shared:
    """A number of things that callers hold for a while.

    One caller has at most its share, and at most twice what stays free beside it: so any number of callers leaves some
    to the next one (the dynamic thresholds of Choudhury and Hahne, 1998), and four who want all have a ninth each.

    Args:
        what: names them in errors, in the plural.
        most: held by all together.
        share: of ``most``, what one caller may have, and ``least`` in any case; 1.0 knows no shares.
    """

    def __init__(self, what: str, most: int, share: float, least: int = 1) -> None:
        self._what, self._most, self._part, self._least = what, most, max(int(most * share), least), least
        self._held: Counter[Hashable] = Counter()
        self.total = 0

    @property
    def is_half_free(self) -> bool:
        """True if no more than half of them are held."""
        return self.total <= self._most / 2

    def check(self, owner: Hashable, amount: int = 1) -> None:
        """:class:`ApiError` unless the caller of this name may have ``amount`` more: 429 for its own part, 503."""
        if self._part < self._most:
            part = max(min(self._part, 2 * (self._most - self.total - amount)), self._least)
            if self._held[owner] + amount > part:
                has = f"has {part:,} {self._what} already"
                raise _error(429, f"the token {owner} {has}, which is its share; ask again in a moment")
        if self.total + amount > self._most:
            raise _error(503, f"{self._most:,} {self._what} are held for all callers already; ask again in a moment")

    def take(self, owner: Hashable, amount: int = 1) -> None:
        """Give a caller ``amount`` more, or raise as :meth:`check` does."""
        self.check(owner, amount)
        self.add(owner, amount)

    def add(self, owner: Hashable, amount: int = 1) -> None:
        """Give a caller ``amount`` more, who may have it."""
        self._held[owner] += amount
        self.total += amount

    def give_back(self, owner: Hashable, amount: int = 1) -> None:
        """Take ``amount`` from a caller."""
        self._held[owner] -= amount
        self.total -= amount
        if not self._held[owner]:
            del self._held[owner]


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> "ApiError":
    from plsc.serve.errors import ApiError  # here: plsc tokens reads rate limits, and starts without FastAPI

    return ApiError(status, message, headers)


class Line(Generic[Item]):
    """What waits, by caller: callers take turns, and each one's are in order. Its length is the number of callers."""

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def put(self, caller: Hashable, item: Item) -> None:
        """Append an item to the caller's."""
        self._of.setdefault(caller, deque()).append(item)

    def take(self, may: Callable[[Hashable, Item], bool] = lambda *_: True) -> Item | None:
        """The first item of the first caller who ``may`` have it, and is the last in turn then; None without any."""
        for caller, items in self._of.items():
            if may(caller, items[0]):
                item = items.popleft()
                del self._of[caller]
                if items:
                    self._of[caller] = items
                return item
        return None


Pay = Callable[[float], None]
Answer = Callable[[], Coroutine[Any, Any, None]]
_payer: ContextVar[Pay] = ContextVar("payer", default=lambda _: None)


def current_payer() -> Pay:
    """What counts seconds that threads and the device spend on the current request; called in the event loop."""
    return _payer.get()


class _Account(Bucket):
    """Seconds that a caller may take now.

    Attributes:
        taken: seconds since the last tick.
        used: part of the time, lately.
        line: resolved at the caller's turns.
    """

    def __init__(self, most: float, rate: float, clock: Clock) -> None:
        super().__init__(most, rate, clock)
        self.taken, self.used = 0.0, 0.0
        self.line: Line[asyncio.Future[None]] = Line()


class Turns:
    """Lets each caller have its part of the time.

    Strangers have a small one, in turn by address. Tokens wait only where others are at work: then one that has taken
    more than its part goes on once its account is filled again. The parts are equal, and whoever takes a tenth of
    another counts for little. It is fair queueing by generalized processor sharing (Parekh and Gallager, 1993).

    Args:
        clock: of all that takes time.
        processor_clock: seconds that the event loop's thread had a processor.
    """

    def __init__(self, limits: "Limits", clock: Clock, processor_clock: Clock = time.thread_time) -> None:
        self._limits, self._clock, self.clocks = limits, clock, (clock, processor_clock)
        saved = limits.strangers_saved_seconds
        self._apart = {
            STRANGERS: _Account(saved, limits.strangers_part, clock),
            HEALTH: _Account(saved, limits.health_part, clock),
        }
        self._tokens: dict[str, _Account] = {}
        self._ticked = 0.0
        self._looped, self._ran = 0.0, 0.0  # seconds of the loop's steps since the last tick, and with a processor
        self._loop_used, self._loop_ran = 0.0, 0.0  # the same as parts of the time, lately
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, owner: str, answer: Answer, connection: "Connection") -> None:
        """Answer, each step at its turn: a hundred that began while the caller was alone must not all go on at once."""
        _payer.set(partial(self.charge_beside, owner))
        try:
            await _Metered(self, owner, connection.address if owner in self._apart else "", answer())
        finally:
            self.charge_reading(owner, connection)

    def charge(self, owner: str, seconds: float, ran: float | None = None) -> None:
        """Count time of the event loop that a caller took, for ``ran`` of which it had a processor."""
        self._looped += seconds
        self._ran += seconds if ran is None else ran
        self.charge_beside(owner, seconds)

    def charge_beside(self, owner: str, seconds: float) -> None:
        """Count time that threads, processes or the device took for a caller."""
        account = self._account(owner)
        account.taken += seconds
        account.level -= seconds

    def charge_reading(self, owner: str, connection: "Connection") -> None:
        """Count what reading of a connection took, and what it has to wait for besides."""
        self.charge(owner, connection.seconds)
        self._account(owner).level -= connection.fine
        connection.seconds = connection.fine = 0.0

    def must_wait(self, owner: str) -> bool:
        """True if a caller has to wait for its turn."""
        among = self._apart if owner in self._apart else self._tokens
        account = among.get(owner)
        return len(among) > 1 and account is not None and (len(account.line) > 0 or account.fill() <= 0)

    def turn(self, owner: str, place: str = "") -> "asyncio.Future[None]":
        """Resolved at the caller's turn; those of one ``place`` take turns with those of others."""
        turn = asyncio.get_running_loop().create_future()
        self._account(owner).line.put(place, turn)
        self._start_ticking()
        return turn

    def _account(self, owner: str) -> _Account:
        account = self._apart.get(owner) or self._tokens.get(owner)
        if account is None:
            account = self._tokens[owner] = _Account(self._limits.lead_seconds, 0.0, self._clock)
            if len(self._tokens) == 2:
                for each in self._tokens.values():  # alone, a token took what it liked, and nobody measured it:
                    each.level, each.taken, each.used = each.most, 0.0, self._limits.kept_part  # it is not gone at once
                self._ticked, self._looped, self._ran = self._clock(), 0.0, 0.0
            if len(self._tokens) > 1:
                self._start_ticking()
        return account

    def _start_ticking(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.tick_seconds, self.tick)

    def tick(self) -> None:
        """Let those go on whose turn it is; called every few milliseconds while somebody may have to wait."""
        self._timer, tokens, limits = None, self._tokens, self._limits
        if len(tokens) > 1:
            self._share_out()
        for owner, each in [*self._apart.items(), *tokens.items()]:
            each.fill()
            is_alone = len(tokens) < 2 and owner in tokens
            while (is_alone or each.level > 0) and (turn := each.line.take()) is not None:
                if not turn.done():
                    each.level -= limits.step_seconds
                    turn.set_result(None)
            if each.used < limits.idle_part and each.level >= each.most and not each.line:
                tokens.pop(owner, None)
        if len(tokens) > 1 or any(each.line for each in (*self._apart.values(), *tokens.values())):
            self._start_ticking()

    def _share_out(self) -> None:
        """Give each token its part of the time until the next tick."""
        limits, now = self._limits, self._clock()
        elapsed = max(now - self._ticked, 1e-6)
        weight = min(elapsed / limits.lately_seconds, 1.0)
        self._ticked = now
        for each in self._tokens.values():
            taken = min(each.taken, _PROCESSORS * elapsed)  # the rest was taken before, and is told late
            each.taken -= taken
            each.used += weight * (taken / elapsed - each.used)
        used = [each.used for each in self._tokens.values()]
        total = sum(used)
        at_work = max(total**2 / max(sum(part * part for part in used), 1e-12), 1.0)  # how many, by what each takes
        rate = max(total, limits.least_part) / at_work + self._to_spare(elapsed, weight, total)
        for each in self._tokens.values():
            each.rate = rate

    def _to_spare(self, elapsed: float, weight: float, total: float) -> float:
        """What nobody takes is there for whoever wants it, as long as the loop and the processors are far from full.

        Other programs' work counts too: it shows in how long the loop's thread waits for a processor amid its steps.
        """
        limits = self._limits
        self._loop_used += weight * (self._looped / elapsed - self._loop_used)
        self._loop_ran += weight * (self._ran / elapsed - self._loop_ran)
        self._looped = self._ran = 0.0
        ran = self._loop_ran / self._loop_used if self._loop_used > 0 else 1.0
        is_free = (ran - limits.crowded_part) / (limits.free_part - limits.crowded_part)
        is_idle = (limits.full_part - self._loop_used) / (limits.full_part - limits.busy_part)
        freedom = min(max(is_free, 0.0), 1.0) * min(max(is_idle, 0.0), 1.0)
        return freedom * max(limits.full_part * _PROCESSORS - total, 0.0)


class _Metered(Awaitable[None]):
    """Runs a coroutine, each step at its caller's turn, who pays for the steps: what it waits for is not its time."""

    def __init__(self, turns: Turns, owner: str, place: str, coroutine: Coroutine[Any, Any, None]) -> None:
        self._turns, self._owner, self._place, self._coroutine = turns, owner, place, coroutine

    def __await__(self) -> Generator[Any, Any, None]:
        turns, (clock, processor_clock) = self._turns, self._turns.clocks
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                if turns.must_wait(self._owner):
                    yield from turns.turn(self._owner, self._place)
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            begun, ran = clock(), processor_clock()
            try:
                awaited = step()
            except StopIteration:
                return
            finally:
                turns.charge(self._owner, clock() - begun, processor_clock() - ran)
            try:
                step = partial(self._coroutine.send, (yield awaited))
            except BaseException as error:  # thrown in here, for the coroutine
                step = partial(self._coroutine.throw, error)
