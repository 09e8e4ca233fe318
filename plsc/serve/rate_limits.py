"""How much a token may ask for in a time: token buckets, and the RateLimit header fields that tell callers of them.

A limit such as ``searches=600/m`` is a bucket that holds 600 and is filled evenly within a minute. What a request costs
beyond one (a search of many queries) is known once its body is read, and taken then, below zero if need be: the caller
waits until the debt is paid. The headers follow draft-ietf-httpapi-ratelimit-headers-10.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from plsc.errors import UsageError
from plsc.serve.errors import ApiError

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


class _Bucket:
    __slots__ = ("_filled", "_rate", "level", "limit", "policy")

    def __init__(self, limit: RateLimit) -> None:
        self.limit, self.level = limit, float(limit.count)
        self.policy = f'"{limit.kind}";q={limit.count};w={limit.seconds}'
        self._rate = limit.count / limit.seconds
        self._filled = time.monotonic()

    def fill(self, now: float) -> float:
        """Add what has come since the last time; returns the level."""
        self.level = min(self.level + (now - self._filled) * self._rate, float(self.limit.count))
        self._filled = now
        return self.level

    def seconds_until(self, level: float) -> int:
        return max(math.ceil((level - self.level) / self._rate), 0)

    def state(self) -> str:
        remaining = max(int(self.level), 0)
        wait = self.seconds_until(self.limit.count if remaining else 1)
        return f'"{self.limit.kind}";r={remaining};t={wait}'


class Allowance:
    """What one request may draw on: the buckets of its caller that it counts in; the last one is that of its kind."""

    __slots__ = ("_buckets",)

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets

    def charge(self, more: int) -> None:
        """Take ``more`` from the bucket of the request's kind."""
        if self._buckets[-1].limit.kind != "requests":
            self._buckets[-1].level -= more

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The RateLimit-Policy and RateLimit fields."""
        policy = ", ".join(bucket.policy for bucket in self._buckets)
        state = ", ".join(bucket.state() for bucket in self._buckets)
        return [(b"ratelimit-policy", policy.encode()), (b"ratelimit", state.encode())]


class RateLimiter:
    """The buckets of all callers, by the names of their tokens. Used in the event loop alone.

    Args:
        defaults: the limits of every caller, for kinds of which its token has none.
        throttled: called with the name and the kind of what was refused.
    """

    def __init__(self, defaults: Sequence[RateLimit], throttled: Callable[[str, str], None]) -> None:
        self._defaults, self._throttled = tuple(defaults), throttled
        self._callers: dict[str, tuple[Sequence[RateLimit], dict[Kind, _Bucket]]] = {}

    def admit(self, name: str, own: Sequence[RateLimit], kind: Kind | None) -> Allowance | None:
        """Take one request of a kind; None where nothing is limited.

        Raises:
            ApiError: 429 where a bucket is empty; nothing is taken then.
        """
        if not own and not self._defaults:
            return None
        limits, buckets = self._callers.get(name, (None, {}))
        if limits != own:  # a new caller, or a token that was changed
            buckets = {limit.kind: _Bucket(limit) for limit in effective_limits(own, self._defaults)}
            self._callers[name] = own, buckets
        now = time.monotonic()
        counted = [buckets[each] for each in ("requests", kind) if each in buckets]
        for bucket in counted:
            if bucket.fill(now) < 1:
                self._throttled(name, bucket.limit.kind)
                raise _throttled_error(name, bucket)
        for bucket in counted:
            bucket.level -= 1
        return Allowance(counted) if counted else None


_allowance: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


def set_allowance(allowance: Allowance | None) -> None:
    """Set what the current request draws on."""
    _allowance.set(allowance)


def charge(count: int) -> None:
    """Count the current request as ``count`` of its kind, of which admission has taken one."""
    allowance = _allowance.get()
    if allowance is not None and count > 1:
        allowance.charge(count - 1)


def _throttled_error(name: str, bucket: _Bucket) -> ApiError:
    wait = max(bucket.seconds_until(1), 1)
    headers = {"Retry-After": str(wait), "RateLimit-Policy": bucket.policy, "RateLimit": bucket.state()}
    whose = f"the token {name}" if name else "this machine"
    return ApiError(429, f"{whose} has used up its {bucket.limit}; ask again in {wait} s", headers)
