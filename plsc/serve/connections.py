"""Connections: how many there are, whose they are, and how long each may take to say what it wants.

A connection is that of the token that it carried last, and nobody's until it has carried one: behind a proxy it may be
a known caller's now and a stranger's next. Nobody's have a budget of their own, by address; where it is full, the one
that has been idle longest is closed, of the address that has most of them, so that a newcomer always finds a place. A
token over its part, and the token with the most where all have too many, lose the one that has been idle longest.

The protocol is built on uvicorn's for httptools: on the callbacks of asyncio.Protocol and of httptools, and on its
attributes ``flow``, ``pipeline`` and ``cycle``, for which pyproject.toml bounds uvicorn's version.
"""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from plsc.serve.access import Bucket, Shared, over_share, part_beside
from plsc.serve.errors import ApiError, to_response
from plsc.serve.settings import Limits
from plsc.serve.turns import TokenTurns

MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 256
MAX_HEAD_PIECES = 64  # reads until a head is whole: 64 KiB are 45 packets
MAX_TARGET_BYTES = 16_384  # path and query, which uvicorn and FastAPI take apart byte by byte
UNKNOWN_HEAD_BYTES, UNKNOWN_TARGET_BYTES = 8_192, 2_048  # of a request without a good token
MAX_PIPELINED = 32  # requests that wait behind the one in progress: a read may hold thousands
UNKNOWN_PIPELINED = 4  # on a connection that has carried no good token
MAX_CHUNKS = 65_536  # of one body: small ones cost a hundred times as much as their bytes
_NEW_PART = 0.1  # of the event loop's time, for connections that are nobody's to the end
_NEW_SAVED_SECONDS = 0.25
_NEW_SECONDS = 0.0003  # of making and ending one
_READ_BYTES, _READ_SECONDS = 8_192, 0.002  # of what has come, parsed before others have a turn
_SMALL_BYTES, _SMALL_SECONDS = 256, 0.0005  # beside others, so small a piece of a body costs its token so much more
_LAST_SECONDS = 1.0  # for an answer that an unknown caller still waits for when the service stops
_NO_HTTP = ApiError(400, "the request is not valid HTTP")


def target_too_long() -> ApiError:
    """The error for a long path and query."""
    most = f"{MAX_TARGET_BYTES:,} bytes together, {UNKNOWN_TARGET_BYTES:,} without a token that is known"
    return ApiError(414, f"the path and the query have at most {most}; shorten them")


def head_too_large() -> ApiError:
    """The error for many or long headers."""
    most = f"{MAX_HEADERS} headers of {MAX_HEAD_BYTES:,} bytes together, {UNKNOWN_HEAD_BYTES:,} without a known token"
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


class _Pool:
    """Connections by those who have them, the ones that have been idle longest first."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.of: defaultdict[str, OrderedDict[Connection, None]] = defaultdict(OrderedDict)

    def add(self, key: str, connection: Connection) -> None:
        self.of[key][connection] = None
        self.count += 1

    def remove(self, key: str, connection: Connection) -> None:
        if connection in self.of[key]:
            del self.of[key][connection]
            self.count -= 1
        if not self.of[key]:
            del self.of[key]

    def largest(self) -> OrderedDict[Connection, None]:
        return max(self.of.values(), key=len)


class ConnectionBudget:
    """The open connections of a server: those of known callers by token, and nobody's by address.

    Args:
        known: connections of known callers.
        part: connections of one of them.
        anonymous: connections of nobody.
    """

    def __init__(self, known: int, part: int, anonymous: int) -> None:
        self._known, self._anonymous, self._part = _Pool(known), _Pool(anonymous), part
        self._seconds = Bucket(_NEW_SAVED_SECONDS, _NEW_PART)

    def add(self, connection: Connection) -> None:
        """Take a new connection, or one that is nobody's again; where there are too many, abort another."""
        connection.owner = None
        self._anonymous.add(connection.address, connection)
        if self._anonymous.count > self._anonymous.most:
            oldest = next(iter(self._anonymous.largest()))
            self.remove(oldest)
            oldest.abort()

    def rest(self, connection: Connection) -> None:
        """Say that a connection becomes idle after an answer: of its owner's it is then the youngest."""
        connection.is_idle = True
        pool, key = self._place(connection)
        if connection in pool.of.get(key, ()):
            pool.of[key].move_to_end(connection)

    def move(self, connection: Connection, owner: str | None) -> None:
        """Count a connection as that of a token, or nobody's; :class:`ApiError` 429 or 503 if too many are busy."""
        known = self._known
        if owner is not None:
            part = max(part_beside(self._part, known.most - known.count - 1), 1)
            if self._part < known.most and len(own := known.of[owner]) >= part and not self._close_idle(own):
                raise over_share(owner, f"{part} busy connections")
            if known.count >= known.most and not self._close_idle(known.largest()):
                raise ApiError(503, f"{known.most} connections are open and busy already; ask again in a moment")
        self.remove(connection)
        if owner is None:
            self.add(connection)
        else:
            connection.owner = owner
            known.add(owner, connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        pool, key = self._place(connection)
        pool.remove(key, connection)

    def end(self, connection: Connection) -> None:
        """Forget a connection that is lost; one that is nobody's owes the time that it took."""
        self.remove(connection)
        if connection.owner is None:
            self._seconds.level -= connection.seconds + _NEW_SECONDS

    def newcomers_owe(self) -> bool:
        """True while connections that were nobody's to the end have taken more than their part of the loop's time."""
        return self._seconds.fill() < 0

    def _place(self, connection: Connection) -> tuple[_Pool, str]:
        owner = connection.owner
        return (self._anonymous, connection.address) if owner is None else (self._known, owner)

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
    turns: TokenTurns
    unread: Shared  # bytes of answers that callers have not taken; nobody's are those of one caller
    unknown_pipelined: int  # requests that may wait where it is not known yet who asks

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
            self.turns.when_due(owner, self._read)
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
        begun, connection = time.perf_counter(), self._connection
        while self._backlog and not (connection.is_lost or self._wire.is_closing()):
            piece, self._backlog = self._backlog[:_READ_BYTES], self._backlog[_READ_BYTES:]
            self._parse(piece)
            owner = connection.owner
            if not self._backlog:
                break
            if owner is not None:
                self.turns.charge_reading(owner, connection)
                if self.turns.must_wait(owner):
                    self._wire.pause_reading()
                    self.turns.when_due(owner, self._read)
                    return
            if owner is None or time.perf_counter() - begun > _READ_SECONDS:  # a task finds out whose request it is
                self._wire.pause_reading()
                self._loop.call_soon(self._read)
                return
        self._backlog = memoryview(b"")
        if connection.owner is not None and self.cycle is not None and self.cycle.more_body:
            self.turns.charge_reading(connection.owner, connection)
        if not (self.flow.read_paused or self._wire.is_closing() or self._wire.is_reading()):
            self._wire.resume_reading()

    def _parse(self, data: memoryview) -> None:
        """Parse data; abort a connection that sends more than a head's worth of what is neither head nor body."""
        self._unparsed += len(data)
        self._pieces += 1
        begun = time.perf_counter()
        super().data_received(cast("bytes", data))
        self._connection.seconds += time.perf_counter() - begun
        # Trailers, or a chunk's extensions, which httptools would go on gathering; or a head byte by byte.
        if self._unparsed > MAX_HEAD_BYTES or self._pieces > MAX_HEAD_PIECES:
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
        if len(self.pipeline) >= (MAX_PIPELINED if self._connection.owner is not None else self.unknown_pipelined):
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
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._fault = target_too_long()
            raise ValueError  # which httptools reports as an invalid request
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; drop a trailer: uvicorn would append it to the headers, where it replaces those admitted."""
        if self._in_trailers:
            return
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        if self._headers > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            self._fault = head_too_large()
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
        if self._chunks > MAX_CHUNKS:
            self._abort()
            raise ValueError("the body comes in too many chunks")

    def on_body(self, body: bytes) -> None:
        """Take a piece of body."""
        self._parsed()
        if len(body) < _SMALL_BYTES:
            self._small += 1
            self._connection.fine += _SMALL_SECONDS if self._small > 1 else 0.0
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
            self._loop.call_later(_LAST_SECONDS, self._abort)

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
