"""ASGI middleware that admits requests: host, token, role, size and number, before a byte of the body is read."""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plsc.gallery.store import collect_changes, take_changes
from plsc.serve.access import Caller, Permission, local_caller, set_caller
from plsc.serve.audit import MAX_IDS, Event
from plsc.serve.connections import Connection, head_too_large, target_too_long
from plsc.serve.errors import ApiError, to_response
from plsc.serve.limits import HEALTH, STRANGERS, Allowance, RateLimiter, Shared, Turns, rate_headers
from plsc.serve.observability import Lifecycle, Metrics
from plsc.serve.routing import permission_of
from plsc.serve.settings import HOST, Limits, Settings, is_loopback
from plsc.serve.tokens import TokenBook

# Headers that decide about a request. Were one sent twice, a proxy might have judged by the other.
_SINGLE = (b"host", b"authorization", b"origin", b"sec-fetch-site", b"content-type", b"content-encoding")
_PROXY_HEADERS = (b"forwarded", b"via", b"x-real-ip")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_REFUSED = (401, 403, 429)
_NO_TOKEN = "a token is needed: ask who runs the service for one, and send it as Authorization: Bearer TOKEN"
_UNKNOWN_TOKEN = (
    "The service does not know this token; check it for a missing character, or ask who runs the service for another "
    "(it is sent as Authorization: Bearer TOKEN)"
)
OPEN, ANY = Permission(None), Permission("search")
# What answers where a path is open to anyone, before FastAPI: no query, cookie or range of a stranger is taken apart.
OpenEndpoint = Callable[[Request], Coroutine[Any, Any, Response]]
_HEALTH = ("/health/", "/v2/health/")
_TOO_SLOW = 408
CLIENT_CLOSED_REQUEST = 499  # nginx's status for callers that went away before the answer


class RequestContext:
    """One request from admission until the last byte of its answer.

    ``receive`` and ``send`` are ASGI's callables for the application: they bound the body in size and time, cancel the
    request when its caller disconnects, and write the audit log before the answer begins.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, admission: "Admission", limits: Limits) -> None:
        self.scope, self._receive, self._send, self._admission = scope, receive, send, admission
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.begun, self._limits = time.monotonic(), limits
        self.body_complete = (
            b"transfer-encoding" not in self.headers and self.headers.get(b"content-length", b"0") == b"0"
        )
        self._empty_body_read = False
        self.body_bytes = 0
        self.is_counted, self.disconnected = False, False
        self.permission = OPEN
        self.allowance: Allowance = ()
        self.caller: Caller | None = None
        self.route = "other"  # its path, with the names of parameters
        self.collection: str | None = None
        self.status = 0  # of the answer, once it has begun
        self.task = cast("asyncio.Task[None]", asyncio.current_task())
        self.connection: Connection = scope["state"]["connection"]

    @property
    def owner(self) -> str:
        """The name of the token whose shares the request draws on, "" without tokens."""
        return (self.caller and self.caller.name) or ""

    async def receive(self) -> Message:
        """Next part of the body; an empty one first where there is none, then ``http.disconnect`` when that happens."""
        if self.body_complete:
            return await self._after_body()
        message = await self._receive_in_time()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the connection was lost before the body was complete")
        size = len(message.get("body", b""))
        if self.body_bytes + size > self._limits.body_bytes:
            raise body_too_large(self._limits)
        self._admission.bodies.take(self.owner, size)
        self.body_bytes += size
        if not message.get("more_body", False):
            self.body_complete, self._empty_body_read = True, True
            self._admission.begin(self, self.permission)
        return message

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on, the first one with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._admission.audit(self)
            headers = list(message["headers"])
            if self.scope["path"].startswith(("/v1", "/v2")):
                headers.append((b"cache-control", b"no-store"))
            headers += rate_headers(self.allowance)
            if not self.body_complete:  # the rest of the body is not waited for
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        if self.connection.is_lost:  # uvloop raises where a lost one is written to
            return
        if self.status == _TOO_SLOW and message["type"] == "http.response.body":
            await self._send({**message, "more_body": True})
            await self._drop_body()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _receive_in_time(self) -> Message:
        limits = self._limits
        # What came earns time, while others do not need it.
        earned = self.body_bytes / limits.body_rate if self._admission.has_room else 0.0
        due = self.begun + min(limits.body_seconds + earned, limits.slow_body_seconds)
        try:
            # The loop's clock is time.monotonic.
            async with asyncio.timeout_at(min(due, time.monotonic() + limits.body_seconds)):
                return await self._receive()
        except TimeoutError:
            seconds = time.monotonic() - self.begun
            came = f"the body did not arrive within {seconds:.0f} s, {self.body_bytes:,} bytes of it did"
            raise ApiError(_TOO_SLOW, f"{came}; send at least {limits.body_rate:,} a second, or less") from None

    async def _drop_body(self) -> None:
        """Take what a caller still sends who has been answered: closing at once would lose the answer on its way."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_seconds):
                while True:
                    async with asyncio.timeout(self._limits.linger_pause_seconds):
                        message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    async def _after_body(self) -> Message:
        if not self._empty_body_read:
            self._empty_body_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await self._receive())["type"] != "http.disconnect":
            pass  # the server's own empty body
        return message

    def cancel(self) -> None:
        """End the request: its caller has left, and nobody waits for the answer."""
        self.disconnected = True
        self.task.cancel()


class Admission:
    """ASGI middleware: admits requests by their head, and counts and audits them.

    Where the route needs a role, sets :func:`plsc.serve.access.current_caller`, and "service"
    (:class:`plsc.serve.service.Service`) in ``scope["state"]``. Takes "ids" from it, which routes that write set for
    the audit log.

    Args:
        app: the application; ``routes`` are its routes, each of which declares what it needs (``routing.requires``).
        static: answers that are open to anyone besides, by their paths.
        tokens: None serves this machine alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        static: Mapping[str, OpenEndpoint],
        lifecycle: Lifecycle,
        settings: Settings,
        tokens: TokenBook | None,
        metrics: Metrics,
    ) -> None:
        self._app, self._lifecycle, self._tokens, self._metrics = app, lifecycle, tokens, metrics
        limits = self._limits = settings.limits
        self._audited = settings.audit_events
        self._rates = RateLimiter(settings.rate_limits, metrics.throttled, settings.clock)
        self.turns = Turns(limits, settings.clock)
        self._routes = [(route, permission_of(route)) for route in routes]
        self._open = _open_endpoints(routes, static)
        self._requests = Shared("requests in flight", limits.requests, settings.share)
        self.bodies = Shared("bytes of bodies", limits.memory_bytes, settings.share, least=limits.body_bytes)
        metrics.watch_limits({name: value for name, value in vars(limits).items() if value is not None})
        metrics.watch_limits({f"{rate.kind}_per_second": rate.count / rate.seconds for rate in settings.rate_limits})
        metrics.watch("in_flight", "Requests in flight", lambda: self._requests.total)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        context = RequestContext(scope, receive, send, self, self._limits)
        try:
            await self._answer(context)
        except asyncio.CancelledError:
            await self._end_early(context)
        finally:
            context.connection.on_lost = None  # the next request on it is another
            if context.is_counted:
                self._requests.give_back(context.owner)
            self.bodies.give_back(context.owner, context.body_bytes)
            status = context.status or CLIENT_CLOSED_REQUEST
            self._metrics.request(context.route, scope["method"], status, time.monotonic() - context.begun)

    @property
    def has_room(self) -> bool:
        """True while slow callers may have more time: half of the memory for bodies and of the requests is free."""
        return self.bodies.is_half_free and self._requests.is_half_free

    def begin(self, context: RequestContext, permission: Permission) -> None:
        """Count a request as in flight: its body is there. From here on one that changes nothing ends with its caller.

        Raises:
            ApiError: 429 or 503 if there are too many.
        """
        self._requests.take(context.owner)
        context.is_counted, context.permission = True, permission
        if not permission.changes:
            context.connection.on_lost = context.cancel

    async def audit(self, context: RequestContext) -> None:
        """Write the audit line of a request with its status; that of a write is on disk before its caller hears."""
        event, scope = _audit_event(context), context.scope
        if event is None or event not in self._audited:
            return
        caller, client = context.caller, scope.get("client")
        entry = {
            "token": None if caller is None else caller.name,
            "operation": getattr(scope.get("route"), "name", None),
            "collection": context.collection or scope["state"].get("collection"),
            "ids": scope["state"].get("ids", [])[:MAX_IDS],
            "status": context.status,
        }
        if changes := take_changes():
            entry["changes"] = changes
        if event == "refusal":
            entry["client"] = None if client is None else client[0]
        await self._lifecycle.audit(event, durable=event == "write" and context.status < 400, **entry)

    async def _answer(self, context: RequestContext) -> None:
        try:
            answer = self._admit(context)
        except ApiError as error:
            self._metrics.refused(str(error.status_code))
            answer = partial(_refuse, error)
        turn = partial(self._call_app, context) if answer is None else partial(_respond, context, answer)
        connection, owner = context.connection, context.owner
        if answer is not None and self._tokens is not None and context.caller is None:
            connection.belongs_to(None)
            connection.on_lost = context.cancel
            owner = HEALTH if context.route.startswith(_HEALTH) else STRANGERS
        await self.turns.take(owner, turn, connection)

    async def _call_app(self, context: RequestContext) -> None:
        await self._app(context.scope, context.receive, context.send)

    async def _end_early(self, context: RequestContext) -> None:
        """End a request that is cancelled: its caller has left, or the time to finish what had begun is over."""
        if not context.disconnected and self._lifecycle.status != "stopping":
            raise asyncio.CancelledError
        context.task.uncancel()
        if not context.disconnected and not context.status:
            error = ApiError(503, "the service is stopping, and this was not finished in time; ask another, or later")
            await to_response(context.scope["path"], error)(context.scope, context.receive, context.send)

    def _admit(self, context: RequestContext) -> OpenEndpoint | None:
        """Check everything that the head says; :class:`ApiError` if the request is not admitted.

        Returns:
            What answers where the path is open to anyone; None where the application does.
        """
        scope, headers = context.scope, context.headers
        _check_head(scope, headers, self._limits)
        if self._tokens is None:
            _check_is_direct(scope, headers)
            _check_origin(scope, headers)
        else:
            self._check_unknown(scope, headers)
        answer = self._open.get((scope["method"], scope["path"]))
        if answer is None:
            self._admit_caller(context)
            return None
        context.route = scope["path"]
        if not context.body_complete:  # an unknown caller: nothing is kept for them
            raise ApiError(400, f"{scope['path'][:80]} takes no body; send the request without one")
        scope["state"]["lifecycle"] = self._lifecycle
        return answer

    def _admit_caller(self, context: RequestContext) -> None:
        """Find out who calls, and whether they may."""
        scope = context.scope
        permission, context.collection = self._match(context)
        context.caller = caller = self._identify(scope, context.headers)
        self.turns.charge_reading(context.owner, context.connection)
        context.connection.belongs_to(context.owner)
        caller.check(permission, context.collection)
        set_caller(caller)
        if permission.changes:
            collect_changes()
        context.allowance = self._rates.admit(context.owner, caller.rates, permission.rate_kind(scope["method"]))
        scope["state"]["service"] = self._lifecycle.service
        if context.body_complete:
            self.begin(context, permission)
        else:
            self._requests.check(context.owner)
            context.permission = permission

    def _match(self, context: RequestContext) -> tuple[Permission, str | None]:
        """What the route that will answer needs, and its collection. Where none does, any role: the unknown learn of no
        404."""
        for route, permission in self._routes:
            match, child = route.matches(context.scope)
            if match is Match.FULL:
                context.scope["route"], context.route = route, getattr(route, "path", "other")
                return permission, child["path_params"].get("collection")
        return ANY, None

    def _check_unknown(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """:class:`ApiError` for a head that is larger than heads without a good token may be."""
        limits = self._limits
        is_long = len(scope["raw_path"]) + len(scope["query_string"]) > limits.unknown_target_bytes
        head = sum(len(name) + len(value) for name, value in scope["headers"])
        if is_long or head > limits.unknown_head_bytes:
            try:
                self._identify(scope, headers)
            except ApiError:
                raise target_too_long(limits) if is_long else head_too_large(limits) from None

    def _identify(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        if self._tokens is None:
            return local_caller(scope.get("client") or ("", 0))
        scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == b"bearer" else None
        if token is None:
            raise ApiError(401, _UNKNOWN_TOKEN if secret.strip() else _NO_TOKEN, {"WWW-Authenticate": "Bearer"})
        if time.time() >= token.expiry:
            message = f"the token {token.name} has expired ({token.expires}); ask for another"
            raise ApiError(401, message, {"WWW-Authenticate": "Bearer"})
        return token.caller


def _open_endpoints(
    routes: Sequence[BaseRoute], static: Mapping[str, OpenEndpoint]
) -> dict[tuple[str, str], OpenEndpoint]:
    """What is open to anyone, by method and path."""
    found = {(method, path): answer for path, answer in static.items() for method in ("GET", "HEAD")}
    for route in routes:
        if isinstance(route, Route) and permission_of(route).role is None:
            found |= {(method, route.path): route.endpoint for method in route.methods or ()}
    return found


async def _refuse(error: ApiError, request: Request) -> Response:
    return to_response(request.scope["path"], error)


async def _respond(context: RequestContext, answer: OpenEndpoint) -> None:
    response = await answer(Request(context.scope))
    await response(context.scope, context.receive, context.send)


def _audit_event(context: RequestContext) -> Event | None:
    """What the audit log calls a request; None for what is open to anyone."""
    if context.status in _REFUSED:
        return "refusal"
    if context.permission.role is None:
        return None
    kind = context.permission.rate_kind(context.scope["method"])
    return "write" if kind == "writes" else "search" if kind == "searches" else "read"


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
    if int(headers.get(b"content-length", b"0").lstrip(b"0") or b"0") > limits.body_bytes:  # int takes 4,300 digits
        raise body_too_large(limits)


def _check_is_direct(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """:class:`ApiError` 403 for a request that came through a proxy, which makes any caller one of this machine.

    A proxy that is told nothing shows in HTTP/1.0, which nginx long spoke by default. Health checks speak it as well,
    and learn nothing but that the service lives.
    """
    shown = [name.decode("latin-1") for name in headers if name in _PROXY_HEADERS or name.startswith(b"x-forwarded-")]
    if shown:
        raise ApiError(403, f"the request came through a proxy ({shown[0][:40]}); behind one, give plsc serve --tokens")
    if scope["http_version"] == "1.0" and not scope["path"].startswith(_HEALTH):
        raise ApiError(403, "HTTP/1.0 is what proxies speak: send HTTP/1.1, or behind a proxy give plsc serve --tokens")


def _check_origin(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """:class:`ApiError` 403 for a web page of another site: without tokens, being on this machine is what admits.

    A name made to resolve to 127.0.0.1 (DNS rebinding) shows in Host, another page's script in Origin and
    Sec-Fetch-Site. The port is whatever a tunnel listens on. HTTP/1.0 may have no Host; no browser speaks it.
    """
    if scope["http_version"] == "1.0" and b"host" not in headers:
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    found = HOST.fullmatch(host)
    if found is None or not is_loopback(found["name"]):
        raise ApiError(403, "without tokens only this machine is served: call it 127.0.0.1, or set tokens up")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower() not in (f"http://{host}", f"https://{host}"):
        raise ApiError(403, "a page of another origin may not call this service; call it from its own page")
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise ApiError(403, "a page of another site may not call this service")
