"""The process: bind sockets, answer while loading, serve, shut down gracefully."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from importlib.util import find_spec
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from plsc.errors import UsageError
from plsc.progress import note
from plsc.serve.app import build_app
from plsc.serve.connections import MAX_PIPELINED, UNKNOWN_PIPELINED, ConnectionBudget, LimitedProtocol
from plsc.serve.door import Door
from plsc.serve.observability import Metrics, MetricsServer
from plsc.serve.service import Lifecycle, Service
from plsc.serve.settings import Limits, Settings, is_loopback
from plsc.serve.shares import Shared
from plsc.serve.token_book import TokenBook

KEEP_ALIVE_SECONDS = 75  # longer than the usual reverse proxy's 60: the proxy closes first, and no request is lost
_FILES_KEPT_BACK = 192  # of the store, the audit log, snapshots, tokens, pictures' processes and metrics
MAX_PORT = 65_535
_LEAST_CONNECTIONS = 16
_BACKLOG = 1024  # connections that the system holds until they are accepted

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
        settings = replace(settings, limits=_with_files(settings.limits))
        self.settings = settings
        tokens = None if settings.tokens is None else TokenBook(settings.tokens)
        if tokens is None and not is_loopback(settings.host):
            raise UsageError(
                f"--host {settings.host} lets other machines call, and there are no tokens to know them by; make some "
                "with plsc tokens add NAME --role search, and give --tokens FILE"
            )
        self._metrics, self._lifecycle = Metrics(), Lifecycle()
        self._listener = _listen(settings.host, settings.port)
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
        limits = settings.limits
        part = max(int(limits.connections * settings.share), 1)
        budget = ConnectionBudget(limits.connections, part, limits.anonymous_connections)
        self._server = _GracefulServer(_config(app, settings, budget), self._lifecycle, budget)

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


class _GracefulServer(uvicorn.Server):
    """uvicorn's server behind a :class:`Door`, for which a signal starts the shutdown and is not raised again."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, budget: ConnectionBudget) -> None:
        super().__init__(config)
        self._lifecycle, self._budget = lifecycle, budget
        self._door: Door | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        if sys.platform == "win32":  # whose event loop watches no sockets
            await super().startup(sockets)
            return
        await super().startup([])
        assert sockets is not None, "it serves a socket that is bound already"
        (listener,) = sockets
        self._door = Door(listener, self._make_protocol, self._budget.newcomers_owe)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept none, and finish requests."""
        if self._door is not None:
            self._door.close()
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state={})
        return protocol

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


def _config(app: ASGIApp, settings: Settings, budget: ConnectionBudget) -> uvicorn.Config:
    limits = settings.limits
    unread = Shared("bytes of answers", limits.memory_bytes, settings.share)
    pipelined = MAX_PIPELINED if settings.tokens is None else UNKNOWN_PIPELINED
    known = {"limits": limits, "budget": budget, "unread": unread, "unknown_pipelined": pipelined}
    protocol = type("Protocol", (LimitedProtocol,), known)
    return uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        loop="none",
        ws="none",
        access_log=False,
        log_level="error",  # warnings tell of requests that are no HTTP: a line each, for whoever likes to fill a disk
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


def _with_files(limits: Limits) -> Limits:
    """Let this process open as many files as it may; take fewer connections where its own files need the rest."""
    try:
        import resource
    except ImportError:  # Windows, whose sockets are no files
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses more than the kernel has
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    wanted = limits.connections + limits.anonymous_connections
    spare = soft - _open_files() - _FILES_KEPT_BACK
    if soft == resource.RLIM_INFINITY or wanted <= spare:
        return limits
    anonymous = max(min(limits.anonymous_connections, spare // 4), _LEAST_CONNECTIONS)
    known = max(min(limits.connections, spare - anonymous), _LEAST_CONNECTIONS)
    note(
        f"plsc serve: this process may open {soft:,} files: it takes {known:,} connections of known callers and "
        f"{anonymous:,} of others; raise ulimit -n to {wanted + soft - spare:,} for all"
    )
    return replace(limits, connections=known, anonymous_connections=anonymous)


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208 (a Path for each would cost more than the question)
    except OSError:
        return 0


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    listener = None
    if not 0 <= port <= MAX_PORT:  # getaddrinfo would take its last 16 bits
        raise UsageError(f"--port {port}: a port lies between 0 and {MAX_PORT}")
    try:
        family, kind, protocol_number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, asyncio turns Nagle's algorithm off: else an answer's second packet waits 40 ms.
        listener = socket.socket(family, kind, protocol_number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
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
