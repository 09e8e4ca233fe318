"""ASGI middleware that admits requests: host, token, role, size and number, before a byte of the body is read."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plsc.serve.errors import ApiError, to_response
from plsc.serve.observability import Metrics
from plsc.serve.routing import required_role
from plsc.serve.service import Lifecycle
from plsc.serve.settings import Limits, Settings, is_loopback
from plsc.serve.tokens import Role, TokenBook, includes

# Headers that decide about a request. Were one sent twice, a proxy might have judged by the other.
_SINGLE = (b"host", b"authorization", b"origin", b"sec-fetch-site", b"content-type", b"content-encoding")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for callers that went away before the answer


@dataclass(frozen=True)
class Caller:
    """The name of the caller's token, None without tokens, and its role."""

    name: str | None
    role: Role


LOCAL = Caller(None, "admin")


class Connection:
    """The connection of a request, in ``scope["state"]["connection"]``; the server's protocol says when it is lost.

    ASGI's ``http.disconnect`` would need a task for each request to wait for it, and uvicorn sends it to the last of
    several pipelined requests alone.
    """

    __slots__ = ("is_lost", "on_lost")

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None

    def lose(self) -> None:
        """Say that the connection is lost, once."""
        if not self.is_lost:
            self.is_lost = True
            if self.on_lost is not None:
                self.on_lost()


class RequestContext:
    """One request from admission until the last byte of its answer.

    ``receive`` and ``send`` are ASGI's callables for the application: they bound the body in size and time, cancel the
    request when its caller disconnects, and write the audit log before the answer begins.
    """

    # A thousand may wait at a time, and be out of the processor's caches when their turn comes.
    __slots__ = (
        "_admission",
        "_body_due",
        "_connection",
        "_empty_body_read",
        "_limits",
        "_receive",
        "_send",
        "_task",
        "begun",
        "body_bytes",
        "body_complete",
        "disconnected",
        "headers",
        "is_counted",
        "role",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, admission: "Admission", limits: Limits) -> None:
        self.scope, self._receive, self._send, self._admission = scope, receive, send, admission
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.begun, self._limits = time.monotonic(), limits
        self.body_complete = not self.announces_body()
        self._body_due = self.begun + limits.body_seconds
        self._empty_body_read = False
        self.body_bytes = 0
        self.is_counted, self.disconnected = False, False
        self.role: Role | None = None
        self.status = 0  # of the answer, once it has begun
        self._task = asyncio.current_task()
        self._connection: Connection | None = scope.setdefault("state", {}).get("connection")

    def announces_body(self) -> bool:
        """True if the head says that a body follows."""
        return b"transfer-encoding" in self.headers or self.headers.get(b"content-length", b"0") != b"0"

    def admitted(self, role: Role | None) -> None:
        """Set the role that the request needs; from the end of its body, ``read`` requests end with their caller."""
        self.role = role
        if self.body_complete:
            self._cancel_on_disconnect()

    async def receive(self) -> Message:
        """Next part of the body; an empty one first where there is none, then ``http.disconnect`` when that happens."""
        if self.body_complete:
            return await self._after_body()
        message = await self._receive_in_time()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the connection was lost before the body was complete")
        self._count(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self.body_complete, self._empty_body_read = True, True
            self._cancel_on_disconnect()
        return message

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on, the first one with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._admission.audit(self)
            headers = list(message["headers"])
            if self.scope["path"].startswith(("/v1", "/v2")):
                headers.append((b"cache-control", b"no-store"))
            if not self.body_complete:  # the rest of the body is not waited for
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        if self._connection is None or not self._connection.is_lost:  # uvloop raises where a lost one is written to
            await self._send(message)

    def close(self) -> None:
        """Stop watching the connection: the next request on it is another."""
        if self._connection is not None:
            self._connection.on_lost = None

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._body_due):  # the loop's clock is time.monotonic
                return await self._receive()
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise ApiError(400, f"the body did not arrive within {seconds:g} s; send it faster, or less") from None

    def _count(self, size: int) -> None:
        self.body_bytes += size
        self._admission.hold(size)
        if self.body_bytes > self._limits.body_bytes:
            raise body_too_large(self._limits)

    async def _after_body(self) -> Message:
        if not self._empty_body_read:
            self._empty_body_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await self._receive())["type"] != "http.disconnect":
            pass  # the server's own empty body
        return message

    def _cancel_on_disconnect(self) -> None:
        """Watch for the caller's end: nobody waits for what a ``read`` request computes; writes are finished."""
        if self.role == "read" and self._connection is not None:
            self._connection.on_lost = self._cancel

    def _cancel(self) -> None:
        self.disconnected = True
        assert self._task is not None, "requests run in tasks"
        self._task.cancel()

    def swallow_cancellation(self) -> bool:
        """True if the request was cancelled because its caller disconnected; the task may end normally then."""
        if self.disconnected and self._task is not None:
            self._task.uncancel()
        return self.disconnected


class Admission:
    """ASGI middleware: admits requests by their head, and counts and audits them.

    Adds to ``scope["state"]``: "caller" (:class:`Caller`) and "service" (:class:`plsc.serve.service.Service`), where
    the route needs a role. Takes "ids" from it, which routes that write set for the audit log.

    Args:
        app: the application; ``routes`` are its routes, each of which declares its role (``routing.requires``).
        tokens: None serves this machine alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        lifecycle: Lifecycle,
        settings: Settings,
        tokens: TokenBook | None,
        metrics: Metrics,
    ) -> None:
        self._app, self._lifecycle, self._tokens, self._metrics = app, lifecycle, tokens, metrics
        self._limits = settings.limits
        self._routes = [(route, required_role(route)) for route in routes]
        self._in_flight = 0  # requests of callers who may do more than what is open to anyone
        self._body_bytes = 0  # of all requests in flight
        metrics.watch_requests(lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        context = RequestContext(scope, receive, send, self, self._limits)
        try:
            await self._answer(context)
        except asyncio.CancelledError:
            if not context.swallow_cancellation():
                raise
        finally:
            context.close()
            self._in_flight -= context.is_counted
            self._body_bytes -= context.body_bytes
            template = getattr(scope.get("route"), "path", "other")
            status = context.status or CLIENT_CLOSED_REQUEST
            self._metrics.request(template, scope["method"], status, time.monotonic() - context.begun)

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes of bodies in flight; :class:`ApiError` 503 if all together are too many."""
        self._body_bytes += size
        if self._body_bytes > self._limits.memory_bytes:
            raise ApiError(503, "the bodies of other requests fill the memory set aside; ask again in a moment")

    def audit(self, context: RequestContext) -> None:
        """Write the audit line of a write, before its caller hears of it."""
        scope = context.scope
        if context.role in (None, "read") or scope["method"] in ("GET", "HEAD"):
            return
        caller, route = scope["state"].get("caller"), scope.get("route")
        if caller is not None and route is not None:
            collection, ids = scope.get("path_params", {}).get("collection"), scope["state"].get("ids", [])
            self._lifecycle.audit(caller.name, route.name, collection, ids, context.status)

    async def _answer(self, context: RequestContext) -> None:
        scope = context.scope
        try:
            self._admit(context)
        except ApiError as error:
            self._metrics.refused(str(error.status_code))
            await to_response(scope["path"], error)(scope, context.receive, context.send)
            return
        await self._app(scope, context.receive, context.send)

    def _admit(self, context: RequestContext) -> None:
        """Check everything that the head says; :class:`ApiError` if the request is not admitted."""
        scope, headers = context.scope, context.headers
        _check_head(scope, headers, self._limits)
        if self._tokens is None:
            _check_origin(headers)
        role = self._match(scope)
        if role is None:
            if context.announces_body():  # an unknown caller: nothing is kept for them
                raise ApiError(400, f"{scope['path'][:80]} takes no body; send the request without one")
        else:
            scope["state"]["caller"] = self._identify(headers, role)
            scope["state"]["service"] = self._lifecycle.service
            if self._in_flight >= self._limits.requests:
                raise ApiError(503, f"{self._limits.requests} requests are in flight already; ask again in a moment")
            self._in_flight += 1
            context.is_counted = True
        context.admitted(role)

    def _match(self, scope: Scope) -> Role | None:
        """The role of the route that will answer; ``read`` where none does: who is unknown learns of no 404."""
        for route, role in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                scope["route"] = route
                return role
        return "read"

    def _identify(self, headers: dict[bytes, bytes], required: Role) -> Caller:
        if self._tokens is None:
            return LOCAL
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == b"bearer" else None
        if token is None:
            message = "a token is needed: send Authorization: Bearer TOKEN, with a token that the service knows"
            raise ApiError(401, message, {"WWW-Authenticate": "Bearer"})
        if not includes(token.role, required):
            raise ApiError(403, f"the token {token.name} may {token.role}; this needs {required}")
        return Caller(token.name, token.role)


def body_too_large(limits: Limits) -> ApiError:
    """The error for a body beyond the limit."""
    return ApiError(413, f"the body is larger than the {limits.body_bytes:,} bytes allowed; send less at a time")


def _check_head(scope: Scope, headers: dict[bytes, bytes], limits: Limits) -> None:
    if _CONTROL.search(scope["path"]):  # a route's pattern also matches before a newline at the end
        raise ApiError(400, "the path holds control characters; send it without them")
    if len(headers) < len(scope["headers"]):
        names = [name for name, _ in scope["headers"]]
        for name in _SINGLE:
            if names.count(name) > 1:
                raise ApiError(400, f"the header {name.decode()} was sent {names.count(name)} times; send it once")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "the body is compressed; send it as it is")
    if int(headers.get(b"content-length", b"0")) > limits.body_bytes:
        raise body_too_large(limits)


def _check_origin(headers: dict[bytes, bytes]) -> None:
    """:class:`ApiError` 403 for a web page of another site: without tokens, being on this machine is what admits.

    A name made to resolve to 127.0.0.1 (DNS rebinding) shows in Host, another page's script in Origin and
    Sec-Fetch-Site.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not is_loopback(_without_port(host)):
        raise ApiError(403, "without tokens only this machine is served: call it 127.0.0.1, or set tokens up")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
        raise ApiError(403, "a page of another origin may not call this service; call it from its own page")
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise ApiError(403, "a page of another site may not call this service")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def caller_of(scope: Scope) -> Caller:
    """The caller of an admitted request."""
    caller: Any = scope["state"].get("caller", LOCAL)
    return caller  # type: ignore[no-any-return]
