"""The process: sockets first, then answers that it is loading, then service, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
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

Load = Callable[[Metrics], Service]


def serve(settings: Settings, load: Load, describe: Callable[[Service], str]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs and close the store.

    ``load`` makes the service, in a thread, while /health answers that it is loading; ``describe`` says in a few words
    what it serves. Raises what ``load`` raises, and :class:`UsageError` for a port that cannot be had, or an address
    beyond this machine without tokens.
    """
    tokens = None if settings.tokens is None else TokenBook(settings.tokens)
    if tokens is None and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} lets other machines call, and there are no tokens to know them by; make some "
            "with plsc tokens add NAME --role read, and give --tokens FILE"
        )
    listener = _listen(settings.host, settings.port)
    metrics, gate = Metrics(), Gate()
    try:
        with _metrics_server(settings, metrics):
            server = _Server(uvicorn.Config(
                build_app(gate, settings, tokens, metrics), http=protocol(settings.limits), lifespan="off",
                loop="asyncio", ws="none", access_log=False, log_level="warning", server_header=False,
                headers=[("X-Content-Type-Options", "nosniff")], timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(settings.drain_seconds), backlog=settings.limits.connections,
            ), gate)  # fmt: skip
            asyncio.run(_run(server, listener, gate, metrics, load, _announcer(settings, listener, describe)))
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which takes a signal as the wish to end, and not to be killed by it once it has ended."""

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


async def _run(
    server: _Server, listener: socket.socket, gate: Gate, metrics: Metrics, load: Load, announce: Callable[..., None]
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    service = None
    try:
        service = await asyncio.to_thread(load, metrics)
        if gate.status == "loading":
            gate.open(service)
            announce(service)
        await serving
    finally:
        gate.shut()
        server.should_exit = True
        await serving
        if service is not None:
            await asyncio.to_thread(service.close)


def _announcer(
    settings: Settings, listener: socket.socket, describe: Callable[[Service], str]
) -> Callable[[Service], None]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    who = "this machine alone may call" if settings.tokens is None else f"callers with a token of {settings.tokens}"

    def announce(service: Service) -> None:
        address = f"http://{host}:{listener.getsockname()[1]}"
        print(f"serving at {address}: {describe(service)}; {who}", flush=True)

    return announce


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from None
    return listener


@contextlib.contextmanager
def _metrics_server(settings: Settings, metrics: Metrics) -> Generator[None, None, None]:
    if settings.metrics_port is None:
        yield
        return
    try:
        server = MetricsServer(metrics, settings.host, settings.metrics_port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on port {settings.metrics_port} for metrics: {reason}") from None
    print(f"metrics at http://{settings.host}:{server.port}/metrics", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        server.close()


