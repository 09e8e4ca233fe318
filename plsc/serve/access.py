"""Who may what, and how much of it: roles, rights, rates and shares; the caller of the current request, what it sees.

Roles are about persons, rights about vectors. Scores of chosen vectors tell a stored template: whoever may send
vectors, or gets the embeddings of the pictures that are searched for, can compute it from as many scores as it has
numbers. Both therefore are rights of their own, and scores are exact only for callers with the right ``vectors``.

A limit such as ``searches=600/m`` is a bucket that holds 600 and is filled evenly within a minute. What a request costs
beyond one (a search of many queries) is known once its body is read, and taken then, below zero if need be: the caller
waits until the debt is paid. The headers follow draft-ietf-httpapi-ratelimit-headers-10.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from plsc.errors import UsageError

if TYPE_CHECKING:
    from plsc.gallery.values import Match
    from plsc.serve.errors import ApiError
    from plsc.serve.settings import Settings

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Role = Literal["search", "read", "write", "admin"]
ROLES: tuple[Role, ...] = ("search", "read", "write", "admin")  # each includes those before it
Right = Literal["vectors", "embeddings"]
RIGHTS: tuple[Right, ...] = ("vectors", "embeddings")
_MEANINGS = {"vectors": "send vectors; send pictures", "embeddings": "get embeddings; search and compare by pictures"}
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


def includes(role: Role, required: Role) -> bool:
    """True if ``role`` allows what needs ``required``."""
    return ROLES.index(role) >= ROLES.index(required)


@dataclass(frozen=True)
class Permission:
    """What an endpoint needs of its caller.

    Attributes:
        role: the least role; None opens the endpoint to anyone.
        right: needed besides the role.
        all_collections: tokens of single collections do not suffice.
        counts_as: what limits of rates count its requests as; None where they are writes, or nothing but requests.
    """

    role: Role | None
    right: Right | None = None
    all_collections: bool = False
    counts_as: Kind | None = None

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        """Declare what an endpoint needs, as its decorator; every endpoint declares it."""
        endpoint.permission = self  # type: ignore[attr-defined]
        return endpoint

    def rate_kind(self, method: str) -> Kind | None:
        """What a request by ``method`` counts as besides "requests"."""
        return "writes" if self.changes and method not in ("GET", "HEAD") else self.counts_as

    @property
    def changes(self) -> bool:
        """True if such endpoints change something, or administer."""
        return self.role in ("write", "admin")


class Owner(NamedTuple):
    """Whose work something is: it takes turns with that of other keys, and a share is that of a ``group`` of keys.

    A token is a group of its own. Without tokens connections are known by address and port, and those of one address
    are a group.
    """

    key: Hashable
    group: Hashable


NOBODY = Owner("", "")  # the service itself


@dataclass(frozen=True)
class Caller:
    """Who asks: the name of the token, None without tokens, and what it may do; ``collections`` None is all.

    ``place`` is the caller's address and port, where there are no tokens to know callers by.
    """

    name: str | None
    role: Role
    rights: frozenset[Right]
    collections: frozenset[str] | None = None
    rates: tuple[RateLimit, ...] = ()
    place: tuple[str, int] = ("", 0)

    @property
    def owner(self) -> Owner:
        """Whose work its requests are."""
        return Owner(self.place, self.place[0]) if self.name is None else Owner(self.name, self.name)

    def check(self, needed: Permission, collection: str | None) -> None:
        """:class:`ApiError` 403 unless the caller may do what needs ``needed``, in ``collection`` if there is one."""
        if needed.role is not None and not includes(self.role, needed.role):
            raise _error(403, f"the token {self.name} has the role {self.role}; this needs {needed.role}")
        if needed.right is not None:
            self.require(needed.right)
        if collection is not None and not self.sees(collection):
            raise _error(403, f"the token {self.name} is for other collections; GET /v1/collections lists them")
        if needed.all_collections and self.collections is not None:
            raise _error(403, f"the token {self.name} is for single collections; this needs one for all")

    def require(self, right: Right) -> None:
        """:class:`ApiError` 403 unless the caller has the right."""
        if right not in self.rights:
            raise _error(
                403,
                f"the token {self.name} has no right to {_MEANINGS[right]}, or allow it: plsc tokens change "
                f"{self.name} --allow {right}",
            )

    def sees(self, collection: str) -> bool:
        """True if the caller may know of ``collection``."""
        return self.collections is None or collection in self.collections


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> "ApiError":
    from plsc.serve.errors import ApiError  # here: plsc tokens needs this module's roles, and starts without FastAPI

    return ApiError(status, message, headers)


@lru_cache(maxsize=64)
def local_caller(place: tuple[str, int]) -> Caller:
    """Who calls from ``place`` on this machine without tokens."""
    return Caller(None, "admin", frozenset(RIGHTS), place=place)


_caller: ContextVar[Caller] = ContextVar("caller")  # requests run in tasks, each with a context of its own


def set_caller(caller: Caller) -> None:
    """Set the caller of the current request."""
    _caller.set(caller)


def current_caller() -> Caller:
    """The caller of the current request; :class:`LookupError` outside of admitted requests."""
    return _caller.get()


def current_owner() -> Owner:
    """Whose the current request is; nobody's outside of admitted requests."""
    caller = _caller.get(None)
    return NOBODY if caller is None else caller.owner


@dataclass(frozen=True)
class ScoreView:
    """What one caller sees of scores: exact with the right to send vectors, else rounded, so that a score tells less.

    A threshold that a caller sends is compared with the rounded score: compared with the exact one, a few searches
    with other thresholds would find it. The service's own threshold, which callers cannot move, judges exact scores.

    Attributes:
        step: scores are multiples of it; 0 leaves them exact.
        least: matches with lower exact scores are not shown, None shows all.
        threshold: the service's own.
    """

    step: float
    least: float | None
    threshold: float | None

    @classmethod
    def of(cls, caller: Caller, settings: "Settings") -> "ScoreView":
        """The view of ``caller``; whoever may only search sees no person below the service's threshold."""
        step = 0.0 if "vectors" in caller.rights else settings.score_step
        least = None if includes(caller.role, "read") else settings.threshold
        return cls(step, least, settings.threshold)

    def score(self, exact: float) -> float:
        """The score as shown."""
        return exact if self.step == 0 else round(round(exact / self.step) * self.step, 6)

    def search_threshold(self, asked: float | None) -> float | None:
        """The least exact score of matches that are shown where the caller asks for ``asked`` as the least shown."""
        if asked is not None and self.step > 0:
            asked = (math.ceil(asked / self.step - 1e-6) - 0.5) * self.step
        given = [threshold for threshold in (asked, self.least) if threshold is not None]
        return max(-1.0, *given) if given else None

    def matches(self, found: "Sequence[Match]", asked: float | None) -> "list[tuple[Match, bool | None]]":
        """The matches as shown, with whether each reaches the threshold; where scores are equal, by person."""
        if self.step == 0:
            return [(match, self.same_person(match.score, asked)) for match in found]
        rounded = [match._replace(score=self.score(match.score)) for match in found]
        judged = [self.same_person(match.score, asked) for match in found]
        shown = [pair for pair in zip(rounded, judged, strict=True) if asked is None or pair[0].score >= asked]
        return sorted(shown, key=lambda pair: (-pair[0].score, pair[0].person))

    def same_person(self, exact: float, asked: float | None = None) -> bool | None:
        """Whether a score reaches the caller's threshold, else the service's; None without any."""
        if asked is not None:
            return self.score(exact) >= asked
        return None if self.threshold is None else exact >= self.threshold


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


def _throttled_error(name: str, bucket: LimitBucket) -> "ApiError":
    wait = max(bucket.seconds_until(1), 1)
    headers = {"Retry-After": str(wait), "RateLimit-Policy": bucket.policy, "RateLimit": bucket.state()}
    whose = f"the token {name}" if name else "this machine"
    return _error(429, f"{whose} has used up its {bucket.limit}; ask again in {wait} s", headers)


class Shared:
    """A number of things that callers hold for a while. Used in the event loop alone.

    Args:
        what: names them in errors, in the plural.
        most: held by all together.
        share: of ``most``, what one caller may have, and ``least`` in any case.
    """

    def __init__(self, what: str, most: int, share: float, least: int = 1) -> None:
        self._what, self._most, self._part, self._least = what, most, max(int(most * share), least), least
        self._held: Counter[str | None] = Counter()
        self.total = 0

    @property
    def is_half_free(self) -> bool:
        """True if no more than half of them are held."""
        return self.total <= self._most / 2

    def check(self, owner: str | None, amount: int = 1) -> None:
        """:class:`ApiError` unless the caller of this name may have ``amount`` more: 429 for its own part, 503."""
        if self._part < self._most:
            part = max(part_beside(self._part, self._most - self.total - amount), self._least)
            if self._held[owner] + amount > part:
                raise over_share(owner, f"{part:,} {self._what}")
        if self.total + amount > self._most:
            raise _error(503, f"{self._most:,} {self._what} are held for all callers already; ask again in a moment")

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


def part_beside(part: int, free: int) -> int:
    """What one caller may have of what others leave: ``part``, and at most twice what stays ``free`` beside it.

    So any number of callers leaves some to the next one (the dynamic thresholds of Choudhury and Hahne, 1998): four who
    want all of it a ninth.
    """
    return min(part, 2 * free)


def over_share(owner: str | None, what: str) -> "ApiError":
    """The error for a token that has ``what`` already."""
    return _error(429, f"the token {owner} has {what} already, which is its share; ask again in a moment")
