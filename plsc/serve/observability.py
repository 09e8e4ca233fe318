"""What operators see of a service: whether it is ready, and Prometheus metrics, on a port of their own."""

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from plsc.errors import PlscError
from plsc.progress import counted
from plsc.serve.audit import Event
from plsc.serve.errors import ApiError
from plsc.serve.settings import HOST, is_loopback

if TYPE_CHECKING:
    from plsc.serve.models import Unsearched
    from plsc.serve.service import Service
    from plsc.serve.tokens import TokenBook

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SOCKET_SECONDS = 5.0  # of one read or write of a scrape
_CONNECTION_SECONDS = 10.0  # of a whole scrape: a byte now and then must not hold a connection
_MAX_SCRAPES = 16
_STORE_SECONDS = 2.0  # a store that takes longer to say what it holds is lost

Statistics = Callable[[], dict[str, dict[str, float]]]


class Lifecycle:
    """State of the process: ``status`` is "loading", "ready" or "stopping"."""

    def __init__(self) -> None:
        self.status = "loading"
        self.tokens: TokenBook | None = None
        self._service: Service | None = None

    @property
    def service(self) -> "Service":
        """The service; :class:`ApiError` 503 unless it is ready."""
        if self._service is None or self.status != "ready":
            raise ApiError(503, f"the service is {self.status}; ask again in a moment")
        return self._service

    def open(self, service: "Service") -> None:
        """Admit requests to ``service``."""
        self._service = service
        self.status = "ready"

    @property
    def private_paths(self) -> Sequence[str]:
        """Files and folders of the service, which no answer names."""
        return () if self._service is None else self._service.private_paths

    async def readiness(self) -> tuple[str, str | None]:
        """ "ready", or why requests are not served; and what to do about that, where it can be said."""
        try:
            service = self.service
        except ApiError:
            return self.status, None
        if self.tokens is not None and not self.tokens.is_current():
            return "without its tokens", None
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await service.statistics("")
                unsearched = await service.unsearched()
        except (PlscError, TimeoutError):
            return "without its store", None
        if unsearched.are_all:
            return "without the model of its gallery", self._told(unsearched)
        return "ready", None

    def _told(self, unsearched: "Unsearched") -> str:
        """What to do about collections of other models; their names are for nobody who has shown no token."""
        if self.tokens is not None:
            return "no collection is of this service's model; its standard error names them, and what to do"
        first, *others = (str(refusal) for refusal in unsearched.refusals.values())
        return f"{first} ({counted(len(others), 'more collection')} likewise)" if others else first

    async def audit(self, event: Event, *, durable: bool, **entry: Any) -> None:
        """Write an audit line, once there is a service; a durable one is on disk when this returns."""
        if self._service is None:
            return
        if durable:
            await self._service.audit.write_durably(event, **entry)
        else:
            self._service.audit.write(event, **entry)


class Metrics:
    """Counters and histograms of one service, in a registry of its own; methods are thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"registry": self.registry}
        self._requests = Counter("plsc_requests", "Requests answered", ["route", "method", "status"], **options)
        self._total = Histogram("plsc_request_seconds", "Whole requests", ["route"], buckets=_SECONDS, **options)
        self._stage = Histogram(
            "plsc_stage_seconds", "Stages: decode, wait, embed, search, store", ["stage"], buckets=_SECONDS, **options
        )
        self._batch = Histogram("plsc_batch_rows", "Rows of a device batch", ["kind"], buckets=_BATCHES, **options)
        self._dropped = Counter("plsc_dropped", "Let go without computing", ["kind", "why"], **options)
        self._refused = Counter("plsc_refused", "Refused before the body was read", ["why"], **options)
        self._throttled = Counter("plsc_throttled", "Refused by a rate limit", ["token", "kind"], **options)
        self._labelled: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        self._stages: dict[str, Any] = {}

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request; ``route`` is the path's template, never the path itself."""
        labels = route, method, status
        if labels not in self._labelled:  # looking children up by their labels costs more than counting
            self._labelled[labels] = self._requests.labels(*labels), self._total.labels(route)
        counter, histogram = self._labelled[labels]
        counter.inc()
        histogram.observe(seconds)

    def stage(self, name: str, seconds: float) -> None:
        """Record the duration of a stage of a request or batch."""
        if name not in self._stages:
            self._stages[name] = self._stage.labels(name)
        self._stages[name].observe(seconds)

    def refused(self, why: str) -> None:
        """Count a request that was not admitted."""
        self._refused.labels(why).inc()

    def throttled(self, token: str, kind: str) -> None:
        """Count a request that a rate limit refused; ``token`` is its name, empty without tokens."""
        self._throttled.labels(token, kind).inc()

    def watch_limits(self, limits: Mapping[str, float]) -> None:
        """Export limits, which do not change."""
        for name, value in limits.items():
            Gauge(f"plsc_limit_{name}", f"Limit of {name.replace('_', ' ')}", registry=self.registry).set(value)

    def watch(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Export a number that is asked for at each scrape."""
        Gauge(f"plsc_{name}", help, registry=self.registry).set_function(value)

    def batch(self, kind: str, rows: int, waited: Sequence[float], seconds: float) -> None:
        """Count a batch of ``rows`` that ran for ``seconds``, after its callers had ``waited`` (seconds each)."""
        self._batch.labels(kind).observe(rows)
        self.stage(kind, seconds)
        self.stage("wait", max(waited))

    def dropped(self, kind: str, why: str, count: int) -> None:
        """Count callers who were dropped without computing; ``why`` is "deadline", "cancelled" or "full"."""
        self._dropped.labels(kind, why).inc(count)

    def watch_store(self, statistics: Statistics) -> None:
        """Export each collection's statistics (rows, growing, tombstones, recall …), read at scrape time."""
        self.registry.register(_StoreCollector(statistics))


class _StoreCollector(Collector):
    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = GaugeMetricFamily("plsc_store_up", "Whether the store answers")
        try:
            statistics = self._statistics()
        except PlscError:
            up.add_metric([], 0.0)
            yield up
            return
        up.add_metric([], 1.0)
        yield up
        for name in sorted({name for values in statistics.values() for name in values}):
            family = GaugeMetricFamily(f"plsc_collection_{name}", f"{name} of a collection", labels=["collection"])
            for collection, values in statistics.items():
                value = values.get(name)
                if isinstance(value, bool | int | float) and not math.isnan(value):
                    family.add_metric([collection], float(value))
            yield family

    def describe(self) -> list[Any]:
        return []  # else the registry would ask the store at registration


class MetricsServer:
    """Serve ``/metrics`` and nothing else on its own socket, each scrape in a daemon thread."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        show = make_wsgi_app(metrics.registry)

        def app(environ: Any, start_response: Any) -> Any:
            if is_loopback(host) and not _names_this_machine(environ.get("HTTP_HOST", "")):
                start_response("403 Forbidden", [("Content-Type", "text/plain")])
                return [b"metrics are shown to this machine alone: call it 127.0.0.1\n"]
            if environ["PATH_INFO"] != "/metrics" or environ["REQUEST_METHOD"] != "GET":
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"only /metrics is here\n"]
            return show(environ, start_response)

        server_class = _Server6 if ":" in host else _Server
        self._server = make_server(host, port, app, server_class, handler_class=_Handler)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="plsc-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; scrapes in progress are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    """At most ``_MAX_SCRAPES`` connections, each for ``_CONNECTION_SECONDS``: so slow ones keep nobody out.

    One more than that many closes the oldest.
    """

    block_on_close = False

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._open: list[tuple[float, socket.socket]] = []
        super().__init__(*args, **keywords)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        self._open.append((time.monotonic(), request))
        self.service_actions()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that are too old, or too many; called twice a second."""
        self._open = [(since, known) for since, known in self._open if known.fileno() >= 0]
        oldest = time.monotonic() - _CONNECTION_SECONDS
        while self._open and (len(self._open) > _MAX_SCRAPES or self._open[0][0] < oldest):
            with contextlib.suppress(OSError):  # it has just ended by itself
                self._open.pop(0)[1].shutdown(socket.SHUT_RDWR)  # its thread's read or write ends, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop the traceback of a scrape that timed out or was cut off."""


def _names_this_machine(host: str) -> bool:
    """True if a Host header can only mean this machine: another name could have been made to resolve to it."""
    found = HOST.fullmatch(host.lower())
    return found is not None and is_loopback(found["name"])


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _SOCKET_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
