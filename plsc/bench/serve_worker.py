"""Processes of `plsc bench serve`: ``python -m plsc.bench.serve_worker TASK.json FOLDER``.

A task is one of three actions: "enrol" makes a gallery and a model, "store" measures the store's own searches, "load"
sends requests to a running service. The load generator speaks HTTP over plain sockets with requests encoded
beforehand, because it shares the machine's cores with the service that it measures.
"""

import base64
import contextlib
import json
import selectors
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plsc.bench.harness import be_rank
from plsc.bench.search import K, SearchData, make_search_data, percentiles, time_searches
from plsc.gallery.values import NewPerson

COLLECTION = "measured"
FORMS = ("vector", "vector_b64")  # how a query is sent
_ENROL_BATCH = 2000  # persons
_MODEL = "mobilefacenet"
_WARM_UP_SHARE = 0.25  # of the measured time, before it
_CONNECT_TIMEOUT = 60.0  # seconds
_RECEIVE_BYTES = 1 << 16
_QUERY_STRIDE = 7  # coprime to the number of queries: callers that start close together send different ones


# Gallery and store --------------------------------------------------------------------------------------------------


def make_gallery(task: dict[str, Any]) -> dict[str, Any]:
    """Draw ``task["rows"]`` vectors of ``task["dim"]``, save an untrained model of that width, enrol every row.

    Returns:
        ``seconds`` of enrolling and compacting.
    """
    import torch

    from plsc.embedding.embedder import open_embedder
    from plsc.gallery.backends import open_store
    from plsc.models import create, save_model

    folder = Path(task["data"])
    data = make_search_data(folder, task["rows"], task["dim"])
    torch.manual_seed(0)
    save_model(create(_MODEL, embedding_dim=task["dim"]), folder / "model.safetensors")
    contract = open_embedder(folder / "model.safetensors", device=torch.device("cpu")).contract_id
    start = time.perf_counter()
    store = open_store(folder / "store")
    try:
        store.create_collection(COLLECTION, task["dim"], contract)
        for first in range(0, task["rows"], _ENROL_BATCH):
            rows = data.rows[first : first + _ENROL_BATCH]
            persons = [NewPerson(row[None], f"person {number}") for number, row in enumerate(rows, first)]
            store.add_persons(COLLECTION, persons, contract)
        store.compact(COLLECTION)
    finally:
        store.close()
    return {"seconds": time.perf_counter() - start}


def measure_store(task: dict[str, Any]) -> dict[str, Any]:
    """Measure the store's own searches of ``task["batch"]`` queries at once, without a service.

    Returns:
        ``qps``, ``p50_ms``, ``p99_ms``.
    """
    import torch

    from plsc.gallery.backends import open_store

    torch.set_num_threads(task["threads"])
    store = open_store(Path(task["data"]) / "store")
    try:
        queries = SearchData(Path(task["data"])).queries
        return time_searches(
            lambda part, k: store.search(COLLECTION, part, k=k), queries, task["batch"], K, task["seconds"]
        )
    finally:
        store.close()


# Load generator -----------------------------------------------------------------------------------------------------


def send_load(task: dict[str, Any]) -> dict[str, Any]:
    """Send searches to ``task["address"]`` over ``task["clients"]`` connections, one request in flight on each.

    Returns:
        ``qps``, ``p50_ms``, ``p99_ms`` and ``answers`` within ``task["seconds"]``, after a warm-up.

    Raises:
        ConnectionError: the service closed a connection, or answered with an error.
    """
    url = urlsplit(task["address"])
    queries = SearchData(Path(task["data"])).queries
    requests = [_request(query, task["path"], url.netloc, task["form"]) for query in queries]
    seconds = call_service((str(url.hostname), url.port or 80), requests, task["clients"], task["seconds"])
    return {"qps": len(seconds) / task["seconds"], **percentiles(seconds), "answers": len(seconds)}


def _request(query: Any, path: str, host: str, form: str) -> bytes:
    value = base64.b64encode(query.astype("<f4").tobytes()).decode() if form == "vector_b64" else query.tolist()
    body = json.dumps({"query": {form: value}, "k": K}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def call_service(address: tuple[str, int], requests: list[bytes], clients: int, seconds: float) -> list[float]:
    """Return the latency of every call that was answered within ``seconds`` after the warm-up."""
    begin = time.perf_counter() + seconds * _WARM_UP_SHARE
    latencies: list[float] = []
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        for first in range(clients):
            connection = connections.enter_context(socket.create_connection(address, _CONNECT_TIMEOUT))
            caller = _Caller(connection, requests, first)
            selector.register(connection, selectors.EVENT_READ, caller)
            caller.send()
        while (now := time.perf_counter()) < begin + seconds:
            for key, _ in selector.select(begin + seconds - now):
                latency = key.data.receive()
                if latency is not None and begin <= time.perf_counter() < begin + seconds:
                    latencies.append(latency)
    return latencies


class _Caller:
    """A connection that sends its next request as soon as the last one is answered."""

    def __init__(self, connection: socket.socket, requests: list[bytes], first: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._requests, self._next = connection, requests, first
        self._received, self._sent_at = b"", 0.0

    def send(self) -> None:
        self._sent_at = time.perf_counter()
        self.connection.sendall(self._requests[self._next % len(self._requests)])
        self._next += _QUERY_STRIDE

    def receive(self) -> float | None:
        """Read what has arrived; return the call's latency once the answer is complete and the next request sent."""
        data = self.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the service closed a connection while it was measured")
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or len(self._received) < end + 4 + _content_length(self._received[:end]):
            return None
        latency = time.perf_counter() - self._sent_at
        self._received = b""
        self.send()
        return latency


def _content_length(head: bytes) -> int:
    """Return the Content-Length of an answer; :class:`ConnectionError` for one that is no success."""
    if head[9:10] != b"2":
        raise ConnectionError(f"the service answered {head[:60]!r}")
    _, _, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0])


def _measure_task(task: dict[str, Any]) -> dict[str, Any]:
    return {"enrol": make_gallery, "store": measure_store, "load": send_load}[task["action"]](task)


if __name__ == "__main__":
    be_rank(_measure_task)
