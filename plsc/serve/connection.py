"""uvicorn's HTTP connections, made impatient: a request's head has to come in time, and lost callers are noticed."""

import asyncio
import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from plsc.serve.asgi import Scope
from plsc.serve.settings import Limits

LARGEST_HEAD = 65_536
MOST_HEADERS = 256


class Connection(asyncio.Protocol):
    """Mixed into a protocol of uvicorn's. Between requests uvicorn's own keep-alive timeout holds.

    The application finds it as ``scope["state"]["connection"]``: it may :meth:`cut` it, and set ``gone``, which is
    called when the connection is lost.
    """

    limits: Limits
    loop: asyncio.AbstractEventLoop
    transport: Any
    connections: set[Any]
    cycle: Any
    flow: Any
    app_state: dict[str, Any]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.gone: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = 0  # bytes since the last request, of which there is no whole head yet
        self.app_state = {**self.app_state, "connection": self}  # what uvicorn copies into each request's scope

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, or cut it off where there are too many."""
        super().connection_made(transport)
        self.transport = JoiningTransport(transport)
        if len(self.connections) > self.limits.connections:
            self.cut()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Pass data on; a head that is not whole yet starts the clock, and its end stops it."""
        super().data_received(data)
        if self._is_busy():
            self._stop_clock()
            self._head = 0
            return
        if self._timer is None:
            self._await_head()
        self._head += len(data)
        if self._head > LARGEST_HEAD:  # httptools would go on reading headers
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the request's handler know that nobody waits for it."""
        self._stop_clock()
        super().connection_lost(exc)
        if self.gone is not None:
            self.gone()

    def cut(self) -> None:
        """End the connection at once, whatever was still to be sent."""
        self.transport.held = None
        self.transport.abort()

    def hold_writes(self) -> None:
        """Keep what is written until :meth:`release_writes`."""
        self.transport.held = []

    def release_writes(self) -> None:
        """Send what was kept, as one."""
        self.transport.release()

    def take_body(self, scope: Scope) -> bytes | None:
        """The body of the request of ``scope``, where the whole of it has come and nobody has read of it; else None."""
        return None

    @property
    def is_writable(self) -> bool:
        """Whether an answer's next part goes out without waiting for the caller."""
        return not self.flow.write_paused

    def can_answer(self, scope: Scope) -> bool:
        """Whether the request of ``scope`` may be answered by :meth:`answer`; else by ASGI's messages."""
        return False

    def answer(self, headers: bytes, content: bytes) -> None:
        """Send status 200, the headers, each with its line's end, and the content, and be done with the request."""
        raise NotImplementedError

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.limits.head_seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self._is_busy():
            self.cut()


class QuickConnection(Connection):
    """By httptools, where a body or an answer that is there as a whole needs none of ASGI's messages.

    uvicorn's way between those and the bytes takes a sixth of the time of a search's request.
    """

    server_state: Any

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._unparsed = 0  # bytes since the parser last finished a head, a chunk's size or a piece of body
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False

    def data_received(self, data: bytes) -> None:
        """Pass data on; cut a connection that sends more than a head's worth of what is neither head nor body."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > LARGEST_HEAD:  # trailers, or a chunk's extensions: httptools would go on gathering them
            self.cut()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; drop a trailer: uvicorn would append it to the headers, where it replaces those admitted."""
        if self._in_trailers:
            return
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        if self._headers > MOST_HEADERS or self._header_bytes > LARGEST_HEAD:
            raise ValueError("the head is too large")  # which httptools reports as an invalid request: 400
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """The head is whole: what comes as a header from here on is a trailer."""
        self._unparsed, self._in_trailers = 0, True
        super().on_headers_complete()  # type: ignore[misc]

    def on_chunk_header(self) -> None:
        """A chunk's size was read."""
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """A piece of body came."""
        self._unparsed = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._unparsed = 0
        super().on_message_complete()  # type: ignore[misc]

    def take_body(self, scope: Scope) -> bytes | None:
        """See :meth:`Connection.take_body`."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.more_body or cycle.disconnected:
            return None
        content, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return content

    def can_answer(self, scope: Scope) -> bool:
        """See :meth:`Connection.can_answer`; not where another request was sent behind this one, or none may follow."""
        cycle = self.cycle
        return cycle.scope is scope and cycle.keep_alive and not cycle.disconnected and self.is_writable

    def answer(self, headers: bytes, content: bytes) -> None:
        """See :meth:`Connection.answer`."""
        cycle = self.cycle
        self.transport.write(b"%s%s\r\n%s" % (_head(tuple(self.server_state.default_headers)), headers, content))
        cycle.response_started = cycle.response_complete = True
        cycle.on_response()


@functools.lru_cache(8)
def _head(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + b"".join(b"%s: %s\r\n" % header for header in headers)


class JoiningTransport:
    """A transport on which several writes can go out as one: a system call costs more than most of an answer.

    ``held``: what is kept back, or None where writes pass.
    """

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self.held: list[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Send, or keep back."""
        if self.held is None:
            self._transport.write(data)
        else:
            self.held.append(data)

    def release(self) -> None:
        """Send what is kept; what comes after passes."""
        held, self.held = self.held, None
        if held:
            self._transport.writelines(held)

    def close(self) -> None:
        """Close once everything is sent."""
        self.release()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol for a service of these limits; by httptools, where there is one: h11 answers far fewer."""
    kinds: tuple[type[asyncio.Protocol], ...]
    if find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        kinds = QuickConnection, HttpToolsProtocol
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        kinds = Connection, H11Protocol
    return type("LimitedConnection", kinds, {"limits": limits})
