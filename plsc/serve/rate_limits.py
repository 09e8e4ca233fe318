"""How much one caller may have: of what all share at a time, and in a time: token buckets, and their RateLimit fields.

A limit such as ``searches=600/m`` is a bucket that holds 600 and is filled evenly within a minute. What a request costs
beyond one (a search of many queries) is known once its body is read, and taken then, below zero if need be: the caller
waits until the debt is paid. The headers follow draft-ietf-httpapi-ratelimit-headers-10.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from plsc.errors import UsageError
from plsc.serve.errors import RETRY_SECONDS, ApiError

Kind = Literal["requests", "searches", "embeddings", "writes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_FORM = re.compile(rf"({'|'.join(KINDS)})=([1-9][0-9]{{0,8}})(?:/([smh]))?", re.ASCII)


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
        """The form that :func:`parse_rate_limit` reads."""
        unit = next(unit for unit, seconds in _SECONDS.items() if seconds == self.seconds)
        return f"{self.kind}={self.count}/{unit}"


def parse_rate_limit(text: str) -> RateLimit:
    """A limit written as KIND=N, KIND=N/s, KIND=N/m or KIND=N/h; :class:`UsageError` for anything else."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{ascii(text)[:80]} is no rate limit; write {', '.join(KINDS[:-1])} or {KINDS[-1]}, and how many a "
            "second, minute or hour: searches=50/s, embeddings=600/m"
        )
    kind = next(kind for kind in KINDS if kind == found[1])
    return RateLimit(kind, int(found[2]), _SECONDS[found[3] or "s"])


def parse_rate_limits(texts: Sequence[str]) -> tuple[RateLimit, ...]:
    """Limits of different kinds; :class:`UsageError` where a kind comes twice."""
    limits = tuple(parse_rate_limit(text) for text in texts)
    if len({limit.kind for limit in limits}) < len(limits):
        raise UsageError(f"{' '.join(texts)[:200]} limits a kind twice; give each kind one limit")
    return limits


def effective_limits(own: Sequence[RateLimit], defaults: Sequence[RateLimit]) -> list[RateLimit]:
    """A token's own limits, and the service's of other kinds."""
    by_kind = {limit.kind: limit for limit in (*defaults, *own)}
    return [by_kind[kind] for kind in KINDS if kind in by_kind]


class Bucket:
    """A token bucket: it holds ``most``, is filled evenly by ``rate`` a second, and may be emptied below zero."""

    __slots__ = ("_filled", "_most", "_rate", "level")

    def __init__(self, most: float, rate: float) -> None:
        self.level = self._most = float(most)
        self._rate, self._filled = rate, time.monotonic()

    def fill(self) -> float:
        """Add what has come since the last time; returns the level."""
        now = time.monotonic()
        self.level = min(self.level + (now - self._filled) * self._rate, self._most)
        self._filled = now
        return self.level

    def seconds_until(self, level: float) -> int:
        """Whole seconds until the bucket holds ``level``."""
        return max(math.ceil((level - self.level) / self._rate), 0)


class LimitBucket(Bucket):
    """What a caller has left of a limit, with its fields of headers."""

    __slots__ = ("limit", "policy")

    def __init__(self, limit: RateLimit) -> None:
        super().__init__(limit.count, limit.count / limit.seconds)
        self.limit, self.policy = limit, f'"{limit.kind}";q={limit.count};w={limit.seconds}'

    def state(self) -> str:
        """What is left, and the seconds until there is more, or all."""
        remaining = max(int(self.level), 0)
        wait = self.seconds_until(self.limit.count if remaining else 1)
        return f'"{self.limit.kind}";r={remaining};t={wait}'


Allowance = Sequence[LimitBucket]  # what a request draws on; the last one is that of its kind, if that is limited
_allowance: ContextVar[Allowance] = ContextVar("allowance", default=())


class RateLimiter:
    """The buckets of all callers, by the names of their tokens. Used in the event loop alone.

    Args:
        defaults: the limits of every caller, for kinds of which its token has none.
        throttled: called with the name and the kind of what was refused.
    """

    def __init__(self, defaults: Sequence[RateLimit], throttled: Callable[[str, str], None]) -> None:
        self._defaults, self._throttled = tuple(defaults), throttled
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
            buckets = {limit.kind: LimitBucket(limit) for limit in effective_limits(own, self._defaults)}
            self._callers[name] = own, buckets
        counted = [buckets[each] for each in ("requests", kind) if each in buckets]
        for bucket in counted:
            if bucket.fill() < 1:
                self._throttled(name, bucket.limit.kind)
                raise _throttled_error(name, bucket)
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


def _throttled_error(name: str, bucket: LimitBucket) -> ApiError:
    wait = max(bucket.seconds_until(1), 1)
    headers = {"Retry-After": str(wait), "RateLimit-Policy": bucket.policy, "RateLimit": bucket.state()}
    whose = f"the token {name}" if name else "this machine"
    return ApiError(429, f"{whose} has used up its {bucket.limit}; ask again in {wait} s", headers)


class Shared:
    """A number of things that callers hold for a while. Used in the event loop alone.

    Args:
        what: names them in errors, in the plural.
        most: held by all together.
        share: of ``most``, what one caller may have, and ``least`` in any case.
    """

    def __init__(self, what: str, most: int, share: float, least: int = 1) -> None:
        self._what, self._most, self._part = what, most, max(int(most * share), least)
        self._held: Counter[str | None] = Counter()
        self.total = 0

    @property
    def is_half_free(self) -> bool:
        """True if no more than half of them are held."""
        return self.total <= self._most / 2

    def check(self, owner: str | None, amount: int = 1) -> None:
        """:class:`ApiError` unless the caller of this name may have ``amount`` more: 429 for its own part, 503."""
        if self._part < self._most and self._held[owner] + amount > self._part:
            raise over_share(owner, f"{self._part:,} {self._what}")
        if self.total + amount > self._most:
            raise ApiError(503, f"{self._most:,} {self._what} are held for all callers already; ask again in a moment")

    def take(self, owner: str | None, amount: int = 1) -> None:
        """Give a caller ``amount`` more, or raise as :meth:`check` does."""
        self.check(owner, amount)
        self._held[owner] += amount
        self.total += amount

    def give_back(self, owner: str | None, amount: int = 1) -> None:
        """Take ``amount`` from a caller."""
        self._held[owner] -= amount
        self.total -= amount
        if not self._held[owner]:
            del self._held[owner]


def over_share(owner: str | None, what: str) -> ApiError:
    """The error for a token that has ``what`` already."""
    message = f"the token {owner} has {what} already, which is its share; ask again in a moment"
    return ApiError(429, message, {"Retry-After": str(RETRY_SECONDS)})
