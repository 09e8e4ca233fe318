"""Hostile callers: refused early and in flat memory, and the service goes on for the others."""

import contextlib
import http.client
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.live_service import DIM, Live, answer_of, image_input, live_service
from support.waiting import held_up, wait_until

from plsc.serve import observability
from plsc.serve.settings import MIB, Limits

pytestmark = pytest.mark.live

LIMITS = Limits(
    body_bytes=8 * MIB,
    memory_bytes=12 * MIB,
    inputs=4,
    collections=3,
    connections=20,
    anonymous_connections=12,
    requests=16,
    head_seconds=0.3,
    body_seconds=0.4,
    send_seconds=0.3,
    matches=20,
)
SPARE = 24 * 2**20  # what a refusal may cost at most: the allocator's own breathing


SETTINGS = {"limits": LIMITS}


@pytest.fixture(scope="module")
def live_by_default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service with the limits that it has when nobody says otherwise."""
    with live_service(tmp_path_factory.mktemp("default")) as running:
        running.collection("amplified")
        yield running


@pytest.fixture(autouse=True)
def _goes_on(live: Live) -> Iterator[None]:
    """Whatever a test does, the service answers others after it."""
    yield
    assert live.ask("GET", "/health/ready").status_code == 200
    assert live.ask("GET", "/v1/info").status_code == 200


def memory(name: str) -> int:
    """This process's VmRSS or VmHWM in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def reset_peak() -> int:
    """Make VmHWM start again from what is resident now, which is returned."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory("VmRSS")


def ask_without_end(connection: socket.socket, request: bytes) -> None:
    """Pipeline requests without reading an answer."""
    while True:
        connection.sendall(request)


@pytest.mark.slow
def test_an_unknown_caller_s_upload_is_refused_before_it_is_read(tmp_path):
    block = bytes(MIB)
    with live_service(tmp_path, callers={"someone": {"role": "admin"}}, limits=Limits(body_bytes=128 * MIB)) as live:
        before = reset_peak()
        with live.connect() as connection:
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {64 * MIB}\r\n\r\n"
            connection.sendall(head.encode())
            time.sleep(0.1)
            sent = 0
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while sent < 64:
                    connection.sendall(block)
                    sent += 1
            assert sent < 64, "the server took the whole upload"
            assert answer_of(connection).startswith(b"HTTP/1.1 401 ")
        assert memory("VmHWM") - before < SPARE


@pytest.mark.parametrize("trailer", [b"x-%06d: y\r\n", b"%06d"], ids=["many", "one"])
def test_trailers_are_dropped_and_bounded(live, trailer):
    """uvicorn would append them to the request's headers without end."""
    block = b"".join(trailer % number for number in range(1000))
    flood = block * (64 * MIB // len(block))
    before = reset_peak()
    with live.connect() as connection:
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        connection.sendall(live.addressed(head.encode()) + (b"" if trailer.endswith(b"\n") else b"x-one: "))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(flood)
    assert memory("VmHWM") - before < 8 * MIB


def test_a_head_of_many_headers_is_refused(live):
    before = reset_peak()
    head = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"aa:bb\r\n" * 30_000 + b"\r\n"
    with live.connect() as connection:
        send_what_is_taken(connection, live.addressed(head))
        assert answer_of(connection)[:12] in (b"", b"HTTP/1.1 431")
    assert memory("VmHWM") - before < 8 * MIB


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_while_it_comes(live, chunked):
    before = reset_peak()
    size = LIMITS.body_bytes + MIB
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    block = bytes(MIB // 4)
    with live.connect() as connection:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        connection.sendall(live.addressed(head.encode()))
        for _ in range(size // len(block)):
            send_what_is_taken(connection, b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
        assert answer_of(connection).startswith(b"HTTP/1.1 413 ")
    assert memory("VmHWM") - before < LIMITS.body_bytes + SPARE


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + side // 8 + 1)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_picture_of_too_many_pixels_costs_nothing(live):
    data = bomb(13_000)
    assert len(data) < 100_000
    place = live.collection("bombs")
    before = reset_peak()
    for _ in range(3):
        refused = live.ask("POST", "/v1/embeddings", {"inputs": [image_input(data)] * 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
        raw = live.ask("POST", f"{place}/search", content=data, headers={"Content-Type": "image/png"})
        assert raw.status_code == 413
    assert memory("VmHWM") - before < SPARE


def test_counts_are_limited(live):
    place = live.collection("counts")
    vector = {"vector": [1.0] * DIM}
    for path, body, status in (
        ("/v1/embeddings", {"inputs": [vector] * 5}, 413),
        (f"{place}/search", {"queries": [vector] * 5}, 413),
        (f"{place}/persons", {"persons": [{}] * 5}, 413),
        (f"{place}/persons", {"faces": [vector] * 5}, 413),
        (f"{place}/persons", {"persons": [{"faces": [vector] * 3}] * 2}, 413),
        (f"{place}/search", {"queries": [vector] * 3, "k": 7}, 400),
        (f"{place}/search", {"query": vector, "k": 1001}, 400),
        (f"{place}/search", {"query": vector, "k": 10**30}, 400),
    ):
        assert live.ask("POST", path, body).status_code == status, (path, len(str(body)))
    statuses = [live.ask("POST", "/v1/collections", {"name": f"n{number}"}).status_code for number in range(4)]
    assert statuses[-1] == 400
    assert 1 <= statuses.count(201) < 3
    assert live.ask("DELETE", "/v1/collections/n0").status_code == 204


BODY = 4 * MIB


def wrong_bodies() -> dict[str, tuple[str, bytes, int]]:
    """Path, body and status of requests that are small, wrong, and used to become gigabytes."""
    long = b'["%s", "", %s]' % (b"a" * 500_000, b'"", ' * 1000 + b'""')
    tensor = b'{"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 3, 16, 16], "data": %s}]}'
    many = b"[" + b"0," * (BODY // 2) + b"0]"
    few = b"[" + b"0," * 60_000 + b"0]"
    keys = b"{%s}" % b",".join(b'"k%d": 0' % number for number in range(60_000))
    nested = b'{"a":' * 100 + b"{}" + b"}" * 100
    search, persons = "/v1/collections/amplified/search", "/v1/collections/amplified/persons"
    infer, levels = "/v2/models/linear/infer", b",".join([b"[" * 100 + b"0" + b"]" * 100] * 20_000)
    asked = b'{"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 3, 16, 16]}], "outputs": [%s{}]}'
    return {
        "outputs": (infer, asked % (b'{"name": "embeddings"},' * 100_000), 400),
        "lists of one pixel": (infer, tensor % (b"[%s[0]]" % (b"[0]," * 900_000)), 413),
        "lists in lists of pixels": (infer, tensor % (b"[%s]" % levels), 413),
        "a key of megabytes": (search, b'{"%s": 0}' % (b"k" * 15 * MIB), 400),
        "a key of escapes": (search, b'{"%s": 0}' % (b"\\u4e2d" * MIB), 400),
        "a picture in wide characters": (search, b'{"query": {"image": "%s"}}' % ("😀".encode() * (13 << 18)), 413),
        "a picture in escapes": (search, b'{"query": {"image": "%s"}}' % (b"\\ud83d\\ude00" * (MIB - 9)), 422),
        "a large picture": (search, b'{"query": {"image": "%s"}}' % (b"A" * (15 * MIB)), 415),
        "strings for pixels": ("/v2/models/linear/infer", tensor % long, 400),
        "zeros for pixels": ("/v2/models/linear/infer", tensor % many, 413),
        "many zeros for queries": (search, b'{"queries": %s}' % many, 413),
        "zeros for queries": (search, b'{"queries": %s}' % few, 413),
        "queries of nothing": (search, b'{"queries": [%s{}]}' % (b"{}," * 30_000), 413),
        "unknown keys": (search, keys, 400),
        "unknown keys of a query": (search, b'{"query": %s}' % keys, 400),
        "strings for a vector": (search, b'{"query": {"vector": %s}}' % few.replace(b"0", b'""'), 400),
        "empty inputs": ("/v1/embeddings", b'{"inputs": %s}' % few.replace(b"0", b'""'), 413),
        "metadata of nothing": (persons, b'{"metadata": %s}' % keys.replace(b": 0", b": null"), 400),
        "persons of nothing": (persons, b'{"persons": %s}' % few, 413),
        "objects in objects": (search, b'{"queries": [%s]}' % b",".join([nested] * (BODY // len(nested))), 413),
    }


class Steps:
    """A profiler of the event loop's thread, which counts the calls of Python functions in each step."""

    def __init__(self) -> None:
        self.longest = self._calls = self._depth = 0

    def __call__(self, frame: object, event: str, _: object) -> None:
        """Count; a step ends where no function of Python is left."""
        self._depth = max(self._depth + {"call": 1, "return": -1}.get(event, 0), 0)
        self._calls = self._calls + (event == "call") if self._depth else 0
        self.longest = max(self.longest, self._calls)


@contextlib.contextmanager
def steps_counted(live: Live) -> Iterator[Steps]:
    """What the event loop does between two looks at its connections."""
    steps, loop, begun = Steps(), live.server._server._accepting.get_loop(), threading.Event()
    loop.call_soon_threadsafe(sys.setprofile, steps)
    loop.call_soon_threadsafe(begun.set)
    assert begun.wait(60)
    try:
        yield steps
    finally:
        loop.call_soon_threadsafe(sys.setprofile, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", wrong_bodies())
def test_a_small_wrong_body_stays_small(live_by_default, kind):
    """Small in memory, and in what keeps the event loop from an answer to another caller."""
    path, body, status = wrong_bodies()[kind]
    live = live_by_default
    live.ask("POST", path, {})  # what is made once is made
    before = reset_peak()
    with steps_counted(live) as steps:
        answer = live.ask("POST", path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, len(answer.content) < 1000) == (status, True), answer.text
    assert memory("VmHWM") - before < 64 * MIB
    assert 0 < steps.longest < 6000  # by less than a third with 16 MiB to count; a body has 30,000 values or more


def test_an_answer_does_not_repeat_megabytes_of_the_request(live_by_default):
    live = live_by_default
    image = {"name": "images", "datatype": "UINT8", "shape": [1, 3, 16, 16], "data": [1] * 768}
    assert live.ask("POST", "/v2/models/linear/infer", {"id": "a" * 1024, "inputs": [image]}).json()["id"] == "a" * 1024
    refused = live.ask("POST", "/v2/models/linear/infer", {"id": "a" * MIB, "inputs": [image]})
    assert (refused.status_code, len(refused.content) < 1000) == (400, True)


def test_requests_behind_each_other_are_limited(live):
    """A read may hold thousands of them: each would be taken apart, and kept."""
    request = live.addressed(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    with live.connect() as connection:
        connection.sendall(request * 30)
        received = b""
        while received.count(b"HTTP/1.1 200") < 30:
            received += connection.recv(65536)
    before = reset_peak()
    with live.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request * (4 * MIB // len(request)))
        assert answer_of(connection).count(b"HTTP/1.1 200") < 100
    assert memory("VmHWM") - before < 8 * MIB


def test_a_length_of_many_digits_is_a_length(live):
    for digits, status in ((b"0" * 5000 + b"1", b"400"), (b"0" * 5000 + b"9" * 9, b"413")):
        with live.connect() as connection:
            head = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %b\r\n\r\n"
            connection.sendall(live.addressed(head % digits))
            assert answer_of(connection).startswith(b"HTTP/1.1 " + status)


def test_long_targets_are_refused(live):
    for path in ("/v1/collections/" + "%41" * 6000, "/health/live?" + "a=&" * 6000):
        refused = live.ask("GET", path)
        assert (refused.status_code, "16,384 bytes" in refused.json()["error"]["message"]) == (414, True)
    assert live.ask("GET", "/health/live?" + "a=&" * 5000).status_code == 200


def test_a_body_in_tiny_chunks_is_refused(live_by_default):
    live = live_by_default
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with live.connect() as connection:
        connection.sendall(live.addressed(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(b"1\r\n \r\n" * MIB)


def test_an_answer_is_limited_however_long_the_metadata_are(live_by_default):
    live = live_by_default
    place = live.collection("wordy")
    metadata = {f"{key:04}" + "\u4e2d" * 1000: "\u6587" * 1000 for key in range(64)}
    persons = [{"metadata": metadata, "faces": [{"vector": [1.0] * DIM}]}] * 4
    for _ in range(5):
        assert live.ask("POST", f"{place}/persons", {"persons": persons}).status_code == 201
    vector = {"vector": [1.0] * DIM}
    one = live.ask("POST", f"{place}/search", {"query": vector, "k": 20})
    assert len(one.json()["results"][0]["matches"]) == 20
    del one
    before = reset_peak()
    many = live.ask("POST", f"{place}/search", {"queries": [vector] * 256, "k": 20})
    assert (many.status_code, many.json()["error"]["code"]) == (400, "bad_request")
    assert "fewer" in many.json()["error"]["message"]
    assert memory("VmHWM") - before < 64 * MIB


def test_pages_of_long_metadata_are_shorter_and_complete(tmp_path):
    with live_service(tmp_path, limits=Limits(answer_bytes=50_000)) as live:
        place = live.collection("wordy")
        persons = [{"metadata": {f"{n}": "x" * 1000 for n in range(number % 7)}} for number in range(200)]
        enrolled = live.ask("POST", f"{place}/persons", {"persons": persons}).json()["persons"]
        seen, after = [], 0
        while after is not None:
            page = live.ask("GET", f"{place}/persons", params={"after": after, "limit": 1000})
            assert len(page.content) < 80_000
            seen += page.json()["persons"]
            after = page.json()["next"]
        assert [{**person, "known": None} for person in seen] == enrolled


def test_json_is_limited_in_depth_and_names_no_files(live_by_default):
    live = live_by_default
    place = live.collection("deep")
    deep = b'{"query": {"vector": [1]}, "filter": ' + b'{"a": ' * 500 + b"1" + b"}" * 500 + b"}"
    answer = live.ask("POST", f"{place}/search", content=deep, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    for given in (
        {"path": "/etc/passwd"},
        {"url": "http://127.0.0.1/"},
        {"image": "/etc/passwd"},
        {"image": "file:///etc/passwd"},
        {"image": "http://127.0.0.1/x.png"},
    ):
        refused = live.ask("POST", "/v1/embeddings", {"inputs": [given]})
        assert refused.status_code in (400, 415, 422), given
        assert "root:" not in refused.text


def test_compressed_bodies_are_not_taken(live):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert live.ask("POST", "/v1/embeddings", content=zlib.compress(b"{}"), headers=headers).status_code == 415


def test_slow_callers_are_cut_off_and_the_others_served(live):
    slow_head, slow_body, silent = live.connect(), live.connect(), live.connect()
    slow_head.sendall(b"GET /v1/info HTTP/1.1\r\nHost: 127.0")
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    slow_body.sendall(live.addressed(head) + b"Content-Length: 100\r\n\r\n{")
    assert live.ask("GET", "/v1/info").status_code == 200
    assert answer_of(slow_head) == b""
    assert answer_of(silent) == b""
    assert answer_of(slow_body).startswith(b"HTTP/1.1 408 ")
    for connection in (slow_head, slow_body, silent):
        connection.close()


def test_a_slow_upload_has_time_by_what_came_and_sees_where_it_is_cut(tmp_path):
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    limits = Limits(body_seconds=1.0, body_rate=50, slow_body_seconds=20.0, memory_bytes=4000)
    with live_service(tmp_path, limits=limits) as live, live.connect() as slow, live.connect() as slower:
        slow.sendall(live.addressed(head) + b"900\r\n\r\n" + b" " * 500)  # which earns 10 s
        slower.sendall(live.addressed(head) + b"100\r\n\r\n")
        slower.setblocking(False)
        cut, left = b"", 400
        while b"\r\n\r\n{" not in cut:  # a caller who goes on sending
            with contextlib.suppress(BlockingIOError):
                slower.send(b" ")
            with contextlib.suppress(BlockingIOError):
                cut += slower.recv(65536)
            slow.sendall(b" ")
            left -= 1
            time.sleep(0.05)
        assert cut.startswith(b"HTTP/1.1 408 ")
        assert b"send at least 50 a second" in cut
        slow.sendall(b" " * left)
        assert slow.recv(65536).startswith(b"HTTP/1.1 400 ")
        with live.connect() as first, live.connect() as second:  # they fill half of the memory: there is no more time
            for connection in (first, second):
                connection.sendall(live.addressed(head) + b"1201\r\n\r\n" + b" " * 1199)
            for connection in (first, second):
                connection.sendall(b" ")
            assert answer_of(first).startswith(b"HTTP/1.1 408 ")


def test_drops_of_a_second_request_s_head_are_timed_too(live):
    with live.connect() as connection:
        connection.sendall(live.addressed(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        connection.sendall(b"GET /health")
        assert answer_of(connection) == b""


@pytest.mark.slow
def test_a_caller_who_does_not_take_the_answer_is_cut_off(live):
    request = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with live.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(5)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # before 5 s are over
            ask_without_end(connection, live.addressed(request))


def test_bodies_in_hand_are_limited_together_as_they_come(live):
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head = live.addressed(f"{head}Content-Length: {7 * MIB}\r\n\r\n".encode())
    announced = [live.connect() for _ in range(4)]
    for connection in announced:
        connection.sendall(head)
    time.sleep(0.05)
    answer = live.ask("POST", "/v1/embeddings", content=bytes(6 * MIB), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, "what was announced alone was counted"
    for connection in announced:
        connection.close()
    with live.connect() as first, live.connect() as second:
        for connection in (first, second):
            connection.sendall(head)
            send_what_is_taken(connection, bytes(7 * MIB - 1))
        answers = [answer_of(connection) for connection in (first, second)]
    assert any(answer.startswith(b"HTTP/1.1 503 ") and b"retry-after" in answer.lower() for answer in answers)


def send_what_is_taken(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


@pytest.mark.slow
@pytest.mark.parametrize("length", ["Content-Length: 1", "Content-Length: 8000000", "Transfer-Encoding: chunked"])
def test_bodies_of_unknown_callers_take_nothing_from_the_others(tmp_path, length):
    """Open paths take no body, so that nobody without a token waits for one here."""
    limits = Limits(body_bytes=8 * MIB, memory_bytes=12 * MIB, requests=8)
    with live_service(tmp_path, callers={"someone": {"role": "read"}}, limits=limits) as live:
        crowd = [live.connect() for _ in range(20)]
        for connection, path in zip(crowd, ["/health/live", "/v1/info"] * 10, strict=True):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        time.sleep(0.05)
        answer = live.ask("POST", "/v1/compare", {})
        assert answer.status_code == 400, answer.text
        assert {answer_of(connection)[:12] for connection in crowd} == {b"HTTP/1.1 400", b"HTTP/1.1 401"}
        for connection in crowd:
            connection.close()


def known_connection(live: Live) -> socket.socket:
    """A connection that a request was answered on: it is not one of the few that unknown callers may have."""
    connection: socket.socket = live.connect()
    connection.sendall(live.addressed(b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
    with contextlib.closing(http.client.HTTPResponse(connection)) as answer:
        answer.begin()
        answer.read()
    return connection


def test_requests_in_progress_are_limited(live):
    with contextlib.ExitStack() as opened:
        began, release = opened.enter_context(held_up(live.service.store, "collections"))
        request = b"GET /v1/collections HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        connections = [opened.enter_context(known_connection(live)) for _ in range(LIMITS.requests)]
        for connection in connections:
            connection.sendall(live.addressed(request))
        assert began.acquire(timeout=60)
        wait_until(lambda: live.ask("GET", "/v1/info").status_code == 503)
        release.set()
        assert all(answer_of(connection).startswith(b"HTTP/1.1 200") for connection in connections)


def test_garbage_is_no_http(live):
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"A" * 100_000):
        with live.connect() as connection:
            with contextlib.suppress(OSError):  # the server may have closed before all of it was sent
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
            assert answer_of(connection)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 403")


def test_a_lost_store_is_told_and_survived(live):
    from plsc.errors import StorageError

    original = live.service.store.statistics

    def lost():
        raise StorageError("the store does not answer; start it again")

    live.service.store.statistics = lost
    live.service.forget("")
    try:
        assert live.ask("GET", "/health/ready").json() == {"status": "without its store"}
    finally:
        live.service.store.statistics = original


def test_a_name_that_is_made_to_resolve_to_this_machine_gets_no_metrics(tmp_path):
    with live_service(tmp_path, metrics_port=0) as live:
        for host, status in (
            *dict.fromkeys(("127.0.0.1", "localhost:9090", "[::1]:1"), 200).items(),
            *dict.fromkeys(("evil.example", "127.0.0.1.evil.example", "[::1]evil.example", ""), 403).items(),
            ("127.0.0.1:80@evil.example", 403),
        ):
            answer = httpx.get(live.server.metrics_address, headers={"Host": host})
            assert (answer.status_code, "plsc_limit_k" in answer.text) == (status, status == 200), host


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


@pytest.mark.parametrize(("seconds", "count"), [(1.0, 8), (3600.0, 40)])
def test_slow_readers_of_the_metrics_are_cut_off_and_keep_nobody_out(tmp_path, monkeypatch, seconds, count):
    """By their time; where that is long, by their number. The end of the service waits for none of them."""
    monkeypatch.setattr(observability, "_CONNECTION_SECONDS", seconds)
    monkeypatch.setattr(observability._Handler, "timeout", 3600.0)
    with live_service(tmp_path, metrics_port=0) as live, contextlib.ExitStack() as closing:
        place = urlsplit(live.server.metrics_address)

        def scrape() -> socket.socket:
            opened = closing.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))
            opened.sendall(b"GET /metr")
            return opened

        first, *_ = [scrape() for _ in range(count)]
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(first)
        for _ in range(3):
            assert httpx.get(live.server.metrics_address, timeout=10).status_code == 200
        scrape()
        monkeypatch.setattr(observability, "_CONNECTION_SECONDS", 3600.0)
