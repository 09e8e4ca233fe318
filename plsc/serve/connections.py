"""Connections: how many there are, whose they are, and how long each may take to say what it wants.

A connection is that of the token that it carried last, and nobody's until it has carried one: behind a proxy it may be
a known caller's now and a stranger's next. Nobody's have a budget of their own, by address; where it is full, the one
that has been idle longest is closed, of the address that has most of them, so that a newcomer always finds a place. A
token over its part, and the token with the most where all have too many, lose the one that has been idle longest.

The protocol is built on uvicorn's for httptools: on the callbacks of asyncio.Protocol and of httptools, and on its
attributes ``flow``, ``pipeline`` and ``cycle``, for which pyproject.toml bounds uvicorn's version.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from plsc.serve.errors import ApiError, to_response
from plsc.serve.limits import Bucket, Clock, Shared, Turns
from plsc.serve.settings import Limits

_NO_HTTP = ApiError(400, "the request is not valid HTTP")


def target_too_long(limits: Limits) -> ApiError:
    """The error for a long path and query."""
    most = f"{limits.target_bytes:,} bytes together, {limits.unknown_target_bytes:,} without a token that is known"
    return ApiError(414, f"the path and the query have at most {most}; shorten them")


def head_too_large(limits: Limits) -> ApiError:
    """The error for many or long headers."""
    most = f"{limits.headers} headers of {limits.head_bytes:,} bytes together"
    most += f", {limits.unknown_head_bytes:,} without a known token"
    return ApiError(431, f"a request has at most {most}; send fewer (cookies are not needed)")


class Connection:
    """The connection of a request, in ``scope["state"]["connection"]``; the server's protocol says when it is lost.

    ASGI's ``http.disconnect`` would need a task for each request to wait for it, and uvicorn sends it to the last of
    several pipelined requests alone.
    """

    __slots__ = ("_budget", "abort", "address", "close", "fine", "is_idle", "is_lost", "on_lost", "owner", "seconds")

    def __init__(self, budget: "ConnectionBudget", abort: Callable[[], None], close: Callable[[], None]) -> None:
        self._budget, self.abort, self.close = budget, abort, close
        self.address = ""
        self.owner: str | None = None  # a token's name, "" for this machine without tokens, None for nobody
        self.is_idle, self.is_lost = True, False
        self.on_lost: Callable[[], None] | None = None
        self.seconds = 0.0  # that reading took and nobody has paid for
        self.fine = 0.0  # seconds besides, for which its token has to wait

    @property
    def holder(self) -> tuple[bool, str]:
        """Whether it is a known caller's, and of which token, or address."""
        return self.owner is not None, self.address if self.owner is None else self.owner

    def lose(self) -> None:
        """Say that the connection is lost, once."""
        if not self.is_lost:
            self.is_lost = True
            if self.on_lost is not None:
                self.on_lost()

    def belongs_to(self, owner: str | None) -> None:
        """Count the connection as that of a token, or as nobody's; :class:`ApiError` if there are too many."""
        if owner != self.owner and not self.is_lost:
            self._budget.move(self, owner)


class ConnectionBudget:
    """The open connections of a server: those of known callers by token, and nobody's by address.

    Args:
        share: of the known callers', what one of them may have.
    """

    def __init__(self, limits: Limits, share: float, clock: Clock) -> None:
        self._limits = limits
        self._known, self._strangers = Shared("busy connections", limits.connections, share), 0
        # Those that have been idle longest first, by whether they are a known caller's, and whose.
        self._of: defaultdict[tuple[bool, str], OrderedDict[Connection, None]] = defaultdict(OrderedDict)
        self._seconds = Bucket(limits.newcomers_saved_seconds, limits.newcomers_part, clock)

    def add(self, connection: Connection) -> None:
        """Take a new connection, or one that is nobody's again; where there are too many, abort another."""
        connection.owner = None
        self._of[connection.holder][connection] = None
        self._strangers += 1
        if self._strangers > self._limits.anonymous_connections:
            oldest = next(iter(self._largest(known=False)))
            self.remove(oldest)
            oldest.abort()

    def rest(self, connection: Connection) -> None:
        """Say that a connection becomes idle after an answer: of its owner's it is then the youngest."""
        connection.is_idle = True
        if connection in (own := self._of.get(connection.holder, OrderedDict())):
            own.move_to_end(connection)

    def move(self, connection: Connection, owner: str | None) -> None:
        """Count a connection as that of a token, or nobody's; :class:`ApiError` 429 or 503 if too many are busy."""
        if owner is None:
            self.remove(connection)
            self.add(connection)
            return
        try:
            self._known.check(owner)
        except ApiError as refusal:
            own = self._of[True, owner] if refusal.status_code == 429 else self._largest(known=True)
            if not self._close_idle(own):
                raise
        self.remove(connection)
        connection.owner = owner
        self._known.add(owner)
        self._of[connection.holder][connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        own = self._of[connection.holder]
        if connection in own:
            del own[connection]
            if connection.owner is None:
                self._strangers -= 1
            else:
                self._known.give_back(connection.owner)
        if not own:
            del self._of[connection.holder]

    def end(self, connection: Connection) -> None:
        """Forget a connection that is lost; one that is nobody's owes the time that it took."""
        self.remove(connection)
        if connection.owner is None:
            self._seconds.level -= connection.seconds + self._limits.newcomer_seconds

    def newcomers_owe(self) -> bool:
        """True while connections that were nobody's to the end have taken more than their part of the loop's time."""
        return self._seconds.fill() < 0

    def _largest(self, *, known: bool) -> OrderedDict[Connection, None]:
        return max((own for (is_known, _), own in self._of.items() if is_known is known), key=len)

    def _close_idle(self, connections: OrderedDict[Connection, None]) -> bool:
        idle = next((connection for connection in connections if connection.is_idle), None)
        if idle is None:
            return False
        self.remove(idle)
        idle.close()
        return True


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on heads, trailers, connections, and callers who do not read.

    Requests find their :class:`Connection` in ``scope["state"]``, where ASGI puts what the server's lifespan shares
    with them. A request's head has ``limits.head_seconds`` to arrive, from the connection or from its first byte;
    between requests uvicorn's keep-alive time-out holds.
    """

    limits: Limits
    budget: ConnectionBudget
    turns: Turns
    unread: Shared  # bytes of answers that callers have not taken; nobody's are those of one caller
    unknown_pipelined: int  # requests that may wait where it is not known yet who asks
    clock: Clock

    def __init__(self, **keywords: Any) -> None:
        self._connection = Connection(self.budget, self._abort, self._close)
        keywords["app_state"] = {**keywords["app_state"], "connection": self._connection}
        super().__init__(**keywords)
        self._loop = asyncio.get_running_loop()
        self._wire: asyncio.Transport
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unparsed = 0  # bytes since the parser last finished a head, a chunk's size or a piece of body
        self._pieces = 0  # reads since then
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False
        self._chunks, self._small = 0, 0
        self._backlog = memoryview(b"")  # what has come and is not parsed yet
        self._unread: tuple[str | None, int] | None = None  # of whom, and how many bytes
        self._fault = _NO_HTTP  # what is told of a request that cannot be parsed
        self._answered: RequestResponseCycle | None = None  # the request in progress; uvicorn's ``cycle`` is the newest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection."""
        super().connection_made(transport)
        self._wire = transport
        self.flow = FlowControl(cast("asyncio.Transport", self))
        self._connection.address = self.client[0] if self.client else ""
        self._start_head_timer()
        self.budget.add(self._connection)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in progress, and forget the connection."""
        self._backlog = memoryview(b"")
        self.budget.end(self._connection)
        self._lose()
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, at its owner's turn."""
        owner = self._connection.owner
        if self._backlog:
            self._backlog = memoryview(bytes(self._backlog) + data)
        elif owner is not None and self.turns.must_wait(owner):
            self._backlog = memoryview(data)
            self._read_at_turn(owner)
        else:
            self._backlog = memoryview(data)
            self._read()
            return
        self._wire.pause_reading()

    def pause_reading(self) -> None:
        """Read no more: uvicorn has enough."""
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        """Read on, as far as uvicorn is concerned."""
        if not self._backlog:
            self._wire.resume_reading()

    def _read(self) -> None:
        """Parse what has come, as long as it is its owner's turn."""
        begun, connection, limits = self.clock(), self._connection, self.limits
        while self._backlog and not (connection.is_lost or self._wire.is_closing()):
            piece, self._backlog = self._backlog[: limits.read_bytes], self._backlog[limits.read_bytes :]
            self._parse(piece)
            owner = connection.owner
            if not self._backlog:
                break
            if owner is not None:
                self.turns.charge_reading(owner, connection)
                if self.turns.must_wait(owner):
                    self._wire.pause_reading()
                    self._read_at_turn(owner)
                    return
            if owner is None or self.clock() - begun > limits.read_seconds:  # a task finds out whose request it is
                self._wire.pause_reading()
                self._loop.call_soon(self._read)
                return
        self._backlog = memoryview(b"")
        if connection.owner is not None and self.cycle is not None and self.cycle.more_body:
            self.turns.charge_reading(connection.owner, connection)
        if not (self.flow.read_paused or self._wire.is_closing() or self._wire.is_reading()):
            self._wire.resume_reading()

    def _read_at_turn(self, owner: str) -> None:
        self.turns.turn(owner).add_done_callback(lambda _: self._read())

    def _parse(self, data: memoryview) -> None:
        """Parse data; abort a connection that sends more than a head's worth of what is neither head nor body."""
        self._unparsed += len(data)
        self._pieces += 1
        begun = self.clock()
        super().data_received(cast("bytes", data))
        self._connection.seconds += self.clock() - begun
        # Trailers, or a chunk's extensions, which httptools would go on gathering; or a head byte by byte.
        if self._unparsed > self.limits.head_bytes or self._pieces > self.limits.head_pieces:
            self._abort()

    def pause_writing(self) -> None:
        """Start the clock: the caller does not read. Where too much is kept for such callers, this one is cut off."""
        super().pause_writing()
        self._unread = self._connection.owner, self._wire.get_write_buffer_size()
        try:
            self.unread.take(*self._unread)
        except ApiError:
            self._unread = None
            self._abort()
        if self._send_timer is None:
            self._send_timer = self._loop.call_later(self.limits.send_seconds, self._abort)

    def resume_writing(self) -> None:
        """Stop the clock: the caller has read nearly everything."""
        if self._unread is not None:
            self.unread.give_back(*self._unread)
            self._unread = None
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def on_message_begin(self) -> None:
        """Start a request; a caller who does not wait for answers is cut off."""
        if len(self.pipeline) >= (self.unknown_pipelined if self._connection.owner is None else self.limits.pipelined):
            self._abort()
            raise ValueError("too many requests wait")  # which ends the parsing of what was read
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False
        self._chunks, self._small = 0, 0
        self._connection.is_idle = False
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        if len(self.url) + len(url) > self.limits.target_bytes:
            self._fault = target_too_long(self.limits)
            raise ValueError  # which httptools reports as an invalid request
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; drop a trailer: uvicorn would append it to the headers, where it replaces those admitted."""
        if self._in_trailers:
            return
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        if self._headers > self.limits.headers or self._header_bytes > self.limits.head_bytes:
            self._fault = head_too_large(self.limits)
            raise ValueError
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too large, as every error is told."""
        response = to_response("", self._fault)
        lines = [b"%b: %b\r\n" % header for header in [*response.raw_headers, (b"connection", b"close")]]
        self.transport.write(b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()

    def on_headers_complete(self) -> None:
        """End a head: what comes as a header from here on is a trailer."""
        self._parsed()
        self._in_trailers = True
        self._stop_head_timer()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle

    def on_chunk_header(self) -> None:
        """Read a chunk's size."""
        self._parsed()
        self._chunks += 1
        if self._chunks > self.limits.chunks:
            self._abort()
            raise ValueError("the body comes in too many chunks")

    def on_body(self, body: bytes) -> None:
        """Take a piece of body."""
        self._parsed()
        if len(body) < self.limits.small_bytes:
            self._small += 1
            self._connection.fine += self.limits.small_seconds if self._small > 1 else 0.0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._parsed()
        super().on_message_complete()
        if not self.pipeline:  # after a large body uvicorn reads no further, and would not see that the caller leaves
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """End an answer."""
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        if not self.pipeline and self._head_timer is None:
            self.budget.rest(self._connection)
        super().on_response_complete()

    def shutdown(self) -> None:
        """End an idle connection, and one with a request after its answer; unknown callers do not delay the end."""
        super().shutdown()
        if self._connection.owner is None:
            self._loop.call_later(self.limits.last_seconds, self._abort)

    def _parsed(self) -> None:
        self._unparsed = self._pieces = 0

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self.limits.head_seconds, self._end_head_time)

    def _end_head_time(self) -> None:
        if self._wire.is_reading():
            self._abort()
        else:  # uvicorn reads no further while earlier requests of this connection wait for their answers
            self._start_head_timer()

    def _close(self) -> None:
        self._lose()
        self._wire.close()

    def _abort(self) -> None:
        self._lose()  # before connection_lost: from here on writing fails
        self._wire.abort()

    def _lose(self) -> None:
        self._connection.lose()
        for cycle in (self._answered, self.cycle):
            if cycle is not None:
                cycle.disconnected = True  # else uvicorn would write to it, or log that a request was not answered

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
