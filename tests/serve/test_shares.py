"""What one token may have of what all share, connections, requests and bodies: beyond, it alone is refused."""

import contextlib
import http.client
import itertools
import select
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clock import Clock
from support.live_service import Live, bearer, image_input, live_service, picture
from support.waiting import held_up, wait_until

from plsc.serve.connections import Connection, ConnectionBudget
from plsc.serve.errors import ApiError
from plsc.serve.limits import Shared
from plsc.serve.settings import MIB, Limits

pytestmark = pytest.mark.live

LIMITS = Limits(body_bytes=2 * MIB, memory_bytes=12 * MIB, connections=32, requests=16, token_share=0.25)


class Guarded:
    """A service with the tokens of a camera, and of others."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def as_camera(self, head: str, body: bytes = b"") -> socket.socket:
        """A connection on which the camera has sent a request; the head's lines end in newlines."""
        connection = self.live.connect()
        with contextlib.suppress(OSError):  # refused before all of it was sent
            connection.sendall(
                f"{head}Host: x\nAuthorization: Bearer {self.live.secrets['camera']}\n\n".replace("\n", "\r\n").encode()
            )
            connection.sendall(body)
        return connection

    def as_other(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer to another token, on a new connection."""
        headers = {**bearer(self.live.secrets["other"]), **options.pop("headers", {})}
        with httpx.Client(base_url=self.live.server.address, timeout=30) as client:
            return client.request(method, path, headers=headers, **options)


def until_refused(take: Callable[[], object]) -> int:
    """How many a caller gets, one by one, until it alone is refused."""
    for count in itertools.count():
        try:
            take()
        except ApiError as error:
            return count if error.status_code == 429 else -1
    raise AssertionError


def test_many_tokens_of_one_hand_leave_some_to_the_next() -> None:
    shared = Shared("requests in flight", 512, 0.25)
    cameras = [partial(shared.take, f"camera{number}") for number in range(5)]
    assert list(map(until_refused, cameras)) == [128, 128, 128, 85, 28]
    for number in range(15):
        shared.take(f"door{number}")
    with pytest.raises(ApiError, match="512 requests in flight are held for all callers") as refused:
        shared.take("another")
    assert refused.value.status_code == 503
    for _ in range(128):
        shared.give_back("camera0")
    assert until_refused(partial(shared.take, "another")) == 85


@pytest.fixture
def connect(clock: Clock) -> Callable[..., list[str]]:
    """``connect(owner)``: another connection of a token's, of 64 in all; returns the owners of those closed so far."""
    budget = ConnectionBudget(Limits(connections=64, anonymous_connections=8), 0.25, clock)
    closed: list[str] = []

    def connect_one(owner: str, *, is_idle: bool = False) -> list[str]:
        connection = Connection(budget, lambda: None, lambda: closed.append(owner))
        budget.add(connection)
        connection.is_idle = is_idle
        connection.belongs_to(owner)
        return closed

    return connect_one


def test_many_tokens_of_one_hand_leave_connections_to_the_next(connect):
    cameras = [partial(connect, f"camera{number}") for number in range(6)]
    assert list(map(until_refused, cameras)) == [16, 16, 16, 10, 4, 1]


def test_who_has_more_than_what_others_leave_loses_an_idle_connection_for_a_new_one(connect):
    for _ in range(16):
        connect("first", is_idle=True)
    for number in range(3):
        assert until_refused(partial(connect, f"camera{number}")) >= 10
    assert connect("first") == ["first"]
    assert connect("first") == ["first"] * 2


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    callers = {name: {"role": "search"} for name in ("camera", "other")}
    with live_service(tmp_path, callers=callers, limits=LIMITS) as live:
        yield Guarded(live)


def first_line(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return connection.makefile("rb").readline()
    return b""


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    """Those on which something came, or the end."""
    return select.select(connections, [], [], 0)[0]


def test_bodies_that_do_not_come_keep_no_other_token_out(guarded):
    head = "POST /v1/compare HTTP/1.1\nContent-Type: application/json\nContent-Length: 9\n"
    with contextlib.ExitStack() as closing:
        waiting = [closing.enter_context(guarded.as_camera(head, b"{")) for _ in range(2 * LIMITS.requests)]
        assert first_line(waiting[-1]) == b"HTTP/1.1 429 Too Many Requests\r\n"  # busy ones fill its connections
        assert guarded.as_other("GET", "/v1/info").status_code == 200
        for connection in waiting[:8]:
            connection.sendall(b"       }")
        assert {first_line(connection) for connection in waiting[:8]} == {b"HTTP/1.1 400 Bad Request\r\n"}


def test_a_token_with_too_many_idle_connections_loses_its_oldest(guarded):
    with contextlib.ExitStack() as closing:
        opened = []
        for _ in range(LIMITS.connections + 4):
            connection = closing.enter_context(guarded.as_camera("GET /v1/info HTTP/1.1\n"))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            answer.read()
            assert answer.status == 200
            opened.append(connection)
        assert guarded.as_other("GET", "/v1/info").status_code == 200
        assert opened[0].recv(1) == b"", "the one that was idle longest is closed"
        opened[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            opened[-1].recv(1)


def test_bodies_of_one_token_leave_room_for_the_others(guarded):
    size = LIMITS.body_bytes
    head = f"POST /v1/compare HTTP/1.1\nContent-Type: application/json\nContent-Length: {size}\n"
    with contextlib.ExitStack() as closing:
        bodies = [closing.enter_context(guarded.as_camera(head, b" " * (size - 1))) for _ in range(8)]
        wait_until(lambda: len(answered(bodies)) == 7)  # a share holds one whole body, whichever it is
        assert {first_line(connection)[:12] for connection in answered(bodies)} <= {b"", b"HTTP/1.1 429"}
        whole = guarded.as_other(
            "POST", "/v1/compare", content=b" " * size, headers={"Content-Type": "application/json"}
        )
        assert whole.status_code == 400, whole.text


def test_requests_in_flight_are_counted_for_each_token(guarded):
    with contextlib.ExitStack() as closing:
        began, release = closing.enter_context(held_up(guarded.live.service.store, "collections"))
        head = "GET /v1/collections HTTP/1.1\nConnection: close\n"
        running = [closing.enter_context(guarded.as_camera(head)) for _ in range(4)]
        assert began.acquire(timeout=60)

        def refused() -> bytes:
            with guarded.as_camera("GET /v1/info HTTP/1.1\nConnection: close\n") as connection:
                return connection.makefile("rb").read()

        wait_until(lambda: refused().startswith(b"HTTP/1.1 429 "))
        answer = refused()
        assert b"the token camera has 4 requests in flight already" in answer
        assert b"retry-after: 1" in answer.lower()
        assert guarded.as_other("GET", "/v1/info").status_code == 200
        release.set()
        assert {first_line(connection) for connection in running} == {b"HTTP/1.1 200 OK\r\n"}


def test_a_good_token_makes_a_shared_connection_nobody_elses(tmp_path):
    """A proxy's connection carries known callers and strangers in turn; strangers wait for theirs on it, too."""
    nothing = Limits(strangers_part=0.0)  # what is saved at the start is all that strangers get
    callers = {"known": {"role": "search"}}
    with live_service(tmp_path, callers=callers, limits=nothing) as live, live.connect() as shared:
        secret = live.secrets["known"]
        known = f"GET /v1/info HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()

        def ask(request: bytes) -> bytes:
            shared.sendall(request)
            received = b""
            while not received.endswith(b"}"):
                received += shared.recv(65536)
            return received[:12]

        def ask_in_turn() -> None:
            while True:
                assert ask(known) == b"HTTP/1.1 200"
                assert ask(b"GET /v1/info HTTP/1.1\r\nHost: x\r\n\r\n") == b"HTTP/1.1 401"

        shared.settimeout(2)
        with pytest.raises(TimeoutError):
            ask_in_turn()
        assert live.ask("GET", "/v1/info").status_code == 200


def test_without_tokens_one_program_leaves_a_process_that_decodes_to_others(tmp_path):
    """Each request used to be a caller of its own, and one program's took all processes."""
    release = threading.Event()
    with live_service(tmp_path, decode_processes=1) as live, contextlib.ExitStack() as ending:
        decoders, decode = live.service.decoders, live.service._decode
        seconds = [0.1] * 4

        def slow(process: Any, **options: Any) -> Any:
            release.wait(seconds.pop() if seconds else 60.0)
            return decode(process, **options)

        def start(client: httpx.Client) -> threading.Thread:
            body = {"inputs": [image_input(picture(1))]}
            thread = threading.Thread(target=client.post, args=("/v1/embeddings",), kwargs={"json": body})
            thread.start()
            ending.callback(thread.join)
            return thread

        live.service._decode = slow
        clients = [ending.enter_context(httpx.Client(base_url=live.server.address, timeout=60)) for _ in range(5)]
        program, newcomer = clients[:4], clients[4]
        for thread in [start(client) for client in program]:
            thread.join()
        try:
            for client in program:
                start(client)
            wait_until(lambda: live.service.metrics.registry.get_sample_value("plsc_in_flight") == 4)
            assert decoders.running == 1
            start(newcomer)
            wait_until(lambda: decoders.running == 2)
        finally:
            release.set()
