"""Connections of unknown callers: hundreds of any kind, beside one who has a token."""

import contextlib
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.live_service import Live, answer_of, bearer, live_service
from support.waiting import wait_until

from plsc.serve.connections import Connection, ConnectionBudget
from plsc.serve.settings import MIB, Limits
from plsc.serve.tokens import remove_token

pytestmark = pytest.mark.live

CROWD = 300
LIMITS = Limits(anonymous_connections=64, connections=8)
HEAD = b"GET /v1/info HTTP/1.1\r\nHost: x\r\n"
OPEN = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
KINDS = {
    "idle": b"",
    "dripping heads": HEAD,
    "dripping bodies": HEAD + b"Content-Length: 1000\r\n\r\n",
    "announced and never sent": b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n",
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    "wrong tokens": HEAD + b"Authorization: Bearer plsc_wrong\r\n\r\n",
    "answers not read": OPEN * 20,
}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Live, dict[str, str]]]:
    """A service with tokens, and a caller's headers."""
    with live_service(tmp_path, callers={"someone": {"role": "read"}}, limits=LIMITS, metrics_port=0) as running:
        yield running, bearer(running.secrets["someone"])


def crowd(live: Live, first: bytes, count: int = CROWD) -> list[socket.socket]:
    found = []
    for _ in range(count):
        connection = live.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            connection.sendall(first)
        found.append(connection)
    return found


def drip(crowd: list[socket.socket], byte: bytes = b"x") -> None:
    for connection in crowd:
        with contextlib.suppress(OSError):  # closed already
            connection.send(byte)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_keeps_nobody_waiting(guarded, kind):
    live, known = guarded
    assert live.ask("GET", "/v1/info", headers=known).status_code == 200
    with contextlib.ExitStack() as closing:
        connections = crowd(live, KINDS[kind])
        for connection in connections:
            closing.callback(connection.close)
        for _ in range(10):
            drip(connections[-64:])
            assert live.ask("GET", "/v1/info", headers=known).status_code == 200  # on a connection that is known
            with httpx.Client(base_url=live.server.address, timeout=60) as newcomer:
                assert newcomer.get("/v1/info", headers=known).status_code == 200
                assert newcomer.get("/health/live").status_code == 200
        assert httpx.get(live.server.metrics_address, timeout=60).status_code == 200
        remove_token(live.folder / "tokens.toml", "someone")
        wait_until(lambda: live.ask("GET", "/v1/info", headers=known).status_code == 401)
        live.server.stop()
        wait_until(lambda: not answers(live))


def answers(live: Live) -> bool:
    try:
        live.connect().close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_answers_that_nobody_reads_are_limited_together(tmp_path):
    with live_service(tmp_path, limits=Limits(memory_bytes=20 * MIB)) as live, contextlib.ExitStack() as closing:
        place = live.collection("wordy")
        metadata = {f"{key:04}": "\u6587" * 1000 for key in range(64)}
        for _ in range(10):
            assert live.ask("POST", f"{place}/persons", {"persons": [{"metadata": metadata}] * 4}).status_code == 201
        page = len(live.ask("GET", f"{place}/persons").content)
        assert page > 7 * MIB
        connections = [closing.enter_context(live.connect()) for _ in range(8)]
        for connection in connections:
            head = f"GET {place}/persons HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            connection.sendall(live.addressed(head.encode()))
        firsts = [connection.recv(1) for connection in connections]  # all answers are made
        sizes = [len(first + answer_of(connection)) for first, connection in zip(firsts, connections, strict=True)]
        assert min(sizes) < page < max(sizes)


def test_strangers_wait_while_a_known_caller_is_answered(tmp_path):
    """A thousand refusals a second would cost the known caller as much as a thousand answers."""
    nothing = replace(LIMITS, strangers_part=0.0, strangers_saved_seconds=0.0)
    with (
        live_service(tmp_path, callers={"someone": {"role": "read"}}, limits=nothing) as live,
        contextlib.ExitStack() as closing,
    ):
        strangers = crowd(live, HEAD + b"\r\n", 8)
        for stranger in strangers:
            closing.callback(stranger.close)
        for _ in range(50):
            assert live.ask("GET", "/v1/info", headers=bearer(live.secrets["someone"])).status_code == 200
        assert select.select(strangers, [], [], 0)[0] == []


@pytest.mark.slow
def test_who_is_cut_off_leaves_no_line_in_the_log(guarded, caplog):
    """Each line is room on the server's disk that a stranger fills."""
    live, _ = guarded
    with contextlib.ExitStack() as closing:
        for connection in crowd(live, OPEN * 30, 4 * LIMITS.anonymous_connections):
            closing.callback(connection.close)
        wait_until(lambda: live.ask("GET", "/health/live").status_code == 200)
    live.server.stop()
    wait_until(lambda: not answers(live))
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.slow
def test_a_head_byte_by_byte_is_cut_off(guarded):
    live, _ = guarded
    with live.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_slowly(connection, HEAD * 100)


def send_slowly(connection: socket.socket, data: bytes) -> None:
    for place in range(len(data)):
        connection.send(data[place : place + 1])
        time.sleep(0.001)


def test_the_crowded_address_gives_way(clock):
    closed: list[str] = []

    def connection(name: str, address: str) -> Connection:
        made = Connection(budget, lambda: closed.append(name), lambda: None)
        made.address = address
        budget.add(made)
        return made

    budget = ConnectionBudget(Limits(connections=2, anonymous_connections=4), 1.0, clock)
    connection("alone", "192.0.2.1")
    oldest = connection("a", "192.0.2.2")
    connection("b", "192.0.2.2")
    budget.rest(oldest)
    connection("c", "192.0.2.2")
    connection("d", "192.0.2.2")
    assert closed == ["b"]
    oldest.belongs_to("somebody")
    connection("e", "192.0.2.3")
    assert closed == ["b"], "a known caller's connection counts elsewhere"
    connection("f", "192.0.2.3")
    assert closed == ["b", "c"]


@pytest.mark.slow
def test_files_are_kept_back_for_the_store(tmp_path):
    """Where the system allows few files, there are fewer connections, and what the service does itself goes on."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from support.live_service import *;"
        "folder = pathlib.Path(sys.argv[2]);"
        "live = live_service(folder); running = live.__enter__(); print(running.server.address, flush=True); input();"
        "live.__exit__(None, None, None)"
    )
    hard = 420

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    process = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        place = httpx.URL(address)
        connections = [socket.create_connection((place.host, place.port), timeout=60) for _ in range(hard + 100)]
        with httpx.Client(base_url=address, timeout=60) as client:
            assert client.post("/v1/collections", json={"name": "staff"}).status_code == 201
            assert client.post("/v1/snapshots").status_code == 201
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < hard
        for connection in connections:
            connection.close()
        _, said = process.communicate("\n", timeout=30)
        assert f"may open {hard} files" in said
        assert "raise ulimit -n" in said
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
