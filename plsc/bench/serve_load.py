"""Callers of a service in a process of their own: as many connections as asked for, each with one request in flight.

    python -m plsc.bench.serve_load TASK.json RESULT.json

They speak HTTP by hand with requests made beforehand, so that two cores are left to the service as far as they can be.
"""

import base64
import contextlib
import json
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from plsc.bench.search_data import K, SearchData
from plsc.files import read_json, write_json

_WARM_SHARE = 0.25  # of the measured time, before it
_PATIENCE = 60.0  # seconds
_CHUNK = 1 << 16


def main(task: str, result: str) -> None:
    """Run the task in a file and write its figures into another."""
    write_json(Path(result), load(read_json(Path(task))))


def load(task: dict[str, Any]) -> dict[str, float]:
    """``{"qps", "p50_ms", "p99_ms", "answers"}`` of ``task["clients"]`` callers over ``task["seconds"]``."""
    place = urlsplit(task["address"])
    requests = _requests(SearchData(Path(task["data"])), task["path"], str(place.netloc), task["form"])
    seconds = np.array(_run((str(place.hostname), place.port or 80), requests, task["clients"], task["seconds"]))
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000 if len(seconds) else (0.0, 0.0)
    return {"qps": len(seconds) / task["seconds"], "p50_ms": float(p50), "p99_ms": float(p99), "answers": len(seconds)}


def _requests(data: SearchData, path: str, host: str, form: str) -> list[bytes]:
    return [_request(row, path, host, form) for row in data.queries]


def _request(row: Any, path: str, host: str, form: str) -> bytes:
    given = base64.b64encode(row.astype("<f4").tobytes()).decode() if form == "vector_b64" else row.tolist()
    body = json.dumps({"query": {form: given}, "k": K}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _run(place: tuple[str, int], requests: list[bytes], clients: int, seconds: float) -> list[float]:
    """What each call took that was answered within ``seconds``, after some time to warm up."""
    begin = time.perf_counter() + seconds * _WARM_SHARE
    calls: list[float] = []
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as answered:
        for first in range(clients):
            caller = _Caller(opened.enter_context(socket.create_connection(place, _PATIENCE)), requests, first)
            answered.register(caller.connection, selectors.EVENT_READ, caller)
            caller.send()
        while (now := time.perf_counter()) < begin + seconds:
            for key, _ in answered.select(begin + seconds - now):
                took = key.data.receive()
                if took is not None and begin <= time.perf_counter() < begin + seconds:
                    calls.append(took)
    return calls


class _Caller:
    """Sends the next request when the answer is there."""

    def __init__(self, connection: socket.socket, requests: list[bytes], first: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._requests, self._next = connection, requests, first
        self._received, self._sent = b"", 0.0

    def send(self) -> None:
        self._sent = time.perf_counter()
        self.connection.sendall(self._requests[self._next % len(self._requests)])
        self._next += 7

    def receive(self) -> float | None:
        """Take what there is; the seconds of the call, when its answer is whole and the next request sent."""
        data = self.connection.recv(_CHUNK)
        if not data:
            raise ConnectionError("the service closed a connection while it was measured")
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or len(self._received) < end + 4 + _length(self._received[:end]):
            return None
        took = time.perf_counter() - self._sent
        self._received = b""
        self.send()
        return took


def _length(head: bytes) -> int:
    """The Content-Length of an answer; :class:`ConnectionError` for one that is an error."""
    if head[9:12] != b"200":
        raise ConnectionError(f"the service answered {head[:60]!r}")
    _, _, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
