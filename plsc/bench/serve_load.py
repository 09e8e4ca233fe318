"""Callers of a service in a process of their own: as many connections as asked for, each with one request in flight.

    python -m plsc.bench.serve_load TASK.json RESULT.json

They speak HTTP by hand with requests made beforehand, so that two cores are left to the service as far as they can be.
"""

import asyncio
import base64
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from plsc.bench.search_data import K, SearchData
from plsc.files import read_json, write_json

_WARM_SHARE = 0.25  # of the measured time, before it


def main(task: str, result: str) -> None:
    """Run the task in a file and write its figures into another."""
    write_json(Path(result), load(read_json(Path(task))))


def load(task: dict[str, Any]) -> dict[str, float]:
    """``{"qps", "p50_ms", "p99_ms", "answers"}`` of ``task["clients"]`` callers over ``task["seconds"]``."""
    place = urlsplit(task["address"])
    requests = _requests(SearchData(Path(task["data"])), task["path"], str(place.netloc), task["form"])
    calls = asyncio.run(_run(str(place.hostname), int(place.port or 0), requests, task["clients"], task["seconds"]))
    seconds = np.array(calls)
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000 if len(seconds) else (0.0, 0.0)
    return {"qps": len(seconds) / task["seconds"], "p50_ms": float(p50), "p99_ms": float(p99), "answers": len(seconds)}


def _requests(data: SearchData, path: str, host: str, form: str) -> list[bytes]:
    return [_request(row, path, host, form) for row in data.queries]


def _request(row: Any, path: str, host: str, form: str) -> bytes:
    given = base64.b64encode(row.astype("<f4").tobytes()).decode() if form == "vector_b64" else row.tolist()
    body = json.dumps({"query": {form: given}, "k": K}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _run(host: str, port: int, requests: list[bytes], clients: int, seconds: float) -> list[float]:
    loop = asyncio.get_running_loop()
    begin = time.perf_counter() + seconds * _WARM_SHARE
    window = begin, begin + seconds
    callers = [
        (await loop.create_connection(partial(_Caller, requests, first, window), host, port))[1]
        for first in range(clients)
    ]
    try:
        return [call for calls in await asyncio.gather(*(caller.done for caller in callers)) for call in calls]
    finally:
        for caller in callers:
            caller.close()
        await asyncio.sleep(0)  # the transports close in the loop's next turn


class _Caller(asyncio.Protocol):
    """Sends the next request when the answer is there, until the time is over."""

    def __init__(self, requests: list[bytes], first: int, window: tuple[float, float]) -> None:
        self._requests, self._next, self._window = requests, first, window
        self._received, self._expected, self._sent = b"", -1, 0.0
        self._calls: list[float] = []
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._expected < 0 and (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            if head[9:12] != b"200":
                self._end(ConnectionError(f"the service answered {head[:60]!r}"))
                return
            self._expected = end + 4 + _length(head)
        if 0 <= self._expected <= len(self._received):
            self._received, self._expected = b"", -1
            self._answered(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionError("the service closed a connection while it was measured"))

    def close(self) -> None:
        self._transport.abort()

    def _answered(self, now: float) -> None:
        begin, end = self._window
        if begin <= now <= end:
            self._calls.append(now - self._sent)
        if now < end:
            self._send()
        else:
            self.done.set_result(self._calls)

    def _end(self, error: ConnectionError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 7


def _length(head: bytes) -> int:
    """The Content-Length of an answer."""
    lines = (line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:])
    return next(int(value) for name, value in lines if name == b"content-length")


if __name__ == "__main__":
    main(*sys.argv[1:])
