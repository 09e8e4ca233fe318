"""Connections: how many there are, whom they belong to, and how long each may take to say what it wants.

A connection is anonymous until a request on it is admitted: until it has carried a good token, or without tokens came
from this machine. Anonymous ones have a budget of their own. Where it is full, the one that has been idle longest is
closed, of the address that has most of them, so that a newcomer always finds a place and callers who are known lose
nothing to those who are not.

The protocol is built on uvicorn's for httptools: on the callbacks of asyncio.Protocol and of httptools, and on its
attributes ``flow``, ``pipeline`` and ``cycle``, for which pyproject.toml bounds uvicorn's version.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from plsc.serve.settings import Limits

MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 256
MAX_HEAD_PIECES = 64  # reads until a head is whole: 64 KiB are 45 packets
MAX_TARGET_BYTES = 16_384  # path and query, which uvicorn and FastAPI take apart byte by byte
MAX_PIPELINED = 32  # requests that wait behind the one in progress: a read may hold thousands
MAX_CHUNKS = 65_536  # of one body: small ones cost a hundred times as much as their bytes
_LAST_SECONDS = 1.0  # for an answer that an unknown caller still waits for when the service stops


class Connection:
    """The connection of a request, in ``scope["state"]["connection"]``; the server's protocol says when it is lost.

    ASGI's ``http.disconnect`` would need a task for each request to wait for it, and uvicorn sends it to the last of
    several pipelined requests alone.
    """

    __slots__ = ("_budget", "abort", "address", "is_identified", "is_lost", "on_lost")

    def __init__(self, budget: "ConnectionBudget", abort: Callable[[], None]) -> None:
        self._budget, self.abort = budget, abort
        self.address = ""
        self.is_lost, self.is_identified = False, False
        self.on_lost: Callable[[], None] | None = None

    def lose(self) -> None:
        """Say that the connection is lost, once."""
        if not self.is_lost:
            self.is_lost = True
            if self.on_lost is not None:
                self.on_lost()

    def identify(self) -> bool:
        """Count the connection among those of known callers; False if there are too many of them."""
        if not self.is_identified:
            self.is_identified = self._budget.identify(self)
        return self.is_identified


class ConnectionBudget:
    """The open connections of a server: those of known callers, and by address those of unknown ones, oldest first.

    Args:
        known: connections of known callers.
        anonymous: connections of others.
    """

    def __init__(self, known: int, anonymous: int) -> None:
        self._max_known, self._max_anonymous = known, anonymous
        self._known: set[Connection] = set()
        self._anonymous: dict[str, OrderedDict[Connection, None]] = {}
        self._count = 0  # of anonymous ones
        self.unread_bytes = 0  # of answers that callers have not taken

    def add(self, connection: Connection) -> None:
        """Take a connection, and abort another in place of which it comes where there are too many."""
        self._anonymous.setdefault(connection.address, OrderedDict())[connection] = None
        self._count += 1
        if self._count > self._max_anonymous:
            most = max(self._anonymous.values(), key=len)
            oldest = next(iter(most))
            self.remove(oldest)
            oldest.abort()

    def rest(self, connection: Connection) -> None:
        """Say that a connection becomes idle after an answer: of the anonymous ones it is then the youngest."""
        if (others := self._anonymous.get(connection.address)) is not None and connection in others:
            others.move_to_end(connection)

    def identify(self, connection: Connection) -> bool:
        """Count a connection among the known ones; False if there are too many of them."""
        if len(self._known) >= self._max_known:
            return False
        self.remove(connection)
        self._known.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self._known.discard(connection)
        others = self._anonymous.get(connection.address)
        if others is not None and connection in others:
            del others[connection]
            self._count -= 1
            if not others:
                del self._anonymous[connection.address]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on heads, trailers, connections, and callers who do not read.

    Requests find their :class:`Connection` in ``scope["state"]``, where ASGI puts what the server's lifespan shares
    with them. A request's head has ``limits.head_seconds`` to arrive, from the connection or from its first byte;
    between requests uvicorn's keep-alive time-out holds.
    """

    limits: Limits
    budget: ConnectionBudget

    def __init__(self, **keywords: Any) -> None:
        self._connection = Connection(self.budget, self._abort)
        keywords["app_state"] = {**keywords["app_state"], "connection": self._connection}
        super().__init__(**keywords)
        self._loop = asyncio.get_running_loop()
        self._wire: asyncio.Transport
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unparsed = 0  # bytes since the parser last finished a head, a chunk's size or a piece of body
        self._pieces = 0  # reads since then
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False
        self._chunks, self._unread = 0, 0
        self._fault = "the request is not valid HTTP"  # what is told of one that cannot be parsed
        self._answered: RequestResponseCycle | None = None  # the request in progress; uvicorn's ``cycle`` is the newest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection."""
        super().connection_made(transport)
        self._wire = transport
        self._connection.address = self.client[0] if self.client else ""
        self._start_head_timer()
        self.budget.add(self._connection)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in progress, and forget the connection."""
        self.budget.remove(self._connection)
        self._lose()
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; abort a connection that sends more than a head's worth of what is neither head nor body."""
        self._unparsed += len(data)
        self._pieces += 1
        super().data_received(data)
        # Trailers, or a chunk's extensions, which httptools would go on gathering; or a head byte by byte.
        if self._unparsed > MAX_HEAD_BYTES or self._pieces > MAX_HEAD_PIECES:
            self._abort()

    def pause_writing(self) -> None:
        """Start the clock: the caller does not read. Where too much is kept for such callers, this one is cut off."""
        super().pause_writing()
        self._unread = self._wire.get_write_buffer_size()
        self.budget.unread_bytes += self._unread
        if self.budget.unread_bytes > self.limits.memory_bytes:
            self._abort()
        if self._send_timer is None:
            self._send_timer = self._loop.call_later(self.limits.send_seconds, self._abort)

    def resume_writing(self) -> None:
        """Stop the clock: the caller has read nearly everything."""
        self.budget.unread_bytes -= self._unread
        self._unread = 0
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def on_message_begin(self) -> None:
        """Start a request; a caller who does not wait for answers is cut off."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._abort()
            raise ValueError("too many requests wait")  # which ends the parsing of what was read
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False
        self._chunks = 0
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._fault = f"the path and the query have at most {MAX_TARGET_BYTES:,} bytes together; shorten them"
            raise ValueError(self._fault)  # which httptools reports as an invalid request: 400
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; drop a trailer: uvicorn would append it to the headers, where it replaces those admitted."""
        if self._in_trailers:
            return
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        if self._headers > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            self._fault = f"a request has at most {MAX_HEADERS} headers of {MAX_HEAD_BYTES:,} bytes together"
            raise ValueError(self._fault)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too large, as every error is told."""
        body = json.dumps({"error": {"code": "bad_request", "message": self._fault}})
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n{body}".encode())
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
        self.budget.rest(self._connection)
        super().on_response_complete()

    def shutdown(self) -> None:
        """End an idle connection, and one with a request after its answer; unknown callers do not delay the end."""
        super().shutdown()
        if not self._connection.is_identified:
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
