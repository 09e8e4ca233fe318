"""What stands before every route: who calls, from where, and how much, settled before the body is read."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from plsc.serve.connection import Connection
from plsc.serve.failures import Refusal, error_response
from plsc.serve.gate import Gate
from plsc.serve.metrics import Metrics
from plsc.serve.roles import Role, needed_role, suffices
from plsc.serve.settings import Settings, is_loopback
from plsc.serve.tokens import TokenBook

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Caller:
    """Who asks: the name of the token, None without tokens, and what they may do."""

    name: str | None
    role: Role


LOCAL = Caller(None, "admin")
GONE = 499  # how proxies count callers that went away before the answer


class Guard:
    """ASGI middleware: admits a request by its head, reads its body within limits, counts and audits it.

    ``scope["state"]`` gets "caller" (:class:`Caller`) and "service", and takes "ids" from routes that write, for the
    audit.
    """

    def __init__(self, app: App, gate: Gate, settings: Settings, tokens: TokenBook | None, metrics: Metrics) -> None:
        self._app, self._gate, self._settings, self._tokens, self._metrics = app, gate, settings, tokens, metrics
        self._requests = 0
        self._bytes = 0  # of all bodies in hand
        metrics.watch_requests(lambda: self._requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        self._requests += 1
        exchange = _Exchange(scope, send, self._settings.limits.send_seconds, self._audit)
        try:
            await self._answer(exchange, receive)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            _current_task().uncancel()
        finally:
            exchange.settle()
            self._requests -= 1
            template = getattr(scope.get("route"), "path", "other")
            status = exchange.status or GONE
            self._metrics.request(template, exchange.method, status, time.monotonic() - exchange.begun)

    async def _answer(self, exchange: "_Exchange", receive: Receive) -> None:
        held = 0
        try:
            try:
                self._admit(exchange)
                body = _Body(exchange.headers, self._settings.limits.body_bytes)
                self._hold(body.announced)
                held = body.announced
                content = await self._read(body, receive, exchange.connection)
                self._hold(len(content) - held)
                held = len(content)
            except Refusal as refusal:
                await self._refuse(exchange, refusal)
                return
            if exchange.needed == "read":
                exchange.cancel_when_gone()
            await self._app(exchange.scope, _replay(content, receive), exchange.send)
        finally:
            self._bytes -= held

    def _admit(self, exchange: "_Exchange") -> None:
        """:class:`Refusal` unless the caller has the role that the request needs; all here is told by the head."""
        if self._tokens is None:
            _check_origin(exchange.headers)
        needed = exchange.needed = needed_role(exchange.method, exchange.path)
        if needed is not None:
            exchange.scope["state"]["caller"] = self._caller(exchange.headers, needed)
            exchange.scope["state"]["service"] = self._gate.service
        if self._requests > self._settings.limits.requests:
            raise Refusal(503, f"{self._settings.limits.requests} requests are in hand already; ask again in a moment")

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

    def _hold(self, size: int) -> None:
        if size > 0 and self._bytes + size > self._settings.limits.memory_bytes:
            raise Refusal(503, "the bodies of other requests fill the memory set aside; ask again in a moment")
        self._bytes += size

    async def _read(self, body: "_Body", receive: Receive, connection: Connection | None) -> bytes:
        if not body.expected:
            return b""
        if connection is not None and connection.has_whole_body:  # a timer costs as much as the reading
            return await body.read(receive)
        seconds = self._settings.limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await body.read(receive)
        except TimeoutError:
            raise Refusal(400, f"the body did not arrive within {seconds:g} s; send it faster, or less") from None

    async def _refuse(self, exchange: "_Exchange", refusal: Refusal) -> None:
        self._metrics.refused(str(refusal.status_code))
        headers = {**(refusal.headers or {}), "Connection": "close"}  # what is left of the body is not waited for
        response = error_response(exchange.path, refusal.status_code, refusal.detail, headers)
        await response(exchange.scope, _never, exchange.send)

    def _audit(self, exchange: "_Exchange") -> None:
        """The line of a write, before its caller hears of it."""
        scope = exchange.scope
        route, caller = scope.get("route"), scope["state"].get("caller")
        looks = exchange.method in ("GET", "HEAD") or exchange.needed == "read"
        if caller is None or route is None or looks:
            return
        collection, ids = scope.get("path_params", {}).get("collection"), scope["state"].get("ids", [])
        self._gate.audit(caller.name, str(route.name), collection, ids, exchange.status)


class _Exchange:
    """One request and its answer."""

    def __init__(
        self, scope: Scope, send: Send, send_seconds: float, begin: "Callable[[_Exchange], None]"
    ) -> None:
        self.scope, self._send, self._seconds, self._begin = scope, send, send_seconds, begin
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.begun = time.monotonic()
        self.needed: Role | None = None  # the role that it takes, once that is known
        self.status = 0
        self.gone = False
        self.connection: Connection | None = scope.setdefault("state", {}).get("connection")

    async def send(self, message: Message) -> None:
        """Pass an answer's message on; a caller who does not take it is cut off."""
        begins, connection = message["type"] == "http.response.start", self.connection
        if begins:
            self.status = message["status"]
            message["headers"] = [*message["headers"], *_headers_of(self.path)]
            self._begin(self)
        if connection is None:
            await self._send(message)
            return
        if begins:
            connection.hold_writes()  # the head goes out with the first of the body
        if connection.is_writable:
            await self._send(message)
        else:
            await self._send_in_time(message, connection)
        if not begins:
            connection.release_writes()

    async def _send_in_time(self, message: Message, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            connection.cut()

    def cancel_when_gone(self) -> None:
        """Let the connection, when it is lost, cancel what nobody waits for any more."""
        task = _current_task()

        def gone() -> None:
            self.gone = True
            task.cancel()

        if self.connection is not None:
            self.connection.gone = gone

    def settle(self) -> None:
        """The answer is out: losing the connection means nothing now."""
        if self.connection is not None:
            self.connection.gone = None


class _Body:
    """The body that a request's head announces; :class:`Refusal` if it is too large or encoded."""

    def __init__(self, headers: dict[bytes, bytes], limit: int) -> None:
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refusal(415, "the body is compressed; send it as it is")
        self._limit = limit
        self.announced = int(headers.get(b"content-length", b"0"))
        self.expected = self.announced > 0 or b"transfer-encoding" in headers
        self._check(self.announced)

    async def read(self, receive: Receive) -> bytes:
        """All of it, counted while it comes."""
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the connection was lost before the body was whole")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            self._check(size)
            more = message.get("more_body", False)
        return b"".join(chunks)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise Refusal(413, f"the body is larger than the {self._limit:,} bytes taken; send less at a time")


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


def _headers_of(path: str) -> list[tuple[bytes, bytes]]:
    return [(b"cache-control", b"no-store")] if path.startswith(("/v1", "/v2")) else []


def _replay(content: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body at once, and then what the connection says."""
    pending = [content]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed


async def _never() -> Message:
    raise RuntimeError("an error's answer reads nothing")


def _current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None, "requests run in tasks"
    return task
