"""The process: sockets first, then answers that it is loading, then service, and an orderly end."""

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Generator
from importlib.util import find_spec
from types import FrameType

import uvicorn

from plsc.errors import UsageError
from plsc.serve.app import build_app
from plsc.serve.connection import protocol
from plsc.serve.gate import Gate
from plsc.serve.metrics import Metrics, MetricsServer
from plsc.serve.service import Service
from plsc.serve.settings import Settings, is_loopback
from plsc.serve.tokens import TokenBook

KEEP_ALIVE_SECONDS = 75  # longer than the usual reverse proxy's 60: the proxy closes first, and no request is lost
LARGEST_PORT = 65_535

Load = Callable[[Metrics], Service]


class Server:
    """Listens from the start; :meth:`run` loads and serves.

    Attributes: ``address`` as a URL, ``metrics_address`` likewise or None.

    Raises :class:`UsageError` for a port that cannot be had, or an address beyond this machine without tokens.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        tokens = None if settings.tokens is None else TokenBook(settings.tokens)
        if tokens is None and not is_loopback(settings.host):
            raise UsageError(
                f"--host {settings.host} lets other machines call, and there are no tokens to know them by; make some "
                "with plsc tokens add NAME --role read, and give --tokens FILE"
            )
        self._metrics, self._gate = Metrics(), Gate()
        self._listener = _listen(settings.host, settings.port, settings.limits.connections)
        try:
            self._metrics_server = _metrics_server(settings, self._metrics)
        except UsageError:
            self._listener.close()
            raise
        self.address = _address(settings.host, self._listener.getsockname()[1])
        self.metrics_address = None
        if self._metrics_server is not None:
            self.metrics_address = _address(settings.host, self._metrics_server.port) + "/metrics"
        self._server = _Uvicorn(_config(build_app(self._gate, settings, tokens, self._metrics), settings), self._gate)

    def run(self, load: Load, ready: Callable[[Service], None]) -> None:
        """Serve until :meth:`stop`, SIGTERM or SIGINT; then finish what runs and close the store.

        ``load`` makes the service, in a thread, while /health says that it loads; what it raises ends the server.
        ``ready`` is called when requests are let in.
        """
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._run(load, ready))
        finally:
            self._listener.close()
            if self._metrics_server is not None:
                self._metrics_server.close()

    def stop(self) -> None:
        """Begin the end; may be called from any thread."""
        self._server.handle_exit(signal.SIGTERM, None)

    async def _run(self, load: Load, ready: Callable[[Service], None]) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        service = None
        try:
            service = await asyncio.to_thread(load, self._metrics)
            gc.collect()
            gc.freeze()  # what was loaded stays: going through it in search of garbage takes a tenth of a second
            if self._gate.status == "loading":
                self._gate.open(service)
                ready(service)
            await serving
        finally:
            self._gate.status = "stopping"
            self._server.should_exit = True
            await serving
            gc.unfreeze()
            if service is not None:
                await asyncio.to_thread(service.close)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which takes a signal as the wish to end, and is not killed by it once it has ended."""

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self._gate = gate

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let SIGTERM and SIGINT begin the end."""
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
        """Stop accepting; a second SIGINT does not wait for what runs."""
        self._gate.status = "stopping"
        super().handle_exit(sig, frame)


def _config(app: Callable[..., object], settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(settings.limits),
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


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int, waiting: int) -> socket.socket:
    listener = None
    if not 0 <= port <= LARGEST_PORT:  # getaddrinfo would take its last 16 bits
        raise UsageError(f"--port {port}: a port lies between 0 and {LARGEST_PORT}")
    try:
        family, kind, protocol_number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol named, asyncio turns Nagle's algorithm off: else an answer's second packet waits 40 ms.
        listener = socket.socket(family, kind, protocol_number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(waiting)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise UsageError(_unheard("listen", host, port, error)) from None
    return listener


def _metrics_server(settings: Settings, metrics: Metrics) -> MetricsServer | None:
    if settings.metrics_port is None:
        return None
    try:
        return MetricsServer(metrics, settings.host, settings.metrics_port)
    except (OSError, OverflowError) as error:
        raise UsageError(_unheard("show metrics", settings.host, settings.metrics_port, error)) from None


def _unheard(what: str, host: str, port: int, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error
    return f"cannot {what} on {host} port {port}: {reason}; choose another port or host"
