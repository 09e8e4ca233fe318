"""Who may what: roles and rights; the caller of the current request, and what it sees of scores.

Roles are about persons, rights about vectors. Scores of chosen vectors tell a stored template: whoever may send
vectors, or gets the embeddings of the pictures that are searched for, can compute it from as many scores as it has
numbers. Both therefore are rights of their own, and scores are exact only for callers with the right ``vectors``.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from plsc.serve.limits import Kind, RateLimit

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
