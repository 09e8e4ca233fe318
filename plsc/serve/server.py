"""The process: bind sockets, answer while loading, serve, shut down gracefully."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import Any

import uvicorn

from plsc.errors import UsageError
from plsc.progress import note
from plsc.serve.admission import Admission
from plsc.serve.app import build_app
from plsc.serve.connections import ConnectionBudget, LimitedProtocol
from plsc.serve.limits import Shared
from plsc.serve.observability import Lifecycle, Metrics, MetricsServer
from plsc.serve.service import Service
from plsc.serve.settings import Limits, Settings, is_loopback
from plsc.serve.tokens import TokenBook

KEEP_ALIVE_SECONDS = 75  # longer than the usual reverse proxy's 60: the proxy closes first, and no request is lost
_FILES_KEPT_BACK = 192  # of the store, the audit log, snapshots, tokens, pictures' processes and metrics
MAX_PORT = 65_535
_LEAST_CONNECTIONS = 16
_BACKLOG = 1024  # connections that the system holds until they are accepted
_NO_FILES_SECONDS = 1.0  # until there may be file descriptors again

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
        tokens = None if settings.tokens is None else TokenBook(settings.tokens, settings.clock)
        if tokens is None and not is_loopback(settings.host):
            raise UsageError(
                f"--host {settings.host} lets other machines call, and there are no tokens to know them by; make some "
                "with plsc tokens add NAME --role search, and give --tokens FILE"
            )
        self._metrics, self._lifecycle = Metrics(), Lifecycle()
        self._metrics_server: MetricsServer | None = None
        self.metrics_address: str | None = None
        with contextlib.ExitStack() as on_error:
            self._listener = on_error.enter_context(_listen(settings.host, settings.port))
            if settings.metrics_port is not None:
                with _binding("show metrics", settings.host, settings.metrics_port):
                    self._metrics_server = MetricsServer(self._metrics, settings.host, settings.metrics_port)
                self.metrics_address = _url(settings.host, self._metrics_server.port) + "/metrics"
            on_error.pop_all()
        self.address = _url(settings.host, self._listener.getsockname()[1])
        app = build_app(self._lifecycle, settings, tokens, self._metrics)
        budget = ConnectionBudget(settings.limits, settings.share, settings.clock)
        self._server = _GracefulServer(
            _config(app, settings, budget), self._lifecycle, budget, settings.limits.accept_pause_seconds
        )

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
    """uvicorn's server, for which a signal starts the shutdown and is not raised again; it accepts slowly in a crowd.

    uvloop accepts all that wait at once, and goes on while others come: a few who connect and leave again would keep it
    from everybody whose connection is open. Here they keep out those who come anew, at worst.
    """

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, budget: ConnectionBudget, pause: float) -> None:
        super().__init__(config)
        self._lifecycle, self._budget, self._pause = lifecycle, budget, pause
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the one socket, which is bound already."""
        await super().startup([])
        assert sockets is not None, "it serves a socket that is bound already"
        (listener,) = sockets
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept none, and finish requests."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept one connection between two looks at those that are open, slowly where strangers come and go."""
        loop = asyncio.get_running_loop()
        starting: set[asyncio.Task[None]] = set()
        while True:
            try:
                wire, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError:
                await asyncio.sleep(_NO_FILES_SECONDS)
                continue
            task = loop.create_task(self._start(wire))
            starting.add(task)
            task.add_done_callback(starting.discard)
            await asyncio.sleep(self._pause if self._budget.newcomers_owe() else 0)

    async def _start(self, wire: socket.socket) -> None:
        protocol: Any = self.config.http_protocol_class
        make = partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, wire)
        except OSError:  # the caller has left
            wire.close()

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


def _config(app: Admission, settings: Settings, budget: ConnectionBudget) -> uvicorn.Config:
    limits = settings.limits
    unread = Shared("bytes of answers", limits.memory_bytes, settings.share)
    pipelined = limits.pipelined if settings.tokens is None else limits.unknown_pipelined
    shared = {"limits": limits, "budget": budget, "turns": app.turns, "unread": unread, "unknown_pipelined": pipelined}
    shared["clock"] = staticmethod(settings.clock)
    protocol = type("Protocol", (LimitedProtocol,), shared)
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
    if not 0 <= port <= MAX_PORT:  # getaddrinfo would take its last 16 bits
        raise UsageError(f"--port {port}: a port lies between 0 and {MAX_PORT}")
    with _binding("listen", host, port), contextlib.ExitStack() as on_error:
        family, kind, protocol_number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, asyncio turns Nagle's algorithm off: else an answer's second packet waits 40 ms.
        listener = on_error.enter_context(socket.socket(family, kind, protocol_number))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        on_error.pop_all()
    return listener


@contextlib.contextmanager
def _binding(what: str, host: str, port: int) -> Generator[None, None, None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot {what} on {host} port {port}: {reason}; choose another port or host") from None
