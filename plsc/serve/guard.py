"""What stands before every route: who calls, from where, and how much, settled before the body is read."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from plsc.serve.asgi import Receive, Scope, Send
from plsc.serve.exchange import Exchange, current_task
from plsc.serve.failures import Refusal, error_response
from plsc.serve.gate import Gate
from plsc.serve.metrics import Metrics
from plsc.serve.request_body import RequestBody
from plsc.serve.roles import Role, needed_role, suffices
from plsc.serve.settings import Settings, is_loopback
from plsc.serve.tokens import TokenBook

Answer = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Caller:
    """Who asks: the name of the token, None without tokens, and what they may do."""

    name: str | None
    role: Role


LOCAL = Caller(None, "admin")
_SINGLE = (b"host", b"authorization", b"origin", b"sec-fetch-site", b"content-type", b"content-encoding")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
GONE = 499  # how proxies count callers that went away before the answer


class Guard:
    """An ASGI application: admits a request by its head, reads its body within limits, counts and audits it.

    ``answer`` does the rest. ``scope["state"]`` gets "caller" (:class:`Caller`) and "service", and takes "ids" from
    routes that write, for the audit.
    """

    def __init__(
        self, answer: Answer, gate: Gate, settings: Settings, tokens: TokenBook | None, metrics: Metrics
    ) -> None:
        self._answer, self._gate, self._settings, self._tokens, self._metrics = answer, gate, settings, tokens, metrics
        self._requests = 0  # in hand, of callers who may ask for more than what is open to anyone
        self._bytes = 0  # of all bodies in hand
        metrics.watch_requests(lambda: self._requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        exchange = Exchange(scope, receive, send, self._settings.limits.send_seconds, self._audit)
        try:
            if await self._admit(exchange):
                await self._answer(exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            current_task().uncancel()
        finally:
            exchange.settle()
            self._requests -= exchange.counted
            self._bytes -= exchange.held
            template = getattr(scope.get("route"), "path", "other")
            status = exchange.status or GONE
            self._metrics.request(template, exchange.method, status, time.monotonic() - exchange.begun)

    async def _admit(self, exchange: Exchange) -> bool:
        """Whether a request is to be answered; if not, it has been refused."""
        try:
            self._check(exchange)
            body = RequestBody(exchange.headers, self._settings.limits, partial(self._hold, exchange))
            if exchange.needed is None and body.is_expected:  # nobody knows this caller: nothing is kept for them
                raise Refusal(400, f"{exchange.path} takes no body; send the request without one")
            exchange.content = await body.read(exchange)
        except Refusal as refusal:
            await self._refuse(exchange, refusal)
            return False
        if exchange.needed == "read":
            exchange.cancel_when_gone()
        return True

    def _check(self, exchange: Exchange) -> None:
        """:class:`Refusal` unless the caller has the role that the request needs; all here is told by the head."""
        if _CONTROL.search(exchange.path):  # a route's pattern would match before a newline at its end
            raise Refusal(400, "the path holds control characters; send it without them")
        _check_single(exchange)
        if self._tokens is None:
            _check_origin(exchange.headers)
        needed = exchange.needed = needed_role(exchange.method, exchange.path)
        if needed is None:
            return
        exchange.scope["state"]["caller"] = self._caller(exchange.headers, needed)
        exchange.scope["state"]["service"] = self._gate.service
        if self._requests >= self._settings.limits.requests:
            raise Refusal(503, f"{self._settings.limits.requests} requests are in hand already; ask again in a moment")
        self._requests += 1
        exchange.counted = True

    def _caller(self, headers: dict[bytes, bytes], needed: Role) -> Caller:
        if self._tokens is None:
            return LOCAL
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == b"bearer" else None
        if token is None:
            message = "a token is needed: send Authorization: Bearer TOKEN, with a token that the service knows"
            raise Refusal(401, message, {"WWW-Authenticate": "Bearer"})
        if not suffices(token.role, needed):
            raise Refusal(403, f"the token {token.name} may {token.role}; this needs {needed}")
        return Caller(token.name, token.role)

    def _hold(self, exchange: Exchange, size: int) -> None:
        """Count ``size`` bytes as those of the exchange; :class:`Refusal` if all together are too many."""
        more = size - exchange.held
        if more > 0 and self._bytes + more > self._settings.limits.memory_bytes:
            raise Refusal(503, "the bodies of other requests fill the memory set aside; ask again in a moment")
        self._bytes += more
        exchange.held = size

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        self._metrics.refused(str(refusal.status_code))
        headers = {**(refusal.headers or {}), "Connection": "close"}  # what is left of the body is not waited for
        await exchange.respond(error_response(exchange.path, refusal.status_code, refusal.detail, headers))

    def _audit(self, exchange: Exchange) -> None:
        """The line of a write, before its caller hears of it."""
        if exchange.needed == "read" or exchange.method in ("GET", "HEAD"):
            return
        scope = exchange.scope
        route, caller = scope.get("route"), scope["state"].get("caller")
        if caller is None or route is None:
            return
        collection, ids = scope.get("path_params", {}).get("collection"), scope["state"].get("ids", [])
        self._gate.audit(caller.name, str(route.name), collection, ids, exchange.status)


def _check_single(exchange: Exchange) -> None:
    """:class:`Refusal` 400 if a header that decides about the request is there twice: others may read the other one."""
    names = [name for name, _ in exchange.scope["headers"]]
    if len(names) == len(exchange.headers):
        return
    for name in _SINGLE:
        if names.count(name) > 1:
            raise Refusal(400, f"the header {name.decode()} is there {names.count(name)} times; send it once")


def _check_origin(headers: dict[bytes, bytes]) -> None:
    """Without tokens, being on this machine is what admits: a web page elsewhere must not borrow that.

    A name made to resolve to 127.0.0.1 (DNS rebinding) shows in Host, another page's script in Origin and
    Sec-Fetch-Site.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not is_loopback(_without_port(host)):
        raise Refusal(403, "without tokens only this machine is served: call it 127.0.0.1, or set tokens up")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
        raise Refusal(403, "a page of another origin may not call this service; call it from its own page")
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise Refusal(403, "a page of another site may not call this service")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
