"""What the service tells Prometheus: a registry of its own, shown on a port of its own and nowhere else."""

import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from plsc.errors import PlscError

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_READ_SECONDS = 5.0

Statistics = Callable[[], dict[str, dict[str, float]]]


class Metrics:
    """Counters and histograms of one service; its methods may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make: Any = {"registry": self.registry}
        self._requests = Counter("plsc_requests", "Requests answered", ["route", "method", "status"], **make)
        self._total = Histogram("plsc_request_seconds", "Whole requests", ["route"], buckets=_SECONDS, **make)
        self._stage = Histogram(
            "plsc_stage_seconds", "Stages: decode, wait, embed, search, store", ["stage"], buckets=_SECONDS, **make
        )
        self._batch = Histogram("plsc_batch_rows", "Rows of a device batch", ["kind"], buckets=_BATCHES, **make)
        self._dropped = Counter("plsc_dropped", "Let go without computing", ["kind", "why"], **make)
        self._refused = Counter("plsc_refused", "Refused before the body was read", ["why"], **make)
        self._labelled: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        self._stages: dict[str, Any] = {}

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered; ``route`` is the path's template, never the path itself."""
        labels = route, method, status
        if labels not in self._labelled:  # looking children up by their labels costs more than counting
            self._labelled[labels] = self._requests.labels(route, method, status), self._total.labels(route)
        counter, histogram = self._labelled[labels]
        counter.inc()
        histogram.observe(seconds)

    def stage(self, name: str, seconds: float) -> None:
        """A stage of a request, or of a batch, took so long."""
        if name not in self._stages:
            self._stages[name] = self._stage.labels(name)
        self._stages[name].observe(seconds)

    def refused(self, why: str) -> None:
        """A request or connection was turned away."""
        self._refused.labels(why).inc()

    def watch_requests(self, in_hand: Callable[[], float]) -> None:
        """Show how many requests are in hand."""
        Gauge("plsc_in_flight", "Requests in hand", registry=self.registry).set_function(in_hand)

    def batch(self, kind: str, rows: int, waited: Sequence[float], seconds: float) -> None:
        """See :class:`plsc.serve.device_worker.Observer`."""
        self._batch.labels(kind).observe(rows)
        self.stage(kind, seconds)
        self.stage("wait", max(waited))

    def dropped(self, kind: str, why: str, count: int) -> None:
        """See :class:`plsc.serve.device_worker.Observer`."""
        self._dropped.labels(kind, why).inc(count)

    def watch_queue(self, kind: str, waiting: Callable[[], float]) -> None:
        """Show how many rows of ``kind`` wait."""
        name = f"plsc_{kind}_queue_rows"
        Gauge(name, f"Rows that wait to {kind}", registry=self.registry).set_function(waiting)

    def watch_store(self, statistics: Statistics) -> None:
        """Show each collection's figures (rows, delta, tombstones, recall …) as they are when asked for."""
        self.registry.register(_StoreFigures(statistics))


class _StoreFigures(Collector):
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
        for name in sorted({name for figures in statistics.values() for name in figures}):
            family = GaugeMetricFamily(f"plsc_collection_{name}", f"{name} of a collection", labels=["collection"])
            for collection, figures in statistics.items():
                value = figures.get(name)
                if isinstance(value, bool | int | float) and not math.isnan(value):
                    family.add_metric([collection], float(value))
            yield family

    def describe(self) -> list[Any]:
        return []  # the store is asked when Prometheus asks, not at registration


class MetricsServer:
    """Serves ``/metrics`` and nothing else on its own socket, in its own thread."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        show = make_wsgi_app(metrics.registry)

        def app(environ: Any, start: Any) -> Any:
            if environ["PATH_INFO"] != "/metrics" or environ["REQUEST_METHOD"] != "GET":
                start("404 Not Found", [("Content-Type", "text/plain")])
                return [b"only /metrics is here\n"]
            return show(environ, start)

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server: type[WSGIServer] = type("Server", (WSGIServer,), {"address_family": family})
        self._server = make_server(host, port, app, server, handler_class=_Handler)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="plsc-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = _READ_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
