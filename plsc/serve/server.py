"""The process: bind sockets, answer while loading, serve, shut down gracefully; and limits of its connections."""

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Generator
from importlib.util import find_spec
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plsc.errors import UsageError
from plsc.serve.admission import Connection
from plsc.serve.app import build_app
from plsc.serve.observability import Metrics, MetricsServer
from plsc.serve.service import Lifecycle, Service
from plsc.serve.settings import Limits, Settings, is_loopback
from plsc.serve.tokens import TokenBook

KEEP_ALIVE_SECONDS = 75  # longer than the usual reverse proxy's 60: the proxy closes first, and no request is lost
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 256
MAX_PORT = 65_535

Load = Callable[[Metrics], Service]


class Server:
    """Listens from the start; :meth:`run` loads and serves.

    Attributes:
        address: URL of the service.
        metrics_address: URL of its metrics, or None.

    Raises:
        UsageError: a port that cannot be bound, or an address beyond this machine without tokens.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        tokens = None if settings.tokens is None else TokenBook(settings.tokens)
        if tokens is None and not is_loopback(settings.host):
            raise UsageError(
                f"--host {settings.host} lets other machines call, and there are no tokens to know them by; make some "
                "with plsc tokens add NAME --role read, and give --tokens FILE"
            )
        self._metrics, self._lifecycle = Metrics(), Lifecycle()
        self._listener = _listen(settings.host, settings.port, settings.limits.connections)
        try:
            self._metrics_server = _metrics_server(settings, self._metrics)
        except UsageError:
            self._listener.close()
            raise
        self.address = _url(settings.host, self._listener.getsockname()[1])
        self.metrics_address = None
        if self._metrics_server is not None:
            self.metrics_address = _url(settings.host, self._metrics_server.port) + "/metrics"
        app = build_app(self._lifecycle, settings, tokens, self._metrics)
        self._server = _GracefulServer(_config(app, settings), self._lifecycle)

    def run(self, load: Load, ready: Callable[[Service], None]) -> None:
        """Serve until :meth:`stop`, SIGTERM or SIGINT; then finish requests in flight and close the store.

        Args:
            load: makes the service, in a thread, while /health says that it loads; its exceptions end the server.
            ready: called once requests are admitted.
        """
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._run(load, ready))
        finally:
            self._listener.close()
            if self._metrics_server is not None:
                self._metrics_server.close()

    def stop(self) -> None:
        """Start the shutdown; may be called from any thread."""
        self._server.handle_exit(signal.SIGTERM, None)

    async def _run(self, load: Load, ready: Callable[[Service], None]) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        service = None
        try:
            service = await asyncio.to_thread(load, self._metrics)
            gc.collect()
            gc.freeze()  # what was loaded stays: going through it in search of garbage takes a tenth of a second
            if self._lifecycle.status == "loading":
                self._lifecycle.open(service)
                ready(service)
            await serving
        finally:
            self._lifecycle.status = "stopping"
            self._server.should_exit = True
            await serving
            gc.unfreeze()
            if service is not None:
                await asyncio.to_thread(service.close)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on heads, trailers, connections, and callers who do not read.

    Built on the callbacks of asyncio.Protocol and of httptools alone; requests find their :class:`Connection` in
    ``scope["state"]``, where ASGI puts what the server's lifespan shares with them. A request's head has
    ``limits.head_seconds`` to arrive, from the connection or from its first byte; between requests uvicorn's keep-alive
    time-out holds.
    ``connected`` holds the open connections of a server.
    """

    limits: Limits
    connected: "set[LimitedProtocol]"

    def __init__(self, **keywords: Any) -> None:
        self._connection = Connection()
        keywords["app_state"] = {**keywords["app_state"], "connection": self._connection}
        super().__init__(**keywords)
        self._loop = asyncio.get_running_loop()
        self._wire: asyncio.Transport
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unparsed = 0  # bytes since the parser last finished a head, a chunk's size or a piece of body
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or close it at once where there are too many."""
        super().connection_made(transport)
        self._wire = transport
        self.connected.add(self)
        if len(self.connected) > self.limits.connections:
            self._abort()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in progress, and forget the connection."""
        self.connected.discard(self)
        self._connection.lose()
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; abort a connection that sends more than a head's worth of what is neither head nor body."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES:  # trailers, or a chunk's extensions: httptools would go on gathering them
            self._abort()

    def pause_writing(self) -> None:
        """Start the clock: the caller does not read."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self._loop.call_later(self.limits.send_seconds, self._abort)

    def resume_writing(self) -> None:
        """Stop the clock: the caller has read nearly everything."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def on_message_begin(self) -> None:
        """Start a request."""
        self._headers, self._header_bytes, self._in_trailers = 0, 0, False
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; drop a trailer: uvicorn would append it to the headers, where it replaces those admitted."""
        if self._in_trailers:
            return
        self._headers += 1
        self._header_bytes += len(name) + len(value)
        if self._headers > MAX_HEADERS or self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # which httptools reports as an invalid request: 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End a head: what comes as a header from here on is a trailer."""
        self._unparsed, self._in_trailers = 0, True
        self._stop_head_timer()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Read a chunk's size."""
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unparsed = 0
        super().on_message_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self.limits.head_seconds, self._end_head_time)

    def _end_head_time(self) -> None:
        if self._wire.is_reading():
            self._abort()
        else:  # uvicorn reads no further while earlier requests of this connection wait for their answers
            self._start_head_timer()

    def _abort(self) -> None:
        self._connection.lose()  # before connection_lost: from here on writing fails
        self._wire.abort()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _GracefulServer(uvicorn.Server):
    """uvicorn's server, for which a signal starts the shutdown and is not raised again after it."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let SIGTERM and SIGINT start the shutdown."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop accepting; a second SIGINT does not wait for requests in flight."""
        self._lifecycle.status = "stopping"
        super().handle_exit(sig, frame)


def _config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    protocol = type("Protocol", (LimitedProtocol,), {"limits": settings.limits, "connected": set()})
    return uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        loop="none",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        headers=[("X-Content-Type-Options", "nosniff")],
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(int(settings.drain_seconds), 1),
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop, a tenth more requests a second than asyncio's own, where there is one (not on Windows)."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    listener = None
    if not 0 <= port <= MAX_PORT:  # getaddrinfo would take its last 16 bits
        raise UsageError(f"--port {port}: a port lies between 0 and {MAX_PORT}")
    try:
        family, kind, protocol_number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, asyncio turns Nagle's algorithm off: else an answer's second packet waits 40 ms.
        listener = socket.socket(family, kind, protocol_number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise _bind_error("listen", host, port, error) from None
    return listener


def _metrics_server(settings: Settings, metrics: Metrics) -> MetricsServer | None:
    if settings.metrics_port is None:
        return None
    try:
        return MetricsServer(metrics, settings.host, settings.metrics_port)
    except (OSError, OverflowError) as error:
        raise _bind_error("show metrics", settings.host, settings.metrics_port, error) from None


def _bind_error(what: str, host: str, port: int, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(f"cannot {what} on {host} port {port}: {reason}; choose another port or host")
