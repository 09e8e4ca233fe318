"""Who may do what: each request needs a role, told by its method and path before anything of its body is read."""

import functools
import re
from typing import Literal

Role = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = ("read", "write", "admin")  # each may do what those before it may

_OPEN = re.compile(r"/|/page/[^/]+|/health/(live|ready)|/v2|/v2/health/(live|ready)|/openapi\.json")
_READ_BY_POST = re.compile(
    r"/v1/(compare|embeddings|collections/[^/]+/search)|/v2/models/[^/]+(/versions/[^/]+)?/infer"
)
_ADMIN = re.compile(r"(DELETE /v1/collections/[^/]+|POST /v1/collections/[^/]+/compact|[A-Z]+ /v1/snapshots(/.*)?)")


@functools.lru_cache(1024)
def needed_role(method: str, path: str) -> Role | None:
    """The least role that may ask for it; None: anyone (the page, health, the description of the interface)."""
    if method in ("GET", "HEAD") and _OPEN.fullmatch(path):
        return None
    if _ADMIN.fullmatch(f"{method} {path}"):
        return "admin"
    if method in ("GET", "HEAD", "OPTIONS") or _READ_BY_POST.fullmatch(path):
        return "read"
    return "write"


def suffices(role: Role, needed: Role) -> bool:
    """Whether ``role`` includes ``needed``."""
    return ROLES.index(role) >= ROLES.index(needed)
